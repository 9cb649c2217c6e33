"""`tuneloop watch`: on a terminal and elsewhere, of a run here, in a bucket and on a cluster."""

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.objects import serve_bucket
from tests.unit import toy
from tests.unit.cluster.api import kubeconfig, serving
from tests.waiting import LIMIT_S
from tuneloop.cli import run_cli
from tuneloop.cli.watch import CODES, draw_sparkline, draw_state
from tuneloop.core.artifacts import MANIFEST, dump_checked_json, load_checked_json
from tuneloop.kfp.api import DONE
from tuneloop.kfp.progress import PHASES
from tuneloop.local.journal import Journal, Node, Workflow, lock_workdir
from tuneloop.runs import tracking
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run
from tuneloop.runs.summary import estimate_loop_end
from tuneloop.ui.describe import describe_state
from tuneloop.workflow.settings import RUN_LABEL

ROOT = Path(__file__).parents[3]
ALL = [
    *("sft", "evaluate-before"),
    *(
        f"iterations/{i}/{stage}"
        for i in (1, 2)
        for stage in ("rollout", "reward", "policy-update")
    ),
    *("evaluate-after", "export"),
]


def start_watch(*words: str, **more: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tuneloop.cli", "watch", *words]
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}/components:{ROOT}",
        "COLUMNS": "100",
        "TERM": "xterm",
    }
    return subprocess.Popen(command, text=True, env=env, **{"stdout": subprocess.PIPE, **more})


def make_run(tmp_path: Path, name: str, iterations: int = 2, *, whole: bool = True) -> Path:
    toy.make(f"{tmp_path}/runs/{name}", iterations, whole=whole)
    record = Record(
        run=name, pipeline="toy", path="toy.py", config={}, store=f"file://{tmp_path}/runs"
    )
    return Run.create(record, "spec: {}").directory


def list_commits(text: str) -> list[str]:
    return re.findall(r"^\d\d:\d\d:\d\d  (\S+)  \d", text, re.M)


def test_a_line_a_commit_and_the_end_of_a_run_that_goes_on_meanwhile(tmp_path: Path) -> None:
    directory = make_run(tmp_path, "r", whole=False)
    about = Workflow("r", started=1.0, parameters={"iterations": "4"})
    journal = Journal(directory)
    with lock_workdir(directory):
        journal.write(about)
        child = start_watch("r", cwd=tmp_path)
        assert child.stdout
        first = [child.stdout.readline() for _ in ALL[:-2]]
        assert "(at most " in first[-1] and " to go)" in first[-1], (
            "two of four iterations were measured"
        )
        assert re.search(r"iterations/2/reward  [\d.]+ s  mean_reward 0.75$", first[-2])
        toy.make(f"{tmp_path}/runs/r", 2)
        journal.write(
            Workflow("r", phase="Succeeded", started=1.0, finished=9.0, parameters=about.parameters)
        )
    rest, _ = child.communicate(timeout=LIMIT_S)
    assert list_commits("".join(first) + rest) == ALL, (
        "each once, in the order in which they were made"
    )
    assert rest.endswith("\nr: succeeded\n") and child.returncode == 0


