"""The files of a model directory: what is copied from one version to the next, and how weights are cut."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.models import write_model
from tuneloop.formats.model_files import (
    choose_shard_bytes,
    copy_companions,
    drop_sampling_settings,
    holds_weights,
    read_dtype,
    read_vocabulary_size,
)


def read_division(directory: Path) -> list[set[str]]:
    """Read which tensors are in which file, in the order of the files."""
    division = []
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            division.append(set(file.keys()))
    return division


@pytest.mark.parametrize("limit", ["100KB", "150KB", "250KB"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_are_cut_as_those_of_the_source(tmp_path: Path, limit: str, dtype: str) -> None:
    """The division is the same again; only the first one may differ, as others order tensors differently."""
    source = write_model("qwen3", tmp_path / "source", max_shard_size=limit)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "first", max_shard_size=choose_shard_bytes(source, "bfloat16"))
    model = model.to(getattr(torch, dtype))
    size = choose_shard_bytes(tmp_path / "first", dtype)
    model.save_pretrained(tmp_path / "second", max_shard_size=size)
    divisions = [read_division(tmp_path / name) for name in ("source", "first", "second")]
    assert len(divisions[0]) > 1 and len(divisions[1]) > 1
    assert divisions[1] == divisions[2]
    largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
    assert all(path.stat().st_size <= largest for path in tmp_path.glob("first/*.safetensors"))


def test_one_file_stays_one(tmp_path: Path) -> None:
    source = write_model("qwen3", tmp_path / "source")
    assert choose_shard_bytes(source, "float32") == 50 * 10**9


def test_companions_are_all_files_but_weights_the_card_and_what_is_there(tmp_path: Path) -> None:
    source = tmp_path / "source"
    target = tmp_path / "target"
    source.mkdir()
    target.mkdir()
    companions = ["preprocessor_config.json", "processor_config.json", "LICENSE", "tekken.json"]
    others = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "consolidated.00.pth",
        "optimizer.pt",
        "model.gguf",
        "README.md",
        ".gitattributes",
    ]
    for name in [*companions, *others]:
        (source / name).write_text(f"source {name}")
    (source / "original").mkdir()
    (target / "config.json").write_text("ours")
    assert copy_companions(source, target) == sorted(companions)
    assert sorted(path.name for path in target.iterdir()) == sorted([*companions, "config.json"])
    assert (target / "config.json").read_text() == "ours"


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.float16"}, "float16"),
        ({"dtype": None, "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_dtype_is_read_wherever_a_configuration_says_it(
    tmp_path: Path, config: dict[str, object], dtype: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_dtype(tmp_path) == dtype


@pytest.mark.parametrize("config", [{"vocab_size": 7}, {"text_config": {"vocab_size": 7}}])
def test_embeddings_are_counted_also_in_a_multimodal_configuration(
    tmp_path: Path, config: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_vocabulary_size(tmp_path) == 7


def test_settings_of_sampling_go_and_ids_stay(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    assert drop_sampling_settings(tmp_path) == {}
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    ids = {"eos_token_id": [2, 3], "pad_token_id": 0}
    path.write_text(json.dumps({**sampling, **ids}))
    assert drop_sampling_settings(tmp_path) == sampling
    assert json.loads(path.read_text()) == ids
    assert drop_sampling_settings(tmp_path) == {}


def test_an_index_counts_as_weights() -> None:
    names = ["model.safetensors.index.json", "pytorch_model.bin.index.json", "a.safetensors"]
    assert all(map(holds_weights, names))
    assert not any(map(holds_weights, ["tokenizer.json", "tokenizer.model", "vocab.json"]))
