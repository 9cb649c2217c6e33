import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit import toy
from tests.unit.cli.test_cli import TOY, Call, call, program, refused
from tests.unit.cluster.api import kubeconfig, serving
from tests.waiting import until
from tuneloop.argo import pod_fields
from tuneloop.cli import run_cli
from tuneloop.config.loading import find_pipeline
from tuneloop.core.store import Store
from tuneloop.extensions.sweep.runs import execute_run, judge_run, list_combinations
from tuneloop.local.journal import Journal, Workflow
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run

__all__ = ["call"]


@pytest.fixture(autouse=True)
def untracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNELOOP_TRACKERS", "")


def test_a_run_for_each_combination_named_by_it() -> None:
    combinations = list_combinations("s", ["a.b=1,x y", "c=1e-4,[d]"])
    assert [*combinations.values()] == [
        {"a.b": "1", "c": "1e-4"},
        {"a.b": "1", "c": "[d]"},
        {"a.b": "x y", "c": "1e-4"},
        {"a.b": "x y", "c": "[d]"},
    ]
    assert len(combinations) == 4 and all(
        re.fullmatch("s-[0-9a-f]{8}", name) for name in combinations
    )
    more = list_combinations("s", ["c=0,1e-4,[d]", "a.b=0,1,x y"])
    assert len(more) == 9 and combinations.items() <= more.items(), (
        "whatever the order of keys and values"
    )


# A toy of skill 0, 1, 2 or 3 begins with the reward 0.25, 0.5, 0.75 or 1, and gets the next one in each iteration.
@pytest.mark.parametrize(
    ("own", "others", "start", "why"),
    [
        ((0, 1), [(1, 1), (2, 1), (3, 1)], 1, "1 0.25, median of others' averages 0.75"),
        ((0, 2), [(1, 3), (2, 2), (3, 2)], 1, "2 0.5, median of others' averages 0.875"),
        (
            (0, 2),
            [(0, 2), (0, 2), (0, 2), (3, 2), (3, 2), (3, 2)],
            2,
            "2 0.5, median of others' averages 0.6875",
        ),
        ((0, 2), [(1, 3), (2, 2), (3, 2)], 3, None),  # not yet
        ((0, 3), [(1, 3), (2, 2), (3, 2)], 1, None),  # two of three have not got as far
        ((0, 2), [(1, 2), (2, 2)], 1, None),  # too few
        ((1, 1), [(1, 1), (1, 1), (1, 1)], 1, None),  # as good as the median
        ((0, 4), [(3, 4), (3, 4), (3, 4)], 1, None),  # its best is, and not its average
        ((0, 0), [(3, 1), (3, 1), (3, 1)], 1, None),  # nothing is known of it
    ],
)
def test_the_median_rule(
    tmp_path: Path,
    own: tuple[int, int],
    others: Sequence[tuple[int, int]],
    start: int,
    why: str | None,
) -> None:
    for name, (skill, iterations) in enumerate([own, *others]):
        toy.make(f"{tmp_path}/{name}", iterations, whole=False, skill=skill)
    run, *rest = (Run(f"{name}", f"{tmp_path}") for name in range(len(others) + 1))
    assert not judge_run(run, [*rest, run], range(start, own[1])), "its loop is over"
    assert judge_run(run, [*rest, run], range(start, 9)) == (why is not None)
    assert not judge_run(run, [*rest, run], range(start, 9)), "once: it may take a while to end"
    written = Store(run.url).get("stopped")
    assert written == (f"best reward by iteration {why}".encode() if why else None)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--over", "iterations"], "--over: 'iterations=': write KEY=V1,V2"),
        (["--over", "iterations=1,,2"], "write KEY=V1,V2"),
        (["--over", "=1"], "write KEY=V1,V2"),
        (["--over", "iterations=1", "--over", "iterations=2"], "each key once"),
        (["--over", "iteration=1,2"], "did you mean iterations?"),
        (["--over", "iterations=1,many"], "has to be a whole number"),
        (["--over", "iterations=1", "--name", "Not a name"], "'Not a name-"),
        ([], "Missing option '--over'"),
    ],
)
def test_mistakes_are_one_line(call: Call, tmp_path: Path, words: list[str], says: str) -> None:
    refused(call("sweep", TOY, "--name", "s", *words), says)
    assert not [*tmp_path.iterdir()]


