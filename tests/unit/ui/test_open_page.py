"""What a page that is open shows of files that are changed behind it: never the changed text."""

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from tests.mutations.changes import KINDS
from tests.mutations.open_page import list_page_outcomes
from tests.mutations.sample_run import SampleRun, make_sample_run
from tests.objects import serve_bucket
from tests.policies import commit_policy
from tests.rollouts import commit_scored_rollouts
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Unavailable
from tuneloop.formats.tokens import load_tokenizer
from tuneloop.runs.run_record import Run
from tuneloop.ui import samples
from tuneloop.ui.app import build_app
from tuneloop.ui.proved_files import ProvedFiles
from tuneloop.ui.report import render_page

TEXT = "01234"
PAGE = "/api/runs/r/samples/1"


@pytest.fixture(scope="module")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    return make_sample_run(tmp_path_factory.mktemp("open"))


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    """Return the file of scored rollouts of a run, whose completion is `TEXT`."""
    policy = commit_policy(tmp_path / "r/base-model")
    tokenizer = load_tokenizer(policy.path / "model")
    ids = [tokenizer.encode(TEXT)]
    commit_scored_rollouts(tmp_path / "r", 1, [TEXT], ids, policy, prompt="p", group=1)
    (path,) = (tmp_path / "r").rglob("rewards.parquet")
    return path


def change_digit(data: bytes) -> bytes:
    changed = data.replace(TEXT.encode(), b"01284")
    assert changed != data
    return changed


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "a digit": change_digit,
    "truncated": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "longer": lambda data: data + b"x",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("hidden", [False, True], ids=["seen", "time put back"])
def test_a_file_that_changed_behind_an_open_page_is_proved_again(
    rewards: Path, tmp_path: Path, change: str, hidden: bool
) -> None:
    """The changed text was shown with 200, and a truncated file was a traceback."""
    whole = rewards.read_bytes()
    status = rewards.stat()
    with TestClient(build_app(str(tmp_path)), raise_server_exceptions=True) as client:
        assert client.get(PAGE).json()["rows"][0]["completion"] == TEXT
        rewards.write_bytes(CHANGES[change](whole))
        if hidden:
            os.utime(rewards, ns=(status.st_atime_ns, status.st_mtime_ns))
        for _ in range(2):
            refusal = client.get(PAGE)
            assert refusal.status_code == 422, refusal.text
            assert "rewards.parquet" in refusal.json()["error"]
            assert "differs from its manifest" in refusal.json()["error"]
        rewards.write_bytes(whole)
        assert client.get(PAGE).json()["rows"][0]["completion"] == TEXT


def test_a_file_that_is_replaced_while_it_is_read_is_not_shown(rewards: Path) -> None:
    """Rows are read late, when the proof is over."""
    ref = Artifact(str(rewards.parents[1])).ref
    whole = rewards.read_bytes()
    files = ProvedFiles(pq.ParquetFile, capacity=1)
    reads: list[int] = []

    def work(file: pq.ParquetFile) -> int:
        reads.append(1)
        if len(reads) == 1:
            rewards.write_bytes(change_digit(whole))
            rewards.write_bytes(whole)
        return int(file.metadata.num_rows)

    assert files.use(ref, rewards.name, work) == 1
    assert len(reads) == 2, "what was read while it changed was not read again"

    def change_each_time(file: pq.ParquetFile) -> int:
        rewards.write_bytes(whole)
        return 0

    with pytest.raises(Unavailable, match="changed while it was read; load the page again"):
        files.use(ref, rewards.name, change_each_time)


def test_a_damaged_tokenizer_is_said_on_the_page_and_by_the_report(
    rewards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The texts of the report's tokens were left out without a word."""
    run = Run.open("r", str(tmp_path))
    samples.TOKEN_TEXTS.clear()
    assert samples.read_page(run, "1", {})["note"] == ""
    (tokenizer,) = (tmp_path / "r/base-model").rglob("tokenizer.json")
    whole = tokenizer.read_bytes()
    for damaged in (whole[:-9], b"{}", whole.replace(b'"0"', b'"8"')):
        tokenizer.write_bytes(damaged)
        page = samples.read_page(run, "1", {})
        assert page["rows"][0]["completion"] == TEXT and not any(page["pieces"].values())
        assert page["note"].startswith("tokens are shown without their texts: "), page["note"]
        assert "tokenizer.json" in page["note"]
        render_page(run)
        assert f"report: {page['note']}" in capsys.readouterr().err
    tokenizer.write_bytes(whole)
    assert samples.read_page(run, "1", {})["note"] == ""


def test_a_tokenizer_that_is_unavailable_leaves_the_completions_readable(
    rewards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The page was refused, and the report at the end of a run that had succeeded failed."""
    files = [path for path in (tmp_path / "r").rglob("*") if path.is_file()]
    objects = {str(path.relative_to(tmp_path)): path.read_bytes() for path in files}
    monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / "cache"))
    with serve_bucket(objects, monkeypatch, refuse=lambda key: key.endswith("tokenizer.json")):
        run = Run.open("r", "s3://bucket")
        page = samples.read_page(run, "1", {})
        assert page["rows"][0]["completion"] == TEXT and not any(page["pieces"].values())
        assert page["note"].startswith("tokens are shown without their texts: "), page["note"]
        render_page(run)
    assert "report: tokens are shown without their texts: " in capsys.readouterr().err


def test_no_change_behind_an_open_page_is_shown_as_if_nothing_were_wrong(
    sample_run: SampleRun,
) -> None:
    """Of 2,926 one was accepted, and 7 were tracebacks; ``python -m tests.mutations.open_page``."""
    outcomes = list(list_page_outcomes(sample_run, len(KINDS), seed=4))
    wrong = [each for each in outcomes if each.verdict in ("accepted", "traceback")]
    assert not wrong, wrong[0]
    assert {outcome.kind for outcome in outcomes} == {kind for kind, _ in KINDS}
    assert sum(outcome.verdict == "refused" for outcome in outcomes) >= 5
