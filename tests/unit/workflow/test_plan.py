"""The plan that a workflow carries says what its containers say: here alone rendered words are read back."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tuneloop.cluster.run_workflows import as_template
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError
from tuneloop.core.program import encode_flags, parse_arguments
from tuneloop.workflow.manifest import parse_applied_object
from tuneloop.workflow.plan import PLAN, PodPlan, RunPlan, ServerPlan, StagePlan, read_plan
from tuneloop.workflow.pod_loop import PROGRAM, PodLoop
from tuneloop.workflow.settings import AUTO

ROOT = Path(__file__).parents[3]
PIPELINES = sorted(path.stem for path in ROOT.glob("pipelines/*.py"))
GPUS = ["cluster.trainer.gpus=2", "cluster.sampler.gpus=1", "cluster.images=there/{image}:2"]
SETTINGS: dict[str, list[str]] = {
    "defaults": [],
    "processes": ["processes=2", *GPUS],
    "limits": ["cluster.trainer.memory=3Gi", "cluster.cpu.memory=1Gi", "cluster.trainer.shm=1Gi"],
}
LOOPS: dict[str, list[str]] = {
    "stages": ["loop.iterations_per_pod=0", "loop.evaluate_every=5"],
    "transformers": ["engine=transformers", "loop.evaluate_every=5"],
    "replicas": ["engine.replicas=2", "engine.weights.kind=pull"],
    "nodes": ["nodes=2", "processes=2"],
    "asynchronous": ["loop.asynchronous=true"],
    "asleep": ["engine.colocate=true", "engine.asleep={cpu: 100m, memory: 1Gi}"],
    "shared": ["cluster.share.group=demo", "cluster.share.request=512Mi"],
    "pods": ["loop.iterations_per_pod=10", "loop.per_workflow=20", *GPUS],
}
CASES = [
    (pipeline, name)
    for pipeline in PIPELINES
    for name in (*SETTINGS, *LOOPS)
    if name in SETTINGS or "loop" in find_pipeline(pipeline).Config.model_fields
]


def build(pipeline: str, *sets: str) -> dict[str, Any]:
    found = find_pipeline(pipeline)
    return found.build(found.configure(None, sets))


def read_container(template: dict[str, Any]) -> dict[str, Any]:
    """Return a template's container, or that of the pods of the JobSet that it applies."""
    job = parse_applied_object(template)
    if not job:
        container: dict[str, Any] = template["container"]
        return container
    (group,) = job["spec"]["replicatedJobs"]
    (container,) = group["template"]["spec"]["template"]["spec"]["containers"]
    return container


def check_pod(pod: PodPlan, container: dict[str, Any]) -> None:
    """Check image and resources."""
    assert container["image"] == pod.image
    requests = container["resources"]["requests"]
    limits = container["resources"].get("limits", {})
    assert requests["cpu"] == pod.resources.cpu
    assert requests["memory"] == pod.resources.memory_request
    assert limits.get("memory") == pod.resources.memory_limit
    assert int(limits.get("nvidia.com/gpu", 0)) == pod.resources.accelerators
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert ("shm" in mounts) == bool(pod.resources.shared_memory)


def check_stage(stage: StagePlan, command: list[str], flags: list[str]) -> None:
    """Check what starts a stage, and the parameters that its program reads from its words."""
    component = stage.component
    assert component and component.role == stage.role
    started = [module for option, module in itertools.pairwise(command) if option == "-m"]
    assert started[-1] == stage.module
    here = [word for word in command if word.startswith("--nproc-per-node=")]
    processes = stage.processes if stage.nodes == 1 else 1
    assert here == ([f"--nproc-per-node={processes}"] if processes > 1 else [])
    wired = {name: f"<{name}>" for name in (*component.inputs, component.output)}
    words = [*flags, *encode_flags(wired)]
    fields = component.Params.model_fields
    read = parse_arguments(words, stage.template, None, component.inputs, component.output, fields)
    stated = {name: read[name] for name in read if name not in wired}
    constants = {name: stage.parameters[name] for name in stage.parameters if name in stated}
    assert component.Params(**stated) == component.Params(**constants)
    # A parameter that is left out of the words is empty, or wired by the pod that runs the stage.
    missing = {name: value for name, value in stage.parameters.items() if name not in stated}
    assert all(value in ("", []) or name == "weights" for name, value in missing.items())


