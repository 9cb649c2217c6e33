"""Bodies of Tinker's requests, and results as they are sent back.

The names of fields are those of Tinker's client, and are checked by its own library in the tests. A
field that is not declared here is refused if it has a value, as it may change what is computed;
`Body.IGNORED` has the few that do not. A field that is declared, but of which only some values are
supported, is refused in `session.py`.

`forward_backward` and its result have two forms, JSON here and protobuf in `wire.py`: a field or a
dtype that is added is added to both.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import BaseModel, Field, model_validator

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.extensions.gateway import wire
from tuneloop.extensions.gateway.resident import AdamParams
from tuneloop.formats.rollouts import Ids, Seed
from tuneloop.training.lora import Lora

ALPHA = 32.0
"""lora_alpha of adapters, as in Tinker."""
Number = Annotated[int, Field(ge=0, lt=2**31)]
"""The number of a request, a model or a sampling session; or seconds."""


class Body(BaseModel, frozen=True, extra="allow", allow_inf_nan=False, protected_namespaces=()):
    """A request's body, or a part of one. A field that is unknown here has to be empty.

    Attributes:
        IGNORED: the client's fields that do not change what is computed.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset({"session_id", "type", "user_metadata"})

    @model_validator(mode="after")
    def _refuse_unknown_fields(self) -> Self:
        # The client sends some fields with their defaults, which are 0, False or null.
        for name, value in (self.model_extra or {}).items():
            if value and name not in self.IGNORED:
                raise UserError(name, value, "is not known here; leave it out")
        return self


class LoraConfig(Body):
    """Adapters; a `rank` of 0 trains the whole model, which Tinker does not have."""

    rank: int = Field(32, ge=0, le=4096)
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def to_peft(self) -> Lora | None:
        """Convert to peft's options; None trains the whole model.

        Raises UserError for a choice of layers that is not supported here.
        """
        if not self.rank:
            return None
        if self.train_unembed:
            remedy = "the output layer gets no adapter here; set it False"
            raise UserError("lora_config.train_unembed", True, remedy)
        if not (self.train_mlp and self.train_attn):
            remedy = "both always get adapters here; leave them True"
            raise UserError("lora_config", "train_mlp, train_attn", remedy)
        return Lora(r=self.rank, lora_alpha=ALPHA)


class OptimizerConfig(Body):
    """The optimizer of a model, which the client's library always names."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    """A model to train, from a checkpoint."""

    model_seq_id: Number = 0
    base_model: str
    lora_config: LoraConfig = LoraConfig(rank=0)
    optimizer_config: OptimizerConfig = OptimizerConfig()


class OptimStep(Body):
    """One optimizer step of a model, with its gradients since the last one.

    The options of another optimizer come as ``optimizer_params``, which is refused.
    """

    model_id: str
    seq_id: Number | None = None
    adam_params: AdamParams = AdamParams()


class SaveWeights(Body):
    """A checkpoint of a model under the name `path`, or a snapshot to sample from."""

    model_id: str
    seq_id: Number | None = None
    path: str | None = None
    overwrite: bool = False
    kind: str = "snapshot"
    sampling_session_seq_id: Number | None = None
    ttl_seconds: Number | None = None


class LoadWeights(Body):
    """A checkpoint to continue from: in the model `model_id`, or in a new one of `model_seq_id`."""

    model_id: str | None = None
    seq_id: Number | None = None
    model_seq_id: Number | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None


class CreateSampling(Body):
    """A sampling session of a checkpoint, by its path or reference."""

    sampling_session_seq_id: Number = 0
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body, extra="ignore"):
    """A part of a prompt: token ids, or a type that `Prompt.read_tokens` refuses.

    The other fields are those of such a type.
    """

    type: str = "encoded_text"
    tokens: Ids = []


class Prompt(Body):
    """A prompt in parts."""

    chunks: list[Chunk]

    def read_tokens(self) -> list[int]:
        """Return the token ids. Raises UserError for anything else."""
        # To leave out an image would sample from another prompt than was sent.
        types = [chunk.type for chunk in self.chunks]
        if any(kind != "encoded_text" for kind in types):
            raise UserError("prompt", types, "only token ids are known here")
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParams(Body):
    """How completions are sampled; the limits of integers are those of int32 tensors.

    A parameter that is served has to be in the `batch` of `session.py: Session.sample`, too:
    requests that differ in it must not be executed together.
    """

    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    seed: Seed | None = None
    stop: str | Annotated[Ids, Field(max_length=4096)] | list[str] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    top_p: float = 1.0


class Sample(Body):
    """A prompt and the number of its completions.

    A sampling session has one model, which older clients name again.
    """

    IGNORED: ClassVar[frozenset[str]] = Body.IGNORED | {"base_model", "model_path"}
    sampling_session_id: str
    seq_id: Number | None = None
    num_samples: int = Field(1, ge=1, le=1024)
    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool | None = None


class Array(Body):
    """A dense tensor, as Tinker's JSON has it; without a shape it has one dimension."""

    data: list[float]
    dtype: Literal["float32", "int64"] = "float32"
    shape: list[Number] | None = None

    def read(self, name: str) -> np.ndarray:
        """Return the values in their shape.

        Raises UserError, with `name`, if they do not fit the dtype or the shape.
        """
        try:
            return np.array(self.data, self.dtype).reshape(self.shape or -1)
        except (ValueError, OverflowError) as error:
            problem = f"do not fit ({error})"
            raise UserError(f"loss_fn_inputs.{name}", self.dtype, problem) from error


