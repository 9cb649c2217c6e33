import itertools
import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit import toy
from tests.unit.cli.test_cli import QUICK, TOY, Call, call, program, refused
from tests.unit.cluster.api import kubeconfig, serving
from tests.waiting import until
from tuneloop.argo import pod_fields
from tuneloop.cli import run_cli
from tuneloop.cluster.sweep import judge_rewards, list_points
from tuneloop.config.loading import find_pipeline
from tuneloop.local.journal import Journal, Workflow
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run

__all__ = ["call"]
OVER = ("--over", "sft.skill=0,1,2", "--over", "per_workflow=80,90")


def test_a_run_for_each_point_of_the_grid_numbered_by_its_place() -> None:
    points = list_points("s", ["a.b=1,x y", "c=1e-4,[d]"], None, 0)
    assert points == {
        "s-1": {"a.b": "1", "c": "1e-4"},
        "s-2": {"a.b": "1", "c": "[d]"},
        "s-3": {"a.b": "x y", "c": "1e-4"},
        "s-4": {"a.b": "x y", "c": "[d]"},
    }


def test_a_sample_of_the_grid_is_the_beginning_of_a_larger_one() -> None:
    over = [f"a={','.join(map(str, range(9)))}", f"b={','.join(map(str, range(7)))}"]
    whole = list_points("s", over, None, 0)
    for seed in range(3):
        samples = [list_points("s", over, runs, seed) for runs in (1, 5, 20, 100)]
        assert [len(each) for each in samples] == [1, 5, 20, 63]
        for less, more in itertools.pairwise(samples):
            assert [*more][: len(less)] == [*less]
        assert samples[-1] == whole and all(each.items() <= whole.items() for each in samples)
    assert len({tuple(list_points("s", over, 5, seed)) for seed in range(5)}) == 5


# Of three other runs that have reached iteration 2 the averages over 1 and 2 are 0.3, 0.5 and 0.7: the median is 0.5.
THREE = [[0.2, 0.4, 0.9], [0.4, 0.6], [0.6, 0.8, 0.1, 0.1]]


@pytest.mark.parametrize(
    ("own", "others", "start", "k", "bound"),
    [
        ([0.4, 0.49], THREE, 2, 2, 0.5),
        ([0.4, 0.5], THREE, 2, None, 0),  # as good as the median
        ([0.9, 0.1], THREE, 2, None, 0),  # the best counts, not the newest
        ([0.1], THREE, 2, None, 0),  # not yet
        ([0.1], THREE, 1, 1, 0.4),
        ([0.1, 0.1], THREE[:2], 1, None, 0),  # of too few
        ([0.1, 0.1, 0.95], THREE, 1, 2, 0.5),  # nobody knows what two of three come to in iteration 3
        ([0.1, 0.1, 0.1], THREE, 3, None, 0),
        ([0.1, 0.55], [*THREE, [0.7, 0.9]], 2, 2, 0.6),  # of an even number the mean of the two in the middle
        ([0.5], [[], [], [], []], 1, None, 0),
    ],
)
def test_the_median_rule(
    own: Sequence[float], others: Sequence[Sequence[float]], start: int, k: int | None, bound: float
) -> None:
    told = judge_rewards(own, others, start)
    best = max(own[:k]) if k else 0
    count = len([each for each in others if len(each) >= (k or 0)])
    wanted = f"best reward by iteration {k} {best:g}, median of the averages of {count} others {bound:g}"
    assert told == (wanted if k else "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--over", "iterations"], "--over: 'iterations=': write KEY=V1,V2"),
        (["--over", "iterations=1,,2"], "write KEY=V1,V2"),
        (["--over", "=1"], "write KEY=V1,V2"),
        (["--over", "iterations=1,1"], "each of its values once"),
        (["--over", "iterations=1", "--over", "iterations=2"], "each key and each of its values once"),
        (["--over", "iteration=1,2"], "did you mean iterations?"),
        (["--over", "iterations=1,many"], "valid integer"),
        (["--over", f"iterations={','.join(map(str, range(10001)))}"], "10001: are too many combinations"),
        (["--over", "iterations=1", "--name", "Not a name"], "--name: 'Not a name-1': use at most 40"),
        (["--over", "iterations=1", "--runs", "0"], "'--runs'"),
        (["--over", "iterations=1", "--parallel", "0"], "'--parallel'"),
        ([], "Missing option '--over'"),
    ],
)
def test_mistakes_are_one_line(call: Call, tmp_path: Path, words: list[str], says: str) -> None:
    refused(call("sweep", TOY, "--name", "s", *words), says)
    assert not [*tmp_path.iterdir()]


