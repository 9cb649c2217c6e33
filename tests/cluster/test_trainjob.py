"""Trainer backends as jobs of the cluster: launched, followed, their output and exit status carried through."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ROOT, STORE, kubectl
from tests.cluster.making import submit_workflow
from tests.cluster.test_jobset import RUN, SMALL
from tests.cluster.volumes import apply, volume
from tuneloop.argo.run_plan import plan_stages
from tuneloop.argo.template import define_workflow, stage_template
from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.cluster.launch import delete_job, launch_job
from tuneloop.cluster.watch import read_nodes
from tuneloop.extensions.trainers.trainjob import (
    as_job,
    as_rayjob,
    as_trainjob,
    as_workflow,
    build_raycluster,
    build_rayservice,
    dump_manifest,
)
from tuneloop.kube.connection import Connection
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.training.backends.native import Native
from tuneloop.training.backends.torchtune import RUNTIMES, Lora, Torchtune, TorchtuneConfig
from tuneloop.training.backends.trl import Trl
from tuneloop.workflow.loop import StageSpec
from tuneloop.workflow.settings import RUN_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TINY = {
    **{
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "log_level": "info",
    },
    **{
        "use_cpu": True,
        "bf16": False,
        "dtype": "float32",
        "gradient_checkpointing": False,
        "report_to": "none",
    },
}


@pytest.fixture(scope="module")
def workspace(cluster: Connection, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The runtimes, and the claim; where the cluster makes no volumes, one of a directory of this machine."""
    place = tmp_path_factory.mktemp("overlay")
    component = os.path.relpath(ROOT / "manifests" / "components" / "trainer", place)
    (place / "kustomization.yaml").write_text(f"components: [{component}]\nkind: Kustomization\n")
    text = kubectl("kustomize", str(place))
    for image in ("base", "trainer", "rollout"):
        text = text.replace(f"tuneloop/{image}:dev", SMALL.images.format(image=image))
    apply(text)
    with volume("tuneloop-workspace", tmp_path_factory.mktemp("workspace")):
        yield
    apply(text, "delete")


@pytest.fixture(scope="module")
def made(cluster: Connection) -> Iterator[dict[str, str]]:
    """References of prompts and of a model in the store."""
    from hera.workflows import DAG

    run = f"backends-{os.urandom(3).hex()}"
    specs = [
        StageSpec(data_prep, train=16, sft=16, eval=4),
        StageSpec(base_model, model="tiny-qwen3"),
    ]
    plan = plan_stages("made", specs, SMALL)
    with define_workflow("made", plan=plan) as built:
        prepare = stage_template(data_prep, plan.stages["data-prep"], SMALL)
        bring = stage_template(base_model, plan.stages["base-model"], SMALL)
        with DAG(name="main"):
            prompts = "{{tasks.data-prep.outputs.parameters.prompts}}"
            data = prepare(name="data-prep", arguments={"prompts": f"{RUN}/data-prep"})
            data >> bring(
                name="base-model", arguments={"prompts": prompts, "checkpoint": f"{RUN}/base-model"}
            )
    submit_workflow(cluster, built.to_dict(), run=run, store=STORE)
    assert argo.wait_for_run(cluster, run) == 0
    found = read_nodes(run_workflows.find_workflows(cluster, run)[-1]).values()
    yield {"at": f"{STORE}/{run}"} | {
        k: v for node in found for k, v in node.outputs.items() if "@" in v
    }
    kubectl(
        "-n",
        cluster.namespace,
        "delete",
        "workflows,pods",
        "-l",
        f"{RUN_LABEL}={run}",
        "--wait=false",
    )


def launched(cluster: Connection, job: dict[str, Any]) -> int:
    try:
        return launch_job(cluster, job)
    finally:
        delete_job(cluster, job)


