"""The part of Tinker's protobuf messages that is served: token ids in, tensors in and out.

Tensors are little-endian bytes with dtype and shape. `SCHEMA` has the field numbers of
``tinker_public.proto`` in the client library, release 0.38.

A field that is added is a line of `SCHEMA`, by the number of the client's own file. It is read or
written here, and in the JSON form of the same message (`messages.py`). The client's library reads
and writes the same bytes in `tests/extensions/gateway/test_wire.py`.
"""

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
"""The content type of bodies and answers in protobuf; all others are JSON."""
# Values of ``dtype`` in the schema.
FLOAT32 = 1
INT64 = 2
DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
"""The types of tensors that are read; those of the JSON form are in `messages.py: Array`."""


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
    """Read only the model of a ``ForwardBackwardRequest``, and its number among the model's
    requests.
    """
    # This message has no other fields, so their megabytes are skipped.
    address = _parse_request(body, "Named")
    return address.model_id, address.seq_id or None


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Decode a ``ForwardBackwardRequest``.

    Raises UserError for any other bytes, images, sound or sparse tensors.
    """
    message = _parse_request(body)
    # Older clients send only this form of it, newer ones both.
    config: dict[str, float] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.text:
            raise UserError(f"loss_fn_config.{name}", value.text, "only numbers are known here")
        config[name] = value.number
    return ForwardBackward(
        model_id=message.model_id,
        seq_id=message.seq_id or None,
        data=[_datum(datum) for datum in message.data],
        loss_fn=message.loss_fn,
        config=config,
        forward_only=message.forward_only,
    )


def _datum(message: Any) -> Datum:
    inputs = {name: _read_tensor(name, tensor) for name, tensor in message.loss_fn_inputs.items()}
    return Datum(_read_tokens(message.model_input), inputs)


def write_forward_backward(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Encode a ``ForwardBackwardOutput``: float32 ``[positions]`` of each datum."""
    message = _load_messages()["ForwardBackwardOutput"](
        loss_fn_output_type="ArrayRecord",
        metrics=dict(metrics),
    )
    output = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    # All data share one tensor: the datum of index i has the bytes from offset i to offset i + 1.
    offsets = np.zeros(len(logprobs) + 1, "<i8")
    offsets[1:] = np.cumsum([values.nbytes for values in logprobs])
    tensor = output.fields["logprobs"]
    tensor.data = b"".join(map(np.ndarray.tobytes, logprobs))
    tensor.offsets = offsets.tobytes()
    tensor.dtype = FLOAT32
    return bytes(message.SerializeToString())


def write_samples(
    sequences: Sequence[JsonMapping],
    prompt_logprobs: Sequence[float] | None,
) -> bytes:
    """Encode a ``SampleResponse`` from its JSON form."""
    message = _load_messages()["SampleResponse"]()
    for sequence in sequences:
        message.sequences.add(
            stop_reason=int(sequence["stop_reason"] == "length"),
            tokens=np.array(sequence["tokens"], "<i4").tobytes(),
            logprobs=np.array(sequence["logprobs"], "<f4").tobytes(),
        )
    if prompt_logprobs is not None:
        # The first token has none.
        values = np.full(len(prompt_logprobs) + 1, np.nan, "<f4")
        values[1:] = prompt_logprobs
        message.prompt_logprobs = values.tobytes()
    return bytes(message.SerializeToString())


def _parse_request(body: bytes, kind: str = "ForwardBackwardRequest") -> Any:
    from google.protobuf.message import DecodeError

    try:
        return _load_messages()[kind].FromString(body)
    except DecodeError as error:
        problem = f"is not a ForwardBackwardRequest ({error})"
        raise UserError("body", f"{len(body)} bytes", problem) from error


def _read_tokens(chunks: Sequence[Any]) -> list[int]:
    # To leave out an image would train on another prompt than was sent.
    if not all(chunk.HasField("encoded_text") for chunk in chunks):
        raise UserError("model_input", "image or sound", "only token ids are known here")
    tokens: list[int] = []
    try:
        for chunk in chunks:
            tokens += np.frombuffer(chunk.encoded_text.tokens, "<i4").tolist()
        return tokens
    except ValueError as error:
        raise UserError("model_input", "tokens", f"are not int32 ({error})") from error


def _read_tensor(name: str, tensor: Any) -> np.ndarray:
    if tensor.dtype not in DTYPES:
        raise UserError(f"loss_fn_inputs.{name}", tensor.dtype, "is neither float32 nor int64")
    dtype = DTYPES[tensor.dtype]
    shape = tuple(tensor.shape)
    if tensor.HasField("sparse_csr"):
        value = f"sparse {list(shape)}"
        raise UserError(f"loss_fn_inputs.{name}", value, "only dense tensors are known here")
    try:
        # A tensor without a shape has one dimension.
        return np.frombuffer(tensor.dense, dtype).reshape(shape or -1)
    except ValueError as error:
        size = f"{len(tensor.dense)} bytes as {dtype} {list(shape)}"
        raise UserError(f"loss_fn_inputs.{name}", size, f"do not fit ({error})") from error


@functools.cache
def _load_messages() -> JsonObject:
    """Create a class for each message of `SCHEMA`.

    They are in a pool of their own, as the client library, which has the same names, may be loaded.
    """
    from google.protobuf import descriptor_pb2, message_factory, text_format

    file = text_format.Parse(SCHEMA.read_text(), descriptor_pb2.FileDescriptorProto())
    classes = message_factory.GetMessages([file])
    return {name.rpartition(".")[2]: message for name, message in classes.items()}
