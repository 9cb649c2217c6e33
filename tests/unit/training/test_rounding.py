"""Parameters as they are written: what rounding keeps, and that a measurement sees just that."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

from tests.making import checkpoint_artifact
from tests.models import write_model
from tuneloop.formats.token_files import Document
from tuneloop.training.fsdp.loading import open_model
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.fsdp.rounding import PERIOD, _make_thresholds, round_tensor
from tuneloop.training.fsdp.trainer import Trainer
from tuneloop.training.lora import Lora
from tuneloop.training.options import TrainerOptions

DTYPES = (torch.bfloat16, torch.float16)
MASK = (1 << 64) - 1
OPTIMIZATION = TrainerOptions().optimization
DOCUMENTS = [Document([5, 6, 7, 8], [0, 0, 1, 1]), Document([9, 10, 11], [0, 1, 1])]


def compute_splitmix(index: int) -> int:
    """The upper 16 bits of SplitMix64's output `index`, in Python's integers."""
    state = ((index + 1) * 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return (state ^ (state >> 31)) >> 48


def test_thresholds_are_those_of_splitmix64() -> None:
    thresholds = _make_thresholds(torch.device("cpu"))
    for index in (0, 1, 2, 1000, PERIOD - 1):
        assert int(thresholds[index]) == compute_splitmix(index)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_the_dtype_has_are_written_as_they_are(dtype: torch.dtype) -> None:
    numbers = torch.randn(300, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(round_tensor(numbers.float(), dtype, "layer.weight"), numbers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_becomes_a_neighbour_and_the_mean_stays(dtype: torch.dtype) -> None:
    numbers = torch.full((PERIOD,), 0.05) * torch.tensor([1.0, -1.0]).repeat(PERIOD)[:PERIOD]
    numbers += torch.linspace(0, 1e-3, PERIOD)
    rounded = round_tensor(numbers, dtype, "layer.weight").float()
    distance = numbers.abs() * torch.finfo(dtype).eps
    assert bool(((rounded - numbers).abs() <= distance).all())
    nearest = numbers.to(dtype).float()
    # A million numbers: the error of the mean is a thousandth of that of a number.
    assert abs(float((rounded - numbers).mean())) < 0.005 * float(distance.mean())
    assert not torch.equal(rounded, nearest)


def test_a_change_far_below_the_distance_of_two_numbers_stays_in_the_mean() -> None:
    base = torch.full((PERIOD,), 0.05).bfloat16().float()
    changed = base + 2e-5
    assert torch.equal(changed.bfloat16().float(), base)
    change = round_tensor(changed, torch.bfloat16, "layer.weight").float() - base
    assert float(change.mean()) == pytest.approx(2e-5, rel=0.02)


def test_a_part_is_rounded_as_in_the_whole() -> None:
    whole = torch.randn(40, 50_000)
    rounded = round_tensor(whole, torch.bfloat16, "layer.weight")
    for first in (0, 7, 39):
        part = round_tensor(whole[first:], torch.bfloat16, "layer.weight", first)
        assert torch.equal(part, rounded[first:])
    assert not torch.equal(rounded, round_tensor(whole, torch.bfloat16, "other.weight"))


def test_what_is_no_number_stays() -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, 3.5e38])
    rounded = round_tensor(values, torch.bfloat16, "layer.weight")
    assert rounded[:2].tolist() == [float("inf"), float("-inf")]
    assert bool(rounded[2].isnan())
    assert rounded[3:].tolist() == [0.0, float("inf")]


@pytest.mark.parametrize("lora", [None, Lora(r=2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_measurement_sees_what_is_written(tmp_path: Path, lora: Lora | None, dtype: str) -> None:
    source = checkpoint_artifact(tmp_path / "base").part("model")
    trainer = open_changed_trainer(source, lora)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.export(source, tmp_path / "written", dtype)
    written = open_model(tmp_path / "written", torch.float32, "auto")
    with trainer.frozen(), trainer.rounded(dtype):
        measured = trainer.logprobs(DOCUMENTS)[0]
    for name, value in trainer.model.named_parameters():
        assert torch.equal(value, before[name])
    expected = []
    with torch.no_grad():
        for document in DOCUMENTS:
            logprobs = written(torch.tensor([document.ids])).logits[0].log_softmax(-1)
            expected += [
                float(logprobs[place - 1, document.ids[place]])
                for place, is_target in enumerate(document.targets)
                if is_target
            ]
    assert measured.tolist() == pytest.approx(expected, abs=2e-6)


def test_modules_that_a_model_keeps_in_float32_are_neither_rounded_nor_written_otherwise(
    tmp_path: Path,
) -> None:
    # The router of a mixture of experts, and norms that a class keeps where float16 is asked for.
    ernie = write_ernie(tmp_path / "ernie")
    gpt_oss = write_model("gpt_oss", tmp_path / "gpt_oss")
    cases = (
        (ernie, "bfloat16", "mlp.gate.weight"),
        (gpt_oss, "float16", "input_layernorm.weight"),
    )
    for source, dtype, kept in cases:
        trainer = open_changed_trainer(source, None)
        target = tmp_path / f"{source.name}-written"
        trainer.export(source, target, dtype)
        written = open_model(target, torch.float32, "auto").state_dict()
        with trainer.frozen(), trainer.rounded(dtype):
            for name, value in trainer.model.state_dict().items():
                assert torch.equal(value, written[name]), name
        tensors = load_file(target / "model.safetensors")
        state = trainer.model.state_dict()
        kept_names = [name for name in tensors if name.endswith(kept)]
        assert kept_names
        for name in kept_names:
            assert tensors[name].dtype == torch.float32
            assert torch.equal(tensors[name], state[name])
            assert not torch.equal(state[name], state[name].to(getattr(torch, dtype)).float())
        rounded = [name for name in tensors if name.endswith("q_proj.weight")]
        assert {str(tensors[name].dtype) for name in rounded} == {f"torch.{dtype}"}


def write_ernie(directory: Path) -> Path:
    """Write a small ERNIE 4.5 with experts, whose class keeps the router in float32."""
    config = Ernie4_5_MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=1,
        moe_layer_end_index=1,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    Ernie4_5_MoeForCausalLM(config).save_pretrained(directory)
    return directory


def open_changed_trainer(source: Path, lora: Lora | None) -> Trainer:
    """Open a trainer whose parameters are none that a dtype of two bytes has."""
    trainer = Trainer(source, Ranks("cpu"), OPTIMIZATION, lora=lora)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.trainable.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
    return trainer
