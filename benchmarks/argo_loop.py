"""Seconds and bytes of Workflow that an iteration costs on Argo, beside a bare loop of as many empty pods.

Both loops run on the cluster that KUBECONFIG names, one after the other: ours (retries, outputs, parts that continue
one another), and the least that Argo can do: the same recursion over the same empty containers in one workflow.
With `--per-pod`, ours runs so many iterations in each pod, stage after stage; so long a bare loop Argo refuses (depth
100), and none is run.

    python benchmarks/argo_loop.py [--iterations 6] [--per-workflow 2] [--stages 1] [--image tuneloop/base:dev]
    python benchmarks/argo_loop.py --iterations 1000 --per-workflow 60 --per-pod 60 --stages 3
"""

from __future__ import annotations

import argparse
import json
import time
import uuid
from typing import Any

from hera.workflows import DAG, Container, Parameter
from hera.workflows.models import ValueFrom

from tuneloop.argo.loop import build_continue_template, pod_template
from tuneloop.argo.pod_fields import OUTPUTS, plan_resources, pod_fields, retry_fields
from tuneloop.argo.template import define_workflow
from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.kube.connection import WORKFLOWS, Connection, connect_to_cluster
from tuneloop.workflow.plan import PodPlan
from tuneloop.workflow.pod_loop import PodLoop, StageCall
from tuneloop.workflow.settings import RUN_LABEL, Cluster, Resources

IN = "{{inputs.parameters.%s}}"
MORE = "asInt(%s) < asInt(workflow.parameters.iterations)"
HERE = "asInt(%s) %% asInt(workflow.parameters['per-workflow']) != 0 && "
STAGE = f"mkdir -p {OUTPUTS} && printf %s $0 > {OUTPUTS}/told"


def build(
    iterations: int,
    per_workflow: int,
    stages: int = 1,
    image: str = "tuneloop/base:dev",
    per_pod: int = 0,
) -> dict[str, Any]:
    """A loop of empty stages, in parts of `per_workflow` iterations; each passes on what the one before has told.

    Args:
        per_pod: iterations a pod, a divisor of `per_workflow`; 0: a pod a stage.
    """
    place = Cluster(cpu=Resources(cpu="20m", memory="64Mi" if not per_pod else "256Mi"))
    parameters = {"iterations": iterations, "per_workflow": per_workflow, "target_reward": "inf"}
    with define_workflow("empty", parameters) as built:
        if per_pod:
            loop = _pods(stages, per_pod, image, place)
        else:
            loop = _loop(_stage(image, place), stages, HERE % "inputs.parameters.iteration")
        proceed = build_continue_template("main", ("iteration", "told"), place)
        proceed.image = image
        inputs = [Parameter(name="iteration", default="1"), Parameter(name="told", default="0")]
        with DAG(name="main", inputs=inputs):
            work = loop(name="loop", arguments={name: IN % name for name in ("iteration", "told")})
            reached = "asInt(tasks.loop.outputs.parameters.iteration)"
            onward = {
                "iteration": "{{=%s + 1}}" % reached,
                "told": "{{tasks.loop.outputs.parameters.told}}",
            }
            work >> proceed(name="continue", arguments=onward, when="{{=%s}}" % (MORE % reached))
    made: dict[str, Any] = built.to_dict()
    return made


def bare(iterations: int, stages: int, image: str) -> dict[str, Any]:
    """The same recursion, without retries, outputs or parts."""
    with define_workflow("bare", {"iterations": iterations}) as built:
        pod = pod_fields("base", "cpu", Cluster(cpu=Resources(cpu="20m", memory="64Mi")))
        kept = {k: pod[k] for k in ("image_pull_policy", "resources", "security_context")}
        stage = Container(name="stage", image=image, command=["true"], **kept)
        loop = _loop(stage, stages, "", told=False)
        with DAG(name="main"):
            loop(name="loop", arguments={"iteration": "1"})
    made: dict[str, Any] = built.to_dict()
    return made


def _stage(image: str, place: Cluster) -> Container:
    """Tells what it was told, and computes nothing."""
    return Container(
        name="stage",
        inputs=[Parameter(name="told")],
        outputs=[Parameter(name="told", value_from=ValueFrom(path=f"{OUTPUTS}/told"))],
        command=["sh", "-c", STAGE],
        args=[IN % "told"],
        **{**pod_fields("base", "cpu", place), "image": image},
        **retry_fields(),
    )


