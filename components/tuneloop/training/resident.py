"""The trainer that stays in memory between two updates of one process, as where a pod runs several iterations.

It saves reading what was just written, and changes no number: it is taken up again only by an update that goes on from
the very checkpoint that it wrote, with the same options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Stage

if TYPE_CHECKING:
    from tuneloop.training.fsdp.trainer import Trainer
    from tuneloop.training.options import TrainerOptions


@dataclass
class ResidentTrainer:
    """At most one trainer; a second would take its memory.

    Attributes:
        attempt: that wrote the checkpoint behind which the trainer stands.
    """

    trainer: Trainer | None = None
    attempt: str = ""
    options: TrainerOptions | None = None

    def keep(self, trainer: Trainer, stage: Stage, options: TrainerOptions) -> None:
        """Keep the trainer whose checkpoint `stage` commits."""
        self.trainer, self.attempt, self.options = trainer, stage.attempt, options

    def take(self, policy: Artifact, options: TrainerOptions) -> Trainer | None:
        """Hand out the trainer that wrote `policy` with these options; any other is let go."""
        found, known, attempt = self.trainer, self.options, self.attempt
        self.trainer = self.options = None
        if known is None or attempt != policy.manifest.root:
            return None
        same = (known.optimization, known.model_options) == (options.optimization, options.model_options)
        return found if same else None


RESIDENT = ResidentTrainer()
"""That of this process."""
