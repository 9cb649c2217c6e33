"""What `export` writes is a model directory for others."""

import time
from pathlib import Path

import pytest

from tuneloop.core.errors import Retryable
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.export import export
from tuneloop.training.fetch import fetch_artifact

pytestmark = [pytest.mark.local, pytest.mark.slow]


def test_transformers_loads_it(tmp_path: Path) -> None:
    """vLLM's own server loads one, too, and agrees with its checkpoint, in ``test_lm_eval.py``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data_prep(out=str(tmp_path / "prompts"), train=200, eval=10, sft=100)
    base_model(out=str(tmp_path / "base"), prompts=str(tmp_path / "prompts"), model="tiny-llama")
    plain = tmp_path / "plain"
    manifest = export(out=str(tmp_path / "model"), policy=str(tmp_path / "base"))
    fetch_artifact(str(tmp_path / "model"), plain)

    policy, tokenizer = AutoModelForCausalLM.from_pretrained(plain), AutoTokenizer.from_pretrained(plain)
    assert policy.num_parameters() == manifest.results["parameters"]
    assert tokenizer.decode(tokenizer.encode("reverse 12 =")) == "reverse 12 ="


def test_a_hub_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens on port 9: temporarily impossible, not the user's mistake."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the hub's client tries for most of a minute
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Retryable, match="the hub does not answer"):
        base_model(out=str(tmp_path / "c"), model="nobody/nothing")
