"""The trainer that stays in memory between two updates of one process, as where a pod runs several iterations.

It saves reading what was just written, and with ``state_every`` above 1 writing it; it changes no number. It is taken
up again only by an update that goes on from the very checkpoint behind which it stands: one that it wrote, or whose
update it has repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuneloop.core.artifacts import Artifact
from tuneloop.core.background import BACKGROUND

if TYPE_CHECKING:
    from tuneloop.training.fsdp.trainer import Trainer
    from tuneloop.training.options import TrainerOptions


@dataclass
class ResidentTrainer:
    """At most one trainer; a second would take its memory.

    Attributes:
        attempt: that wrote the checkpoint behind which the trainer stands.
        options: that it was made with.
    """

    trainer: Trainer | None = None
    attempt: str = ""
    options: TrainerOptions | None = None

    def keep(self, trainer: Trainer, attempt: str, options: TrainerOptions) -> None:
        """Keep the trainer that stands behind the checkpoint of `attempt`."""
        self.trainer, self.attempt, self.options = trainer, attempt, options

    def take(self, policy: Artifact, options: TrainerOptions) -> tuple[Trainer | None, bool]:
        """Hand out the trainer behind `policy`, and say whether these are its options; any other is let go.

        First what is still to be written of it is waited for: who takes it changes it.

        Raises:
            Exception: what ended that writing (`tuneloop.core.background`).
        """
        BACKGROUND.wait()
        found, known, attempt = self.trainer, self.options, self.attempt
        self.trainer = self.options = None
        if known is None or attempt != policy.manifest.root:
            return None, False
        return found, (known.optimization, known.model_options) == (options.optimization, options.model_options)


RESIDENT = ResidentTrainer()
"""That of this process."""
