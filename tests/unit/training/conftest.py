"""What the trainers' tests train."""

from pathlib import Path

import pytest
import torch

from tests.making import tiny_model


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request, tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp(request.param), request.param, dtype=torch.float32)
