"""The final model behind vLLM's OpenAI API, from the artifact that `export` committed; set by hand, and by a run."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cluster.conftest import ROOT, STORE, kubectl
from tests.cluster.making import draw_tiny_model, submit_workflow
from tests.cluster.test_jobset import IMAGES, RUN, SMALL
from tests.cluster.volumes import apply
from tests.waiting import until
from tuneloop.argo.run_plan import plan_stages
from tuneloop.argo.template import define_workflow, stage_template
from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.cluster.watch import read_nodes
from tuneloop.config.loading import find_pipeline
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import EXIT_NOT_PROMOTED
from tuneloop.kube.connection import Connection
from tuneloop.local.journal import Node
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.deploy_model import deploy_model
from tuneloop.stages.evaluate import evaluate
from tuneloop.stages.export import export
from tuneloop.workflow.loop import StageSpec
from tuneloop.workflow.settings import RUN_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

OVERLAY = """
kind: Kustomization
components: [COMPONENTS/model-server, COMPONENTS/model-deployer]
images: [{name: tuneloop/rollout, newName: NAME, newTag: TAG}]
patches:
  - target: {kind: ConfigMap, name: tuneloop-model}
    patch: |
      - {op: replace, path: /data/MODEL, value: "REFERENCE"}
  - target: {kind: Deployment, name: tuneloop-model}
    patch: |
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --enforce-eager}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --dtype=float32}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --max-model-len=128}
      - op: add
        path: /spec/template/spec/containers/0/env
        value: [{name: VLLM_CPU_KVCACHE_SPACE, value: "1"}]
      - op: replace
        path: /spec/template/spec/containers/0/resources
        value: {requests: {cpu: 200m, memory: 4Gi}, limits: {memory: 4Gi}}
