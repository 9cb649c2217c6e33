"""Whether a reader of a changed run says the same, refuses, or is taken in."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.mutations.changes import CHANGES, KINDS, Files, kind_of
from tests.mutations.readers import OF_FILES, OF_RUN, OF_WEIGHTS, READERS, Answer, ask
from tests.mutations.sample_run import SampleRun

Verdict = Literal["same", "refused", "said", "absent", "forged", "accepted", "traceback", "hang"]
"""The same meaning; an error of one line; a line that names what was left out; what is not there counts as not
committed; what somebody made to fit, which only the root or a reference tells; and the three that must not be."""
FORGED = "all made to fit"
OF_KIND = {
    **dict.fromkeys(("manifest",), (*OF_RUN, *OF_FILES)),
    **dict.fromkeys(
        (
            "record",
            "workflow",
            "configuration",
            "journal",
            "end of the journal",
            "index of the run",
            "failure",
        ),
        OF_RUN,
    ),
    **dict.fromkeys(("log", "files of pods", "report"), ("status", "logs", "resume", "stop")),
    **dict.fromkeys(
        ("pointer", "index of a version", "weights of a version", "other file of a version"),
        OF_WEIGHTS,
    ),
    **dict.fromkeys(("publication", "pull", "replica"), OF_WEIGHTS),
}
MARKS = (
    "manifest",
    "record",
    "journal",
    "end of the journal",
    "pointer",
    "index of a version",
    "failure",
    "publication",
    "pull",
    "replica",
)
"""Kinds of files without which something is as if it had never been; the root tells, but for states and resume points,
which later stages can do without."""
OPTIONAL = ("/state/", "/resume/")


@dataclass(frozen=True)
class Outcome:
    """What one reader made of one change; `first`: it was the first to be asked."""

    kind: str
    change: str
    reader: str
    verdict: Verdict
    detail: str
    first: bool


def list_verdicts(run: SampleRun, count: int, seed: int) -> Iterator[Outcome]:
    """Make `count` changes, each of some kind, of all kinds of files in turn, and ask all readers of each."""
    truth = {name: ask(reader, run) for name, reader in READERS.items()}
    for name, answer in truth.items():
        assert answer.code == 0 and not answer.said, (name, answer)
    run.restore()
    chance = random.Random(seed)
    by_kind: dict[str, list[Path]] = {kind: [] for kind, _ in KINDS}
    for path in sorted(run.kept, key=lambda path: re.sub(r"data-[0-9a-f]+", "data", str(path))):
        if kind := kind_of(path):
            by_kind[kind].append(path)
    assert all(by_kind.values()), {kind: len(paths) for kind, paths in by_kind.items()}
    made, kinds = 0, [*by_kind]
    chance.shuffle(kinds)
    while made < count:
        kind = kinds[made % len(kinds)]
        change = chance.choice([*CHANGES])
        path = chance.choice(by_kind[kind])
        files = CHANGES[change](run, path, chance)
        if not files or all(data == run.kept[each][0] for each, data in files.items()):
            continue
        made += 1
        for n, name in enumerate(OF_KIND.get(kind, OF_FILES)):
            write(files)
            answer = ask(READERS[name], run)
            optional = any(part in str(path) for part in OPTIONAL)
            verdict = judge(kind, change, name, truth[name], answer, optional=optional)
            detail = (
                f"{[*files]}\n{answer.meaning}\n{answer.said}"
                if verdict in ("accepted", "traceback")
                else ""
            )
            yield Outcome(kind, change, name, verdict, detail, n == 0)
            run.restore()


def write(files: Files) -> None:
    """Make the change."""
    for path, data in files.items():
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)


def judge(
    kind: str, change: str, reader: str, truth: Answer, answer: Answer, *, optional: bool
) -> Verdict:
    """Judge an answer by the one of the undamaged run."""
    if answer.meaning == "hang":
        return "hang"
    if answer.code is None:
        return "traceback"
    if answer.refused:
        return "refused"
    if answer.code != 0:
        return "traceback"  # it ended badly without a word
    if (
        answer.meaning == truth.meaning or kind == "log"
    ):  # which is shown as it is: what programs wrote
        return "same"
    if answer.said:
        return "said"
    if (
        change == "removed"
        and (kind in MARKS or reader == "gc")
        and (optional or reader != "audit")
    ):
        return "absent"
    if (
        change == "removed"
        and reader == "audit"
        and "deleted the files of 1 old checkpoint" in answer.meaning
    ):
        return "absent"  # as `gc --keep` leaves it
    if change == "two files swapped" and optional and reader == "stages":
        return "absent"  # a resume point of another stage: it begins anew
    if change == FORGED and (optional or reader not in ("audit", "inputs")):
        return "forged"
    return "accepted"
