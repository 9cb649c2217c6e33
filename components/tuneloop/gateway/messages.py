"""Bodies of Tinker's requests, and results as they are sent back."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, Field

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.formats.rollouts import Ids, Seed
from tuneloop.gateway import wire
from tuneloop.gateway.resident import AdamParams
from tuneloop.training.lora import Lora

ALPHA = 32.0
"""lora_alpha of adapters, as in Tinker."""
Number = Annotated[int, Field(ge=0, lt=2**31)]
"""Of a request, a model or a sampling session; seconds."""


class Body(BaseModel, frozen=True, extra="ignore", allow_inf_nan=False, protected_namespaces=()):
    """A request's body; other fields, such as the client's metadata, are ignored."""


class LoraConfig(Body):
    """Adapters; a `rank` of 0 trains the whole model, which Tinker does not have."""

    rank: int = Field(32, ge=0, le=4096)
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def to_peft(self) -> Lora | None:
        """Convert to peft's options. Raises UserError for a choice of layers that is not supported here."""
        if not self.rank:
            return None
        if self.train_unembed:
            raise UserError(
                "lora_config.train_unembed",
                True,
                "the output layer gets no adapter here; set it False",
            )
        if not (self.train_mlp and self.train_attn):
            raise UserError(
                "lora_config",
                "train_mlp, train_attn",
                "both always get adapters here; leave them True",
            )
        return Lora(r=self.rank, lora_alpha=ALPHA)


class CreateModel(Body):
    """A model to train, from a checkpoint."""

    model_seq_id: Number = 0
    base_model: str
    lora_config: LoraConfig = LoraConfig(rank=0)


class OptimStep(Body):
    model_id: str
    seq_id: Number | None = None
    adam_params: AdamParams = AdamParams()


class SaveWeights(Body):
    model_id: str
    seq_id: Number | None = None
    path: str | None = None
    overwrite: bool = False
    kind: str = "snapshot"
    sampling_session_seq_id: Number | None = None
    ttl_seconds: Number | None = None


class LoadWeights(Body):
    model_id: str | None = None
    seq_id: Number | None = None
    model_seq_id: Number | None = None
    path: str
    optimizer: bool


class CreateSampling(Body):
    sampling_session_seq_id: Number = 0
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body):
    type: str = "encoded_text"
    tokens: Ids = []


class Prompt(Body):
    chunks: list[Chunk]

    def read_tokens(self) -> list[int]:
        """Return the token ids. Raises UserError for anything else."""
        if any(chunk.type != "encoded_text" for chunk in self.chunks):
            raise UserError(
                "prompt", [chunk.type for chunk in self.chunks], "only token ids are known here"
            )
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParams(Body):
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    seed: Seed | None = None
    stop: str | Annotated[Ids, Field(max_length=4096)] | list[str] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    top_p: float = 1.0


class Sample(Body, extra="allow"):
    """A prompt and the number of its completions. Unknown fields are refused, as they would change the answer."""

    sampling_session_id: str
    seq_id: Number | None = None
    num_samples: int = Field(1, ge=1, le=1024)
    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool | None = None
    type: str = "sample"


class Array(Body):
    data: list[float]
    dtype: Literal["float32", "int64"] = "float32"

    def read(self, name: str) -> np.ndarray:
        try:
            return np.array(self.data, self.dtype)
        except (ValueError, OverflowError) as error:
            raise UserError(
                f"loss_fn_inputs.{name}", self.dtype, f"do not fit ({error})"
            ) from error


class JsonDatum(Body):
    model_input: Prompt
    loss_fn_inputs: dict[str, Array]


class JsonInput(Body):
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
        given = self.forward_backward_input
        data = [
            wire.Datum(
                each.model_input.read_tokens(),
                {k: v.read(k) for k, v in each.loss_fn_inputs.items()},
            )
            for each in given.data
        ]
        config = given.loss_fn_config or {}
        return wire.ForwardBackward(
            self.model_id, self.seq_id, data, given.loss_fn, config, self.forward_only
        )


@dataclass(frozen=True)
class Losses:
    """Result of `forward_backward`: float32 ``[positions]`` of each datum, and sums."""

    logprobs: list[np.ndarray]
    metrics: dict[str, float]

    def json(self) -> JsonObject:
        outputs = [
            {"logprobs": {"data": p.tolist(), "dtype": "float32", "shape": [len(p)]}}
            for p in self.logprobs
        ]
        return {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": outputs,
            "metrics": self.metrics,
        }

    def proto(self) -> bytes:
        return wire.write_forward_backward(self.logprobs, self.metrics)


@dataclass(frozen=True)
class Samples:
    """Result of `asample`; `version` of the weights that made every token."""

    sequences: list[JsonObject]
    prompt_logprobs: list[float] | None
    version: int

    def json(self) -> JsonObject:
        prompt = None if self.prompt_logprobs is None else [None, *self.prompt_logprobs]
        return {
            "sequences": self.sequences,
            "prompt_logprobs": prompt,
            "weight_version": self.version,
        }

    def proto(self) -> bytes:
        return wire.write_samples(self.sequences, self.prompt_logprobs)
