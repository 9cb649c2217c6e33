"""The certificate of runs on a cluster, as far as it needs none: its plan, its programs, what it says."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.certify.cluster_certificate import ClusterCertificate, ClusterOutcome, RunOutcome
from tests.certify.cluster_faults import copy_pod
from tests.certify.cluster_plan import (
    CLUSTER_KINDS,
    HOGGED,
    INPUTS,
    PREEMPTED,
    STAGES,
    ClusterInjection,
    make_cluster_plan,
)
from tests.certify.cluster_rig import SAID, draw_workflow
from tests.certify.held import COMMIT, END, GO, HELD, HOLDS, ORDERS, WORK
from tests.unit import toy
from tuneloop.workflow.settings import QUEUE_LABEL, RUN_LABEL

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("count", [1, 15, 30, 40])
def test_a_plan_is_of_its_seed_and_has_every_kind(count: int) -> None:
    plan = make_cluster_plan(count, seed=1)
    assert plan == make_cluster_plan(count, seed=1) and (
        count == 1 or plan != make_cluster_plan(count, seed=2)
    )
    assert [each.index for each in plan] == [*range(count)]
    shares = Counter(each.kind for each in plan)
    assert (
        len(shares) == min(count, len(CLUSTER_KINDS))
        and max(shares.values()) - min(shares.values()) <= 1
    )
    assert max(Counter((each.run, each.stage) for each in plan).values()) == 1, (
        "one at most for a stage of a run"
    )
    known = {kind.name: kind for kind in CLUSTER_KINDS}
    assert all(each.moment in known[each.kind].moments for each in plan)
    assert all(INPUTS[each.stage] for each in plan if known[each.kind].reads)


def test_the_stages_of_the_plan_are_those_of_the_toy(tmp_path: Path) -> None:
    made = toy.make(str(tmp_path), iterations=1)
    assert [key if not key[0].isdigit() else f"iterations/{key}" for key in made] == [*STAGES]


def test_programs_stand_still_where_the_plan_has_a_fault() -> None:
    kinds = {"sft": HOGGED, "evaluate-after": PREEMPTED}
    plan = [
        ClusterInjection(n, 0, kind, stage, COMMIT) for n, (stage, kind) in enumerate(kinds.items())
    ]
    drawn = draw_workflow("c1", plan, "certify-1")
    templates = {each["name"]: each for each in drawn["spec"]["templates"] if "container" in each}
    env = {each["name"]: each.get("value") for each in templates["sft"]["container"]["env"]}
    assert json.loads(env[HOLDS]) == {"sft": COMMIT, "evaluate-after": COMMIT}
    patch = json.loads(templates["sft"]["podSpecPatch"])
    assert "512Mi" in str(patch) and templates["sft"]["container"]["resources"]["limits"] == {
        "memory": "384Mi"
    }
    assert "podSpecPatch" not in templates["reward"]
    assert templates["evaluate"]["metadata"]["labels"][QUEUE_LABEL] == "c1"
    assert QUEUE_LABEL not in templates["sft"].get("metadata", {}).get("labels", {})


@pytest.mark.parametrize(
    ("moment", "order", "committed", "code"),
    [(WORK, "", False, 143), (COMMIT, GO, False, 0), (END, "", True, 0)],
)
def test_a_program_stands_still_until_it_is_told(
    moment: str, order: str, committed: bool, code: int, tmp_path: Path
) -> None:
    """No order: it gets SIGTERM, and does what a stage does then."""
    manifest, orders = tmp_path / "run/sft/manifest.json", tmp_path / "orders"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {
        **os.environ,
        "PYTHONPATH": path,
        HOLDS: json.dumps({"sft": moment}),
        ORDERS: str(orders),
    }
    words = [
        sys.executable,
        "-m",
        "tests.certify.held",
        "--checkpoint",
        f"file://{tmp_path}/run/sft",
    ]
    with subprocess.Popen(words, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        line = next(line for line in program.stdout if line.startswith(HELD))
        said = SAID.search(line)
        assert said and said[1] == moment and int(said[2]) == program.pid
        assert manifest.exists() == committed
        if order:
            (tmp_path / "new").write_text(order)
            (tmp_path / "new").rename(orders)
        else:
            program.send_signal(signal.SIGTERM)
        program.communicate()
    assert program.returncode == code
    assert manifest.exists() == (code == 0)


def test_a_duplicate_runs_what_argo_starts_and_is_unknown_to_argo() -> None:
    env = [{"name": HOLDS, "value": "{}"}, {"name": "TUNELOOP_ATTEMPT", "value": "0"}]
    main = {
        "name": "main",
        "command": [
            "/var/run/argo/argoexec",
            "emissary",
            "--",
            "python",
            "-m",
            "tests.certify.held",
        ],
        "args": ["--checkpoint", "s3://b/r/sft"],
        "env": env,
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
    }
    labels = {RUN_LABEL: "c1", "workflows.argoproj.io/workflow": "c1"}
    pod = {
        "metadata": {"namespace": "tuneloop", "labels": labels},
        "spec": {
            "nodeName": "n",
            "initContainers": [{"name": "init"}],
            "containers": [{"name": "wait"}, main],
            "volumes": [{"name": "scratch", "emptyDir": {}}, {"name": "exec-sa-token"}],
            "serviceAccountName": "tuneloop-stage",
        },
    }
    copied = copy_pod(pod, "again")
    (container,) = copied["spec"]["containers"]
    assert (container["command"], container["args"]) == (
        ["python", "-m", "tests.certify.held"],
        main["args"],
    )
    assert container["env"] == env[1:] and main["env"] == env
    assert copied["metadata"] == {
        "name": "again",
        "namespace": "tuneloop",
        "labels": {RUN_LABEL: "c1"},
    }
    assert copied["spec"]["volumes"] == [{"name": "scratch", "emptyDir": {}}]
    assert not {"nodeName", "initContainers"} & {*copied["spec"]}


def test_a_certificate_names_what_must_not_be(capsys: pytest.CaptureFixture[str]) -> None:
    plan = [ClusterInjection(n, 0, HOGGED, "sft", WORK) for n in range(3)]
    outcomes = [
        ClusterOutcome(plan[0], met=True, ends=["out of memory"], lost_s=4.0),
        ClusterOutcome(plan[1]),
    ]
    outcomes.append(ClusterOutcome(plan[2], met=True, problem="it was taken"))
    roots, calm = (
        {"here": "sha256:1", "undisturbed": "sha256:1"},
        RunOutcome("calm", "sha256:1", []),
    )
    good = ClusterCertificate(
        1, roots, calm, [RunOutcome("c1", "sha256:1", outcomes[:1], lost_pods=1, lost_s=4.0)]
    )
    assert good.violations == []
    good.print()
    assert "out of memory 1" in capsys.readouterr().out
    bad = RunOutcome("c1", "sha256:2", outcomes[1:], ["the root is sha256:2"])
    told = ClusterCertificate(
        1, {**roots, "here": "sha256:3"}, calm, [bad], ["secret/s"]
    ).summarize()
    assert (told["equal"], told["met"], told["injections"]) == (0, 1, 2)
    assert told["violations"] == [
        "run c1: the root is sha256:2",
        f"injection 2: {HOGGED}, sft {WORK}, run 0: it was taken",
        f"injection 1: {HOGGED}, sft {WORK}, run 0: was not met",
        "left on the cluster: secret/s",
        "the undisturbed run has other roots here and on the cluster: {'here': 'sha256:3', 'undisturbed': 'sha256:1'}",
    ]