def test_a_run_that_succeeds_as_it_is_stopped_does_not_end_the_sweep(tmp_path: Path) -> None:
    toy.make(f"{tmp_path}/r", 1)
    run = Run("r", str(tmp_path))

    def execute() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    with pytest.raises(KeyboardInterrupt):
        execute_run(run, [run], execute, range(0))
    Store(run.url).put("stopped", b"below the others")
    execute_run(run, [run], execute, range(0))


def test_a_pipeline_without_a_loop_stops_nothing_early(call: Call) -> None:
    refused(
        call("sweep", "sft", "--name", "s", "--over", "seed=1,2", "--stop-below-median", "2"),
        "has no loop",
    )


def rows(out: str) -> list[list[str]]:
    """The rows of the table, without the names of the runs."""
    lines = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    at = max(number for number, line in enumerate(lines) if line[0] == "run")
    return [line[1:] for line in lines[at + 2 :] if line != [""]]


def times(tmp_path: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("manifest.json")}


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 130)]
)
def test_a_sweep_that_was_ended_goes_on(call: Call, tmp_path: Path, number: int, code: int) -> None:
    held = tmp_path / "held"
    held.touch()
    line = [
        "sweep",
        TOY,
        "--name",
        "s",
        "--set",
        "iterations=1",
        "--set",
        f"held={held}",
        "--over",
        "sft.skill=0,2",
    ]
    first, second = list_combinations("s", line[-1:])
    child = program(*line, cwd=tmp_path, start_new_session=True)
    until(
        lambda: (tmp_path / "runs" / first / "evaluate-after/manifest.json").exists(), child=child
    )
    os.killpg(child.pid, number)
    child.communicate()
    assert child.returncode == code and not (tmp_path / "runs" / second).exists()
    if number != signal.SIGKILL:
        assert Run.open(first).phase == "interrupted"
        return
    until(lambda: Run.open(first).phase == "interrupted")
    held.unlink()
    made = times(tmp_path)

    result = call(*line)
    assert result.code == 0, result.out + result.err
    assert made.items() <= times(tmp_path).items(), "what was committed stays"
    how = "(greedy, held-out prompts)"
    assert rows(result.out) == [
        ["2", f"1.000 {how}", "succeeded"],
        ["0", f"0.500 {how}", "succeeded"],
    ]
    made = times(tmp_path)
    again = call(*line)
    assert (again.code, rows(again.out)) == (0, rows(result.out)) and times(tmp_path) == made
    refused(
        call(*line, "--set", "iterations=2"), f"--run: '{first}': exists with another iterations"
    )


def test_a_run_that_fails_holds_up_no_other(call: Call) -> None:
    result = call(
        "sweep", TOY, "--name", "s", "--set", "iterations=1", "--over", "broken=true,false"
    )
    assert result.code == 1 and "(in export; see `tuneloop logs s-" in result.err, result.err
    shares = ["0.750 (greedy, held-out prompts)"] * 2
    assert rows(result.out) == [["false", shares[0], "succeeded"], ["true", shares[1], "failed"]]


TOLD = "best reward by iteration {} {}, median of others' averages {}"


