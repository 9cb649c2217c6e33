"""A run that something happens to is resumed and ends as the undisturbed one; `make certify` has a thousand faults."""

import fcntl
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.certify.certificate import Certificate, Outcome
from tests.certify.check import Standing, compare
from tests.certify.interpose import Call, lose_power, run_meanwhile, wait_for_others
from tests.certify.kinds import KINDS, Injection, make_plan
from tests.disks import NoMounts, mount_small_disk
from tests.waiting import LIMIT_S
from tuneloop.core.ends import RETRY_STAGE

ROOT = Path(__file__).parents[2]
COUNT = 36


def certify(tmp_path: Path, *words: str) -> dict[str, Any]:
    """What a certificate that is made so says, if it has no violation."""
    line = [
        sys.executable,
        "-m",
        "tests.certify",
        "--jobs",
        "1",
        "--output",
        str(tmp_path / "told.json"),
        *words,
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        line,
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=6 * LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    told: dict[str, Any] = json.loads((tmp_path / "told.json").read_text())
    return told


def test_faults_of_every_kind_change_nothing(tmp_path: Path) -> None:
    told = certify(tmp_path, "--injections", str(COUNT), "--seed", "19")
    assert {kind["kind"] for kind in told["kinds"]} == {kind.name for kind in KINDS}
    assert (told["injections"], told["equal"], told["leaks"], told["violations"]) == (
        COUNT,
        COUNT,
        0,
        [],
    )
    assert told["attempts"] > COUNT, "nothing was disturbed"


@pytest.mark.local
@pytest.mark.slow
def test_a_fault_of_stages_that_train_and_sample_changes_nothing(tmp_path: Path) -> None:
    told = certify(
        tmp_path, "--real", "--injections", "26", "--kind", "killed before a call", "--seed", "2"
    )
    assert (told["injections"], told["equal"], told["met"], told["leaks"]) == (1, 1, 1, 0)
    assert told["stages_lost"] and told["attempts"] > 1, "nothing was disturbed"


@pytest.mark.local
@pytest.mark.slow
def test_stages_on_disks_of_twenty_sizes_end_with_75_and_resume_to_the_same_root(
    tmp_path: Path,
) -> None:
    """At 4 of 5 sizes a stage ended with 1 and a traceback of safetensors or shutil."""
    try:
        with mount_small_disk(tmp_path / "disk", 1 << 16):
            pass
    except NoMounts as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    certificate = certify(tmp_path, "--full-disk", "--injections", "20")
    assert [outcome["code"] for outcome in certificate["outcomes"]] == [75] * 20
    assert [outcome["problems"] for outcome in certificate["outcomes"]] == [[]] * 20


def test_a_plan_is_of_its_seed_and_has_every_kind() -> None:
    calls = {kind.place: ["open a", "fsync a.b", "write c", "get d", "keys e", "LIST i", "GET f", "PUT g", "PUT if h"]
             for kind in KINDS}  # fmt: skip
    plan = make_plan(calls, 300, seed=1)
    assert plan == make_plan(calls, 300, seed=1) != make_plan(calls, 300, seed=2)
    assert len(plan) == 300 and [each.index for each in plan] == [*range(300)]
    assert {each.kind for each in plan} == {kind.name for kind in KINDS}
    fits = {kind.name: kind.fits for kind in KINDS}
    assert all(fits[each.kind](each.call) for each in plan)
    torn = Counter(each.at for each in plan if each.kind == "duplicate pod")
    assert max(torn.values()) - min(torn.values()) <= 1, "each call once before any is drawn again"


def test_what_differs_from_the_undisturbed_run_is_told() -> None:
    calm = Standing("sha256:1", ("a", "sft/state/data/x", "b"))
    assert compare(calm, calm) == []
    assert compare(Standing("sha256:1", ("a", "b")), calm) == [], "a trainer's state may be missing"
    other = Standing("sha256:2", ("a", "c"), problems=("audit: sft: x was changed",))
    assert compare(other, calm) == [
        "audit: sft: x was changed",
        "the root is sha256:2, of the undisturbed run sha256:1",
        "leaked: c",
        "missing: b",
    ]


def test_a_certificate_names_what_went_wrong(tmp_path: Path) -> None:
    made = [Injection(n, "torn write", "files", n, f"fsync {n}", 0) for n in range(2)]
    outcomes = [Outcome(made[0], "sha256:1"), Outcome(made[1], problem="leaked: c")]
    told = Certificate(7, {"stages": "sha256:1"}, {"files": 9}, outcomes, 1.0).summarize()
    assert (told["equal"], told["leaks"], told["boundaries"]) == (
        1,
        1,
        {"files": {"calls": 9, "injected": 2}},
    )
    assert told["violations"][0]["call"] == "fsync 1" and told["kinds"][0]["violations"] == 1


def test_a_loss_of_power_takes_what_is_not_durable(tmp_path: Path) -> None:
    run, durable = tmp_path / "run", tmp_path / "durable"
    for place in (run, durable):
        place.mkdir()
    (run / "before").write_text("1")
    (durable / "begun").write_text(str((run / "before").stat().st_ino))
    for name in ("named", "synced", "neither"):
        (run / name).write_text("2")
    inodes = {name: (run / name).stat().st_ino for name in ("named", "synced")}
    (durable / "notes").write_text(
        f"name\t{inodes['named']}\t{run}/named\nbytes\t{inodes['synced']}\t{run}/synced\n"
    )
    assert lose_power(run, durable, "bytes") == ["neither", "named"]
    assert [(run / name).read_text() for name in ("before", "named", "synced", "neither")] == [
        "1",
        "",
        "2",
        "",
    ]
    assert lose_power(run, durable, "names") == ["synced", "neither"]
    assert sorted(path.name for path in run.iterdir()) == ["before", "named"]


def test_a_duplicate_that_wants_a_lock_of_the_first_goes_on_when_that_has_let_it_go(
    tmp_path: Path,
) -> None:
    """The first stood still, with its lock, until the duplicate had ended: neither ever went on."""

    def work() -> int:
        with (tmp_path / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (tmp_path / "done").touch()
        return 0

    with (tmp_path / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_meanwhile(work)(Call("open", "", ""))
        assert not (tmp_path / "done").exists()
    wait_for_others()
    assert (tmp_path / "done").exists()


def test_pods_are_retried_as_rendered() -> None:
    from tests.certify.attempts import STRATEGY
    from tests.unit.core.test_ends import strategies

    assert strategies()["sft_then_grpo.sft"] == STRATEGY and STRATEGY["expression"] == RETRY_STAGE
