"""What rewards have said in earlier attempts of a stage, so that no judge is asked twice.

``scores.jsonl`` in a resume point has a line for each call of a reward that ended in a verdict of
its own: the row's number, the reward, the xxh3-64 of what it was given, and the verdict.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

FILE = "scores.jsonl"
FINAL = ("score", "unverifiable", "escape")
"""Kinds of verdicts that are kept. The others may be scores in another attempt."""
Verdict = Sequence[Any]
"""Kind, value, parts, and what the completion did to its judge, as JSON has them."""


class ScoreRecord:
    """The verdicts of a stage's rewards, of all attempts."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple[int, str, str], Verdict] = {}

    def __len__(self) -> int:
        return len(self._verdicts)

    def find(self, row_number: int, row: Mapping[str, Any], name: str) -> Verdict | None:
        """Return what the reward `name` said of these very texts; None if it was not asked."""
        return self._verdicts.get((row_number, name, _hash_row(row)))

    def add(self, row_number: int, row: Mapping[str, Any], name: str, verdict: Verdict) -> None:
        """Add what the reward `name` said of a row, unless another attempt may get a score."""
        kind = verdict[0]
        if kind in FINAL:
            self._verdicts[row_number, name, _hash_row(row)] = verdict

    def write(self, directory: Path) -> None:
        """Write all verdicts to a directory."""
        with (directory / FILE).open("w") as file:
            for (row_number, name, digest), verdict in sorted(self._verdicts.items()):
                file.write(json.dumps([row_number, name, digest, *verdict]) + "\n")

    @classmethod
    def read(cls, path: Path) -> "ScoreRecord":
        """Read the file that an attempt wrote."""
        record = cls()
        for line in path.read_text().splitlines():
            row_number, name, digest, *verdict = json.loads(line)
            record._verdicts[row_number, name, digest] = verdict
        return record


def _hash_row(row: Mapping[str, Any]) -> str:
    texts = [row["completion"], row["answer"], row["metadata"]]
    return xxhash.xxh3_64_hexdigest(json.dumps(texts).encode(errors="surrogatepass"))
