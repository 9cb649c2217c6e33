"""What a compiled pipeline says of its components and pods."""

import functools
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests import compiling
from tests.unit import toy
from tuneloop.config.loading import find_pipeline
from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.core.errors import UserError
from tuneloop.kfp.loop import LoopTasks
from tuneloop.kfp.template import check_names
from tuneloop.stages.deploy_model import deploy_model
from tuneloop.workflow.loop import Loop, Step
from tuneloop.workflow.plan import read_plan


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(pipeline, keys …) → the pipeline's and the platform's document."""
    directory = tmp_path_factory.mktemp("compiled")

    @functools.cache
    def build(name: str, *sets: str) -> tuple[dict[str, Any], dict[str, Any]]:
        path = compiling.compiled(name, [*sets], directory / "pipeline.yaml")
        spec, platform = yaml.load_all(path.read_text(), yaml.CSafeLoader)
        return spec, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]

    return build


def test_pods_of_an_identity_read_no_secret(compiled: Any) -> None:
    """A run's account is said when it is started."""
    identity = "{kind: irsa, role: 'arn:aws:iam::123456789012:role/t', region: eu-central-1}"
    spec, pods = compiled("sft", f"cluster.credentials={identity}")
    for name, pod in pods.items():
        assert not pod.get("secretAsEnv"), name
        # AWS_REGION has one source.
        (store,) = pod["configMapAsEnv"]
        assert [each["envVar"] for each in store["keyToEnv"]] == ["AWS_ENDPOINT_URL"]
        container = spec["deploymentSpec"]["executors"][name]["container"]
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["TUNELOOP_CREDENTIALS"] == "irsa"
        assert variables["AWS_REGION"] == "eu-central-1"
    account = f"{identity[:-1]}, service_account: stores}}"
    with pytest.raises(
        UserError, match=r"^cluster.credentials.service_account: 'stores': a run of"
    ):
        compiled("sft", f"cluster.credentials={account}")


def test_pods_ask_for_what_the_cluster_section_says(compiled: Any) -> None:
    keys = [
        "cluster.trainer={gpus: 2, shm: 8Gi, node_selector: {gpu: h100}}",
        "cluster.sampler.gpus=1",
    ]
    more = [
        "cluster.trainer.tolerations=[{key: gpu, operator: Exists}]",
        "cluster.queue=gpus",
        "cluster.priority=high",
    ]
    kfp = ["kfp.timeout_s=60", "cluster.pod.volumes={/data: pvc/c}", "kfp.retries=7"]
    spec, pods = compiled("sft_then_grpo", *keys, *more, *kfp, "processes=2")
    queue = {"kueue.x-k8s.io/queue-name": "gpus", "kueue.x-k8s.io/priority-class": "high"}
    labels = {name: pod.get("podMetadata", {}).get("labels") for name, pod in pods.items()}
    accelerated = {"exec-sft", "exec-iterations", "exec-evaluate", "exec-evaluate-2"}
    assert {name for name, found in labels.items() if found} == accelerated
    assert all(found == queue for found in labels.values() if found)
    train = pods["exec-sft"]
    assert train["nodeSelector"] == {"labels": {"gpu": "h100"}}
    assert [(each["key"], each["operator"]) for each in train["tolerations"]] == [("gpu", "Exists")]
    assert (
        train["emptyDirMounts"][0]["sizeLimit"] == "8Gi"
        and train["emptyDirMounts"][0]["mountPath"] == "/dev/shm"
    )
    assert "nodeSelector" not in pods["exec-data-prep"]
    for name, pod in pods.items():
        assert (
            pod["activeDeadlineSeconds"] == "60" and pod["pvcMount"][0]["mountPath"] == "/data"
        ), name
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["secretAsEnv"][0]["optional"] is True, name
        sources = [*pod["secretAsEnv"][0]["keyToEnv"], *pod["configMapAsEnv"][0]["keyToEnv"]]
        assert len({each["envVar"] for each in sources}) == len(sources) == 8, (
            "one variable, one source"
        )
    container = spec["deploymentSpec"]["executors"]["exec-sft"]["container"]
    assert container["resources"]["accelerator"]["resourceCount"] == "2"
    iterations = spec["deploymentSpec"]["executors"]["exec-iterations"]["container"]
    assert iterations["resources"]["accelerator"]["resourceCount"] == "3", (
        "a server's beside the trainer's"
    )
    server = json.loads(iterations["args"][iterations["args"].index("--server") + 1])
    assert server["devices"] == "2", "ranks take the first"
    assert "--nproc-per-node=2" in container["command"]
    inner = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert inner["sft"]["retryPolicy"]["maxRetryCount"] == 7
    assert "cachingOptions" in inner["sft"] and not inner["iterations"].get(
        "cachingOptions", {}
    ).get("enableCache")