def _pods(stages: int, per_pod: int, image: str, place: Cluster) -> DAG:
    """The loop with a pod for every `per_pod` iterations, as `tuneloop.argo.loop` has it."""
    names = ("iteration", "told")
    script = 'printf %s "$1" > "$TUNELOOP_OUTPUTS/told"'  # $0 is a flag, as those that follow
    about: Any = {
        "command": ["sh", "-c", script],
        "flags": [],
        "wires": {"told": "iteration"},
        "output": "made",
    }
    steps = [StageCall(name=f"s{index}", **about) for index in range(1, stages + 1)]
    told = f"s{stages}.told"
    described = PodLoop(steps=steps, carry={"told": told}, reward=told)
    resources = plan_resources("cpu", place)
    plan = PodPlan(template="iterations", image=image, resource_role="cpu", resources=resources)
    pod = pod_template(described, names, names, {}, per_pod=per_pod, pod=plan, cluster=place)
    pod.image = image
    last = (
        "tasks.next.status == 'Succeeded' ? tasks.next.outputs.parameters.%s"
        " : tasks.iterations.outputs.parameters.%s"
    )
    outputs = [Parameter(name=k, value_from=ValueFrom(expression=last % (k, k))) for k in names]
    reached = "tasks.iterations.outputs.parameters.iteration"
    with DAG(name="loop", inputs=[Parameter(name=n) for n in names], outputs=outputs) as loop:
        work = pod(name="iterations", arguments={name: IN % name for name in names})
        given = {
            "iteration": "{{=asInt(%s) + 1}}" % reached,
            "told": "{{tasks.iterations.outputs.parameters.told}}",
        }
        work >> loop(
            name="next", arguments=given, when="{{=%s%s}}" % (HERE % reached, MORE % reached)
        )
    return loop


def _loop(stage: Container, stages: int, here: str, told: bool = True) -> DAG:
    """`stages` of them one after the other, then the next iteration."""
    names = ("iteration", "told") if told else ("iteration",)
    last = "tasks.next.status == 'Succeeded' ? tasks.next.outputs.parameters.%s : %s"
    own = {
        "iteration": f"string({IN % 'iteration'})",
        "told": f"tasks['s{stages}'].outputs.parameters.told",
    }
    outputs = [
        Parameter(name=k, value_from=ValueFrom(expression=last % (k, own[k]))) for k in names
    ]
    with DAG(
        name="loop", inputs=[Parameter(name=n) for n in names], outputs=outputs if told else None
    ) as loop:
        before: Any = None
        for index in range(1, stages + 1):
            task = stage(name=f"s{index}", arguments={"told": IN % "iteration"} if told else {})
            before = before >> task if before else task
        arguments = {"iteration": "{{=asInt(inputs.parameters.iteration) + 1}}"}
        if told:
            arguments["told"] = "{{tasks.s%d.outputs.parameters.told}}" % stages
        before >> loop(
            name="next",
            arguments=arguments,
            when="{{=%s%s}}" % (here, MORE % "inputs.parameters.iteration"),
        )
    return loop


def _size(part: Any) -> float:
    """kB as JSON, which is what etcd and its limit of 1.5 MB see."""
    return len(json.dumps(part, separators=(",", ":"))) / 1000


def measure(cluster: Connection, made: dict[str, Any], iterations: int) -> None:
    """Run it to its end, and print seconds an iteration and the size of each workflow."""
    run = f"b{uuid.uuid4().hex[:8]}"
    name = made["metadata"]["generateName"].rstrip("-")
    begun = time.monotonic()
    argo.create_workflow(
        cluster,
        run_workflows.prepare_workflow(
            made, run=run, store="memory:///bench", namespace=cluster.namespace
        ),
        run,
    )
    try:
        code = argo.wait_for_run(cluster, run)
        seconds = time.monotonic() - begun
        found = run_workflows.find_workflows(cluster, run)
        whole, status = ([_size(w) for w in found], [_size(w["status"]) for w in found])
        print(
            f"{name:6} exit {code}  {len(found)} workflows  {seconds:7.1f} s, {seconds / iterations:.2f} s an iteration"
            f"; status {max(status):.1f} kB at most, {sum(status) / iterations:.2f} kB an iteration"
        )
        for workflow, bytes_whole, bytes_status in zip(found, whole, status):
            given = {p["name"]: p["value"] for p in workflow["spec"]["arguments"]["parameters"]}
            first = given.get("iteration", "1")
            print(
                f"       from iteration {first:>4}: {bytes_whole:.1f} kB, of which status {bytes_status:.1f} kB"
            )
    finally:
        argo.stop_run(cluster, run)
        group, version, plural = WORKFLOWS
        cluster.custom.delete_collection_namespaced_custom_object(
            group, version, cluster.namespace, plural, label_selector=f"{RUN_LABEL}={run}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--per-workflow", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1, help="pods an iteration")
    parser.add_argument("--per-pod", type=int, default=0, help="iterations a pod; 0: a pod a stage")
    parser.add_argument("--image", default="tuneloop/base:dev")
    given = parser.parse_args()
    cluster = connect_to_cluster()
    ours = build(given.iterations, given.per_workflow, given.stages, given.image, given.per_pod)
    measure(cluster, ours, given.iterations)
    if not given.per_pod:
        measure(cluster, bare(given.iterations, given.stages, given.image), given.iterations)


if __name__ == "__main__":
    main()