def test_what_a_pipeline_cannot_do_is_one_line(call: Call, tmp_path: Path) -> None:
    refused(call("sweep", "sft", "--name", "s", "--over", "seed=1,2", "--stop-below-median", "2"), "has no loop")
    server = ["--set", "engine.name=vllm", "--over", "seed=1,2", "--parallel", "2"]
    refused(call("sweep", "grpo", "--name", "s", *server), "--parallel: 2: each run has a server at the same port")
    assert not [*tmp_path.iterdir()]


def rows(out: str) -> list[list[str]]:
    """The rows of the table."""
    lines = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    (at,) = [number for number, line in enumerate(lines) if line[0] == "run"]
    return [line for line in lines[at + 2 :] if line != [""]]


def times(tmp_path: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("manifest.json")}


def test_a_killed_sweep_goes_on_and_what_has_ended_is_not_begun_again(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELOOP_TRACKERS", "")
    line = ["sweep", TOY, "--name", "s", "--set", "iterations=1", "--over", "sft.skill=0,2"]
    child = program(*line, cwd=tmp_path, start_new_session=True)
    until(lambda: (tmp_path / "runs/s-1/evaluate-before/manifest.json").exists(), child=child)
    assert [Run.open(name).phase for name in ("s-1", "s-2")] == ["running", "created"]
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    until(lambda: Run.open("s-1").phase == "interrupted")
    made = times(tmp_path)

    result = call(*line)
    assert result.code == 0, result.out + result.err
    assert made.items() <= times(tmp_path).items(), "what was committed stays"
    assert rows(result.out) == [
        ["s-2", "2", "succeeded", "1", "1.000", "0.750"],
        ["s-1", "0", "succeeded", "1", "0.500", "0.250"],
    ]
    made = times(tmp_path)
    again = call(*line)
    assert (again.code, rows(again.out)) == (0, rows(result.out)) and ": " not in again.out
    assert times(tmp_path) == made
    refused(call(*line, "--set", "iterations=2"), "--run: 's-1': exists with another iterations")


def test_a_run_that_fails_holds_up_no_other(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNELOOP_TRACKERS", "")
    line = ["sweep", TOY, "--name", "s", "--set", "iterations=1", "--over", "broken=true,false", "--parallel", "2"]
    child = program(*line, cwd=tmp_path)
    out, err = child.communicate()
    assert child.returncode == 1 and "(in export; see `tuneloop logs s-1 export`" in err, err
    assert {row[0]: row[2] for row in rows(out)} == {"s-1": "failed", "s-2": "succeeded"}
    assert "s-1: failed\n" in out and "s-2: succeeded\n" in out


def judged(iteration: int) -> str:
    """What is said of a run of skill 0 in an iteration, beside runs of the skills 1, 2 and 3."""
    best, bound = {1: ("0.25", "0.75"), 2: ("0.5", "0.875"), 3: ("0.75", "0.9167")}[iteration]
    return f"best reward by iteration {iteration} {best}, median of the averages of 3 others {bound}"


def test_a_run_below_the_median_is_stopped_and_stays_so(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three runs have succeeded; another process has begun the fourth, which is under way."""
    monkeypatch.setenv("TUNELOOP_TRACKERS", "")
    sets = ["--set", "iterations=3"]
    for skill in (1, 2, 3):
        config = find_pipeline(TOY).configure(sets=["iterations=3", f"sft.skill={skill}"]).model_dump(mode="json")
        about = {"run": f"s-{skill}", "pipeline": "toy_pipeline", "path": TOY, "store": f"file://{tmp_path}/runs"}
        journal = Journal(Run.create(Record(**about, config=config), "").directory)
        toy.make(f"{tmp_path}/runs/s-{skill}", 3, skill=skill)
        journal.write(Workflow(name=f"s-{skill}", phase="Succeeded"))
    child = program("run", TOY, "--run", "s-4", *QUICK, *sets, "--set", "sft.skill=0", cwd=tmp_path)
    until(lambda: (tmp_path / "runs/s-4/iterations/1/reward/manifest.json").exists(), child=child)
    child.send_signal(signal.SIGSTOP)
    line = ["sweep", TOY, "--name", "s", *sets, "--over", "sft.skill=1,2,3,0"]
    sweep = program(*line, "--stop-below-median", "1", cwd=tmp_path)
    status = Path(f"/proc/{child.pid}/status")
    until(lambda: int(status.read_text().partition("ShdPnd:")[2].split()[0], 16) >> signal.SIGTERM - 1 & 1, child=sweep)
    child.send_signal(signal.SIGCONT)
    out, err = sweep.communicate()
    child.communicate()
    assert (sweep.returncode, child.returncode) == (0, 75), out + err
    why = (tmp_path / "runs/s-4/stopped").read_text()
    assert why in map(judged, (1, 2, 3)) and f"s-4: is stopped: {why}\n" in out
    assert [row[:3] for row in rows(out)][-1] == ["s-4", "0", "stopped"] and rows(out)[-1][-1] == why
    made = times(tmp_path)
    again = call(*line)
    assert (again.code, rows(again.out)) == (0, rows(out)) and times(tmp_path) == made
    (tmp_path / "runs/s-4/stopped").unlink()
    resumed = call(*line)
    assert resumed.code == 0 and ["s-4", "0", "succeeded", "3"] in [row[:4] for row in rows(resumed.out)]


def test_on_a_cluster_all_are_submitted_at_once_and_one_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pod_fields, "CLAIM", str(tmp_path))
    line = ["sweep", "grpo", "--name", "s", "--store", f"file://{tmp_path}", "-n", "tuneloop"]
    line += ["--set", "cluster.claim=artifacts", "--over", "update.learning_rate=1e-4,1e-5,1e-6,1e-7"]
    with serving() as (server, cluster):
        monkeypatch.setenv("KUBECONFIG", kubeconfig(cluster.host, tmp_path))

        def names() -> list[str]:
            return [name for plural, name in server.objects if plural == "workflows"]

        server.becomes = {"phase": "Succeeded"}
        assert run_cli(line) == 0, capsys.readouterr().err
        assert names() == ["s-1", "s-2", "s-3", "s-4"]
        for name, rate in zip(names(), ("0.0001", "1e-05", "1e-06", "1e-07")):
            spec = json.dumps(server.objects["workflows", name]["spec"])
            assert re.search(rf"--learning-rate\W+{re.escape(rate)}\W", spec)
        for number, skill in enumerate((1, 2, 3, 0), 1):
            toy.make(f"file://{tmp_path}/s-{number}", 2, skill=skill)
        server.objects["workflows", "s-4"]["status"] = {"phase": "Running"}
        capsys.readouterr()
        assert run_cli([*line, "--stop-below-median", "2"]) == 0
        said = capsys.readouterr()
        assert f"s-4: is stopped: {judged(2)}\n" in said.out and "s-4: stopped\n" in said.out
        assert server.objects["workflows", "s-4"]["status"] == {"phase": "Failed"}
        assert [row[0] for row in rows(said.out)] == ["s-3", "s-2", "s-1", "s-4"]

        assert run_cli(line) == 0 and len(names()) == 4
        del server.objects["workflows", "s-3"]  # as the controller does a day later
        assert run_cli(line) == 0 and names() == ["s-1", "s-2", "s-4"]
        assert run_cli([*line, "--set", "rollout.n=2"]) == 2
        assert "--run: 's-1': exists with another" in capsys.readouterr().err
        (tmp_path / "s-4/stopped").unlink()
        assert run_cli(line) == 0 and names()[3:] == ["s-4-2"]
