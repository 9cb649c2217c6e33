"""``python -m tests.mutations [COUNT] [SEED] [SECONDS]``: change files of a run one at a time; print what readers said.

Exit code 1 where a reader accepted what had changed, ended by a traceback, or hung.
"""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import get_args

from tests.mutations.judge import Outcome, Verdict, list_verdicts
from tests.mutations.sample_run import make_sample_run


def main(count: int = 10_000, seed: int = 0, seconds: int = 86_400) -> int:
    table: dict[str, Counter[Verdict]] = {}
    wrong: Counter[str] = Counter()
    changes: Counter[str] = Counter()
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as home:
        run = make_sample_run(Path(home))
        for outcome in list_verdicts(run, count, seed):
            changes[outcome.kind] += outcome.first
            if outcome.first and changes.total() % 1000 == 0:
                print(f"{changes.total()} of {count} files changed", file=sys.stderr, flush=True)
            table.setdefault(outcome.kind, Counter())[outcome.verdict] += 1
            if outcome.verdict in ("accepted", "traceback", "hang"):
                wrong[show(outcome)] += 1
                if wrong[show(outcome)] == 1:
                    print(f"\n{show(outcome)}\n{outcome.detail}", flush=True)
            if time.monotonic() > end:
                break
    columns: tuple[Verdict, ...] = get_args(Verdict)
    print(f"\n{'file':28}{'changes':>9}" + "".join(f"{column:>11}" for column in columns))
    total: Counter[Verdict] = Counter()
    for kind, found in sorted(table.items()):
        total += found
        print(f"{kind:28}{changes[kind]:9}" + "".join(f"{found[column]:11}" for column in columns))
    print(f"{'all':28}{changes.total():9}" + "".join(f"{total[column]:11}" for column in columns))
    for what, times in wrong.most_common():
        print(f"{times:6} {what}")
    return bool(wrong)


def show(outcome: Outcome) -> str:
    return f"{outcome.verdict}: {outcome.kind}, {outcome.change}, by {outcome.reader}"


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
