"""What reads a run, and what each reader takes from it: all that must not change unseen."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from tests.mutations.sample_run import RUN, SampleRun
from tuneloop.cli import execute, inspect, prove, weights
from tuneloop.cli.checks import check_local_run
from tuneloop.cli.exits import run_command
from tuneloop.core.artifacts import Artifact
from tuneloop.inference.proof import read_canary
from tuneloop.local import journal
from tuneloop.runs.retention import find_leftovers
from tuneloop.runs.run_record import Run
from tuneloop.ui import samples
from tuneloop.weights.inspect import delete_unused_versions
from tuneloop.weights.materialize import materialize_version

LIMIT_S = 120.0
"""A reader that takes longer hangs: undisturbed, each takes less than a second."""
TIMES = {"created", "seconds", "lost_seconds", "cause"}
"""Keys of ``status --json`` that are times, or no claim about what was computed."""
DURATION = re.compile(r"\d+(\.\d+)? (s|min|h)\b( \d\d (s|min))?")
LINE = re.compile(r"^(error|failed for now|unavailable|interrupted): ")


class Hang(BaseException):
    """A reader took longer than `LIMIT_S`."""


@dataclass(frozen=True)
class Answer:
    """What a reader came to.

    Attributes:
        code: exit code; None where it ended by an exception that is no error of ours.
        meaning: what it took from the run, without times.
        said: lines on standard error.
    """

    code: int | None
    meaning: Any
    said: list[str]

    @property
    def refused(self) -> bool:
        """Whether it ended with a line that names what is wrong."""
        return self.code in (2, 75) and any(LINE.match(line) for line in self.said)


Reader = Callable[[SampleRun], Any]


def ask(reader: Reader, run: SampleRun) -> Answer:
    """Let `reader` read the run, as its command would."""
    found: list[Any] = []

    def work() -> int:
        code, meaning = reader(run), None
        if isinstance(code, tuple):
            code, meaning = code
        found.append(meaning)
        return int(code or 0)

    journal._report_once.cache_clear()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _time_limit():
        try:
            code: int | None = run_command(work)
        except Exception:
            code, found = None, [traceback.format_exc()]
        except Hang:
            code, found = None, ["hang"]
    said = [line for line in err.getvalue().splitlines() if ": committed already" not in line]
    text = re.sub(
        r"[ ─]+", " ", DURATION.sub("…", out.getvalue())
    )  # a column of times is as wide as its widest
    return Answer(code, found[0] if found and found[0] is not None else text, said)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(each) for key, each in value.items() if key not in TIMES}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


def _print_status(name: str | None) -> Reader:
    def read(run: SampleRun) -> Any:
        inspect.show_status(name, run.store)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            inspect.show_status(name, run.store, True)
        return 0, _without_times(json.loads(out.getvalue()))

    return read


def _read_report(run: SampleRun) -> Any:
    _forget_files()
    opened = Run.open(RUN, run.store)
    with TemporaryDirectory() as scratch:
        inspect.report_run(RUN, run.store, Path(scratch) / "report.html")
    curves = [(c.name, c.stage, c.role, c.method, c.axis, c.x, c.y) for c in opened.curves()]
    samples = [opened.read_samples(entry) for entry in opened.with_role("evaluator", "scorer")]
    versions = [(e.key, e.manifest.facts["version"], e.manifest.digest) for e in opened.checkpoints]
    config = opened.record and opened.record.config
    return 0, (curves, samples, versions, config, opened.read_failures())


def _forget_files() -> None:
    samples.COMPLETIONS.clear()
    samples.TOKEN_TEXTS.clear()


def _read_samples(run: SampleRun) -> Any:
    _forget_files()
    opened = Run.open(RUN, run.store)
    return 0, json.dumps(
        [samples.read_page(opened, iteration, {}) for iteration in ("3", "6")], default=float
    )


def _audit(run: SampleRun) -> Any:
    code = prove.audit_run(RUN, run.root, run.store)
    return code


def _find_resume_settings(run: SampleRun) -> Any:
    """What `resume` reads before it executes."""
    opened = Run.open(RUN, run.store)
    record, state = opened.record, opened.state
    if record is None or state is None:
        return 0, None
    workflow = opened.read_workflow()
    check_local_run(record.config, workflow, opened.store_url)
    told = {
        "phase": state.workflow.phase,
        "parts": state.parts,
        "parameters": state.workflow.parameters,
    }
    return 0, (record.config, record.pipeline, record.store, workflow, told)


def _compute_again(run: SampleRun) -> Any:
    made = run.compute_again()
    return 0, {key: (manifest.digest, manifest.results) for key, manifest in made.items()}


def _read_inputs(run: SampleRun) -> Any:
    """What a stage reads of its inputs, all files of each."""
    found: dict[str, Any] = {}
    for key, ref in run.refs.items():
        artifact = Artifact(ref)
        facts = {**artifact.manifest.facts, **artifact.manifest.results, **artifact.manifest.params}
        found[key] = facts, _digest(artifact.path, [*artifact.manifest.files])
        if "canary.json" in artifact.manifest.files:
            found[f"{key} canary"] = read_canary(artifact).model_dump()
    return 0, found


def _digest(directory: Path, names: list[str]) -> dict[str, str]:
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}


def _materialize(run: SampleRun) -> Any:
    found = {}
    for version in (10, 12, 14, 15, None):
        with TemporaryDirectory() as scratch:
            directory = Path(scratch) / "model"
            done = materialize_version(run.weights, version, directory)
            names = [
                str(p.relative_to(directory))
                for p in directory.rglob("*")
                if not p.name.startswith(".")
            ]
            found[str(version)] = done.version, done.source, _digest(directory, sorted(names))
    return 0, found


def _collect_garbage(run: SampleRun) -> Any:
    opened = Run.open(RUN, run.store)
    left = {(item.key, item.reason) for item in find_leftovers(opened, keep=1, idle=1e12)}
    return 0, (sorted(left), delete_unused_versions(run.weights, delete=False))


READERS: dict[str, Reader] = {
    "status": _print_status(RUN),
    "list": _print_status(None),
    "audit": _audit,
    "report": _read_report,
    "samples": _read_samples,
    "logs": lambda run: inspect.show_logs(RUN, store=run.store),
    "stop": lambda run: execute.stop_run(RUN, run.store, 1.0),
    "resume": _find_resume_settings,
    "stages": _compute_again,
    "inputs": _read_inputs,
    "weights ls": lambda run: weights.show_versions(RUN, run.store),
    "weights verify": lambda run: weights.verify_weights(RUN, None, None, run.store),
    "weights diff": lambda run: weights.diff_weights(run.weights, 10, 15, "", None, run.store),
    "materialize": _materialize,
    "gc": _collect_garbage,
}
OF_RUN = ("status", "list", "audit", "report", "samples", "logs", "stop", "resume", "weights ls")
OF_FILES = ("audit", "report", "samples", "stages", "inputs", "gc")
OF_WEIGHTS = (
    "report",
    "stages",
    "weights ls",
    "weights verify",
    "weights diff",
    "materialize",
    "gc",
)
