"""Files that are changed behind an open `tuneloop ui`: what its pages show then.

``python -m tests.mutations.open_page [COUNT] [SEED]`` opens the page once, asks for all that it shows, and then changes
files one at a time, puts their time of change back, and asks again.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from tests.mutations.changes import CHANGES, KINDS, Files, kind_of
from tests.mutations.judge import FORGED, MARKS, OPTIONAL, Verdict
from tests.mutations.sample_run import RUN, SampleRun, make_sample_run
from tuneloop.local import journal
from tuneloop.ui.app import build_app

TIMES = {"loop_end", "cause", "lost_seconds", "seconds", "alive_s", "age_s"}
"""Keys of answers that are times, or no claim about what was computed."""
REFUSED = (404, 422, 503)
Answers = Mapping[str, tuple[int, Any]]


@dataclass(frozen=True)
class PageOutcome:
    """What the pages made of one change: the worst verdict of them, and which page it was."""

    kind: str
    change: str
    verdict: Verdict
    page: str
    detail: str


def list_pages(run: SampleRun) -> list[str]:
    """List the addresses of all that is shown of the run."""
    keys = ["1", "3", "6", "evaluate-before", "evaluate-after"]
    samples = [f"/api/runs/{RUN}/samples/{key}" for key in keys]
    searched = [f"{samples[1]}?search=b", f"{samples[0]}?place=0"]
    return [
        f"/api/runs/{RUN}/now",
        f"/api/runs/{RUN}",
        f"/api/runs/{RUN}/weights",
        *samples,
        *searched,
    ]


def list_page_outcomes(run: SampleRun, count: int, seed: int) -> Iterator[PageOutcome]:
    """Make `count` changes behind one open page, of all kinds of files in turn."""
    chance = random.Random(seed)
    paths_by_kind: dict[str, list[Path]] = {kind: [] for kind, _ in KINDS}
    for path in sorted(run.kept, key=lambda path: re.sub(r"data-[0-9a-f]+", "data", str(path))):
        kind = kind_of(path)
        if kind:
            paths_by_kind[kind].append(path)
    kinds = list(paths_by_kind)
    with TestClient(build_app(run.store), raise_server_exceptions=False) as client:
        calm, _ = ask_pages(client, run)
        made = 0
        while made < count:
            kind = kinds[made % len(kinds)]
            change = chance.choice(list(CHANGES))
            path = chance.choice(paths_by_kind[kind])
            files = CHANGES[change](run, path, chance)
            if not files or all(data == run.kept[other][0] for other, data in files.items()):
                continue
            made += 1
            write_unseen(run, files)
            answers, errors = ask_pages(client, run)
            is_optional = any(part in str(path) for part in OPTIONAL)
            yield judge_pages(kind, change, calm, answers, errors, is_optional)
            write_unseen(run, {other: run.kept[other][0] for other in files})
            run.restore()
        again, _ = ask_pages(client, run)
        for page, answer in again.items():
            assert answer == calm[page], f"what was put back is not shown as before: {page}"


def ask_pages(client: TestClient, run: SampleRun) -> tuple[Answers, str]:
    """Ask for all pages; return their statuses and answers without times, and what the server printed."""
    journal._report_once.cache_clear()
    answers: dict[str, tuple[int, Any]] = {}
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        for page in list_pages(run):
            response = client.get(page)
            body = _drop_times(response.json()) if response.status_code != 500 else response.text
            answers[page] = response.status_code, body
    return answers, errors.getvalue()


def write_unseen(run: SampleRun, files: Files) -> None:
    """Change files, and put back the time of their last change, as who wants to hide it does."""
    for path, data in files.items():
        if data is None:
            path.unlink()
            continue
        path.write_bytes(data)
        os.utime(path, ns=(run.kept[path][1], run.kept[path][1]))


def judge_pages(
    kind: str, change: str, calm: Answers, answers: Answers, errors: str, is_optional: bool
) -> PageOutcome:
    """Judge the answers of all pages by those of the unchanged run."""
    verdicts: list[tuple[Verdict, str]] = []
    for page, (status, body) in answers.items():
        if status == 500:
            verdicts.append(("traceback", page))
        elif status in REFUSED:
            verdicts.append(("refused", page))
        elif (status, body) == calm[page] or kind == "log":
            verdicts.append(("same", page))
        elif errors or (isinstance(body, dict) and body.get("note")):
            verdicts.append(("said", page))
        elif change == "removed" and kind in MARKS:
            verdicts.append(("absent", page))
        elif change == FORGED or is_optional:
            verdicts.append(("forged", page))
        else:
            verdicts.append(("accepted", page))
    order = ["traceback", "accepted", "forged", "absent", "said", "refused", "same"]
    verdict, page = min(verdicts, key=lambda each: order.index(each[0]))
    detail = ""
    if verdict in ("traceback", "accepted"):
        detail = f"now {answers[page]}\nbefore {calm[page]}\n{errors}"
    return PageOutcome(kind, change, verdict, page, detail)


def _drop_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_times(part) for key, part in value.items() if key not in TIMES}
    return [_drop_times(part) for part in value] if isinstance(value, list) else value


def main(count: int = 2_926, seed: int = 0) -> int:
    """Print how many changes came to what; return 1 if one was shown as if nothing were wrong."""
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as home:
        run = make_sample_run(Path(home))
        for outcome in list_page_outcomes(run, count, seed):
            verdicts[outcome.verdict] += 1
            if outcome.verdict in ("traceback", "accepted"):
                print(f"{outcome.verdict}: {outcome.kind}, {outcome.change}, {outcome.page}")
                print(outcome.detail[:3000])
    print(f"{count} changes behind an open page: {dict(verdicts)}")
    return int(bool(verdicts["traceback"] or verdicts["accepted"]))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