def test_every_task_is_told_where_programs_of_the_policy_run(compiled: Any) -> None:
    spec, pods = compiled("grpo", "cluster.sandbox=http://sandbox:8000")
    told = {
        name: each["container"].get("env", [])
        for name, each in spec["deploymentSpec"]["executors"].items()
    }
    assert {"exec-data-prep", "exec-evaluate", "exec-iterations"} <= told.keys()
    for name, env in told.items():
        values = {item["name"]: item["value"] for item in env}
        assert values["TUNELOOP_SANDBOX"] == "http://sandbox:8000", name
        (secret,) = pods[name]["secretAsVolume"]
        assert (
            values["TUNELOOP_SANDBOX_TOKEN_FILE"] == f"{secret['mountPath']}/token"
            and secret["optional"]
        )


def test_every_image_is_named_with_its_tag(compiled: Any) -> None:
    spec, _ = compiled(
        "grpo",
        "loop.iterations=1",
        "kfp.unroll=60",
        "cluster.images=registry.example/t/{image}:1.2",
    )
    images = {each["container"]["image"] for each in spec["deploymentSpec"]["executors"].values()}
    assert images == {f"registry.example/t/{name}:1.2" for name in ("base", "trainer", "rollout")}


def test_a_loop_in_one_task_does_not_grow(compiled: Any) -> None:
    few, many = (compiled("grpo", f"loop.iterations={n}")[0] for n in (9, 1000))
    assert few["components"].keys() == many["components"].keys()
    for spec in (few, many):
        spec["root"]["inputDefinitions"]["parameters"]["loop_iterations"].pop("defaultValue")
    assert few["root"] == many["root"]


def test_stages_that_span_nodes_are_launched_from_the_small_image(compiled: Any) -> None:
    spec, pods = compiled("sft", "nodes=2", "cluster.trainer.gpus=4")
    container = spec["deploymentSpec"]["executors"]["exec-sft"]["container"]
    assert container["image"] == "tuneloop/base:dev" and "accelerator" not in container["resources"]
    assert '"nodes":2' in container["args"][-1] and '"gpus":4' in container["args"][-1]
    assert "podMetadata" not in pods["exec-sft"], (
        "a launcher that holds quota for its own child deadlocks"
    )
    assert "podMetadata" in pods["exec-evaluate"]
    parameters = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]["sft"]["inputs"][
        "parameters"
    ]
    assert parameters["expected_world_size"]["runtimeValue"]["constant"] == 2


def test_a_job_has_no_tag_of_kfp(compiled: Any) -> None:
    pod = 'cluster.pod.env={WORD: "{{x}} $(HOME)"}'
    spec, _ = compiled("sft", "nodes=2", pod)
    (job,) = spec["deploymentSpec"]["executors"]["exec-sft"]["container"]["args"][-1:]
    assert "{{" not in job and "$(" not in job
    assert json.loads(job)["cluster"]["pod"]["env"] == {"WORD": "{{x}} $(HOME)"}


