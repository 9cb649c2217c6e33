"""Runs that share devices: seats on real ResourceClaims, and the devices that pods see. Needs a DRA driver."""

import copy
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hera.workflows import DAG, Container

from tests.cluster.conftest import STORE, kubectl
from tests.cluster.making import RUN, digests, submit_workflow
from tests.cluster.test_queue import until
from tuneloop.argo.loop import build_continue_template
from tuneloop.argo.pod_fields import pod_fields, retry_fields
from tuneloop.argo.run_plan import plan_stages
from tuneloop.argo.template import define_workflow, stage_template
from tuneloop.cli import run_cli
from tuneloop.cluster import reservations
from tuneloop.cluster import submit as argo
from tuneloop.cluster.watch import read_logs, read_status
from tuneloop.config.extended import extend_cluster
from tuneloop.core.errors import UserError
from tuneloop.extensions.sharing.settings import Share
from tuneloop.kube.connection import WORKFLOWS, Connection
from tuneloop.stages.data_prep import data_prep
from tuneloop.workflow.loop import StageSpec
from tuneloop.workflow.settings import (
    GROUP_LABEL,
    RUN_LABEL,
    AcceleratorResources,
    Resources,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CLASS = os.environ.get("TUNELOOP_TEST_DEVICE_CLASS", "gpu.example.com")
IMAGES = os.environ.get("TUNELOOP_TEST_IMAGES", "tuneloop/{image}:dev")


@pytest.fixture
def share(cluster: Connection, run: str) -> Iterator[Share]:
    """A group of the test's own, of which nothing may be left."""
    if not kubectl("get", "deviceclass", CLASS, "--ignore-not-found"):
        pytest.fail(f"needs the DeviceClass {CLASS}: a DRA driver", pytrace=False)
    yield Share(group=run, device_class=CLASS, patience=10)
    kubectl("-n", cluster.namespace, "delete", "workflows", "-l", f"test={run}", "--wait=false")
    kubectl(
        "-n",
        cluster.namespace,
        "delete",
        "resourceclaims,leases",
        "-l",
        f"{GROUP_LABEL}={run}",
        "--wait=false",
    )


def claims(cluster: Connection, share: Share) -> dict[str, list[str]]:
    """Claim → the runs on it."""
    found = reservations.list_claims(cluster, f"{GROUP_LABEL}={share.group}")
    return {each["metadata"]["name"]: reservations.list_claim_runs(each) for each in found}


def idle(cluster: Connection, share: Share, run: str, name: str) -> str:
    """A workflow that is under way and does nothing."""
    metadata = {"name": name, "labels": {RUN_LABEL: run, "test": share.group}}
    spec = {"entrypoint": "main", "templates": [{"name": "main", "suspend": {}}]}
    body = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": metadata,
        "spec": spec,
    }
    cluster.custom.create_namespaced_custom_object(
        *WORKFLOWS[:2], cluster.namespace, WORKFLOWS[2], body
    )
    return name


