"""The journal of a run: a line that is damaged is as if it were not there, and is said once."""

import json
import random
from pathlib import Path

import pytest

from tuneloop.cli.show import show_stages
from tuneloop.local.journal import Journal, Node, State, Workflow, read_state
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run
from tuneloop.runs.stages import list_stages
from tuneloop.runs.summary import describe_iterations


def write(directory: Path) -> Path:
    """Write the journal of a run that was killed in its second session."""
    journal = Journal(directory)
    journal.write(Workflow("w", parameters={"iterations": "3"}, pid=7))
    for number in range(3):
        node = Node(f"stage-{number}", f"w.stage({number})", f"stage({number})", "stage", "Pod")
        for phase in ("Pending", "Running", "Succeeded"):
            node.phase = phase
            journal.write(node)
    journal.write(Workflow("w", "Failed", parameters={"iterations": "3"}))
    journal.write(Workflow("w", parameters={"iterations": "3"}))
    journal.write(
        Node(
            "last",
            "w.last",
            "last",
            "last",
            "Pod",
            phase="Running",
            inputs={"x": "/iterations/2/x"},
        )
    )
    journal.close()
    return directory / "nodes.jsonl"


def read(directory: Path) -> State:
    found = read_state(directory)
    assert found is not None
    return found


def test_the_newest_line_of_a_node_counts_and_lines_are_json(tmp_path: Path) -> None:
    lines = write(tmp_path).read_text().splitlines()
    assert {"kind", "id", "phase", "sum"} <= json.loads(lines[1]).keys()
    assert list(read(tmp_path).nodes) == ["last"], "those of the session before are history"
    (tmp_path / "nodes.jsonl").write_text("\n".join(lines[:10]) + "\n")
    assert [(n.id, n.phase) for n in read(tmp_path).nodes.values()] == [
        (f"stage-{i}", "Succeeded") for i in range(3)
    ]


def test_a_line_that_is_damaged_counts_no_more_and_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    lines = path.read_bytes().splitlines()[:10]
    lines[9] = lines[9].replace(b"Succeeded", b"Succeedes")
    lines[4] = b"\xff\xfe not json"
    # As after a kill: no session has ended.
    (tmp_path / "ended.json").unlink()
    path.write_bytes(b"\n".join(lines) + b'\n{"kind": "node", "id": "torn')
    assert [n.phase for n in read(tmp_path).nodes.values()] == ["Succeeded", "Succeeded", "Running"]
    read(tmp_path)
    assert capsys.readouterr().err == f"{path}: 2 damaged lines are skipped\n", (
        "the last one is being written"
    )


def test_a_journal_that_was_cut_off_is_not_one_whose_executor_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that had succeeded was `interrupted`, without a word."""
    journal = Journal(tmp_path)
    journal.write(Workflow("w"))
    journal.write(Node("a", "a", "a", "a", "Pod", phase="Succeeded"))
    journal.write(Workflow("w", phase="Succeeded"))
    journal.close()
    path = tmp_path / "nodes.jsonl"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        state = read(tmp_path)
        assert (state.workflow.phase, state.alive) == ("Succeeded", False)
        assert f"it lacks the last {len(whole) - size} byte" in state.note
        assert state.note in capsys.readouterr().err
    path.unlink()
    assert read(tmp_path).workflow.phase == "Succeeded"
    assert "is missing, so that the stages of the run are not known" in capsys.readouterr().err
    # Neither a resumed run that was killed, nor a journal whose end is damaged.
    path.write_bytes(whole)
    journal = Journal(tmp_path)
    journal.write(Workflow("w"))
    journal.close()
    assert read(tmp_path).workflow.phase == "Running"
    (tmp_path / "ended.json").write_text("{}")
    assert (read(tmp_path).workflow.phase, read(tmp_path).note) == ("Running", "")
    assert "ended.json: is damaged" in capsys.readouterr().err


def test_no_bad_byte_stands_in_the_way_of_who_looks_at_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(
        Record(run="r", pipeline="toy", path="", config={}, store=f"file://{tmp_path}"), ""
    )
    path = write(run.directory)
    whole, rng = path.read_bytes(), random.Random(0)
    phases = set()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            change = rng.choice(("flip", "drop", "cut", "insert"))
            if change == "flip":
                data[at] = rng.randrange(256)
            elif change == "insert":
                data[at:at] = rng.randbytes(3)
            else:
                del data[at : at + (1 if change == "drop" else rng.randrange(200))]
        path.write_bytes(data)
        phases.add(run.phase)
        describe_iterations(run)
        show_stages(list_stages(run))
    assert "interrupted" in phases and phases <= {"created", "interrupted", "failed"}
    capsys.readouterr()


def test_what_a_line_says_is_of_its_type_and_any_text_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path)
    journal.write(Workflow("w", parameters={"prompt": "naïve \udcff"}))
    for name, started in (("fine", 1), ("wrong", "soon")):
        journal.write(Node(name, name, name, name, "Pod", started=started))  # type: ignore[arg-type]
    journal.close()
    state = read(tmp_path)
    assert state.workflow.parameters == {"prompt": "naïve ?"}
    assert [(node.id, node.started) for node in state.nodes.values()] == [("fine", 1.0)]
    assert "1 damaged lines are skipped" in capsys.readouterr().err
