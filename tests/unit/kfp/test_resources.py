"""A pod asks for accelerators, in the queue of its role, exactly if its stage computes on one: every pipeline, engine
and option, both engines.

What computes is said here, apart from the code: who trains, who scores with a model, and who samples, where that is
not a server's to do.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.compiling import compiled
from tuneloop.argo.run_plan import plan_stage
from tuneloop.argo.template import stage_template
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError
from tuneloop.extensions.trainers import trainjob
from tuneloop.stages.model_reward import model_reward
from tuneloop.stages.rollout import rollout
from tuneloop.training.backends.native import Native
from tuneloop.workflow.loop import StageSpec
from tuneloop.workflow.settings import QUEUE_LABEL, AcceleratorResources, Cluster

LOOPS, OTHERS = ("grpo", "sft_then_grpo"), ("sft", "dpo")
PARALLEL = "engine.args.tensor_parallel_size=3"
ENGINES = {
    "vllm": ("engine.kind=vllm", PARALLEL),
    "pull": ("engine.kind=vllm", "engine.weights.kind=pull", PARALLEL),
    "transformers": ("engine.kind=transformers",),
    "endpoint": (
        "engine.kind=endpoint",
        "engine.rollout_endpoint_url=http://h:1",
        "engine.weights.kind=pull",
    ),
    "fleet": ("engine.kind=endpoint", "engine.weights=refit", "engine.weights.fleet=http://h:1"),
}
CLAIM = ("cluster.share.group=g", "cluster.share.device_class=gpu.example.com")
OPTIONS = {
    "plain": (),
    "stages": ("loop.iterations_per_pod=0",),
    "nodes": ("nodes=2",),
    "tokenize": ("tokenize=true",),
    "pods": ("loop.iterations_per_pod=10", "loop.evaluate_every=5"),
    "asynchronous": ("loop.asynchronous=true",),
    "turns": ("cluster.share.group=g",),
    "claim": CLAIM,
    "own-claim": (*CLAIM, "cluster.share.runs_per_claim=1", "nodes=2"),
}
REPLICAS = {
    "vllm-2": (*ENGINES["vllm"], "engine.replicas=2"),
    "pull-2": (*ENGINES["pull"], "engine.replicas=2"),
}
REFUSED = {
    **{
        (engine, "asynchronous"): "loop.asynchronous: True"
        for engine in ("pull", "pull-2", "endpoint", "fleet")
    },
    **{
        (engine, each): "engine.replicas: 2"
        for engine in REPLICAS
        for each in ("turns", "claim", "own-claim")
    },
}
OURS = ("vllm", "pull", *REPLICAS)
"""Engines whose servers are the run's."""
GPUS = {"trainer": 5, "sampler": 3, "scorer": 2, "": 0}
SETS = tuple(
    f"cluster.{role}={{gpus: {count}, queue: of-{role}}}" for role, count in GPUS.items() if role
)
WORK = {
    **dict.fromkeys(("sft", "policy_update", "preference", "reward_model"), "trainer"),
    **dict.fromkeys(("reference_logprobs", "model_reward"), "scorer"),
    **dict.fromkeys(("rollout", "evaluate"), "sampler"),
    "server": "sampler",
    "iterations": "trainer",
}


def find_program(words: list[str]) -> str:
    """The module that a container starts: ``sft``, ``server``, ``iterations``; behind torchrun or KFP's adapter."""
    started = words[len(words) - words[::-1].index("-m")] if "-m" in words else ""
    return (
        (words[words.index(started) + 1] if started.endswith("kfp.stage") else started)
        .split(":")[-1]
        .split(".")[-1]
    )


def count_expected(program: str, engine: str, served: bool) -> int:
    """GPUs of a pod. `served`: whether the run's own vLLM server is another pod."""
    if program == "iterations":
        beside = engine in OURS and not served
        return GPUS["trainer"] + (GPUS["sampler"] if beside else 0)
    elsewhere = engine in ("endpoint", "fleet") or (engine in OURS and served)
    return GPUS["" if program in ("rollout", "evaluate") and elsewhere else WORK.get(program, "")]