def test_trl_in_two_pods(
    cluster: Connection,
    made: dict[str, str],
    workspace: None,
    run: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    places = {"model_name_or_path": "/workspace/model", "dataset_name": "/workspace/dataset"}
    backend = Trl(trainer="sft", nodes=2, args={**places, "output_dir": "/workspace/out", **TINY})
    bring = {"dataset": f"{made['prompts']}#sft.parquet", "model": f"{made['checkpoint']}#model"}
    assert launched(cluster, as_trainjob(backend, f"{run}-trl", SMALL, run=run, **bring)) == 0
    said = capfd.readouterr().out
    assert (
        "Total train batch size (w. parallel, distributed & accumulation) = 4" in said
    )  # 2 a rank, 2 ranks
    assert "node-0-0: " in said and "'loss'" in said
    missing = Trl(
        trainer="sft", nodes=2, args={**backend.args, "model_name_or_path": "/workspace/none"}
    )
    assert launched(cluster, as_trainjob(missing, f"{run}-none", SMALL, run=run, **bring)) == 1
    assert "/workspace/none" in capfd.readouterr().out


def test_grpo_as_a_runtime(
    cluster: Connection,
    made: dict[str, str],
    workspace: None,
    run: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = [
        "engine.kind=transformers",
        "loop.iterations=2",
        "data.train=12",
        "data.eval=4",
        "evaluate.limit=4",
    ]
    given += ["rollout.prompts_per_iteration=4", "rollout.n=4", "data.rewards={length_penalty: 1}"]
    given += ["data.reward_args={length_penalty: {max_length: 24, buffer: 20}}"]
    bring = {"model": f"{made['checkpoint']}#model", "dataset": f"{made['prompts']}#train.parquet"}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": f"{run}-grpo", "namespace": cluster.namespace},
        "spec": {
            "runtimeRef": {"name": "tuneloop-grpo"},
            "initializer": {name: {"storageUri": place} for name, place in bring.items()},
            "trainer": {"args": ["--no-track", *(f"--set={each}" for each in given)]},
        },
    }
    assert launched(cluster, job) == 0
    said = capfd.readouterr().out
    assert f"/workspace/runs/{run}-grpo/export/" in said, said


def test_trl_after_initializers_that_are_steps_of_argo(
    cluster: Connection, made: dict[str, str], workspace: None, run: str
) -> None:
    places = {"model_name_or_path": "/workspace/model", "dataset_name": "/workspace/dataset"}
    backend = Trl(trainer="sft", args={**places, "output_dir": f"/workspace/{run}", **TINY})
    bring = {"dataset": f"{made['prompts']}#sft.parquet", "model": f"{made['checkpoint']}#model"}
    submit_workflow(cluster, as_workflow(backend, "tune", SMALL, **bring), run=run, store=STORE)
    assert argo.wait_for_run(cluster, run) == 0
    nodes = read_nodes(run_workflows.find_workflows(cluster, run)[-1]).values()
    pods = {node.display_name.partition("(")[0]: node for node in nodes if node.type == "Pod"}
    assert pods["node"].started >= max(pods[f"{part}-initializer"].finished for part in bring) > 0


@pytest.mark.parametrize("kind", ["RayCluster", "RayService"])
def test_kuberay_takes_what_is_rendered_for_it(
    cluster: Connection, tmp_path: Path, kind: str
) -> None:
    if kind == "RayCluster":
        manifest = build_raycluster("try", SMALL, 2)
    else:
        manifest = build_rayservice(
            [{"name": "llm", "import_path": "mine:app"}], "answers", SMALL, 2
        )
    path = tmp_path / "manifest.yaml"
    own = [
        "-n",
        cluster.namespace,
        "create",
        "--dry-run=server",
        "--validate=strict",
        "-o=name",
        "-f",
        str(path),
    ]
    path.write_text(dump_manifest(manifest))
    assert kubectl(*own).strip() == f"{kind.lower()}.ray.io/{manifest['metadata']['name']}"
    path.write_text(dump_manifest({**manifest, "spec": {**manifest["spec"], "nothing": 1}}))
    assert not kubectl(*own, check=False)


@pytest.mark.parametrize("model", RUNTIMES)
def test_the_trainer_takes_torchtunes_jobs(
    cluster: Connection, workspace: None, run: str, tmp_path: Path, model: str
) -> None:
    config = TorchtuneConfig(epochs=1, model=Lora(lora_rank=8))
    job = as_trainjob(Torchtune(model=model, config=config), run, SMALL, model="s3://b/m#model")
    path = tmp_path / "manifest.yaml"
    own = [
        "-n",
        cluster.namespace,
        "create",
        "--dry-run=server",
        "--validate=strict",
        "-o=name",
        "-f",
        str(path),
    ]
    path.write_text(dump_manifest(job))
    assert kubectl(*own).strip() == f"trainjob.trainer.kubeflow.org/{run}"
    job["spec"]["runtimeRef"]["name"] = "tuneloop-torchtune"  # a name without a model
    path.write_text(dump_manifest(job))
    assert not kubectl(*own, check=False)


def test_our_own_stage_as_a_trainjob_and_as_a_job(
    cluster: Connection,
    made: dict[str, str],
    workspace: None,
    run: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = {
        "policy": made["checkpoint"],
        "prompts": made["prompts"],
        "max_steps": 3,
        "device": "cpu",
    }
    given |= {"per_device_train_batch_size": 2}
    pair = Native(nodes=2, args={**given, "checkpoint": f"{made['at']}/pair"})
    assert launched(cluster, as_trainjob(pair, f"{run}-pair", SMALL, run=run)) == 0
    wrong = Native(
        args={**given, "prompts": made["checkpoint"], "checkpoint": f"{made['at']}/wrong"}
    )
    assert launched(cluster, as_job(wrong, f"{run}-wrong", SMALL, run=run)) == 2
    assert "holds no sft.parquet" in capfd.readouterr().out


def test_our_own_stage_as_a_rayjob(
    cluster: Connection, made: dict[str, str], run: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given = {
        "policy": made["checkpoint"],
        "prompts": made["prompts"],
        "max_steps": 3,
        "device": "cpu",
    }
    given |= {"per_device_train_batch_size": 2, "checkpoint": f"{made['at']}/ray"}
    roomy = SMALL.adjust_role("trainer", memory="3Gi")
    assert (
        launched(cluster, as_rayjob(Native(nodes=2, args=given), f"{run}-ray", roomy, run=run)) == 0
    )
    assert "sft: 3/3 steps" in capfd.readouterr().out