def check_server(server: ServerPlan, args: list[str]) -> None:
    flags = dict(zip(args[::2], args[1::2], strict=True))
    assert json.loads(flags["--engine-args"]) == server.engine_args
    assert int(flags["--port"]) == server.port
    assert flags.get("--weights") == server.weights
    assert json.loads(flags.get("--asleep", "{}")) == server.asleep


@pytest.mark.parametrize(("pipeline", "name"), CASES)
def test_the_plan_is_what_is_rendered(pipeline: str, name: str) -> None:
    workflow = build(pipeline, *SETTINGS.get(name, LOOPS.get(name, [])))
    plan = read_plan(workflow)
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    programs: set[str] = set()
    for template in templates.values():
        if "container" in template or "resource" in template:
            programs.add(template["name"])
    inner = plan.loop.stages if plan.loop and plan.loop.pod else []
    for stage in plan.stages.values():
        if stage.template in inner:
            continue
        programs -= {stage.job_template, f"{stage.template}-result"}
        container = read_container(templates[stage.job_template])
        check_pod(stage, container)
        wired = len(encode_flags(dict.fromkeys(stage.wired, "")))
        check_stage(stage, container["command"], container["args"][:-wired])
        if stage.nodes > 1:
            env = {item["name"]: item.get("value") for item in container["env"]}
            assert env["PET_NNODES"] == str(stage.nodes)
            assert env["PET_NPROC_PER_NODE"] == str(stage.processes)
    for server in plan.servers.values():
        programs.remove(server.template)
        container = read_container(templates[server.template])
        check_pod(server, container)
        check_server(server, container["args"])
    if plan.loop and plan.loop.pod:
        programs.remove(plan.loop.pod.template)
        check_iterations(plan, read_container(templates[plan.loop.pod.template]))
    assert programs <= {"continue", "take-claim", "give-claim"}, "the plan has all other pods"


def check_iterations(plan: RunPlan, container: dict[str, Any]) -> None:
    """Check the pod that runs iterations, and what it is given of its stages."""
    looped = plan.loop
    assert looped and looped.pod
    check_pod(looped.pod, container)
    assert container["command"] == ["python", "-m", PROGRAM]
    words = container["args"]
    loop = PodLoop.model_validate_json(words[words.index("--loop") + 1])
    auto = looped.iterations_per_pod == AUTO
    assert ("--auto" in words) == auto
    if not auto:
        assert words[words.index("--per-pod") + 1] == str(looped.iterations_per_pod)
    calls = [*loop.steps, *([loop.check] if loop.check else [])]
    assert [call.name for call in calls] == looped.pod_stages
    for call in calls:
        check_stage(plan.stages[call.name], call.command, call.flags)
    for name in looped.stages:
        assert plan.stages[name].resources == looped.pod.resources


def test_equal_settings_give_an_equal_plan_that_is_read_back() -> None:
    first = build("grpo")
    assert first == build("grpo")
    text = first["metadata"]["annotations"][PLAN]
    plan = RunPlan.model_validate_json(text)
    assert plan.dump() == text and json.loads(text)["form"] == 1
    assert plan.stages["policy-update"].parameters["learning_rate"] == 0.0005
    assert [*plan.servers] == ["serve"] and plan.pipeline == "grpo"


def test_a_workflow_without_a_plan_says_what_to_do() -> None:
    workflow = build("sft")
    text = workflow["metadata"]["annotations"].pop(PLAN)
    with pytest.raises(UserError, match=r"workflow: 'sft-': carries no plan .*: render it again"):
        read_plan(workflow)
    for other in (text.replace('"form":1', '"form":2'), "{}", "no JSON"):
        workflow["metadata"]["annotations"][PLAN] = other
        with pytest.raises(UserError, match=r"a plan of another version .*: render it again"):
            read_plan(workflow)


def test_a_workflow_of_a_template_has_the_templates_plan() -> None:
    workflow = build("grpo")
    template = as_template(workflow, "grpo")
    assert PLAN not in template["metadata"].get("annotations", {})
    live = {
        "metadata": {"name": "demo"},
        "spec": {"workflowTemplateRef": {"name": "grpo"}},
        "status": {"storedWorkflowTemplateSpec": template["spec"]},
    }
    assert read_plan(live) == read_plan(workflow)
    # The controller copies it into the workflow before it runs anything.
    annotations = template["spec"]["workflowMetadata"]["annotations"]
    copied = {"metadata": {"name": "demo", "annotations": annotations}, "spec": live["spec"]}
    assert read_plan(copied) == read_plan(workflow)
