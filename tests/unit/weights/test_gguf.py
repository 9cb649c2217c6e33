"""GGUF files as transformers and the library gguf read them, and the models of which none is written."""

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from tests import policies
from tests.making import checkpoint_artifact, prompts_artifact
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.stages.base_model import CHATML, EOS, PAD, START, base_model
from tuneloop.stages.export import export
from tuneloop.stages.sft import sft
from tuneloop.weights.gguf import write_gguf

needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "reverse 1234 =",
    f"{START}user\nreverse 12 ={EOS}\n{START}assistant\n",
    "I've told them it's 12345 o'clock, DON'T you?  ünïcödé 你好世界 🙂",
    "\n\n\tx = foo(bar);\r\n  return 42\n a<tool>b   ",
]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA3 |= {"original_max_position_embeddings": 64}


def make_tokenizer(pre: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE that splits text as llama.cpp's pre-tokenizer of that name."""
    whole, rest = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=each) for each in (True, False)
    )
    parts = {
        "gpt-2": [whole],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), whole],
        "qwen2": [pre_tokenizers.Split(Regex(WORDS % ""), "isolated"), rest],
        "llama-bpe": [pre_tokenizers.Split(Regex(WORDS % "{1,3}"), "isolated"), rest],
    }[pre]
    core = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    core.pre_tokenizer = pre_tokenizers.Sequence(parts) if len(parts) > 1 else parts[0]
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[PAD, START, EOS, "<bos>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(iter(TEXTS * 20), trainer)
    core.add_tokens(["<tool>"])
    about = {"eos_token": EOS, "pad_token": PAD, "model_max_length": 256}
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    if pre == "llama-bpe":
        about["bos_token"] = "<bos>"
        core.post_processor = processors.TemplateProcessing(
            single="<bos> $A",
            pair="<bos> $A $B",
            special_tokens=[("<bos>", core.token_to_id("<bos>"))],
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, **about
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [START]})
    tokenizer.chat_template = CHATML
    return tokenizer


def make_model(
    directory: Path, family: type[Any], pre: str, dtype: str = "float32", **about: Any
) -> Path:
    """A random decoder whose norms are not all one, with seven rows more than it has tokens; returns `directory`."""
    tokenizer = make_tokenizer(pre)
    shape = {**policies.SHAPE, "vocab_size": len(tokenizer) + 7, "max_position_embeddings": 256}
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(family(**{**shape, **ids, **about}))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(
                torch.randn_like(parameter) / 8
            )
    made.to(getattr(torch, dtype)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def compute_logits(directory: Path, **about: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **about).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 100)[None]).logits


def check_file(model: Path, alone: Path, texts: list[str] = TEXTS) -> Any:
    """Read ``model.gguf`` beside `model`, and in a directory where nothing else is; returns what gguf reads."""
    from gguf import GGUFReader

    assert compute_logits(
        model, gguf_file="model.gguf", config=AutoConfig.from_pretrained(model)
    ).equal(compute_logits(model))
    alone.mkdir()
    shutil.copy(model / "model.gguf", alone)
    ours, theirs = (
        AutoTokenizer.from_pretrained(model),
        AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf"),
    )
    for text in texts:
        ids = ours(text, add_special_tokens=False)["input_ids"]
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids, text
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "chat_template"):
        assert getattr(theirs, name) == getattr(ours, name), name
    return GGUFReader(model / "model.gguf")