@pytest.mark.parametrize(
    ("phase", "code", "said"),
    [("Failed", 1, "r: failed: sft: exit code 1"), ("Running", 75, "r: interrupted")],
)
def test_how_a_run_ended_is_the_exit_code(
    phase: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    message = "sft: exit code 1" if phase == "Failed" else ""
    Journal(make_run(tmp_path, "r", 1, whole=False)).write(
        Workflow("r", phase=phase, message=message, started=1.0)
    )
    assert run_cli(["watch", "r"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_every_end_of_a_run_on_kfp_ends_a_watch() -> None:
    """A run that KFP had skipped, as all of it was cached, was watched for ever."""
    assert {PHASES[state].lower() for state in DONE} <= CODES.keys()
    assert not {PHASES[state].lower() for state in PHASES.keys() - set(DONE)} & CODES.keys()


def test_of_a_store_elsewhere_only_what_is_new_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.make(f"{tmp_path}/store/far", 2)
    files = {
        str(path.relative_to(tmp_path / "store")): path
        for path in (tmp_path / "store").rglob("*.json")
    }
    later = {name for name in files if "/export/" in name or "/evaluate-after/" in name}
    objects = {name: path.read_bytes() for name, path in files.items() if name not in later}
    with serve_bucket(objects, monkeypatch) as asked:
        child = start_watch("far", "--store", "s3://bucket", cwd=tmp_path)
        assert child.stdout
        first = [child.stdout.readline() for _ in ALL[:-2]]
        while asked["LIST"] < 30:  # some more looks
            assert child.poll() is None, "neither evaluated nor exported: it has not ended"
            time.sleep(0.05)
        read = asked["GET"]
        objects |= {name: files[name].read_bytes() for name in later}
        rest, _ = child.communicate(timeout=LIMIT_S)
        assert list_commits("".join(first) + rest) == ALL and child.returncode == 0
        assert asked["GET"] - read < 2 * len(ALL), "what was read before is not read again"
        assert read < 100


def test_a_run_elsewhere_has_ended_by_one_rule_for_watch_and_track(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    toy.make(f"{tmp_path}/runs/far", 2)
    assert (
        tracking.find_phase(Run.open("far", "runs")) == "succeeded"
        and run_cli(["watch", "far"]) == 0
    )
    (tmp_path / "runs/far/evaluate-after").rename(tmp_path / "later")
    assert tracking.find_phase(Run.open("far", "runs")) == "running", (
        "what was exported is not evaluated yet"
    )
    monkeypatch.setattr(tracking, "IDLE_S", 0.0)
    assert (
        tracking.find_phase(Run.open("far", "runs")) == "elsewhere"
        and run_cli(["watch", "far"]) == 75
    )
    told = "\nfar: elsewhere: nothing was committed for a day, and it is unknown how it ended\n"
    assert capsys.readouterr().out.endswith(told)
    failure = dump_checked_json({"message": "no memory", "time": time.time() + 1e6}, "failure.json")
    (tmp_path / "runs/far/rollout").mkdir()
    (tmp_path / "runs/far/rollout/failure.json").write_bytes(failure)
    assert (
        tracking.find_phase(Run.open("far", "runs")) == "failed" and run_cli(["watch", "far"]) == 1
    )


def test_on_a_cluster_the_workflow_says_how_it_stands_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    toy.make(f"{tmp_path}/runs/far", 2, whole=False)
    parameters = [{"name": "run", "value": "far"}, {"name": "iterations", "value": "5"}]
    with serving() as (server, cluster):
        monkeypatch.setenv("KUBECONFIG", kubeconfig(cluster.host, tmp_path))
        about = {
            "name": "far",
            "labels": {RUN_LABEL: "far"},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        workflow = {"metadata": about, "spec": {"arguments": {"parameters": parameters}}}
        server.objects["workflows", "far"] = workflow | {"status": {"phase": "Running"}}
        going = describe_state(Run("far", "runs"), cluster)
        assert (going["phase"], going["iterations"]) == ("running", "2 of at most 5") and going[
            "loop_end"
        ]
        server.objects["workflows", "far"] = workflow | {
            "status": {"phase": "Failed", "message": "no quota"}
        }
        assert run_cli(["watch", "far", "-n", "tuneloop"]) == 1
    out = capsys.readouterr().out
    assert list_commits(out) == ALL[:-2] and out.endswith("\nfar: failed: no quota\n")


@pytest.mark.parametrize("command", ["watch", "run"])
def test_on_a_terminal_there_is_a_table(command: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    if command == "watch":
        Journal(make_run(tmp_path, "r")).write(
            Workflow("r", "Succeeded", started=1.0, parameters={"iterations": "2"})
        )
        child = start_watch("r", cwd=tmp_path, stdout=theirs)
    else:
        words = [
            "run",
            str(ROOT / "tests/unit/toy_pipeline.py"),
            "--run",
            "r",
            "--no-track",
            "--no-warm",
        ]
        env = {**os.environ, "PYTHONPATH": f"{ROOT}/components:{ROOT}", "TERM": "xterm"}
        line = [sys.executable, "-m", "tuneloop.cli", *words]
        child = subprocess.Popen(
            line, cwd=tmp_path, env={**env, "COLUMNS": "100"}, stdout=theirs, text=True
        )
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
    except OSError:  # who wrote has ended
        pass
    assert child.wait(LIMIT_S) == 0
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", seen.decode())
    assert re.search(r"stage +state +done +seconds +retries +newest", text) and "─" * 50 in text
    assert (
        re.search(r"reward +Committed|reward +(Succeeded|Running)", text) and "r: succeeded" in text
    )
    assert re.search(r"iteration [12] of at most 2   reward [\d.]+ [▁█]", text)


def test_the_table_says_what_stages_wait_for_and_cuts_only_messages(tmp_path: Path) -> None:
    directory = make_run(tmp_path, "r", whole=False)
    journal = Journal(directory)
    with lock_workdir(directory):
        journal.write(Workflow("r", started=1.0, parameters={"iterations": "2"}))
        waits = "[no] node has enough memory, and this goes on for longer than a line"
        journal.write(Node("e", "r.export", "export", "export", "Pod", "Pending", message=waits))
        stands = describe_state(Run.open("r", f"{tmp_path}/runs"), None)
    assert stands["loop_end"] is None, "there are no iterations to come"
    with (screen := Console(width=72)).capture() as drawn:
        screen.print(draw_state(stands))
    lines = [line.rstrip() for line in drawn.get().splitlines()]
    assert lines[0] == "r  running" and lines[-1] == "iteration 2 of at most 2   reward 0.750 ▁█"
    (export,) = [line for line in lines if line.startswith(" export")]
    assert "Pending" in export and "[no]" in export and export.endswith("…")
    assert sum(bool(re.match(r" [a-z]", line)) for line in lines) == 1 + 6, (
        "a line each, headings first"
    )


def test_the_loop_ends_as_far_off_as_its_iterations_took(tmp_path: Path) -> None:
    make_run(tmp_path, "r", 4, whole=False)
    for number in range(1, 5):  # a manifest's time is no part of its digest
        path = tmp_path / "runs/r/iterations" / str(number) / "policy-update/manifest.json"
        manifest = load_checked_json(path.read_bytes(), MANIFEST, str(path.parent), "")
        manifest["provenance"]["started"], manifest["timings"]["total"] = (
            100.0 * number + 1000 * (number > 2),
            5.0,
        )
        path.write_bytes(dump_checked_json(manifest, MANIFEST))
    run = Run.open("r", f"{tmp_path}/runs")
    assert estimate_loop_end(run, 10) == 1405 + 6 * 100, (
        "the pause of a run that was resumed does not count"
    )
    assert [estimate_loop_end(run, most) for most in (None, 4, 3)] == [None] * 3
    newest = run.training_rewards()[-1].value
    assert estimate_loop_end(run, 10, target_reward=newest) is None, "its reward ended the loop"
    assert estimate_loop_end(run, 10, target_reward=newest + 0.01) is not None


def test_a_sparkline_is_as_wide_as_its_values_at_most() -> None:
    assert draw_sparkline([0.5]) == "▁"
    assert draw_sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert draw_sparkline([*range(2400)]) == "▁▁▂▂▂▃▃▃▃▄▄▄▅▅▅▆▆▆▆▇▇▇██"