def test_seats_are_taken_once_handed_on_and_given_back(cluster: Connection, share: Share) -> None:
    """Six at once: two sit on each of three claims. A run's next workflow keeps the seat. What is deleted leaves it."""
    names = [idle(cluster, share, f"{share.group}-{i}", f"{share.group}-{i}") for i in range(6)]
    got: dict[str, str] = {}
    threads = [
        threading.Thread(
            target=lambda n=n: got.update({n: reservations.reserve_claim(cluster, n, share)})
        )
        for n in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seated = claims(cluster, share)
    assert {name: len(runs) for name, runs in seated.items()} == {
        f"{share.group}-{i}": 2 for i in (1, 2, 3)
    }
    assert {run: name for name, runs in seated.items() for run in runs} == got
    assert reservations.reserve_claim(cluster, names[0], share) == got[names[0]], (
        "a repeated step gets another claim"
    )

    first, second = names[0], idle(cluster, share, names[0], f"{names[0]}-2")
    reservations.release_ended_runs(cluster, without=first)  # the exit handler of the first
    assert claims(cluster, share) == seated
    owners = [
        owner["name"]
        for each in reservations.list_claims(cluster, f"{GROUP_LABEL}={share.group}")
        for owner in each["metadata"]["ownerReferences"]
    ]
    assert sorted(owners) == sorted([second, *names[1:]])

    gone = [name for name in names if got[name] == got[names[0]] and name != first]
    kubectl("-n", cluster.namespace, "delete", "workflow", first, second, *gone, "--wait")
    until(lambda: got[first] not in claims(cluster, share))  # by Kubernetes' garbage collector
    left = next(name for name in names if got[name] != got[first])
    kubectl("-n", cluster.namespace, "delete", "workflow", left, "--wait")
    reservations.release_ended_runs(cluster)
    assert left not in claims(cluster, share)[got[left]]

    other = share.model_copy(update={"count": 2})
    survivor = next(name for name in names if name not in (first, left, *gone))
    with pytest.raises(
        UserError, match=r"cluster.share: .*count.*: 2.*ResourceClaim .* of the group has"
    ):
        reservations.reserve_claim(cluster, survivor, other)


def pipeline(share: Share) -> dict[str, Any]:
    """One real stage that uses the shared devices, late enough to overlap with those of other runs; then the run's
    next workflow, which only has its seat."""
    size: Any = {"cpu": "50m", "memory": "256Mi"}
    settings = {
        "images": IMAGES,
        "scorer": AcceleratorResources(**size),
        "cpu": Resources(**size),
        "share": share,
    }
    cluster = extend_cluster().model_validate(settings)
    using = copy.copy(data_prep)
    using.accelerator = True
    spec = StageSpec(using, source_args={"digits": 2}, train=8, eval=4, sft=0)
    plan = plan_stages("shared", [spec], cluster)
    with define_workflow("shared", plan=plan, cluster=cluster) as built:
        prepare: Any = stage_template(using, plan.stages["data-prep"], cluster)
        prepare.command = ["sh", "-c", f'sleep 8; exec {" ".join(prepare.command)} "$@"', "sh"]
        proceed = build_continue_template("second", (), cluster)
        over = Container(
            name="over", command=["true"], **pod_fields("base", "cpu", cluster), **retry_fields()
        )
        with DAG(name="main"):
            prepare(name="data-prep", arguments={"prompts": f"{RUN}/data-prep"}) >> proceed(
                name="continue"
            )
        with DAG(name="second"):
            over(name="over")
    made: dict[str, Any] = built.to_dict()
    return made


def test_an_unknown_class_is_refused_before_anything_is_created(
    cluster: Connection, share: Share
) -> None:
    unknown = share.model_copy(update={"device_class": "no.example.com"})
    with pytest.raises(
        UserError,
        match=r"device_class: 'no.example.com': is not a DeviceClass of .*; see `kubectl get",
    ):
        submit_workflow(cluster, pipeline(unknown), run=share.group, store=STORE)
    assert not kubectl(
        "-n",
        cluster.namespace,
        "get",
        "workflows",
        "-l",
        f"{RUN_LABEL}={share.group}",
        "-o",
        "name",
    )


def test_two_runs_on_one_claim_and_a_third_on_another(cluster: Connection, share: Share) -> None:
    """Each run is two workflows, on one claim; those of a claim see its devices; nothing is left of them."""
    runs = [f"{share.group}-{i}" for i in range(3)]
    for name in runs:
        made = pipeline(share)
        made["metadata"]["labels"]["test"] = share.group
        submit_workflow(cluster, made, run=name, store=STORE)
    until(lambda: sum(map(len, claims(cluster, share).values())) == 3)
    seated = claims(cluster, share)
    assert sorted(map(len, seated.values())) == [1, 2]
    claim_of = {}
    for name in runs:
        ((claim, told),) = read_status(cluster, name).claims.items()
        assert name in seated[claim] and name in told
        claim_of[name] = claim
    assert [argo.wait_for_run(cluster, name) for name in runs] == [0, 0, 0]
    devices: dict[str, set[str]] = {claim: set() for claim in seated}
    for name in runs:
        seen = read_status(cluster, name)
        assert len(seen.workflows) == 2
        assert {n.outputs["claim"] for n in seen.nodes.values() if n.template == "take-claim"} == {
            claim_of[name]
        }
        assert list(digests(seen.nodes.values(), name)) == ["data-prep"], "artifacts of another run"
        (told,) = (
            line for _, line in read_logs(cluster, name) if line.startswith("data_prep: devices")
        )
        devices[claim_of[name]].add(told)
    assert [len(each) for each in devices.values()] == [1, 1] and not set.intersection(
        *devices.values()
    ), devices
    until(lambda: not claims(cluster, share))
    assert not kubectl(
        "-n", cluster.namespace, "get", "leases", "-l", f"{GROUP_LABEL}={share.group}", "-o", "name"
    )


EXPERIMENT = {
    "cluster.images": IMAGES,
    "engine.kind": "transformers",
    "data.source_args.digits": 3,
    "data.source_args.sft_wrong_share": 0.4,
    "data.train": 128,
    "data.eval": 16,
    "data.sft": 800,
    "sft.max_steps": 150,
    "rollout.prompts_per_iteration": 48,
    "update.learning_rate": 4e-4,
    "loop.iterations": 40,
    "loop.iterations_per_pod": 10,  # which keep the turn
    "loop.target_reward": 0.97,
}
"""It comes to a mean reward of 1.0 on held-out prompts (greedy) from 0.69 with seed 0, and from 0.63 with seed 1."""


def submit_experiment(cluster: Connection, group: str, run: str, seed: int) -> None:
    share = {"group": group, "device_class": CLASS, "patience": 45}
    settings = (
        EXPERIMENT
        | {"seed": seed}
        | {f"cluster.share.{name}": value for name, value in share.items()}
    )
    flags = [f"--set={key}={value}" for key, value in settings.items()]
    assert run_cli(["submit", "sft_then_grpo", "--run", run, "--store", STORE, *flags]) == 0
    label = f"test={group}"
    kubectl(
        "-n",
        cluster.namespace,
        "label",
        "workflows",
        "-l",
        f"{RUN_LABEL}={run}",
        label,
        "--overwrite",
    )


def test_two_experiments_on_one_claim_learn_what_one_learns_alone(
    cluster: Connection, share: Share
) -> None:
    """One alone on a claim; then the same again, and one of another seed, both on one claim. Nothing that one commits
    depends on the other, and both learn the task."""
    alone, *both = (f"{share.group}-{name}" for name in ("alone", "same", "other"))
    submit_experiment(cluster, share.group, alone, seed=0)
    assert argo.wait_for_run(cluster, alone) == 0
    for seed, name in enumerate(both):
        submit_experiment(cluster, share.group, name, seed)
    until(
        lambda: (
            len(claims(cluster, share)) == 1 and set(*claims(cluster, share).values()) == {*both}
        )
    )
    assert [argo.wait_for_run(cluster, name) for name in both] == [0, 0]
    ended = {name: [*read_status(cluster, name).nodes.values()] for name in (alone, *both)}
    made = [digests(nodes, name) for name, nodes in ended.items()]
    assert made[0] == made[1] != made[2] and "export" in made[0]
    for nodes in ended.values():
        (learned,) = {
            n.outputs["mean-reward"] for n in nodes if n.display_name.startswith("evaluate-after(")
        }
        assert float(learned) >= 15 / 16, (
            "1.0 where it was measured; another processor rounds otherwise"
        )