def test_a_run_below_the_median_is_stopped_and_stays_so(call: Call, tmp_path: Path) -> None:
    """Three runs have succeeded."""
    held = tmp_path / "held"
    held.touch()
    sets = ["iterations=3", f"held={held}"]
    line = [
        "sweep",
        TOY,
        "--name",
        "s",
        "--set",
        sets[0],
        "--set",
        sets[1],
        "--over",
        "sft.skill=1,2,3,0",
    ]
    *ended, last = list_combinations("s", line[-1:])
    for skill, name in enumerate(ended, 1):
        config = (
            find_pipeline(TOY).configure(sets=[*sets, f"sft.skill={skill}"]).model_dump(mode="json")
        )
        about = {
            "run": name,
            "pipeline": "toy_pipeline",
            "path": TOY,
            "store": f"file://{tmp_path}/runs",
        }
        journal = Journal(Run.create(Record(**about, config=config), "").directory)
        toy.make(f"{tmp_path}/runs/{name}", 3, skill=skill)
        journal.write(Workflow(name=name, phase="Succeeded"))
    result = call(*line, "--stop-below-median", "1")
    assert result.code == 0, result.out + result.err
    why = (tmp_path / "runs" / last / "stopped").read_text()
    assert why in [TOLD.format(*each) for each in ((1, 0.25, 0.75), (2, 0.5, 0.875))]
    assert result.out.count(f"{last}: is stopped early: {why}\n") == 1
    assert [row[0] for row in rows(result.out)] == ["1", "2", "3", "0"]
    assert rows(result.out)[-1][-1] == f"stopped: {why}"
    held.unlink()
    made = times(tmp_path)
    again = call(*line)
    assert (again.code, rows(again.out)) == (0, rows(result.out)) and times(tmp_path) == made
    (tmp_path / "runs" / last / "stopped").unlink()
    resumed = call(*line)
    assert resumed.code == 0 and [row[-1] for row in rows(resumed.out)] == ["succeeded"] * 4


def test_on_a_cluster_all_are_submitted_at_once_and_one_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pod_fields, "CLAIM", str(tmp_path))
    line = ["sweep", "grpo", "--name", "s", "--store", f"file://{tmp_path}", "-n", "tuneloop"]
    line += [
        "--set",
        "cluster.claim=artifacts",
        "--over",
        "update.learning_rate=1e-4,1e-5,1e-6,1e-7",
    ]
    runs = [*list_combinations("s", line[-1:])]
    with serving() as (server, cluster):
        monkeypatch.setenv("KUBECONFIG", kubeconfig(cluster.host, tmp_path))

        def names() -> list[str]:
            return [name for plural, name in server.objects if plural == "workflows"]

        server.becomes = {"phase": "Succeeded"}
        assert run_cli(line) == 0, capsys.readouterr().err
        assert names() == runs
        for name, rate in zip(names(), ("0.0001", "1e-05", "1e-06", "1e-07")):
            spec = json.dumps(server.objects["workflows", name]["spec"])
            assert re.search(rf"--learning-rate\W+{re.escape(rate)}\W", spec)
        for name, skill in zip(runs, (1, 2, 3, 0)):
            toy.make(f"file://{tmp_path}/{name}", 2, skill=skill)
        worst = server.objects["workflows", runs[3]]
        for phase in (
            "Pending",
            "Running",
        ):  # before a version is made, too: what has not failed isn't mended
            worst["status"] = {"phase": phase}
            assert run_cli([*line, "--set", "rollout.n=2"]) == 2
            assert "exists with another" in capsys.readouterr().err
        assert run_cli([*line, "--stop-below-median", "2"]) == 0
        said, why = capsys.readouterr().out, TOLD.format(2, 0.5, 0.875)
        assert (
            f"{runs[3]}: is stopped early: {why}\n" in said
            and rows(said)[-1][-1] == f"stopped: {why}"
        )
        assert worst["status"] == {"phase": "Failed"}
        assert [row[0] for row in rows(said)] == ["1e-4", "1e-5", "1e-6", "1e-7"]

        assert run_cli(line) == 0 and len(names()) == 4
        del server.objects["workflows", runs[2]]  # as the controller does a day later
        assert run_cli(line) == 0 and names() == [*runs[:2], runs[3]]
        (tmp_path / runs[3] / "stopped").unlink()
        assert run_cli(line) == 0 and names()[3:] == [f"{runs[3]}-2"]
