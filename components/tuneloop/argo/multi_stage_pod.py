"""Several iterations of a loop in one pod: what `tuneloop.local.iterations` runs, as a Hera template."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hera.workflows import Container, Parameter
from hera.workflows.models import ValueFrom

from tuneloop.argo.claims import role_of
from tuneloop.argo.lease_sidecar import take_turns
from tuneloop.argo.pod_fields import OUTPUTS, find_role, retried_pod_fields
from tuneloop.argo.tasks import RUN, input_tag
from tuneloop.core.program import encode_flags, to_kebab_case
from tuneloop.workflow.loop import Loop, StageSpec, Step
from tuneloop.workflow.pod_loop import PROGRAM, PerPod, PodLoop, StageCall
from tuneloop.workflow.settings import Cluster, ResourceRole


def describe_loop(
    loop: Loop, specs: Sequence[StageSpec], shared: Mapping[str, Any], wired: Iterable[str], evaluate_every: int
) -> PodLoop:
    """Return the steps of a loop with their commands and flags.

    Args:
        shared: parameters that every stage which has them is given.
        wired: parameters whose values the pod is given, beside those that the steps are wired to.
    """
    known = {spec.component: spec for spec in specs}

    def describe(step: Step) -> StageCall:
        stage, spec = step.component, known[step.component].with_shared(shared)
        wires = {**step.wires, **{name: name for name in spec.accepted(list(wired))}}
        constants = stage.resolve_constants(spec.parameters, wires.keys() - stage.inputs.keys())
        return StageCall(
            name=step.name,
            command=stage.command(spec.processes),
            flags=encode_flags(constants),
            wires={to_kebab_case(name): wire for name, wire in wires.items()},
            output=to_kebab_case(stage.output),
        )

    check = describe(loop.check) if evaluate_every else None
    steps = [describe(step) for step in loop.steps]
    carry, reward = dict(loop.carry), loop.reward
    return PodLoop(steps=steps, carry=carry, reward=reward, check=check, evaluate_every=evaluate_every)


def list_roles(loop: Loop, specs: Sequence[StageSpec], evaluate_every: int) -> list[ResourceRole]:
    """List what the stages of a loop compute that one pod runs."""
    known = {spec.component: spec.parameters for spec in specs}
    steps = [*loop.steps, *([loop.check] if evaluate_every else [])]
    return [find_role(step.component, known[step.component], step.wires) for step in steps]


def pod_template(
    loop: PodLoop,
    inputs: Sequence[str],
    outputs: Sequence[str],
    values: Mapping[str, str],
    *,
    per_pod: PerPod,
    role: ResourceRole,
    cluster: Cluster,
) -> Container:
    """Return the template `iterations`, a container that runs `per_pod` of them; with auto at most its workflow's."""
    limit = ["{{workflow.parameters.per-workflow}}", "--auto"] if per_pod == "auto" else [str(per_pod)]
    passed = {**{name: input_tag(name) for name in inputs}, **values}
    made = Container(
        name="iterations",
        inputs=[Parameter(name=name) for name in inputs],
        outputs=[Parameter(name=name, value_from=ValueFrom(path=f"{OUTPUTS}/{name}")) for name in outputs],
        command=["python", "-m", PROGRAM],
        args=[
            *("--loop", loop.model_dump_json(exclude_defaults=True)),
            *("--run", RUN, "--iterations", "{{workflow.parameters.iterations}}", "--per-pod", *limit),
            *("--target-reward", "{{workflow.parameters.target-reward}}"),
            *(word for name, value in passed.items() for word in ("--value", f"{name}={value}")),
        ],
        **retried_pod_fields("rollout", role, cluster),
    )
    take_turns(made, cluster, role_of("rollout"))
    return made
