"""The graph of a rendered workflow as a picture, SVG: stages in columns, each behind those that it comes after."""

import re
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from html import escape
from typing import Any

from tuneloop.planning.plan import count_pods
from tuneloop.workflow.manifest import list_calls
from tuneloop.workflow.pod_loop import expand_pod
from tuneloop.workflow.rendered_stages import read_stage

WIDTH, HEIGHT, ACROSS, DOWN = 150, 42, 190, 60
"""Of a box, and from one to the next."""
STYLE = (
    "text{font:13px sans-serif;fill:#222}.about{font-size:11px;fill:#555}rect{fill:#f4f6fa;stroke:#4a6fa5}"
    "path{fill:none;stroke:#666}.back{stroke-dasharray:5 4}"
)


def draw_graph(workflow: Mapping[str, Any]) -> str:
    """Draw the stages of a workflow, how many pods each can become, and dashed the way back of a loop."""
    workflow, _ = expand_pod(workflow)
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    pods, after, back = count_pods(workflow), dict[str, set[str]](), set[tuple[str, str]]()
    made, begins = dict[str, str](), dict[str, list[str]]()

    def visit(name: str, at: str, before: set[str], above: Sequence[str]) -> set[str]:
        """Add the stages of a template that comes after `before`; return those that nothing in it comes after."""
        template, ends, used = templates[name], dict[str, set[str]](), set[str]()
        if not list_calls(template):
            after[at], made[at] = before, name
            for each in above:
                begins.setdefault(each, []).append(at)
            return {at}
        groups = template.get("steps") or [template["dag"]["tasks"]]
        for group in groups:
            tasks = {task["name"]: task for task in group}
            waits = {
                task: set(re.findall(r"[A-Za-z][\w-]*", t.get("depends", ""))) & {*tasks} for task, t in tasks.items()
            }
            for task in TopologicalSorter(waits).static_order():
                first = set[str]().union(*(ends[each] for each in waits[task])) if waits[task] else before
                target = tasks[task]["template"]
                if target in (*above, name):
                    back.update((each, target) for each in first)
                    ends[task] = first
                    continue
                used |= waits[task]
                ends[task] = visit(target, f"{at}.{task}", first, (*above, name))
            if template.get("steps"):
                before = set[str]().union(*(ends[task] for task in tasks))
        return before if template.get("steps") else set[str]().union(*(ends[t] for t in ends if t not in used))

    visit(workflow["spec"]["entrypoint"], "", set(), ())
    columns, place = list[int](), dict[str, tuple[int, int]]()
    for stage in TopologicalSorter(after).static_order():
        column = max((place[each][0] + 1 for each in after[stage]), default=0)
        columns += [0] * (column + 1 - len(columns))
        place[stage] = column, columns[column]
        columns[column] += 1
    lines = [_draw_edge(place[a], place[b]) for b, before in after.items() for a in sorted(before)]
    low = max(columns) * DOWN + 10
    for a, target in sorted(back):
        (x1, y1), (x2, y2) = (_find_corner(place[each]) for each in (a, begins[target][0]))
        ends = x1 + WIDTH / 2, y1 + HEIGHT, x2 + WIDTH / 2, y2 + HEIGHT
        lines.append(
            f'<path class="back" d="M{ends[0]} {ends[1]}C{ends[0]} {low},{ends[2]} {low},{ends[2]} {ends[3]}"/>'
        )
    boxes = []
    for stage, (x, y) in ((stage, _find_corner(at)) for stage, at in place.items()):
        devices = read_stage(templates[made[stage]]).accelerators
        server = ", a server" if templates[made[stage]].get("daemon") else ""
        about = f"at most {pods[made[stage]]} ×{f', {devices} accelerators' if devices else ''}{server}"
        boxes.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        boxes.append(f'<text x="{x + 8}" y="{y + 17}">{escape(stage.rpartition(".")[2])}</text>')
        boxes.append(f'<text class="about" x="{x + 8}" y="{y + 34}">{about}</text>')
    size = f'width="{len(columns) * ACROSS}" height="{low + 10}"'
    return "\n".join(
        (f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>', *lines, *boxes, "</svg>\n")
    )


def _find_corner(at: tuple[int, int]) -> tuple[int, int]:
    return at[0] * ACROSS + 6, at[1] * DOWN + 6


def _draw_edge(a: tuple[int, int], b: tuple[int, int]) -> str:
    (x1, y1), (x2, y2) = _find_corner(a), _find_corner(b)
    x1, y1, y2 = x1 + WIDTH, y1 + HEIGHT // 2, y2 + HEIGHT // 2
    return f'<path d="M{x1} {y1}C{x1 + 20} {y1},{x2 - 20} {y2},{x2} {y2}"/>'
