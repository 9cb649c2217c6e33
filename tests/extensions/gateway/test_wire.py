"""Our half of Tinker's wire format against the client library's own."""

import numpy as np
import pytest
from pydantic import ValidationError
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from tuneloop.core.errors import UserError
from tuneloop.extensions.gateway import wire
from tuneloop.extensions.gateway.messages import Array


def encoded(*chunks: types.ModelInputChunk, config: dict | None = None) -> bytes:
    inputs = {"target_tokens": [6, 7, 70_000], "weights": [0.0, 0.5, 1.0]}
    datum = types.Datum(model_input=types.ModelInput(chunks=list(chunks)), loss_fn_inputs=inputs)
    asked = types.ForwardBackwardInput([datum, datum], "ppo", config)
    return forward_backward_request_to_proto(
        types.ForwardBackwardRequest(asked, "a.b:train:0", 3)
    ).SerializeToString()


def test_what_the_client_sends() -> None:
    body = encoded(
        types.EncodedTextChunk(tokens=[5, 6]),
        types.EncodedTextChunk(tokens=[70_001]),
        config={"clip_low_threshold": 0.5},
    )
    found = wire.read_forward_backward(body)
    assert wire.read_address(body) == (found.model_id, found.seq_id) == ("a.b:train:0", 3)
    assert (found.seq_id, found.loss_fn, found.config) == (3, "ppo", {"clip_low_threshold": 0.5})
    assert [datum.tokens for datum in found.data] == [[5, 6, 70_001]] * 2
    assert found.data[0].inputs["target_tokens"].tolist() == [6, 7, 70_000]
    assert found.data[1].inputs["weights"].dtype == np.float32


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(UserError, match="only token ids"):
        wire.read_forward_backward(encoded(types.ImageChunk(data=b"x", format="png")))
    with pytest.raises(UserError, match="not a ForwardBackwardRequest"):
        wire.read_forward_backward(b"\xff\xff\xff")


def test_bytes_that_do_not_fit_are_refused() -> None:
    def asked(tokens: bytes, dense: bytes, *shape: int) -> bytes:
        message = wire._load_messages()["ForwardBackwardRequest"](model_id="m", seq_id=1)
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens
        datum.loss_fn_inputs["weights"].CopyFrom(
            wire._load_messages()["Tensor"](dense=dense, dtype=wire.FLOAT32, shape=shape)
        )
        return bytes(message.SerializeToString())

    assert wire.read_forward_backward(asked(bytes(8), bytes(8), 2)).data[0].tokens == [0, 0]
    for wrong in (
        asked(bytes(7), bytes(8), 2),
        asked(bytes(8), bytes(7), 2),
        asked(bytes(8), bytes(8), 3),
    ):
        with pytest.raises(
            UserError, match=r"model_input.*int32|loss_fn_inputs.weights.*do not fit"
        ):
            wire.read_forward_backward(wrong)
    with pytest.raises(UserError, match=r"loss_fn_inputs.x.*do not fit"):
        Array(data=[1e300], dtype="int64").read("x")
    with pytest.raises(ValidationError, match="finite number"):
        Array(data=[float("nan")])


def test_what_the_client_reads() -> None:
    parts = [np.array([-1, -2, -3], "<f4"), np.array([-4], "<f4")]
    found = deserialize_forward_backward_output(
        wire.write_forward_backward(parts, {"loss:sum": 2.5})
    )
    assert [out["logprobs"].tolist() for out in found.loss_fn_outputs] == [[-1, -2, -3], [-4]]
    assert found.metrics == {"loss:sum": 2.5}
    sequences = [
        {"tokens": [1, 70_000], "logprobs": [-0.5, -1.5], "stop_reason": "length"},
        {"tokens": [], "logprobs": [], "stop_reason": "stop"},
    ]
    said = deserialize_sample_response(wire.write_samples(sequences, [-0.25]))
    assert [(each.tokens, each.stop_reason) for each in said.sequences] == [
        ([1, 70_000], "length"),
        ([], "stop"),
    ]
    assert said.sequences[0].logprobs == [-0.5, -1.5]
    assert said.prompt_logprobs == [None, -0.25]
