"""Fields of requests: what the client sends is accepted, and what would change a result without being supported is
refused.
"""

from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2

from tuneloop.core.component import convert_validation_error
from tuneloop.core.errors import UserError
from tuneloop.extensions.gateway import messages, wire

MODEL = "a.b:train:0"
PROMPT = types.ModelInput.from_ints([5, 6])
REQUESTS: dict[type[messages.Body], BaseModel] = {
    messages.CreateModel: types.CreateModelRequest(
        session_id="a.b",
        model_seq_id=0,
        base_model="m",
        user_metadata={"who": "me"},
        lora_config=types.LoraConfig(rank=2, train_unembed=False),
    ),
    messages.OptimStep: types.OptimStepRequest(
        model_id=MODEL, seq_id=1, optim_params=types.AdamParams()
    ),
    messages.SaveWeights: types.SaveWeightsForSamplerRequest(
        model_id=MODEL, seq_id=1, path="p", user_metadata={"who": "me"}
    ),
    messages.LoadWeights: types.LoadWeightsRequest(
        session_id="a.b", model_seq_id=1, path="p", optimizer=True, user_metadata={"who": "me"}
    ),
    messages.CreateSampling: types.CreateSamplingSessionRequest(
        session_id="a.b", sampling_session_seq_id=0, base_model="m"
    ),
    messages.Sample: types.SampleRequest(
        sampling_session_id="a.b:sample:0",
        seq_id=1,
        prompt=PROMPT,
        sampling_params=types.SamplingParams(max_tokens=4),
        base_model="m",
    ),
}
"""Body → what the client library sends for it."""


def dump(request: BaseModel) -> dict[str, Any]:
    return request.model_dump(mode="json", exclude_none=True)


def refuse(kind: type[messages.Body], body: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    return str(convert_validation_error(caught.value))


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_what_the_client_sends_is_accepted_and_its_other_fields_are_refused(
    kind: type[messages.Body],
) -> None:
    body = dump(REQUESTS[kind])
    kind.model_validate(body)
    fields = type(REQUESTS[kind]).model_fields.keys() | {"min_p"}
    for name in fields - kind.model_fields.keys() - kind.IGNORED - {"optim_params"}:
        kind.model_validate(body | {name: None})
        said = refuse(kind, body | {name: 1})
        assert said == f"{name}: 1: is not known here; leave it out"


@pytest.mark.parametrize("name", ["min_p", "repetition_penalty", "presence_penalty"])
def test_a_sampling_parameter_that_is_not_known_is_refused(name: str) -> None:
    """It was ignored, and completions were sampled without it."""
    body = dump(REQUESTS[messages.Sample])
    body["sampling_params"][name] = 0.5
    said = refuse(messages.Sample, body)
    assert said == f"sampling_params.{name}: 0.5: is not known here; leave it out"


def test_another_optimizer_is_refused() -> None:
    dimuon = types.DimuonOptimizerConfig()
    for kind in (messages.CreateModel, messages.LoadWeights):
        body = dump(REQUESTS[kind].model_copy(update={"optimizer_config": dimuon}))
        assert refuse(kind, body).startswith("optimizer_config.type: 'dimuon': has to be 'adamw'")
    step = types.OptimStepRequest(
        model_id=MODEL, optim_params=types.DimuonParams(learning_rate=0.1)
    )
    assert refuse(messages.OptimStep, dump(step)).startswith("optimizer_params: {")


def test_a_tensor_in_json_has_its_shape() -> None:
    tensor = types.TensorData.from_numpy(np.arange(6.0).reshape(3, 2))
    body = {"data": tensor.data, "dtype": tensor.dtype, "shape": tensor.shape}
    array = messages.Array.model_validate(body)
    assert array.read("x").tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(UserError, match=r"loss_fn_inputs.x.*do not fit"):
        messages.Array(data=[1, 2], shape=[3]).read("x")
    sparse = {"data": [1.0], "sparse_crow_indices": [0, 1], "sparse_col_indices": [0]}
    assert refuse(messages.Array, sparse).startswith("sparse_c")


def test_options_of_a_loss_are_read_in_their_older_form() -> None:
    body = tinker_public_pb2.ForwardBackwardRequest(model_id=MODEL, loss_fn="ppo")
    body.loss_fn_config["clip_low_threshold"] = 0.5
    request = wire.read_forward_backward(body.SerializeToString())
    assert request.config == {"clip_low_threshold": 0.5}
