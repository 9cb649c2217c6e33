"""Which attention a model is trained with, and which rows may be packed: by what its class in transformers has."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.models import write_model
from tuneloop.core.errors import UserError
from tuneloop.formats.architectures import FLASH, find_recurrent_layers
from tuneloop.formats.token_files import Document
from tuneloop.training.fsdp.attention import choose_attention
from tuneloop.training.fsdp.loading import open_model
from tuneloop.training.fsdp.policy import Policy
from tuneloop.training.fsdp.ranks import Ranks

DOCUMENTS = [Document([5, 6, 7, 8], [0, 0, 1, 1]), Document([9, 10], [0, 1])]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    work = tmp_path_factory.mktemp("models")
    return {name: write_model(name, work / name) for name in ("gpt_oss", "lfm2", "llama3")}


def test_a_class_without_sdpa_is_trained_with_eager(
    models: dict[str, Path], tmp_path: Path
) -> None:
    policy = Policy(models["gpt_oss"], Ranks("cpu"))
    assert policy.chosen()["attention"] == "eager"
    assert policy.logprobs(DOCUMENTS)[0].shape == (3,)
    written = policy.export(models["gpt_oss"], tmp_path / "export", "bfloat16")
    assert written.config._attn_implementation == "eager"


def test_a_choice_that_the_class_does_not_have_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"'sdpa': transformers' GptOss.*take auto or eager"):
        Policy(models["gpt_oss"], Ranks("cpu"), attn_implementation="sdpa")


def test_the_choice_holds_for_what_is_written(models: dict[str, Path], tmp_path: Path) -> None:
    for choice, attention in (("auto", "sdpa"), ("eager", "eager")):
        policy = Policy(models["llama3"], Ranks("cpu"), attn_implementation=choice)
        written = policy.export(models["llama3"], tmp_path / choice, "bfloat16")
        assert policy.layout.attention == written.config._attn_implementation == attention


def test_flash_attention_is_for_classes_that_have_it(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    choices = {
        name: choose_attention(directory, torch.device("cuda"), "bfloat16", "auto", "auto")
        for name, directory in models.items()
    }
    # gpt-oss has attention sinks, which FlashAttention 2 does not compute.
    assert {name: choice.attention for name, choice in choices.items()} == {
        "gpt_oss": "eager",
        "lfm2": "sdpa",
        "llama3": "flash_attention_2",
    }


def test_rows_of_a_recurrent_model_are_padded_and_equal_each_alone(models: dict[str, Path]) -> None:
    policy = Policy(models["lfm2"], Ranks("cpu"))
    assert find_recurrent_layers(models["lfm2"]) == ["conv"]
    assert policy.chosen()["packing"] == "padded"
    with torch.no_grad():
        together = policy.logprobs(DOCUMENTS)[0]
        alone = torch.cat([policy.logprobs([document])[0] for document in DOCUMENTS])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_packed_rows_of_a_recurrent_model_are_refused(models: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"'packed': .*layers \(conv\)"):
        Policy(models["lfm2"], Ranks("cpu"), packing="packed")


def test_a_kernel_that_was_asked_for_does_not_pack_a_recurrent_model(
    models: dict[str, Path],
) -> None:
    """Nothing is computed: which rows are packed is decided without the kernel."""
    gpu = torch.device("cuda")
    recurrent = choose_attention(models["lfm2"], gpu, "bfloat16", FLASH, "auto")
    assert (recurrent.attention, recurrent.packed) == (FLASH, False)
    assert "layers (conv) whose state would go on" in recurrent.obstacle
    assert choose_attention(models["llama3"], gpu, "bfloat16", FLASH, "auto").packed
    with pytest.raises(UserError, match=r"'packed': .*layers \(conv\)"):
        choose_attention(models["lfm2"], gpu, "bfloat16", FLASH, "packed")


def test_a_recurrent_model_whose_configuration_names_no_layers_is_not_packed(
    tmp_path: Path,
) -> None:
    transformers.RwkvConfig(hidden_size=32, num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"'packed': .*layers \(recurrent\)"):
        choose_attention(tmp_path, torch.device("cpu"), "float32", "auto", "packed")


def test_auto_opens_any_model_on_a_cpu(models: dict[str, Path]) -> None:
    names = {
        name: open_model(directory, torch.float32, "auto").config._attn_implementation
        for name, directory in models.items()
    }
    assert names == {"gpt_oss": "eager", "lfm2": "sdpa", "llama3": "sdpa"}
