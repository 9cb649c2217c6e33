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
            named = {
                task: re.findall(r"[A-Za-z][\w-]*", t.get("depends", ""))
                for task, t in tasks.items()
            }
            waits = {task: {*names} & {*tasks} for task, names in named.items()}
            for task in TopologicalSorter(waits).static_order():
                first = (
                    set[str]().union(*(ends[each] for each in waits[task]))
                    if waits[task]
                    else before
                )
                target = tasks[task]["template"]
                if target in (*above, name):
                    back.update((each, target) for each in first)
                    ends[task] = first
                    continue
                used |= waits[task]
                ends[task] = visit(target, f"{at}.{task}", first, (*above, name))
            if template.get("steps"):
                before = set[str]().union(*(ends[task] for task in tasks))
        return (
            before
            if template.get("steps")
            else set[str]().union(*(ends[t] for t in ends if t not in used))
        )

    visit(workflow["spec"]["entrypoint"], "", set(), ())
    used, place = (
        dict[int, int](),
        dict[str, tuple[int, int]](),
    )  # where columns end; upper left corners
    for stage in TopologicalSorter(after).static_order():
        x = max((place[each][0] + ACROSS for each in after[stage]), default=6)
        place[stage] = x, used.get(x, 6)
        used[x] = place[stage][1] + DOWN
    low, drawn = max(used.values()), list[str]()
    for stage, (x, y) in place.items():
        x2, y2 = x - 20, y + HEIGHT // 2
        for x1, y1 in (
            (place[each][0] + WIDTH, place[each][1] + HEIGHT // 2) for each in sorted(after[stage])
        ):
            drawn.append(f'<path d="M{x1} {y1}C{x1 + 20} {y1},{x2} {y2},{x} {y2}"/>')
    for stage, target in sorted(back):
        (x1, y1), (x2, y2) = (
            (x + WIDTH // 2, y + HEIGHT) for x, y in (place[stage], place[begins[target][0]])
        )
        drawn.append(f'<path class="back" d="M{x1} {y1}C{x1} {low},{x2} {low},{x2} {y2}"/>')
    for stage, (x, y) in place.items():
        devices = read_stage(templates[made[stage]]).accelerators
        server = ", a server" if templates[made[stage]].get("daemon") else ""
        about = (
            f"at most {pods[made[stage]]} ×{f', {devices} accelerators' if devices else ''}{server}"
        )
        drawn.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        drawn.append(f'<text x="{x + 8}" y="{y + 17}">{escape(stage.rpartition(".")[2])}</text>')
        drawn.append(f'<text class="about" x="{x + 8}" y="{y + 34}">{about}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(used) + ACROSS}" height="{low + 10}">'
    )
    return "\n".join((head, f"<style>{STYLE}</style>", *drawn, "</svg>\n"))