class JsonDatum(Body):
    """`wire.Datum` in JSON."""

    model_input: Prompt
    loss_fn_inputs: dict[str, Array]

    def read(self) -> wire.Datum:
        inputs = {name: array.read(name) for name, array in self.loss_fn_inputs.items()}
        return wire.Datum(self.model_input.read_tokens(), inputs)


class JsonInput(Body):
    """Data and the loss of it."""

    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float] | None = None


class JsonForwardBackward(Body):
    """`wire.ForwardBackward` without protobuf, for people and small clients."""

    model_id: str
    seq_id: Number | None = None
    forward_backward_input: JsonInput
    forward_only: bool = False

    def read(self) -> wire.ForwardBackward:
        content = self.forward_backward_input
        return wire.ForwardBackward(
            model_id=self.model_id,
            seq_id=self.seq_id,
            data=[datum.read() for datum in content.data],
            loss_fn=content.loss_fn,
            config=content.loss_fn_config or {},
            forward_only=self.forward_only,
        )


@dataclass(frozen=True)
class Losses:
    """Result of `forward_backward`: float32 ``[positions]`` of each datum, and sums."""

    logprobs: list[np.ndarray]
    metrics: dict[str, float]

    def json(self) -> JsonObject:
        # The client reads tensors of one dimension only.
        tensors = [
            {"data": values.tolist(), "dtype": "float32", "shape": [len(values)]}
            for values in self.logprobs
        ]
        return {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": [{"logprobs": tensor} for tensor in tensors],
            "metrics": self.metrics,
        }

    def proto(self) -> bytes:
        return wire.write_forward_backward(self.logprobs, self.metrics)


@dataclass(frozen=True)
class Samples:
    """Result of `asample`.

    Attributes:
        sequences: the completions, as Tinker's JSON has them.
        prompt_logprobs: of each token of the prompt but the first.
        version: of the weights that made every token.
    """

    sequences: list[JsonObject]
    prompt_logprobs: list[float] | None
    version: int

    def json(self) -> JsonObject:
        logprobs: list[float | None] | None = None
        if self.prompt_logprobs is not None:
            # Tinker has a value for the first token, which nothing predicts.
            logprobs = [None]
            logprobs += self.prompt_logprobs
        return {
            "sequences": self.sequences,
            "prompt_logprobs": logprobs,
            "weight_version": self.version,
        }

    def proto(self) -> bytes:
        return wire.write_samples(self.sequences, self.prompt_logprobs)
