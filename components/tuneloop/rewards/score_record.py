"""The verdicts of a stage's earlier attempts, so that no judge is asked twice.

``scores.jsonl`` in a resume point has a line for each call of a reward that ended in a verdict of
its own: the row's number, the reward, the xxh3-64 of what it was given, and the verdict.

The key has a digest of the reward's own file, but of no file that it imports: after a change of a
helper, an attempt that goes on keeps the verdicts by the old one.

`rewards/stage_scoring.py` commits the file, and `rewards/scoring.py` fills the record.
"""

import json
from pathlib import Path

import xxhash

from tuneloop.rewards.outcomes import Verdict
from tuneloop.rewards.registry import Call

FILE = "scores.jsonl"
"""Has the fields of `Key`, then those of `Verdict`, in each line; another attempt reads it, perhaps
of another release."""
FINAL = ("score", "unverifiable", "escape")
"""Kinds of verdicts that are kept; a kind that is not here is judged again in another attempt,
where it may be a score."""
Key = tuple[int, str, str]
"""The row's number, the reward with the digest of its code, and the digest of the texts."""


class ScoreRecord:
    """The verdicts of a stage's rewards, of all attempts."""

    def __init__(self) -> None:
        self._verdicts: dict[Key, Verdict] = {}

    def __len__(self) -> int:
        return len(self._verdicts)

    def find(self, call: Call) -> Verdict | None:
        """Return what the reward decided on the same texts, while its file was the same; None if it was
        not asked."""
        return self._verdicts.get(_build_key(call))

    def add(self, call: Call, verdict: Verdict) -> None:
        """Add the verdict of a call, unless another attempt may get a score."""
        if verdict.kind in FINAL:
            self._verdicts[_build_key(call)] = verdict

    def write(self, directory: Path) -> None:
        """Write all verdicts to a directory."""
        with (directory / FILE).open("w") as file:
            for key, verdict in sorted(self._verdicts.items()):
                file.write(json.dumps(key + verdict) + "\n")

    @classmethod
    def read(cls, path: Path) -> "ScoreRecord":
        """Read the file that an attempt wrote."""
        record = cls()
        for line in path.read_text().splitlines():
            row_number, name, digest, *verdict = json.loads(line)
            record._verdicts[row_number, name, digest] = Verdict(*verdict)
        return record


def _build_key(call: Call) -> Key:
    row = call.row
    texts = json.dumps([row["completion"], row["answer"], row["metadata"]])
    # A completion that was cut may hold half of a surrogate pair.
    digest = xxhash.xxh3_64_hexdigest(texts.encode(errors="surrogatepass"))
    return call.row_number, f"{call.reward.name} {call.reward.source}", digest
