"""What `export` writes is a model directory for others: transformers and vLLM load it and agree."""

import gc
import json
import time
from pathlib import Path

import pytest

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Retryable
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.export import export
from tuneloop.stages.sft import sft
from tuneloop.training.fetch import fetch_artifact

pytestmark = [pytest.mark.local, pytest.mark.slow]


def test_transformers_and_vllm_load_it_and_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Llama; whole loops have vLLM load a Qwen3 and prove it by its canary."""
    monkeypatch.setenv(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
    )  # in process, as a child has no way to say why it died
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    vllm = pytest.importorskip("vllm")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data_prep(out=str(tmp_path / "prompts"), train=200, eval=10, sft=100)
    base_model(out=str(tmp_path / "base"), prompts=str(tmp_path / "prompts"), model="tiny-llama")
    plain = tmp_path / "plain"
    manifest = export(out=str(tmp_path / "model"), policy=str(tmp_path / "base"))
    fetch_artifact(str(tmp_path / "model"), plain)

    policy, tokenizer = (
        AutoModelForCausalLM.from_pretrained(plain),
        AutoTokenizer.from_pretrained(plain),
    )
    assert policy.num_parameters() == manifest.results["parameters"]
    assert tokenizer.decode(tokenizer.encode("reverse 12 =")) == "reverse 12 ="

    engine = vllm.LLM(str(plain), enforce_eager=True, max_model_len=256, max_num_seqs=2, seed=0)
    canary = json.loads((Artifact(str(tmp_path / "base")).path / "canary.json").read_text())
    greedy = vllm.SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
    (answer,) = engine.generate({"prompt_token_ids": canary["ids"]}, greedy)
    served = [
        said[token].logprob for token, said in zip(canary["ids"][1:], answer.prompt_logprobs[1:])
    ]
    gap = max(abs(ours - theirs) for ours, theirs in zip(served, canary["logprobs"], strict=True))
    print(f"largest difference of the canary's log-probabilities {gap:.4f}")
    assert gap < 0.03  # bfloat16 on both sides; other weights differ by about 1
    assert len(answer.outputs[0].token_ids) == 4
    del engine
    gc.collect()


def test_vllm_serves_an_exported_adapter_over_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine serves the base, and the adapter as the merged model."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    vllm = pytest.importorskip("vllm")
    from vllm.lora.request import LoRARequest

    data_prep(out=str(tmp_path / "prompts"), train=8, eval=4, sft=24)
    base_model(out=str(tmp_path / "base"), prompts=str(tmp_path / "prompts"))
    about = {
        "lora": {"r": 8, "use_rslora": True},
        "save_dtype": "float32",
        "learning_rate": 1e-2,
        "device": "cpu",
    }
    sft(
        out=f"{tmp_path}/sft",
        policy=f"{tmp_path}/base",
        prompts=f"{tmp_path}/prompts",
        max_steps=20,
        **about,
    )
    export(out=str(tmp_path / "model"), policy=str(tmp_path / "sft"), adapter=True)
    adapter = LoRARequest("adapter", 1, str(Artifact(str(tmp_path / "model")).part("adapter")))
    base = Artifact(str(tmp_path / "base")).part("model")
    options = {
        "enable_lora": True,
        "max_lora_rank": 8,
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 2,
    }
    engine = vllm.LLM(str(base), enforce_eager=True, seed=0, **options)
    greedy = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for policy, request in (("base", None), ("sft", adapter)):
        canary = json.loads((Artifact(str(tmp_path / policy)).path / "canary.json").read_text())
        (answer,) = engine.generate(
            {"prompt_token_ids": canary["ids"]}, greedy, lora_request=request
        )
        served = [
            said[token].logprob
            for token, said in zip(canary["ids"][1:], answer.prompt_logprobs[1:])
        ]
        assert served == pytest.approx(canary["logprobs"], abs=1e-3)
    before = canary["before"]
    assert max(abs(ours - theirs) for ours, theirs in zip(served, before, strict=True)) > 0.1
    del engine
    gc.collect()


def test_a_hub_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens on port 9: temporarily impossible, not the user's mistake."""
    monkeypatch.setattr(
        time, "sleep", lambda seconds: None
    )  # the hub's client tries for most of a minute
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Retryable, match="the hub does not answer"):
        base_model(out=str(tmp_path / "c"), model="nobody/nothing")
