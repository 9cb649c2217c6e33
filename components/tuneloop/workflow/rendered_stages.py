"""Read the stage of a rendered template: its flags are those that its container will get."""

import itertools
import json
from dataclasses import dataclass
from typing import Any

from tuneloop.core.artifacts import Role
from tuneloop.core.component import Component, find_component
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.manifest import list_calls, parse_applied_object

SERVER = "tuneloop.inference.server"
LOOP: tuple[Role, ...] = ("sampler", "scorer", "trainer")
"""Roles of the stages that every iteration of a loop runs."""


@dataclass(frozen=True)
class Stage:
    """A template that runs a tuneloop stage: `module` is what its container starts (None: another program), `flags` are
    the texts that it gets, by name in snake_case, `ranks` is the number of torchrun's processes in each of the `nodes`
    pods, which work together, and `memory` is a pod's memory request, as Kubernetes writes it."""

    name: str
    module: str | None
    flags: dict[str, str]
    image: str
    accelerators: int
    ranks: int
    nodes: int = 1
    memory: str = ""

    @property
    def component(self) -> Component | None:
        """The stage as declared; None for another program, or one that is not known here."""
        return find_component(self.module, self.name) if self.module else None

    @property
    def role(self) -> Role | None:
        """The stage's role in a loop."""
        return self.component.role if self.component else None

    @property
    def serves(self) -> bool:
        """Whether it is the rollout server."""
        return self.module == SERVER

    @property
    def engine_args(self) -> JsonObject:
        """What is passed on to the engine; empty where the stage has none."""
        try:
            return dict(json.loads(self.flags.get("engine_args", "{}")))
        except ValueError:
            return {}

    def read_json(self, name: str) -> Any:
        """Return a flag whose value is JSON; None where it is absent, or decided while the workflow runs."""
        try:
            return json.loads(self.flags.get(name, "null"))
        except ValueError:
            return None

    def number(self, name: str) -> float | None:
        """Return a flag as a number; None where it is absent, null or decided while the workflow runs."""
        try:
            return float(self.flags[name])
        except (KeyError, ValueError):
            return None


def read_stage(template: JsonMapping) -> Stage:
    """Read what a leaf template says of its stage."""
    job = parse_applied_object(template)
    body = container_of(template, job)
    group = group_of(job)
    words = [*body.get("command", ()), *body.get("args", ())]
    flags: dict[str, str] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            following = words[index + 1] if index + 1 < len(words) else ""
            flags[key.replace("-", "_")] = value if equals else following
    started = [module for option, module in itertools.pairwise(words) if option == "-m"]
    resources = body.get("resources", {})
    accelerators = sum(
        int(count) for name, count in resources.get("limits", {}).items() if "/" in name
    )
    env = {item["name"]: item.get("value") for item in body.get("env", ())}
    ranks = int(env.get("PET_NPROC_PER_NODE") or flags.get("nproc_per_node", "1"))
    nodes = group.get("parallelism", 1)
    world = flags.get("expected_world_size", "")
    ranks = int(world or 1) if "backend" in flags else ranks  # another backend starts them
    only_reads = (
        world.isdigit() and int(world) != ranks * nodes
    )  # the output of the JobSet before it
    module = started[-1] if started and not only_reads else None
    memory = resources.get("requests", {}).get("memory", "")
    return Stage(
        template["name"], module, flags, body.get("image", ""), accelerators, ranks, nodes, memory
    )


def read_loop(workflow: JsonMapping) -> dict[str, Role]:
    """Find the stages that a loop (a template that calls itself) runs: template → role, in the order of the graph."""
    templates = {template["name"]: template for template in workflow["spec"].get("templates") or ()}
    called = {
        name: [call["template"] for call in list_calls(template)]
        for name, template in templates.items()
    }
    wanted = [name for name, others in called.items() if name in others]
    seen: set[str] = set()
    found: dict[str, Role] = {}
    while wanted:
        if (name := wanted.pop(0)) in seen or name not in templates:
            continue
        seen.add(name)
        wanted += called[name]
        if not called[name] and (role := read_stage(templates[name]).role) in LOOP:
            found[name] = role
    return found


def container_of(template: JsonMapping, job: JsonMapping) -> JsonObject:
    """Return the stage's container: the template's, or that of the JobSet `job` it applies; empty without one."""
    if job.get("kind") == "JobSet":
        return group_of(job)["template"]["spec"]["containers"][0]
    return template.get("container") or template.get("script") or {}


def group_of(job: JsonMapping) -> JsonObject:
    """Return the spec of the one Job of our JobSets; empty for any other object."""
    if job.get("kind") != "JobSet":
        return {}
    return job["spec"]["replicatedJobs"][0]["template"]["spec"]
