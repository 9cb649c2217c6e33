"""A directory of peft's adapters as the base model: merged into its own base, or refused in one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models import write_model
from tests.unit.config.test_followed import CPU
from tests.unit.planning.test_limits import limits
from tuneloop.config.model_facts import Model, read_model_facts
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.stages.base_model import base_model

IDS = torch.arange(3, 41)[None]


def open_model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3", tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters that peft wrote, with random matrices, over `model`."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(open_model(model), config)
    directory = tmp_path_factory.mktemp("adapter") / "adapter"
    adapted.save_pretrained(directory)
    return directory


def change_config(adapter: Path, target: Path, **values: Any) -> Path:
    """Copy adapters, and change their adapter_config.json."""
    shutil.copytree(adapter, target)
    path = target / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return target


def test_adapters_are_merged_into_the_base_that_they_name(
    model: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base_model(out=str(tmp_path / "base"), model=str(adapter), save_dtype="float32")
    policy = Artifact(str(tmp_path / "base"))
    assert policy.manifest.facts["adapter_base"] == str(model)
    assert f"merged into its base model {model}" in capsys.readouterr().err
    merged = open_model(policy.path / "model")
    expected = PeftModel.from_pretrained(open_model(model), str(adapter))
    with torch.no_grad():
        logits = merged(IDS).logits
        torch.testing.assert_close(logits, expected(IDS).logits, rtol=0.02, atol=0.02)
        assert (logits - open_model(model)(IDS).logits).abs().max() > 0.5
    assert not any("lora" in name for name in merged.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(policy.path / "model")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(model).get_vocab()
    assert not (policy.path / "model" / "adapter_config.json").exists()


def test_settings_follow_the_base(model: Path, adapter: Path) -> None:
    facts = read_model_facts(str(adapter))
    own = read_model_facts(str(model))
    assert isinstance(facts.shape, Model) and isinstance(own.shape, Model)
    assert facts.shape.parameters == own.shape.parameters and facts.name == str(adapter)
    assert (facts.context, facts.dtype) == (own.context, own.dtype)
    assert limits("sft", CPU, f"base_model={adapter}") == []


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        (None, "its adapter_config.json names no base model"),
        ("/no/such/model", "/no/such/model, is not a directory here"),
        ("./runs/model", "./runs/model, is not a directory here"),
        ("a/b/c", "a/b/c, is not a directory here"),
    ],
)
def test_a_base_that_is_not_here_is_refused_before_anything_starts(
    model: Path, adapter: Path, tmp_path: Path, base: str | None, reason: str
) -> None:
    orphan = change_config(adapter, tmp_path / "orphan", base_model_name_or_path=base)
    (line,) = limits("sft", CPU, f"base_model={orphan}")
    with pytest.raises(UserError) as error:
        base_model(out=str(tmp_path / "base"), model=str(orphan))
    for text in (line, str(error.value)):
        assert text.startswith(f"base_model: {str(orphan)!r}: is an adapter (peft), and ")
        assert reason in text and "\n" not in text
        assert "set model.adapter_base to the model that it was trained on" in text
    # The remedy is one.
    assert limits("sft", CPU, f"base_model={orphan}", f"model.adapter_base={model}") == []
    hub = "model.adapter_base=hf://me/model@main"
    assert limits("sft", CPU, f"base_model={orphan}", hub) == []
    base_model(out=str(tmp_path / "base"), model=str(orphan), adapter_base=str(model))


def test_adapters_that_name_each_other_are_refused(adapter: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    second = change_config(adapter, tmp_path / "second", base_model_name_or_path=str(first))
    change_config(adapter, first, base_model_name_or_path=str(second))
    for name, base in ((first, second), (second, first)):
        with pytest.raises(UserError) as planned:
            limits("sft", CPU, f"base_model={name}")
        with pytest.raises(UserError) as loaded:
            base_model(out=str(tmp_path / "base"), model=str(name))
        problem = f"is an adapter (peft), and its base model {base} is an adapter, too; set"
        for error in (planned, loaded):
            assert problem in str(error.value) and "\n" not in str(error.value)


def test_a_base_that_is_chosen_and_not_here(model: Path, adapter: Path, tmp_path: Path) -> None:
    chosen = str(tmp_path / "nowhere")
    (line,) = limits("sft", CPU, f"base_model={adapter}", f"model.adapter_base={chosen}")
    with pytest.raises(UserError) as error:
        base_model(out=str(tmp_path / "base"), model=str(adapter), adapter_base=chosen)
    assert line == str(error.value)
    assert line.startswith(f"model.adapter_base: {chosen!r}: is not a directory here")


def test_a_base_that_the_hub_does_not_give(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    orphan = change_config(adapter, tmp_path / "orphan", base_model_name_or_path="me/lost")
    assert limits("sft", CPU, f"base_model={orphan}") == [], "the hub is not asked"
    with pytest.raises(
        UserError, match=r"its base model me/lost .*; set model.adapter_base"
    ) as error:
        base_model(out=str(tmp_path / "base"), model=str(orphan))
    assert "\n" not in str(error.value)


def test_adapters_of_another_model_are_refused(adapter: Path, tmp_path: Path) -> None:
    other = write_model("gpt_neox", tmp_path / "other")
    with pytest.raises(UserError, match="does not fit its base model") as error:
        base_model(out=str(tmp_path / "a"), model=str(adapter), adapter_base=str(other))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="is an adapter, too"):
        base_model(out=str(tmp_path / "b"), model=str(adapter), adapter_base=str(adapter))


def test_what_cannot_be_merged_is_refused(model: Path, tmp_path: Path) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(open_model(model), config).save_pretrained(tmp_path / "prompts")
    with pytest.raises(UserError, match="type PROMPT_TUNING, which cannot be merged"):
        base_model(
            out=str(tmp_path / "base"), model=str(tmp_path / "prompts"), adapter_base=str(model)
        )


def test_an_adapter_that_changes_nothing_is_said(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(open_model(model), config).save_pretrained(tmp_path / "new")
    base_model(out=str(tmp_path / "base"), model=str(tmp_path / "new"), adapter_base=str(model))
    assert "the adapter changes nothing" in capsys.readouterr().err


def test_a_base_for_a_whole_model_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.adapter_base: .* is a whole model; leave it out"):
        base_model(out=str(tmp_path / "base"), model=str(model), adapter_base=str(model))