@needs_gguf
@pytest.mark.parametrize(
    ("family", "pre", "dtype", "about"),
    [
        (Qwen3Config, "qwen2", "bfloat16", {"tie_word_embeddings": True}),
        (Qwen3Config, "smollm", "float32", {}),
        (Qwen2Config, "qwen2", "float16", {"head_dim": 16, "tie_word_embeddings": True}),
        (Qwen2Config, "qwen2", "float32", {"head_dim": 16, "rms_norm_eps": 1e-3}),
        (LlamaConfig, "smollm", "bfloat16", {"tie_word_embeddings": True}),
        (
            LlamaConfig,
            "gpt-2",
            "float32",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        ),
        (
            LlamaConfig,
            "llama-bpe",
            "float32",
            {"rope_parameters": LLAMA3, "num_key_value_heads": 1},
        ),
    ],
)
def test_a_file_is_the_model(
    tmp_path: Path, family: type[Any], pre: str, dtype: str, about: dict[str, Any]
) -> None:
    model = make_model(tmp_path / "model", family, pre, dtype, **about)
    write_gguf(model, model / "model.gguf", "a test")
    reader = check_file(model, tmp_path / "alone")
    said = {name: field.contents() for name, field in reader.fields.items()}
    assert (said["general.description"], said["tokenizer.ggml.pre"]) == ("a test", pre)
    assert said["tokenizer.ggml.add_bos_token"] == (pre == "llama-bpe")
    tokens = dict(
        zip(said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"], strict=True)
    )
    assert [tokens[each] for each in (START, "<tool>", "a")] == [3, 4, 1]
    assert [kind for name, kind in tokens.items() if name.startswith("[PAD")] == [5] * 7
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    assert kinds == {{"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]}
    assert {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) == 1} == {
        "F32"
    }
    config = AutoConfig.from_pretrained(model)
    if (
        family is not Qwen3Config and config.rope_parameters["rope_type"] == "default"
    ):  # what a file alone tells it
        assert compute_logits(tmp_path / "alone", gguf_file="model.gguf").equal(
            compute_logits(model)
        )
    if config.rope_parameters["rope_type"] == "llama3":
        rotary = AutoModelForCausalLM.from_pretrained(model).model.rotary_emb
        plain = 5e5 ** -(torch.arange(0, 32, 2) / 32)
        (found,) = (tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
        torch.testing.assert_close(torch.tensor(found), plain / rotary.inv_freq)
        assert found.min() == 1 and found.max() == 8


@needs_gguf
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
def test_a_trained_policy_is_exported(tmp_path: Path, name: str) -> None:
    prompts = prompts_artifact(tmp_path / "prompts").ref
    base_model(out=str(tmp_path / "base"), prompts=prompts, model=name)
    about: dict[str, Any] = {"max_steps": 3, "learning_rate": 1e-2, "device": "cpu"}
    sft(out=str(tmp_path / "sft"), policy=str(tmp_path / "base"), prompts=prompts, **about)
    policy = Artifact(str(tmp_path / "sft"))
    whole = export(out=str(tmp_path / "whole"), policy=policy.ref)
    manifest = export(out=str(tmp_path / "model"), policy=policy.ref, gguf=True)
    again = export(out=str(tmp_path / "again"), policy=policy.ref, gguf=True)
    assert (manifest.files, manifest.results) == (again.files, whole.results)
    assert {
        name: each for name, each in manifest.files.items() if name != "model.gguf"
    } == whole.files
    model = Artifact(str(tmp_path / "model")).path
    texts = [f"say {i} =" for i in range(50)] + [
        "say 12 34",
        f"{START}user\nsay 5{EOS}\n{START}assistant\n",
    ]
    reader = check_file(model, tmp_path / "alone", texts)
    assert reader.fields["general.description"].contents() == f"checkpoint {policy.manifest.digest}"
    base = Artifact(str(tmp_path / "base")).part("model")
    assert not compute_logits(model).equal(compute_logits(base))


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@needs_gguf
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "architectures"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope"),
        ({"rope_parameters": LLAMA3}, "rope"),
    ],
)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(
    tmp_path: Path, values: dict[str, Any], named: str
) -> None:
    model = make_model(tmp_path / "model", Qwen3Config, "qwen2")
    change(model / "config.json", **values)
    with pytest.raises(UserError, match=rf"^gguf: {named}: .* is not supported; .* is$") as caught:
        write_gguf(model, tmp_path / "model.gguf", "")
    assert "\n" not in str(caught.value) and not (tmp_path / "model.gguf").exists()


@needs_gguf
def test_a_tokenizer_that_llama_cpp_has_not_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", Qwen3Config, "smollm")
    file, target = model / "tokenizer.json", tmp_path / "model.gguf"
    kept = file.read_text()
    stripped = Tokenizer.from_str(kept)
    stripped.add_tokens([AddedToken("<mask>", lstrip=True)])
    said = json.loads(kept)
    digits, rest = said["pre_tokenizer"]["pretokenizers"]
    grouped = {"type": "Sequence", "pretokenizers": [{**digits, "individual_digits": False}, rest]}
    for changed, named in (
        (json.dumps({**said, "pre_tokenizer": grouped}), "tokenizer: {.*"),
        (json.dumps({**said, "pre_tokenizer": None}), "tokenizer: {.*"),
        (json.dumps({**said, "normalizer": {"type": "Lowercase"}}), "tokenizer: {.*"),
        (json.dumps({**said, "model": {**said["model"], "ignore_merges": True}}), "tokenizer: {.*"),
        (stripped.to_str(), "strips: True"),
        (None, "vocabulary: 'no tokenizer.json'"),
    ):
        file.write_text(changed) if changed else file.unlink()
        with pytest.raises(UserError, match=rf"^gguf: {named}: is not supported; .* is$") as caught:
            write_gguf(model, target, "")
        assert "\n" not in str(caught.value) and not target.exists()


@needs_gguf
def test_what_is_refused_is_not_exported(tmp_path: Path) -> None:
    policy = checkpoint_artifact(tmp_path / "policy")  # its tokenizer knows words, and no bytes
    with pytest.raises(
        UserError, match=r"^gguf: vocabulary: 'WordLevel': is not supported; BPE is$"
    ):
        export(out=str(tmp_path / "model"), policy=policy.ref, gguf=True)
    assert not (tmp_path / "model/manifest.json").exists()


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = checkpoint_artifact(tmp_path / "policy")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        UserError, match=r"^gguf: 'gguf': is not installed; pip install 'tuneloop\[gguf\]'$"
    ):
        export(out=str(tmp_path / "model"), policy=policy.ref, gguf=True)
    assert export(out=str(tmp_path / "model"), policy=policy.ref).files