def list_pods(
    workflow: dict[str, Any],
) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Yield the name, program, container, labels and pod of each template that has one."""
    for template in workflow["spec"]["templates"]:
        name, labels = template["name"], template.get("metadata", {}).get("labels", {})
        if "resource" in template:
            job = yaml.safe_load(template["resource"]["manifest"])
            pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
            container = pod["containers"][0]
            yield (
                name,
                find_program(container["command"]),
                container,
                job["metadata"]["labels"],
                pod,
            )
        elif container := template.get("container"):
            program = "" if name.endswith("-result") else find_program(container["command"])
            patch = json.loads(template.get("podSpecPatch") or "{}")
            yield (
                name,
                program,
                container,
                labels,
                {**patch, "volumes": template.get("volumes", [])},
            )


def check_workflow(pipeline: str, engine: str, option: str, *sets: str) -> None:
    claims = "device_class" in str(OPTIONS[option])
    found = find_pipeline(pipeline)
    workflow = found.build(
        found.configure(sets=[*sets, *OPTIONS[option], *(() if claims else SETS)])
    )
    pods, served = list(list_pods(workflow)), pipeline in LOOPS
    assert len({program for _, program, *_ in pods}) > 3
    for name, program, container, labels, pod in pods:
        expected = count_expected(program, engine, served)
        resources = container["resources"]
        assert int(resources.get("limits", {}).get("nvidia.com/gpu", 0)) == (
            0 if claims else expected
        ), name
        assert bool(pod.get("resourceClaims")) == bool(claims and expected), name
        own = "tuneloop-samplers" if WORK.get(program) == "sampler" else "tuneloop"
        queue = own if claims else f"of-{WORK.get(program)}"
        assert labels.get(QUEUE_LABEL) == (queue if expected and option != "claim" else None), name
        assert ("shm" in str(pod.get("volumes"))) == bool(expected), name
        assert pod.get("terminationGracePeriodSeconds", 30) == (300 if expected else 30), name
        assert resources["requests"].keys() >= {"cpu", "memory"}, name
    argo = json.loads(workflow["spec"]["podSpecPatch"])
    assert all(
        each["resources"]["requests"] for each in [*argo["containers"], *argo["initContainers"]]
    )


@pytest.mark.parametrize("option", [each for each in OPTIONS if each != "tokenize"])
@pytest.mark.parametrize("engine", [*ENGINES, *REPLICAS])
@pytest.mark.parametrize("pipeline", LOOPS)
def test_accelerators_are_where_the_work_is_on_argo(
    pipeline: str, engine: str, option: str
) -> None:
    sets = {**ENGINES, **REPLICAS}[engine]
    if (engine, option) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[engine, option]):
            check_workflow(pipeline, engine, option, *sets)
    else:
        check_workflow(pipeline, engine, option, *sets)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["cluster.sampler.gpus=2"], r"cluster.sampler.gpus: 2: has to be .* \(1 × 1\)"),
        (["cluster.sampler.gpus=4", "engine.args.tensor_parallel_size=2"], r"\(2 × 1\)"),
        (["cluster.sampler.gpus=1", "engine.args.tensor_parallel_size=x"], r"\(x × 1\)"),
        (
            ["engine.replicas=2", "engine.kind=transformers"],
            "engine.replicas: 2: is a setting of kind vllm, not of transformers, which has args",
        ),
        (
            ["engine.replicas=2", "engine.colocate=true"],
            "replicas are servers with devices of their own",
        ),
    ],
)
def test_gpus_that_no_server_computes_on_are_refused(sets: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        find_pipeline("grpo").configure(sets=sets)


def test_a_task_of_kubeflow_has_one_server(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"engine.replicas: 2: is built for Argo and for one machine"
    ):
        compiled("grpo", ["engine.replicas=2"], tmp_path / "made.yaml")
    sets = ["engine.args={enable_sleep_mode: true}", "engine.asleep={cpu: 100m}"]
    with pytest.raises(
        UserError, match=r"engine.asleep: .*: is built for Argo and for one machine"
    ):
        compiled("grpo", sets, tmp_path / "made.yaml")
    sets = ["engine.args={kv_cache_memory_bytes: 1073741824}", "engine.snapshot=true"]
    with pytest.raises(
        UserError, match=r"engine.snapshot: True: is built for Argo and for one machine"
    ):
        compiled("grpo", sets, tmp_path / "made.yaml")


def test_a_server_on_as_many_gpus_as_it_computes_on() -> None:
    sets = [
        "engine.args={tensor_parallel_size: 2, pipeline_parallel_size: 2}",
        "cluster.sampler.gpus=4",
    ]
    assert find_pipeline("grpo").configure(sets=sets).engine.replicas == 1


@pytest.mark.parametrize("option", ["plain", "nodes", "tokenize", "turns", "claim"])
@pytest.mark.parametrize("pipeline", OTHERS)
def test_accelerators_are_where_the_work_is_without_a_loop(pipeline: str, option: str) -> None:
    if (pipeline, option) != ("dpo", "nodes"):  # it has no such key
        check_workflow(pipeline, "transformers", option)


KFP = [
    *(
        (pipeline, engine, sets)
        for pipeline in LOOPS
        for engine in ENGINES
        for sets in ((), ("kfp.unroll=60",))
    ),
    *(("sft_then_grpo", engine, ("kfp.unroll=60", "nodes=2")) for engine in ("vllm", "fleet")),
    *(("sft", "transformers", sets) for sets in ((), ("nodes=2",))),
    *(("dpo", "transformers", sets) for sets in ((), ("tokenize=true",))),
]


@pytest.mark.parametrize(("pipeline", "engine", "sets"), KFP)
def test_accelerators_are_where_the_work_is_on_kubeflow(
    pipeline: str, engine: str, sets: tuple[str, ...], tmp_path: Path
) -> None:
    more = (*ENGINES[engine], "loop.iterations=1") if pipeline in LOOPS else ()
    path = compiled(pipeline, [*SETS, *more, *sets], tmp_path / "made.yaml")
    spec, platform = yaml.load_all(path.read_text(), yaml.CSafeLoader)
    tasks = spec["deploymentSpec"]["executors"]
    pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert len(tasks) > 4
    for name, task in tasks.items():
        words, pod = task["container"]["command"], pods.get(name, {})
        launches = "--job" in task["container"].get("args", ())
        program = find_program(words)
        expected = 0 if launches else count_expected(program, engine, served=False)
        given = task["container"]["resources"]
        assert int(given.get("accelerator", {}).get("resourceCount", 0)) == expected, name
        queue = pod.get("podMetadata", {}).get("labels", {}).get(QUEUE_LABEL)
        assert queue == (f"of-{WORK[program]}" if expected else None), name
        assert ("emptyDirMounts" in pod) == bool(expected), name
        assert {"resourceCpuRequest", "resourceMemoryRequest"} <= given.keys(), name
        if launches:
            job = json.loads(
                task["container"]["args"][task["container"]["args"].index("--job") + 1]
            )
            cluster = Cluster(**job["cluster"])
            for role in ("trainer", "sampler", "scorer"):
                assert cluster.count_gpus(role) == GPUS[role]
                assert cluster.build_queue_labels(role) == {QUEUE_LABEL: f"of-{role}"}


def test_a_job_of_a_trainer_backend_asks_for_the_trainers() -> None:
    place: Any = {
        "node_selector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    }
    cluster = Cluster(
        trainer=AcceleratorResources(gpus=5, queue="mine", grace_s=99, shm="8Gi", **place)
    )
    backend = Native(args={"policy": "p", "prompts": "q", "checkpoint": "c"})
    for make in (trainjob.as_trainjob, trainjob.as_jobset, trainjob.as_job, trainjob.as_rayjob):
        assert make(backend, "t", cluster)["metadata"]["labels"][QUEUE_LABEL] == "mine"
    train = trainjob.as_trainjob(backend, "t", cluster)["spec"]
    assert train["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "5"
    assert train["podTemplateOverrides"][0]["spec"] == {
        "nodeSelector": {"gpu": "h100"},
        **dict([*place.items()][1:]),
    }
    ray = trainjob.as_rayjob(Native(nodes=2, args=backend.args), "t", cluster)["spec"]
    group = trainjob.as_jobset(backend, "t", cluster)["spec"]["replicatedJobs"][0]["template"][
        "spec"
    ]
    pods = [
        trainjob.as_job(backend, "t", cluster)["spec"],
        group,
        ray["rayClusterSpec"]["headGroupSpec"],
    ]
    for pod in (
        each["template"]["spec"] for each in (*pods, ray["rayClusterSpec"]["workerGroupSpecs"][0])
    ):
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "5"
        assert pod["terminationGracePeriodSeconds"] == 99 and pod["nodeSelector"] == {"gpu": "h100"}
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod[
            "volumes"
        ]
    rows = trainjob.prepare_rayjob({"prompts": "p"}, "rows", cluster)
    assert QUEUE_LABEL not in rows["metadata"]["labels"] and "nvidia.com/gpu" not in str(rows), (
        "data_prep is on CPU"
    )
    (submitter,) = ray["submitterPodTemplate"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in str(submitter["resources"]), "it starts the work, and does none"


@pytest.mark.parametrize("served", [True, False])
def test_stages_of_ones_own(served: bool) -> None:
    """A reward model is the scorer's; an engine of one's own computes in the stage, as far as is known."""
    cluster = Cluster(**{role: {"gpus": count} for role, count in GPUS.items() if role})  # type: ignore[arg-type]
    wired = ["iteration", *(["endpoint"] if served else [])]
    for component, given, expected in (
        (model_reward, {}, GPUS["scorer"]),
        (rollout, {"engine": "my_engine:open_engine"}, GPUS["sampler"]),
        (rollout, {}, 0 if served else GPUS["sampler"]),
        (rollout, {"endpoint": "http://h:1"}, 0),
    ):
        names = [
            name for name in wired if name in component.Params.model_fields and name not in given
        ]
        stage = plan_stage(StageSpec(component, **given), cluster, names)
        made: Any = stage_template(component, stage, cluster)
        assert stage.resources.accelerators == expected, given
        assert int(made.resources.gpus or 0) == expected, given


def test_a_pod_of_several_roles_asks_for_the_most() -> None:
    cluster = Cluster(
        trainer=AcceleratorResources(gpus=1), sampler=AcceleratorResources(gpus=4, cpu="8")
    )
    gpus: list[Any] = []
    cases: Any = itertools.product(
        (False, True), (["cpu"], ["cpu", "trainer"], ["sampler", "trainer"])
    )
    for served, roles in cases:
        role, merged = cluster.merge_roles(roles, served)
        gpus.append((role, merged.count_gpus(role)))
    apart, beside = gpus[:3], gpus[3:]
    assert apart == [("cpu", 0), ("trainer", 1), ("trainer", 4)]
    assert beside == [("sampler", 4), ("trainer", 5), ("trainer", 8)]
