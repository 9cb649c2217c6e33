"""A multimodal class, trained on text: Gemma 3 with its processor, from base_model to the export."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from tests.making import prompts_artifact
from tests.models import SHAPE, gemma_tokenizer
from tuneloop.core.artifacts import Artifact
from tuneloop.stages.base_model import base_model
from tuneloop.stages.export import export
from tuneloop.stages.sft import sft

PROCESSOR = {
    "preprocessor_config.json": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 28, "width": 28},
        "image_seq_length": 4,
    },
    "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
}
"""The files of its processor: those of Gemma 3 as published, for smaller images."""
IMAGE_TOKENS = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Gemma 3 with a vision tower, in bfloat16."""
    directory = tmp_path_factory.mktemp("gemma") / "model"
    tokenizer = gemma_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": IMAGE_TOKENS})
    boi, eoi, image = tokenizer.convert_tokens_to_ids(IMAGE_TOKENS)
    text = {
        **SHAPE,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "vocab_size": len(tokenizer),
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=boi,
        eoi_token_index=eoi,
        image_token_index=image,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    Gemma3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for name, values in PROCESSOR.items():
        (directory / name).write_text(json.dumps(values))
    return directory


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj", "down_proj"]}])
def test_gemma_3_from_base_model_to_export(source: Path, tmp_path: Path, lora: object) -> None:
    base_model(out=str(tmp_path / "base"), model=str(source))
    base = Artifact(str(tmp_path / "base"))
    assert base.manifest.facts["architecture"] == "Gemma3ForConditionalGeneration"
    prompts = prompts_artifact(tmp_path / "prompts")
    options = {"max_steps": 3, "learning_rate": 1e-2, "warmup_steps": 0, "device": "cpu"}
    sft(
        out=str(tmp_path / "sft"),
        policy=base.ref,
        prompts=prompts.ref,
        lora=lora,
        **options,
    )
    export(out=str(tmp_path / "export"), policy=Artifact(str(tmp_path / "sft")).ref)
    exported = Artifact(str(tmp_path / "export")).path
    for name in PROCESSOR:
        assert (exported / name).read_bytes() == (source / name).read_bytes()
    before = read_tensors(source)
    after = read_tensors(exported)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    # Text trains the language model, and the vision tower stays bit for bit.
    assert changed and all("language_model" in name for name in changed)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model, information = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert type(model) is Gemma3ForConditionalGeneration
    assert not information["missing_keys"] and not information["unexpected_keys"]
    chat = [{"role": "user", "content": "say 1 ="}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        logits = model(input_ids=inputs["input_ids"]).logits
    assert logits.isfinite().all()