"""
ASK = """
import json, urllib.request
body = {"model": "tuneloop", "prompt": "12", "max_tokens": 4, "temperature": 0, "logprobs": 1}
models = urllib.request.urlopen("http://tuneloop-model:8000/v1/models", timeout=60)
request = urllib.request.Request("http://tuneloop-model:8000/v1/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=60))
print(json.dumps({**answer, "names": [each["id"] for each in json.load(models)["data"]]}))
"""
GRPO = [
    *(
        "engine.kind=transformers",
        "engine.args={}",
        "loop.iterations=2",
        "evaluate.limit=8",
        "loop.target_reward=2",
    ),
    *(
        "loop.per_workflow=1",
        "loop.iterations_per_pod=1",
        "rollout.prompts_per_iteration=4",
        "rollout.n=4",
    ),
    *("data.source_args={digits: 2}", "data.train=40", "data.eval=8", f"cluster.images={IMAGES}"),
    *(
        "cluster.cpu.cpu=50m",
        "deploy.at_least=0",
    ),  # two servers at a time have to have room on a small node
]


class Exported(NamedTuple):
    """References of an exported model, and of its evaluation."""

    model: str
    metrics: str


def read_outputs(cluster: Connection, run: str) -> dict[str, Node]:
    """The nodes of a run's newest workflow by their names."""
    return {
        node.display_name: node
        for node in read_nodes(run_workflows.find_workflows(cluster, run)[-1]).values()
    }


@pytest.fixture
def served(cluster: Connection, run: str, tmp_path: Path) -> Iterator[Exported]:
    """An exported model that a Deployment serves, because its ConfigMap says so."""
    from hera.workflows import DAG

    specs = [
        StageSpec(data_prep, train=16, sft=16, eval=4),
        StageSpec(base_model, model="tiny-qwen3"),
        StageSpec(evaluate, engine="transformers", max_tokens=4),
        StageSpec(export),
    ]
    plan = plan_stages("exported", specs, SMALL)
    with define_workflow("exported", plan=plan) as built:
        prepare, bring, judge, save = (
            stage_template(spec.component, plan.stages[spec.component.template], SMALL)
            for spec in specs
        )
        with DAG(name="main"):
            model, prompts, policy = draw_tiny_model(prepare, bring)
            measured = {"policy": policy, "prompts": prompts, "metrics": f"{RUN}/evaluate"}
            model >> judge(name="evaluate", arguments=measured)
            model >> save(name="export", arguments={"policy": policy, "model": f"{RUN}/export"})
    submit_workflow(cluster, built.to_dict(), run=run, store=STORE)
    assert argo.wait_for_run(cluster, run) == 0
    nodes = read_outputs(cluster, run)
    made = Exported(nodes["export"].outputs["model"], nodes["evaluate"].outputs["metrics"])
    name, _, tag = SMALL.images.format(image="rollout").rpartition(":")
    components = os.path.relpath(ROOT / "manifests" / "components", tmp_path)
    text = OVERLAY.replace("COMPONENTS", components).replace("REFERENCE", made.model)
    (tmp_path / "kustomization.yaml").write_text(text.replace("NAME", name).replace("TAG", tag))
    objects = kubectl("kustomize", str(tmp_path))
    apply(objects)
    try:
        kubectl(
            "-n",
            cluster.namespace,
            "rollout",
            "status",
            "deployment/tuneloop-model",
            "--timeout=600s",
        )
        yield made
    finally:
        apply(objects, "delete")


def ask(cluster: Connection) -> dict[str, Any]:
    """What the Service answers, asked in a pod of the Deployment."""
    words = ("exec", "deploy/tuneloop-model", "-c", "vllm", "--", "python", "-c", ASK)
    said: dict[str, Any] = json.loads(kubectl("-n", cluster.namespace, *words))
    return said


def test_the_final_model_answers(cluster: Connection, served: Exported) -> None:
    said = ask(cluster)
    assert said["model"] == "tuneloop"
    assert said["names"] == ["tuneloop", served.model]
    assert said["usage"]["completion_tokens"] >= 1
    assert all(logprob <= 0 for logprob in said["choices"][0]["logprobs"]["token_logprobs"])
    fetched = kubectl("-n", cluster.namespace, "logs", "deploy/tuneloop-model", "-c", "fetch")
    assert f"{served.model} is at /tmp/model" in fetched


def is_proved(cluster: Connection) -> bool:
    """Whether the model that is set was found to answer."""
    path = r"jsonpath={.metadata.annotations.tuneloop\.dev/promotion}"
    told: bool = json.loads(
        kubectl("-n", cluster.namespace, "get", "deploy/tuneloop-model", "-o", path)
    )["proved"]
    return told


def deploy(
    cluster: Connection, run: str, given: Exported, killed: bool = False, **params: Any
) -> str:
    """What the stage says that refuses to deploy a model; its pod may be `killed` when the model is set."""
    from hera.workflows import DAG

    plan = plan_stages("deployed", [StageSpec(deploy_model, **params)], SMALL)
    with define_workflow("deployed", plan=plan) as built:
        stage = stage_template(deploy_model, plan.stages["deploy-model"], SMALL)
        with DAG(name="main"):
            stage(
                name="deploy-model",
                arguments={**given._asdict(), "promotion": f"{RUN}/deploy-model"},
            )
    submit_workflow(cluster, built.to_dict(), run=run, store=STORE)
    if killed:
        until(lambda: not is_proved(cluster), pause=1.0)
        pods = ("pods", "-l", f"{RUN_LABEL}={run}", "--grace-period=0", "--force")
        assert kubectl("-n", cluster.namespace, "delete", *pods).count("deleted") == 1
    assert argo.wait_for_run(cluster, run) == EXIT_NOT_PROMOTED
    nodes = read_nodes(run_workflows.find_workflows(cluster, run)[-1]).values()
    (said,) = (
        node.message for node in nodes if node.type == "Pod" and ": not promoted: " in node.message
    )
    return said


def commit_broken(root: str) -> Exported:
    """A model that vLLM cannot load, with an evaluation as none has."""
    about = {"policy": f"{root}/policy@sha256:{'0' * 64}"}
    for name in ("export", "evaluate"):
        draft = Draft(f"{root}/{name}")
        draft.path.mkdir(parents=True, exist_ok=True)
        (draft.path / "config.json").write_text('{"model_type": "nonsense"}')
        pq.write_table(pa.table({"prompt": ["12"]}), draft.path / "samples.parquet")
        draft.commit(
            stage=name, inputs=about, results={"mean_reward": 2.0} if name == "evaluate" else {}
        )
    return Exported(*(Artifact(f"{root}/{name}").ref for name in ("export", "evaluate")))


def test_a_run_has_its_model_served_if_it_is_good_and_another_taken_back(
    cluster: Connection, served: Exported, run: str, root: str, tmp_path: Path
) -> None:
    """From data to what answers; what is evaluated too low changes nothing; what does not start is taken back, also
    when the stage is killed, and the model before it answers all the while."""
    first = f"{run}-a"
    grpo = find_pipeline("grpo")
    submit_workflow(cluster, grpo.build(grpo.configure(sets=GRPO)), run=first, store=STORE)
    assert argo.wait_for_run(cluster, first) == 0
    assert len(run_workflows.find_workflows(cluster, first)) == 2, (
        "the first workflow deploys nothing"
    )
    good = read_outputs(cluster, first)["export"].outputs["model"]
    assert ask(cluster)["names"] == ["tuneloop", good] and is_proved(cluster)
    apply(kubectl("kustomize", str(tmp_path)))  # what a run has set is none of the overlay's

    assert "is below 1.5: " in (said := deploy(cluster, f"{run}-b", served, at_least=1.5))
    assert said.endswith(f"tuneloop-model still serves {good}")
    assert ask(cluster)["names"] == ["tuneloop", good]

    answers: list[dict[str, Any]] = []
    done = threading.Event()

    def ask_on() -> None:
        while not done.is_set():
            answers.append(ask(cluster))

    asking = threading.Thread(target=ask_on)
    asking.start()
    try:
        said = deploy(cluster, f"{run}-c", commit_broken(root), killed=True, ready_s=120.0)
        assert asking.is_alive(), "every question was answered"
    finally:
        done.set()
        asking.join()
    assert said.endswith(
        f"the pods of tuneloop-model are not all ready after 120 s; tuneloop-model serves {good}"
    )
    assert {name for each in answers for name in each["names"]} == {"tuneloop", good}
