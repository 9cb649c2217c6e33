"""A loop that is killed and resumed ends with the digests of one that was left alone."""

import os
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.local.loops import command, digests, finish, kill_when
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import Artifact
from tuneloop.local import journal
from tuneloop.runs.run_record import Run

pytestmark = pytest.mark.local
ROOT = Path(__file__).parents[2]
KILLS = 6
MOMENTS: dict[str, Callable[[Path], bool]] = {
    "begun": lambda out: True,
    "writing": lambda out: any(out.glob("data-*")),
    "committed": lambda out: (out / "manifest.json").is_file(),
}
"""Of a stage that writes to `out`."""


def pods(workdir: Path) -> list[journal.Node]:
    """Those of a run that has ended, in the order they began."""
    found = journal.read_state(workdir)
    assert found is not None
    made = [node for node in found.nodes.values() if node.type == "Pod" and node.finished]
    return sorted(made, key=lambda pod: pod.started)


def output(pod: journal.Node, run: Path) -> Path:
    """Where below `run` its stage commits: the one URL among its inputs that names no digest."""
    (url,) = [
        value
        for value in pod.inputs.values()
        if value.startswith(f"file://{run}/") and "@" not in value
    ]
    return Path(url.removeprefix("file://")).relative_to(run)


def test_killed_in_two_stages_and_resumed_is_the_undisturbed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In SFT when it has committed where to resume, and in an update that has begun to write."""
    steps = {"sft.max_steps": 100}  # the first ten are committed where a resume finds them
    finish(command("run", "sft_then_grpo", "--run", "calm", store=tmp_path, **steps))
    calm = pods(tmp_path / "calm")
    training = next(pod for pod in calm if pod.template == "sft")
    update = [pod for pod in calm if pod.template == "policy-update"][1]
    killed = tmp_path / "killed"
    points = {
        training.id: lambda: any((killed / "sft").glob("resume/*/manifest.json")),
        update.id: lambda: any((killed / "iterations" / "2" / "policy-update").glob("data-*")),
    }
    line = command("run", "sft_then_grpo", "--run", "killed", store=tmp_path, **steps)
    for pod, happened in points.items():
        assert kill_when(line, killed, pod, happened) == "Running"
        line = command("resume", "killed", store=tmp_path)
    finish(line)
    assert Artifact(str(killed / "sft")).manifest.notes["resumed_from"] >= 10
    assert digests(tmp_path, "killed") == digests(tmp_path, "calm")
    capsys.readouterr()
    audits = []
    for run in ("killed", "calm"):
        assert run_cli(["audit", run, "--store", str(tmp_path)]) == 0
        audits.append(capsys.readouterr().out)
    assert audits[0] == audits[1]
    assert run_cli(["bisect", "killed", "--against", "calm", "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "equal in all artifacts that both have\n"
    assert finish(command("replay", "killed", "2", store=tmp_path)).count(": equal, sha256:") == 3


@pytest.mark.slow
def test_killed_without_the_trainers_state_it_replays_what_followed_it(tmp_path: Path) -> None:
    """Five iterations of one pod, state after the third alone; killed in the fifth, whose policy then is replayed."""
    settings = {
        "update.state_every": 3,
        "loop.iterations": 5,
        "loop.iterations_per_pod": 60,
        "sft.max_steps": 100,
    }
    settings["seed"] = 1  # whose five updates all take a step
    finish(command("run", "sft_then_grpo", "--run", "calm", store=tmp_path, **settings))
    (pod,) = (each for each in pods(tmp_path / "calm") if each.template == "iterations")
    killed = tmp_path / "killed"
    line = command("run", "sft_then_grpo", "--run", "killed", store=tmp_path, **settings)

    def begun() -> bool:
        return any((killed / "iterations/5/policy-update").glob("data-*"))

    assert kill_when(line, killed, pod.id, begun) == "Running"
    finish(command("resume", "killed", store=tmp_path))
    assert digests(tmp_path, "killed") == digests(tmp_path, "calm")
    made = {
        i: Artifact(str(killed / f"iterations/{i}/policy-update")).manifest for i in range(1, 6)
    }
    assert [
        i for i in made if (killed / f"iterations/{i}/policy-update/state/manifest.json").is_file()
    ] == [3]
    assert made[5].notes["replayed"] == {"from_version": 4, "updates": 1}, (
        "version 1 is that of sft"
    )
    assert made[4].facts["updates"] == 1, "without a step the replay proves nothing"


def test_killed_at_six_points_and_resumed_is_the_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop of stages that compute next to nothing, twice at each of the moments."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    seed = int(os.environ.get("TUNELOOP_TEST_SEED") or random.SystemRandom().randrange(10**6))
    print(f"kill points from TUNELOOP_TEST_SEED={seed}")
    toy = [
        sys.executable,
        "-m",
        "tuneloop.cli",
        "run",
        str(ROOT / "tests/unit/toy_pipeline.py"),
        "--no-track",
    ]
    toy += ["--store", str(tmp_path), "--run"]
    finish([*toy, "calm"])
    calm = pods(tmp_path / "calm")
    assert len({pod.template for pod in calm}) >= 6, "points spread over all stages"

    rng, seen = random.Random(seed), []
    moments = [*MOMENTS] * (KILLS // len(MOMENTS))
    rng.shuffle(moments)
    for pod, moment in zip(sorted(rng.sample(calm, KILLS), key=calm.index), moments, strict=True):
        out = tmp_path / "killed" / output(pod, tmp_path / "calm")
        phase = kill_when(
            [*toy, "killed"], tmp_path / "killed", pod.id, partial(MOMENTS[moment], out)
        )
        seen.append((pod.display_name, moment, phase))
    print("killed in:", seen)
    finish([*toy, "killed"])
    assert digests(tmp_path, "killed") == digests(tmp_path, "calm")


@pytest.mark.slow
def test_an_oversampled_loop_that_is_killed_keeps_the_same_groups(tmp_path: Path) -> None:
    """Killed when it updates: the groups are those that committed rewards say, whoever reads them when, and what became
    of each is in the run's curves."""
    settings = {
        "rollout.oversampled_prompts": 8,
        "loop.iterations": 2,
        "seed": 1,
        "sft.max_steps": 100,
    }
    finish(command("run", "sft_then_grpo", "--run", "calm", store=tmp_path, **settings))
    killed = tmp_path / "killed"
    pod = [each for each in pods(tmp_path / "calm") if each.template == "policy-update"][1]
    line = command("run", "sft_then_grpo", "--run", "killed", store=tmp_path, **settings)
    out = killed / "iterations" / "2" / "policy-update"
    assert kill_when(line, killed, pod.id, lambda: any(out.glob("data-*"))) == "Running"
    finish(command("resume", "killed", store=tmp_path))
    assert digests(tmp_path, "killed") == digests(tmp_path, "calm")
    curves = {
        curve.name: curve.y
        for curve in Run.open("killed", str(tmp_path)).curves()
        if "groups_" in curve.name
    }
    for iteration in (1, 2):
        at = f"{killed}/iterations/{iteration}"
        scores: dict[str, set[float]] = {}
        for row in pq.read_table(Artifact(f"{at}/reward").path / "rewards.parquet").to_pylist():
            scores.setdefault(row["group"], set()).add(row["score"])
        telling = [group for group in sorted(scores) if len(scores[group]) > 1]
        counts = {
            "asked": 8,
            "kept": len(telling[:4]),
            "rejected": 8 - len(telling),
            "unused": len(telling[4:]),
        }
        facts = Artifact(f"{at}/policy-update").manifest.facts
        assert facts["groups"] == counts and facts["rollouts"] == 4 * counts["kept"]
        assert {name: curves[f"groups_{name}"][iteration - 1] for name in counts} == counts
    assert max(curves["groups_kept"]) > 0, "an update that learns nothing shows little"


