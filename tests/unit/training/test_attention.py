"""Attention over packed rows by documents' boundaries; and what ``auto`` chooses."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tuneloop.core.errors import UserError
from tuneloop.formats.token_files import Document
from tuneloop.training.fsdp import attention
from tuneloop.training.fsdp.attention import choose_attention, find_model_obstacle
from tuneloop.training.fsdp.policy import Policy
from tuneloop.training.fsdp.ranks import Ranks

VOCABULARY = 41
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Qwen2": SLIDING | {"use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Gemma3Text": SLIDING | {"query_pre_attn_scalar": 8},
    "Olmo2": {},
    "Phi3": {"sliding_window": 4},
    "SmolLM3": {},
    "Granite": {},
    "DeepseekV3": LATENT,
}


def write_model(directory: Path, name: str, **settings: Any) -> Path:
    """Write a model of two layers with random weights."""
    config = getattr(transformers, f"{name}Config")(**(SHAPE | settings))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    rng = random.Random(0)
    documents = []
    for length in (2, 30, 5, 17, 9, 9, 3):
        ids = [rng.randrange(VOCABULARY) for _ in range(length)]
        targets = [False, *(rng.random() < 0.6 for _ in range(length - 1))]
        documents.append(Document(ids, targets))
    return documents


def compute(
    model: Path, documents: list[Document], **options: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor | None]]:
    """Return log-probabilities, entropies, and the gradient of a weighted sum of the former."""
    policy = Policy(model, Ranks("cpu"), max_length=64, **options)
    values, entropies = policy.logprobs(documents, 0.7)
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    gradients = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    return values.detach(), entropies, gradients


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_rows_equal_padded_rows(name, documents, tmp_path):
    model = write_model(tmp_path, name, **ARCHITECTURES[name])
    assert find_model_obstacle(model) == ""
    padded = compute(model, documents, packing="padded", attn_implementation="eager")
    packed = compute(model, documents, packing="packed", attn_implementation="varlen")
    assert packed[0].std() > 0.1
    torch.testing.assert_close(packed, padded, rtol=1e-3, atol=1e-4)


def test_recomputed_activations_keep_documents_apart(documents, tmp_path):
    model = write_model(tmp_path, "Qwen3")
    kept = compute(model, documents, attn_implementation="varlen")
    again = compute(model, documents, attn_implementation="varlen", gradient_checkpointing=True)
    torch.testing.assert_close(again, kept, rtol=1e-5, atol=1e-6)


def test_a_packed_row_has_no_padding(documents, tmp_path):
    policy = Policy(write_model(tmp_path, "Llama"), Ranks("cpu"), attn_implementation="varlen")
    batch = policy.collate(documents)
    assert policy.chosen()["packing"] == "packed"
    assert batch.input_ids.shape == (1, sum(len(document.ids) for document in documents))
    lengths = sorted(len(document.ids) for document in documents)
    assert sorted(batch.boundaries.diff().tolist()) == lengths
    assert batch.longest == max(lengths)


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_rows_with_padding_have_boundaries_too(documents, packing, tmp_path):
    """A capacity below the total leaves several rows; the kernel also takes padded ones."""
    policy = Policy(
        write_model(tmp_path, "Llama"),
        Ranks("cpu"),
        attn_implementation="sdpa",
        packing=packing,
        max_length=32,
    )
    batch = policy.collate(documents)
    boundaries = batch.boundaries.tolist()
    assert boundaries[0] == 0
    assert boundaries[-1] == batch.input_ids.numel()
    if packing == "packed":
        starts = (batch.position_ids.flatten() == 0).nonzero().flatten().tolist()
        assert {*boundaries[:-1]} <= {*starts}
        # What is no boundary lies in padding, where every token is at position 0.
        others = {*starts} - {*boundaries}
        assert all(start - 1 in starts for start in others)
    else:
        width = batch.input_ids.shape[1]
        assert {*range(0, boundaries[-1], width)} <= {*boundaries}


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Gemma2", {"attn_logit_softcapping": 50.0}, "caps attention logits"),
        ("Llama", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ("Llama", {"head_dim": 12}, "heads of 12"),
        ("GptOss", {"num_local_experts": 2}, "no attention that kernels"),
        (
            "Qwen3Next",
            {"num_experts": 2, "layer_types": ["linear_attention", "full_attention"]},
            "linear_attention",
        ),
        ("GPTNeo", {"attention_types": [[["global"], 2]]}, "no attention that kernels"),
    ],
)
def test_what_the_kernels_lack_is_named(name, settings, reason, tmp_path):
    config = getattr(transformers, f"{name}Config")(**(SHAPE | settings))
    config.save_pretrained(tmp_path)
    assert reason in find_model_obstacle(tmp_path)
    with pytest.raises(UserError, match=reason):
        choose_attention(tmp_path, torch.device("cpu"), "float32", "varlen", "auto")


def test_auto_packs_on_a_gpu_where_a_kernel_can_run(tmp_path, monkeypatch):
    gpu = torch.device("cuda")
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed
    model = write_model(tmp_path / "model", "Llama")

    def choose(device: torch.device, dtype: Any, packing: Any = "auto") -> attention.Choice:
        return choose_attention(model, device, dtype, "auto", packing)

    assert choose(gpu, "bfloat16") == attention.Choice("varlen", packed=True)
    assert choose(gpu, "bfloat16", "packed") == attention.Choice("varlen", packed=True)
    assert choose(gpu, "bfloat16", "padded") == attention.Choice("sdpa", packed=False)
    assert choose(torch.device("cpu"), "bfloat16") == attention.Choice("sdpa", packed=False)
    single = choose(gpu, "float32")
    assert (single.attention, single.packed) == ("sdpa", False)
    assert "16 bits" in single.obstacle
    capability = (7, 5)
    assert "capability 8.0" in choose(gpu, "bfloat16").obstacle


def test_auto_prefers_flash_attention_where_it_is_installed(tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model = write_model(tmp_path / "model", "Llama")
    choice = choose_attention(model, torch.device("cuda"), "bfloat16", "auto", "auto")
    assert choice == attention.Choice("flash_attention_2", packed=True)
    assert choice.takes_boundaries


def test_a_model_that_no_kernel_computes_is_padded_and_says_why(documents, tmp_path, monkeypatch):
    """The choice is that of a GPU; the model runs here, with what was chosen."""
    model = write_model(tmp_path, "Gemma2", attn_logit_softcapping=5.0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    choice = choose_attention(model, torch.device("cuda"), "bfloat16", "auto", "auto")
    monkeypatch.setattr(attention, "choose_attention", lambda *arguments: choice)
    policy = Policy(model, Ranks("cpu"))
    assert policy.chosen()["packing"] == "padded"
    assert "attn_logit_softcapping" in policy.chosen()["padded_because"]
    assert torch.isfinite(policy.logprobs(documents)[0]).all()


@pytest.mark.parametrize(("how", "form"), [("sdpa", "padded"), ("eager", "padded")])
def test_other_attentions_pad(how, form, tmp_path):
    choice = choose_attention(tmp_path, torch.device("cpu"), "float32", how, "auto")
    assert (choice.attention, choice.packed) == (how, form == "packed")