def test_handles_are_typed_and_parameters_described(compiled: Any) -> None:
    spec, _ = compiled("grpo", "loop.iterations=1", "kfp.unroll=1")
    reward = spec["components"]["comp-reward"]
    kinds = {
        k: v["artifactType"]["schemaTitle"]
        for k, v in reward["outputDefinitions"]["artifacts"].items()
    }
    assert kinds["rewards"] == "system.Dataset" and kinds["results"] == "system.Metrics"
    assert reward["inputDefinitions"]["parameters"]["timeout_s"]["description"].startswith(
        "seconds that one call"
    )
    asked = spec["root"]["inputDefinitions"]["parameters"]
    store = asked.pop("store")
    assert "isOptional" not in store and store["description"].startswith("URL of the store")
    # KFP's form does not start a run while a field without a default is empty.
    assert all("defaultValue" in parameter for parameter in asked.values())
    assert all(parameter["description"] for parameter in asked.values())


def test_what_is_set_for_a_run_reaches_every_task(compiled: Any) -> None:
    """From the first task, which has one output for each of the others."""
    for sets in ((), ("loop.iterations=1", "kfp.unroll=1")):
        spec, _ = compiled("grpo", "engine.weights.kind=pull", *sets)
        tasks = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
        outputs = spec["components"]["comp-configure"]["outputDefinitions"]["parameters"]
        for name, task in tasks.items():
            if name != "configure":
                source = task["inputs"]["parameters"]["changed_settings"]["taskOutputParameter"]
                # KFP numbers the components of one name.
                component = re.sub(r"^comp-|-\d+$", "", task["componentRef"]["name"])
                component = component.replace("-", "_")
                assert source["outputParameterKey"] == f"{component}_settings" in outputs


def test_urls_below_the_run_reach_every_stage_that_has_them(compiled: Any) -> None:
    """In one task: it knows them by its flags."""
    pipeline = find_pipeline("grpo")
    config = pipeline.configure(None, ["engine.weights.kind=pull"])
    spec, _ = compiled("grpo", "engine.weights.kind=pull")
    words = spec["deploymentSpec"]["executors"]["exec-iterations"]["container"]["args"]
    published = json.loads(words[words.index("--published") + 1])
    assert published == {"weights": "@run@/weights"}
    stages = {stage.component.template: stage.component for stage in pipeline.module.stages(config)}
    wired = set()
    for step in json.loads(words[words.index("--loop") + 1])["steps"]:
        for name in published.keys() & stages[step["name"]].Params.model_fields.keys():
            assert step["wires"][name] == name
            wired.add(name)
    assert wired == published.keys()


def test_pods_have_the_memory_that_plan_estimates(compiled: Any) -> None:
    """Request and limit where it is known, else a request alone, and the pipeline says so."""
    spec, _ = compiled("sft_then_grpo")
    resources = {
        name: executor["container"]["resources"]
        for name, executor in spec["deploymentSpec"]["executors"].items()
    }
    plan = read_plan(
        find_pipeline("sft_then_grpo").build(find_pipeline("sft_then_grpo").configure())
    )
    trainer = plan.stages["sft"].resources
    assert resources["exec-sft"]["resourceMemoryLimit"] == trainer.memory_limit
    assert resources["exec-sft"]["resourceMemoryRequest"] == trainer.memory_request
    # The trainer and vLLM's server run in this pod at once.
    server = plan.servers["serve"].resources
    together = sum(
        int(item.memory_request.removesuffix("Mi")) for item in (plan.loop.pod.resources, server)
    )
    assert resources["exec-iterations"]["resourceMemoryRequest"] == f"{together}Mi"
    # An engine in the process of a stage was not measured.
    assert "resourceMemoryLimit" not in resources["exec-evaluate"]
    assert "evaluate (requests" in spec["pipelineInfo"]["description"]
    set_memory = ("cluster.trainer.memory=5Gi", "cluster.sampler.memory=6Gi")
    spec, _ = compiled("sft_then_grpo", *set_memory)
    executors = spec["deploymentSpec"]["executors"]
    limits = {
        name: executors[name]["container"]["resources"].get("resourceMemoryLimit")
        for name in ("exec-sft", "exec-evaluate", "exec-iterations")
    }
    assert limits == {
        "exec-sft": "5Gi",
        "exec-evaluate": "6Gi",
        "exec-iterations": f"{11 << 10}Mi",
    }
    assert "not known" not in spec["pipelineInfo"]["description"]