@pytest.mark.slow
def test_a_loop_that_carries_groups_is_killed_and_resumed_with_the_same(tmp_path: Path) -> None:
    """A pod a stage undisturbed, and one pod for all that is killed while it updates on carried groups."""
    settings = {
        "rollout.oversampled_prompts": 8,
        "rollout.carry_after": 2,
        "loop.iterations": 3,
        "seed": 1,
    }
    settings |= {"sft.max_steps": 10}
    finish(command("run", "sft_then_grpo", "--run", "calm", store=tmp_path, **settings))
    line = command(
        "run",
        "sft_then_grpo",
        "--run",
        "killed",
        store=tmp_path,
        **settings,
        **{"loop.iterations_per_pod": 60},
    )
    out = tmp_path / "killed/iterations/2/policy-update"
    before = next(
        pod for pod in pods(tmp_path / "calm") if pod.template == "sft"
    )  # it has the same id at both grains
    assert (
        kill_when(line, tmp_path / "killed", before.id, lambda: any(out.glob("data-*")))
        == "Succeeded"
    )
    finish(command("resume", "killed", store=tmp_path))
    assert digests(tmp_path, "killed") == digests(tmp_path, "calm")

    rewarded, mixed = list[str](), 0
    for iteration in range(1, 4):
        at = f"{tmp_path}/calm/iterations/{iteration}"
        rows = pq.read_table(Artifact(f"{at}/reward").part("rewards.parquet")).to_pylist()
        assert [row["group"] for row in rows] == [
            row["group"] for row in rows[::4] for _ in range(4)
        ]
        rewarded += [row["group"] for row in rows[::4]]
        mixed += sum(len({*row["policy_versions"]}) > 1 for row in rows)
        assert Artifact(f"{at}/policy-update").manifest.params["max_staleness"] == 3
    assert len({*rewarded}) == len(rewarded) == 12 and mixed > 0
    assert finish(command("replay", "killed", "3", store=tmp_path)).count(": equal, sha256:") == 3


@pytest.mark.slow
def test_an_asynchronous_loop_samples_beside_its_updates_and_resumes_the_same(
    tmp_path: Path,
) -> None:
    settings = {"loop.asynchronous": True, "sft.max_steps": 10}
    finish(command("run", "sft_then_grpo", "--run", "calm", store=tmp_path, **settings))
    calm = pods(tmp_path / "calm")
    updates, samplings = (
        [p for p in calm if p.template == name] for name in ("policy-update", "rollout")
    )
    beside = [
        s
        for s in samplings
        if any(u.started < s.finished and s.started < u.finished for u in updates)
    ]
    assert len(beside) == 2, "of three, all but the first"
    versions = [
        Artifact(f"{tmp_path}/calm/iterations/{i}/reward").manifest.facts["version"]
        for i in (1, 2, 3)
    ]
    assert versions == [1, 1, 2], "the update of iteration 2 makes version 3 of 2, and so on"
    line = command("run", "sft_then_grpo", "--run", "killed", store=tmp_path, **settings)
    assert kill_when(line, tmp_path / "killed", beside[0].id, lambda: True) in (
        "Pending",
        "Running",
    )
    finish(command("resume", "killed", store=tmp_path))
    assert digests(tmp_path, "killed") == digests(tmp_path, "calm")
