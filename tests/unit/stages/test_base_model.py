"""Version 0 of the policy: the same bytes from the same seed, a tokenizer that spells anything, a canary."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.formats.canary import LENGTH, canary_logprobs, derive_ids
from tuneloop.formats.tokens import stop_ids
from tuneloop.stages.base_model import base_model, train_tokenizer
from tuneloop.stages.data_prep import data_prep


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("prompts") / "p")
    data_prep(out=path, train=200, eval=10, sft=100)
    return path


@pytest.fixture(scope="module")
def tiny(prompts: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = str(tmp_path_factory.mktemp("tiny") / "c")
    base_model(out=path, prompts=prompts)
    return Artifact(path).path


@pytest.mark.parametrize(
    ("name", "architecture"), [("tiny-qwen3", "Qwen3"), ("tiny-llama", "Llama")]
)
def test_tiny_models(prompts: str, tmp_path: Path, name: str, architecture: str) -> None:
    manifest = base_model(out=str(tmp_path / "c"), prompts=prompts, model=name)
    root = Artifact(str(tmp_path / "c")).path
    policy = AutoModelForCausalLM.from_pretrained(root / "model", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    assert policy.config.architectures == [f"{architecture}ForCausalLM"]
    assert policy.dtype == torch.float32 and policy.config.tie_word_embeddings
    assert manifest.results["parameters"] == sum(p.numel() for p in policy.parameters())
    assert 0.8e6 < manifest.results["parameters"] < 0.9e6
    assert manifest.facts["version"] == 0
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert (policy.config.eos_token_id, policy.config.pad_token_id) == (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    assert policy.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == policy.config.vocab_size <= 512
    canary = json.loads((root / "canary.json").read_text())
    assert len(canary["ids"]) == LENGTH and len(canary["logprobs"]) == LENGTH - 1
    assert canary["text"] == "prompts"
    assert canary["logprobs"] == pytest.approx(canary_logprobs(policy, canary["ids"]), abs=1e-6)


def test_the_chat_template_is_a_setting_that_the_checkpoint_keeps(
    prompts: str, tmp_path: Path
) -> None:
    """Template, arguments and the end of turns are in the files, so that whoever loads them renders alike."""
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' quietly' if quiet else '' }}\n{{ m.content }}<|endoftext|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    made = [
        base_model(
            out=str(tmp_path / name),
            prompts=prompts,
            chat_template=str(file),
            template_args=arguments,
        )
        for name, arguments in (("loud", {}), ("quiet", {"quiet": True}))
    ]
    assert made[0].digest != made[1].digest
    model = Artifact(str(tmp_path / "quiet")).path / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    talk = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False).startswith(
        "<|im_start|>user quietly\nhi"
    )
    stops = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    assert stop_ids(tokenizer, model) == tuple(sorted(stops))
    # The same command with another file is another stage.
    file.write_text(file.read_text() + "\n")
    with pytest.raises(UserError, match="is committed already"):
        base_model(out=str(tmp_path / "loud"), prompts=prompts, chat_template=str(file))


def test_same_seed_same_bytes(prompts: str, tiny: Path, tmp_path: Path) -> None:
    again = base_model(out=str(tmp_path / "a"), prompts=prompts)
    other = base_model(out=str(tmp_path / "b"), prompts=prompts, seed=1)
    first = {str(p.relative_to(tiny)): p.read_bytes() for p in tiny.rglob("*") if p.is_file()}
    assert first == {
        name: (Artifact(str(tmp_path / "a")).path / name).read_bytes() for name in again.files
    }
    changed = {name for name in first if other.files[name] != again.files[name]}
    assert changed == {"model/model.safetensors", "canary.json"}


def test_tokenizer_of_the_task(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    assert tokenizer.tokenize("reverse 2914 =") == ["reverse", "Ġ", "2", "9", "1", "4", "Ġ="]
    assert tokenizer.tokenize(" 4192") == ["Ġ", "4", "1", "9", "2"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(chat)
    assert [
        ids.count(tokenizer.convert_tokens_to_ids(t)) for t in ("<|im_start|>", "<|im_end|>")
    ] == [2, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi\nassistant\n"


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=30))
def test_tokenizer_spells_anything(text: str) -> None:
    tokenizer = train_tokenizer(iter(["reverse 12 ="] * 3), 300, 64)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_model_directory_takes_the_tiny_ones_place(tiny: Path, tmp_path: Path) -> None:
    base_model(out=str(tmp_path / "c"), model=str(tiny / "model"), save_dtype="bfloat16")
    policy = AutoModelForCausalLM.from_pretrained(
        Artifact(str(tmp_path / "c")).path / "model", dtype="auto"
    )
    source = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype="auto")
    assert policy.dtype == torch.bfloat16 and source.dtype == torch.float32
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor.bfloat16(), policy.state_dict()[name]), name


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer*", "has no tokenizer"),
        ("*.safetensors", "has no weights"),
    ],
)
def test_a_directory_that_lacks_something(
    tiny: Path, tmp_path: Path, without: str, message: str
) -> None:
    broken = shutil.copytree(tiny / "model", tmp_path / "model")
    for path in broken.glob(without):
        path.unlink()
    with pytest.raises(UserError, match=message):
        base_model(out=str(tmp_path / "c"), model=str(broken))
    assert not list((tmp_path / "c").rglob("*.safetensors"))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config.json", {"model_type": "unheard-of"}, "cannot be loaded: .*unheard-of"),
        ("config.json", {"hidden_size": 64}, "cannot be loaded"),
        (
            "config.json",
            {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5},
            "lack .*layers.4",
        ),
        ("tokenizer_config.json", {"eos_token": None}, "no eos_token"),
    ],
)
def test_a_directory_that_does_not_fit(
    tiny: Path, tmp_path: Path, file: str, values: dict[str, Any], message: str
) -> None:
    broken = shutil.copytree(tiny / "model", tmp_path / "model")
    edit(broken / file, **values)
    with pytest.raises(UserError, match=message):
        base_model(out=str(tmp_path / "c"), model=str(broken))


def test_bad_parameters(prompts: str, tiny: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "c")
    with pytest.raises(UserError, match=r"--prompts: None: is required for tiny-qwen3"):
        base_model(out=out)
    with pytest.raises(UserError, match=r"holds no train\.parquet"):
        base_model(out=out, prompts=str(tiny.parent))
    with pytest.raises(UserError, match=r"base_model.vocab_size: 100"):
        base_model(out=out, prompts=prompts, vocab_size=100)
    with pytest.raises(UserError, match="no such directory"):
        base_model(out=out, model=str(tmp_path / "none"))


def test_a_hub_name_that_is_not_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"nobody/nothing.*cannot be loaded"):
        base_model(out=str(tmp_path / "c"), model="nobody/nothing")


def test_derive_ids_spread_and_stay_inside() -> None:
    for size in (260, 32_000, 151_936):
        ids = derive_ids(size)
        assert (
            len(ids) == LENGTH and all(0 <= i < size for i in ids) and len(set(ids)) > LENGTH // 2
        )
    assert derive_ids(512) == derive_ids(512) != derive_ids(513)


def test_canary_is_the_log_softmax_and_leaves_the_mode(tiny: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32).train()
    ids = derive_ids(200, 5)
    with torch.no_grad():
        logits = policy(torch.tensor([ids])).logits[0]
    want = [float(logits[i].log_softmax(-1)[ids[i + 1]]) for i in range(4)]
    assert canary_logprobs(policy, ids) == pytest.approx(want, abs=1e-5)
    assert policy.training
