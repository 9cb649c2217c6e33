"""The part of Tinker's protobuf messages that is served: token ids in, tensors in and out, as little-endian bytes with
dtype and shape. `SCHEMA` has the field numbers of ``tinker_public.proto`` in the client library, release 0.38."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject

SCHEMA = Path(__file__).with_name("tinker.textproto")
PROTOBUF = "application/x-protobuf"
FLOAT32 = 1
INT64 = 2
DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}


@dataclass(frozen=True)
class Datum:
    """One sequence, and the inputs of a loss for each position."""

    tokens: list[int]
    inputs: dict[str, np.ndarray]


@dataclass(frozen=True)
class ForwardBackward:
    """A request of `forward_backward`, from either encoding."""

    model_id: str
    seq_id: int | None
    data: list[Datum]
    loss_fn: str
    config: dict[str, float] = field(default_factory=dict)
    forward_only: bool = False


def read_address(body: bytes) -> tuple[str, int | None]:
    """Read only the model of a ``ForwardBackwardRequest``, and its number among the model's requests."""
    named = _parse(body, "Named")
    return named.model_id, named.seq_id or None


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Decode a ``ForwardBackwardRequest``. Raises UserError for any other bytes, images, sound or sparse tensors."""
    sent = _parse(body)
    config = {}
    for name, value in sent.loss_fn_config_v2.items():
        if value.text:
            raise UserError(f"loss_fn_config.{name}", value.text, "only numbers are known here")
        config[name] = value.number
    data = [
        Datum(
            _tokens(datum.model_input),
            {name: _dense(name, tensor) for name, tensor in datum.loss_fn_inputs.items()},
        )
        for datum in sent.data
    ]
    return ForwardBackward(
        sent.model_id, sent.seq_id or None, data, sent.loss_fn, config, sent.forward_only
    )


def write_forward_backward(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Encode a ``ForwardBackwardOutput``: float32 ``[positions]`` of each datum."""
    offsets = np.cumsum([0, *(part.nbytes for part in logprobs)], dtype="<i8")
    message = _messages()["ForwardBackwardOutput"](
        loss_fn_output_type="ArrayRecord", metrics=dict(metrics)
    )
    tensor = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs)).fields[
        "logprobs"
    ]
    tensor.data = b"".join(map(np.ndarray.tobytes, logprobs))
    tensor.offsets = offsets.tobytes()
    tensor.dtype = FLOAT32
    return bytes(message.SerializeToString())


def write_samples(
    sequences: Sequence[JsonMapping], prompt_logprobs: Sequence[float] | None
) -> bytes:
    """Encode a ``SampleResponse`` from its JSON form."""
    message = _messages()["SampleResponse"]()
    for sequence in sequences:
        message.sequences.add(
            stop_reason=int(sequence["stop_reason"] == "length"),
            tokens=np.array(sequence["tokens"], "<i4").tobytes(),
            logprobs=np.array(sequence["logprobs"], "<f4").tobytes(),
        )
    if prompt_logprobs is not None:  # the first token has none
        message.prompt_logprobs = np.array([np.nan, *prompt_logprobs], "<f4").tobytes()
    return bytes(message.SerializeToString())


def _parse(body: bytes, kind: str = "ForwardBackwardRequest") -> Any:
    from google.protobuf.message import DecodeError

    try:
        return _messages()[kind].FromString(body)
    except DecodeError as error:
        raise UserError(
            "body", f"{len(body)} bytes", f"is not a ForwardBackwardRequest ({error})"
        ) from error


def _tokens(chunks: Sequence[Any]) -> list[int]:
    if not all(chunk.HasField("encoded_text") for chunk in chunks):
        raise UserError("model_input", "image or sound", "only token ids are known here")
    try:
        return [
            int(token)
            for chunk in chunks
            for token in np.frombuffer(chunk.encoded_text.tokens, "<i4")
        ]
    except ValueError as error:
        raise UserError("model_input", "tokens", f"are not int32 ({error})") from error


def _dense(name: str, tensor: Any) -> np.ndarray:
    if tensor.dtype not in DTYPES:
        raise UserError(f"loss_fn_inputs.{name}", tensor.dtype, "is neither float32 nor int64")
    dtype = DTYPES[tensor.dtype]
    shape = tuple(tensor.shape)
    if tensor.HasField("sparse_csr"):
        raise UserError(
            f"loss_fn_inputs.{name}", f"sparse {list(shape)}", "only dense tensors are known here"
        )
    try:
        return np.frombuffer(tensor.dense, dtype).reshape(shape or -1)
    except ValueError as error:
        size = f"{len(tensor.dense)} bytes as {dtype} {list(shape)}"
        raise UserError(f"loss_fn_inputs.{name}", size, f"do not fit ({error})") from error


@functools.cache
def _messages() -> JsonObject:
    """Create a class for each message of `SCHEMA`, in a separate pool, as the client library may be loaded, too."""
    from google.protobuf import descriptor_pb2, message_factory, text_format

    file = text_format.Parse(SCHEMA.read_text(), descriptor_pb2.FileDescriptorProto())
    return {
        name.rpartition(".")[2]: kind for name, kind in message_factory.GetMessages([file]).items()
    }