def test_wrong_settings_are_refused_before_anything_is_compiled(compiled: Any) -> None:
    with pytest.raises(UserError, match=r"kfp\.retries"):
        compiled("sft", "kfp.retries=-1")
    with pytest.raises(
        UserError, match=r"cluster\.trainer\.memory_on_retry: .*job of several pods"
    ):
        compiled("sft", "nodes=2", "cluster.trainer={memory: 4Gi, memory_on_retry: 8Gi}")
    with pytest.raises(UserError, match=r"nodes.*kfp\.unroll"):
        compiled("grpo", "nodes=2")


@component("rewards", role="scorer", results={"ref": float})
def ref_result(stage: Stage, rollouts: Input) -> Results:
    """Return a result with the name of a handle's reference."""
    return {"ref": 1.0}


@component("rewards", role="scorer")
def url_parameter(stage: Stage, rollouts: Input, *, url: str = "") -> Results:
    """Take a parameter with the name of the output's address."""
    return {}


@component("metrics_view", role="scorer", results={"changed_settings": float})
def settings_result(stage: Stage, rollouts: Input) -> Results:
    """Return a result with the name of a parameter of the adapter."""
    return {"changed_settings": 1.0}


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (ref_result, "ref"),
        (url_parameter, "url"),
        (settings_result, "changed_settings"),
        # One that ships, which is for Argo and for one machine.
        (deploy_model, "url"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_stage_with_a_name_of_the_adapter_is_refused(stage: Any, name: str) -> None:
    """It replaced the reference that later tasks read, or the address where the output is committed."""
    with pytest.raises(UserError, match=f"stage {stage.name}: '{name}': has a meaning of its own"):
        check_names(stage)


@component("checkpoint", role="trainer", results={"loss": float})
def train_on_scores(stage: Stage, policy: Input, scores: Input, *, iteration: int = 0) -> Results:
    """Take the scorer's artifact under another name than the stages that ship."""
    return {"loss": 1.0}


def test_an_unrolled_loop_that_could_not_end_by_its_reward_is_refused() -> None:
    """It was compiled, and ran on to its last iteration whatever the rewards were."""
    train = Step(train_on_scores, policy="policy", scores="reward.rewards", iteration="iteration")
    steps = [
        Step(toy.rollout, policy="policy"),
        Step(toy.reward, rollouts="rollout.rollouts"),
        train,
    ]
    loop = Loop(
        steps,
        carry={"policy": "train-on-scores.checkpoint"},
        constants=(),
        reward="reward.mean-reward",
        check=Step(toy.evaluate, policy="policy"),
        finish=[],
    )
    definition = find_pipeline("grpo")
    config = definition.configure(None, ["kfp.unroll=2", "loop.iterations=2"])

    def create_task(name: str, **arguments: Any) -> SimpleNamespace:
        outputs = ("rollouts", "rewards", "mean_reward", "checkpoint")
        return SimpleNamespace(outputs=dict.fromkeys(outputs))

    tasks = LoopTasks(
        loop,
        steps=dict.fromkeys([step.name for step in steps], create_task),
        config=config,
        url="s3://b/r",
        shared={},
        changes=dict.fromkeys([step.name for step in steps], ""),
        target_reward=1.0,
        values={"policy": None},
    )
    with pytest.raises(UserError, match=r"kfp\.unroll: 2: .* needs the input rewards from reward"):
        tasks.iterate({"policy": None, "iteration": 1}, "s3://b/r/iterations/1")
