"""Scoring in a stage: it stops when the stage does, and keeps the scores for its next attempt.

The stages `reward` and `evaluate` use it. A resume point that it commits has `FILE` alone, is named
by the number of its verdicts, and is deleted when the stage has committed. A stage that uses it
must have no resume points of its own: `Stage.save_resume` of `core/context.py` deletes the earlier
ones. Tests are in `tests/unit/rewards/test_judges.py`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from tuneloop.core.context import Stage
from tuneloop.core.errors import Retryable
from tuneloop.rewards.error_budget import check_error_budget
from tuneloop.rewards.outcomes import Outcome, Row
from tuneloop.rewards.score_record import FILE, ScoreRecord
from tuneloop.rewards.scoring import score_all

EscapeScore = Annotated[
    float | None,
    Field(description="score of attempts to leave the sandbox; default: none, so not trained on"),
]
PunishFailures = Annotated[
    bool,
    Field(
        description="completions that use up a reward's time or memory, or crash it, get its "
        "least score"
    ),
]
JudgeMemory = Annotated[int, Field(ge=1, description="memory of each process that judges")]
DEFAULT_MEMORY_MB = 4096
SAVE_EVERY_S = 60.0
"""Seconds between two resume points, in case the process is killed."""


@dataclass
class ScoringStage:
    """Scores rows for a stage, with the scores of its earlier attempts."""

    stage: Stage
    record: ScoreRecord
    saved: int = 0
    """How many verdicts the newest resume point has."""
    saved_at: float = 0.0

    @classmethod
    def open(cls, stage: Stage) -> "ScoringStage":
        """Take up the scores that an earlier attempt of the stage has committed."""
        point = stage.latest_resume()
        record = ScoreRecord()
        if point and FILE in point.manifest.files:
            record = ScoreRecord.read(point.part(FILE))
            stage.log(f"goes on with {len(record)} scores of the attempt before")
        return cls(stage, record, len(record), time.monotonic())

    def score(
        self,
        rows: Sequence[Row],
        *,
        timeout_s: float,
        memory: int,
        punish: bool,
        escape_score: float | None,
        workers: int = 1,
        progress: Callable[[int], None] = lambda count: None,
    ) -> list[Outcome]:
        """Score rows as `score_all` does; what ends it early commits the scores so far.

        An argument of `score_all` that a stage is to set has to be handed on here.
        """

        def advance(count: int) -> None:
            self.stage.check_stop()
            progress(count)
            if time.monotonic() - self.saved_at >= SAVE_EVERY_S:
                self.save()

        try:
            return score_all(
                rows,
                timeout_s=timeout_s,
                memory=memory,
                punish=punish,
                escape_score=escape_score,
                workers=workers,
                progress=advance,
                record=self.record,
            )
        except BaseException:
            # A judge may be slow or have a price, so what it has judged is not lost.
            self.save()
            raise

    def check_budget(self, outcomes: Sequence[Outcome], budget: float) -> None:
        """Check a budget as `check_error_budget`; before another attempt, commit the scores."""
        try:
            check_error_budget(self.stage.name, outcomes, budget)
        except Retryable:
            self.save()
            raise

    def save(self) -> None:
        """Commit the scores as a resume point, if there are more than the newest one has."""
        self.saved_at = time.monotonic()
        if len(self.record) > self.saved:
            self.saved = len(self.record)
            self.stage.save_resume(self.saved, self.record.write)
