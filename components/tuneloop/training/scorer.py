"""A reward model: a language model whose head gives one number at the end of a document."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tuneloop.formats.token_files import Document
from tuneloop.training import distributed_checkpoint
from tuneloop.training.batching import Batch
from tuneloop.training.fsdp.policy import Policy, open_model
from tuneloop.training.fsdp.trainer import Trainer


class _Scoring(torch.nn.Module):
    """The parts of ``…ForSequenceClassification`` under its names; the class itself does not know packed rows."""

    def __init__(self, body: torch.nn.Module, score: torch.nn.Linear, config: Any) -> None:
        super().__init__()
        self.model, self.score, self.config = body, score, config
        self._no_split_modules = body._no_split_modules

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.score

    def gradient_checkpointing_enable(self, options: dict[str, Any]) -> None:
        self.model.gradient_checkpointing_enable(options)

    def forward(self, **inputs: Any) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutputWithPast

        return SequenceClassifierOutputWithPast(
            logits=self.score(self.model(**inputs).last_hidden_state)
        )


class Scorer(Policy):
    """Scores documents. A language model's directory is opened with a new head of zeros, so that every score is 0."""

    def _open(self, directory: Path) -> Any:
        made = self._adapt(_open(directory, torch.float32, self.layout.attention))
        made.score.requires_grad_(True)  # the head is new, and trained even with adapters
        return _Scoring(made.model, made.score, made.config)

    def collate(self, documents: Sequence[Document]) -> Batch:
        # A target is predicted at the position before it: so a target after the end selects the last position.
        return super().collate(
            [Document([*each.ids, 0], [False] * len(each.ids) + [True]) for each in documents]
        )

    def scores(self, documents: Sequence[Document] | Batch) -> Tensor:
        """Score documents in one forward pass: the head's number at each one's last token, with gradient."""
        batch = documents if isinstance(documents, Batch) else self.collate(documents)
        return self._logits(batch.to(self.ranks.device)).float()[:, 0]

    def load_masters(self, directory: Path) -> None:
        """Load the parameters of a language model, which does not have such a head."""
        distributed_checkpoint.load_tensors(
            {name: value for name, value in self.masters().items() if name != "model.score.weight"},
            directory,
        )

    def _reopen(self, directory: Path, dtype: torch.dtype) -> Any:
        implementation = "eager" if self.layout.attention == "eager" else "auto"
        return _open(directory, dtype, implementation)


class ScoreTrainer(Scorer, Trainer):
    """A reward model and its optimizer."""


def _open(directory: Path, dtype: torch.dtype, attention: str) -> Any:
    from transformers import logging

    said = logging.get_verbosity()
    logging.set_verbosity_error()  # the warning that the model has no such head is expected
    try:
        made = open_model(directory, dtype, attention, "SequenceClassification", num_labels=1)
    finally:
        logging.set_verbosity(said)
    if not any("SequenceClassification" in name for name in made.config.architectures or ()):
        torch.nn.init.zeros_(made.score.weight)
    return made
