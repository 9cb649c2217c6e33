"""The facts that stages read of each other's artifacts, one dataclass for each kind of artifact.

A stage writes them as plain entries of `Stage.facts`, and its file does not name the class here.
What a class requires, older artifacts must have, too: a new field needs a default
(`tuneloop.core.facts`). An entry without a field is recorded and read by nobody here, but some
readers take entries by name: `ui/describe.py`, `extensions/provenance`, and
`training/checkpoint.py`, which hands on what is said of the model. `stages/reward.py` hands on all
facts of the rollouts. Tests: `tests/unit/core/test_facts.py`.
"""

from dataclasses import dataclass
from typing import ClassVar

from tuneloop.core.facts import Facts
from tuneloop.core.json_types import JsonObject
from tuneloop.formats.chat_forms import Reasoning
from tuneloop.formats.conversations import History
from tuneloop.formats.held_out import HeldOutFacts
from tuneloop.formats.too_long import DROP_AT_MOST, LengthPolicy, TooLong


@dataclass(frozen=True)
class TrainerState:
    """What is known of a trainer's state beside its tensors: ``state.json``, or the fact instead.

    `training/checkpoint.py: write_checkpoint` writes the same entries as a plain mapping: a field
    that is added is added there, and has a default for older checkpoints. The entries decide in
    `training/state_sources.py` whether a state can be continued.

    Attributes:
        stage: the stage that wrote it.
        step: optimizer steps taken.
        betas: of AdamW.
        lora: options of the adapters, None without adapters.
        base: digest of the checkpoint that the adapters belong to.
        digest: of the tensors, where the state is not part of the checkpoint.
    """

    stage: str
    step: int
    betas: list[float]
    format: int = 1
    lora: JsonObject | None = None
    base: str | None = None
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class VersionFacts(Facts):
    """The policy version that an artifact holds or was made with."""

    source: ClassVar[str] = "a checkpoint"

    version: int


@dataclass(frozen=True, kw_only=True)
class LineageFacts(Facts):
    """What a checkpoint states of its base model and of its trainer. Each field may be absent:
    retention reads artifacts of other kinds by this class, too (`training/old_checkpoints.py`).

    Attributes:
        base: reference of the checkpoint that the adapters belong to, None without adapters.
        trainer_state: None where the state is among the files, or where nothing was trained yet.
        dropped_generation_settings: settings of sampling that the base had, and that are not handed
            on.
    """

    base: str | None = None
    trainer_state: TrainerState | None = None
    dropped_generation_settings: JsonObject | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingFacts(Facts):
    """Facts of whatever was trained: a policy, or a reward model, which has no version."""

    held_out: HeldOutFacts | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts(VersionFacts, LineageFacts):
    """Facts of a policy's version.

    Attributes:
        iteration: of the loop, None where the checkpoint was made outside it.
        save_dtype: of the weights in ``model/``.
    """

    iteration: int | None = None
    save_dtype: str | None = None
    held_out: HeldOutFacts | None = None


@dataclass(frozen=True)
class SamplingFacts:
    """How completions were sampled."""

    temperature: float


@dataclass(frozen=True)
class OversamplingFacts:
    """How many groups were sampled, and how many of them the update wants: `stages/rollout.py`
    states it, and `training/mini_batches.py` leaves the others out."""

    asked: int
    wanted: int


@dataclass(frozen=True, kw_only=True)
class RewardFacts(Facts):
    """Facts of scored rollouts: those of the rollouts, which the stage reward passes on.

    Attributes:
        version, digest: of the policy that was sampled.
        groups: None where every group counts.
    """

    source: ClassVar[str] = "the output of the stage reward"

    version: int
    digest: str
    sampling: SamplingFacts
    groups: OversamplingFacts | None = None


@dataclass(frozen=True, kw_only=True)
class PromptFacts(Facts):
    """Facts of data, and of tokens made of it.

    `stages/tokenize_data.py` copies them from the one to the other by a list of names, in which a
    new field belongs, too (`conversations.py: History` names all places).

    Attributes:
        too_long, drop_at_most: what becomes of rows that are too long.
        history, reasoning: how conversations are learned.
        tokenizer: digest of the tokenizer, where rows are tokenized already.
    """

    source: ClassVar[str] = "the output of data_prep or tokenize_data"

    too_long: TooLong = "drop"
    drop_at_most: float = DROP_AT_MOST
    history: History = "as-rendered"
    reasoning: Reasoning = "keep"
    tokenizer: str | None = None

    @property
    def length_policy(self) -> LengthPolicy:
        """What becomes of rows that are too long."""
        return LengthPolicy(self.too_long, self.drop_at_most)


@dataclass(frozen=True, kw_only=True)
class LogprobFacts(Facts):
    """Facts of a reference's log-probabilities; `digest` is that of the reference."""

    source: ClassVar[str] = "the output of reference_logprobs"

    digest: str


@dataclass(frozen=True)
class RewardSummary:
    """What a mean reward was taken over: how many completions had each outcome."""

    outcomes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class ScoreFacts(Facts):
    """Facts of any artifact with scores, as a reader of runs meets them; all may be absent."""

    outcomes: dict[str, int] | None = None
    reward: RewardSummary | None = None
