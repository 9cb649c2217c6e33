"""A reward model: a language model whose head gives one number at the end of a document.

The stage `reward_model` trains one and `model_reward` scores with it. It is a `Policy`, so that
sharding, packing and checkpoints are those of policies. Tests:
`tests/unit/stages/test_preference.py`, and against TRL `tests/local/test_parity.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tuneloop.core.json_types import JsonObject
from tuneloop.formats.token_files import Document
from tuneloop.training import distributed_checkpoint
from tuneloop.training.batching import Batch
from tuneloop.training.fsdp.loading import open_model
from tuneloop.training.fsdp.policy import Policy
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.fsdp.trainer import Trainer


class _Scoring(torch.nn.Module):
    """The parts of ``…ForSequenceClassification`` under its names; the class itself does not know
    packed rows.

    It has what `Policy` asks of a model of transformers, and `fsdp/export.py: make_empty_model`;
    what these ask for beside that is added here. It is always written whole, by the first rank
    (`fsdp/export.py: write_sharded_model`).
    """

    def __init__(self, body: torch.nn.Module, score: torch.nn.Linear, config: Any) -> None:
        super().__init__()
        self.model = body
        self.score = score
        self.config = config
        self._no_split_modules = body._no_split_modules

    @classmethod
    def _from_config(cls, config: Any, dtype: torch.dtype) -> Any:
        """Make transformers' own model, whose names are the same (`make_empty_model`)."""
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_config(config, dtype=dtype)

    def get_output_embeddings(self) -> torch.nn.Module:
        """Return what `Policy` treats as the output layer."""
        return self.score

    def gradient_checkpointing_enable(self, options: JsonObject) -> None:
        """Recompute the layers' activations in the backward pass."""
        self.model.gradient_checkpointing_enable(options)

    def forward(self, **inputs: Any) -> Any:
        """Compute scores float32 or bfloat16 ``[batch, positions, 1]`` as transformers' logits."""
        from transformers.modeling_outputs import SequenceClassifierOutputWithPast

        return SequenceClassifierOutputWithPast(
            logits=self.score(self.model(**inputs).last_hidden_state)
        )


class Scorer(Policy):
    """Scores documents.

    A language model's directory is opened with a new head of zeros, so that every score is 0.
    """

    def _open(self, directory: Path) -> Any:
        model = self._adapt(_open(directory, torch.float32, self.layout.attention, self.ranks))
        # The head is new, and trained even with adapters.
        model.score.requires_grad_(True)
        return _Scoring(model.model, model.score, model.config)

    def collate(self, documents: Sequence[Document]) -> Batch:
        """Lay documents out so that the only target of each is after its end."""
        # A target is predicted at the position before it: this one selects the last position.
        extended = [
            Document([*document.ids, 0], [False] * len(document.ids) + [True])
            for document in documents
        ]
        return super().collate(extended)

    def scores(self, documents: Sequence[Document] | Batch) -> Tensor:
        """Score documents in one forward pass: the head's number at each one's last token, with
        gradient.
        """
        batch = documents if isinstance(documents, Batch) else self.collate(documents)
        return self._logits(batch.to(self.ranks.device)).float()[:, 0]

    def load_masters(self, directory: Path) -> None:
        """Load the parameters of a language model, which does not have such a head."""
        masters = self.masters()
        masters.pop("model.score.weight", None)
        distributed_checkpoint.load_tensors(masters, directory)

    def _reopen(self, directory: Path, dtype: torch.dtype) -> Any:
        implementation = "eager" if self.layout.attention == "eager" else "auto"
        return _open(directory, dtype, implementation)


class ScoreTrainer(Scorer, Trainer):
    """A reward model and its optimizer."""


def _open(
    directory: Path,
    dtype: torch.dtype,
    attention: str,
    ranks: Ranks | None = None,
) -> Any:
    """Open a reward model, or a language model with a new head of zeros; `ranks` as `open_model`
    takes them.
    """
    from transformers import logging

    verbosity = logging.get_verbosity()
    # It warns that a language model has no such head.
    logging.set_verbosity_error()
    try:
        model = open_model(
            directory, dtype, attention, "SequenceClassification", ranks, num_labels=1
        )
    finally:
        logging.set_verbosity(verbosity)
    architectures = model.config.architectures or ()
    if not any("SequenceClassification" in name for name in architectures):
        torch.nn.init.zeros_(model.score.weight)
    return model
