"""The canary states its noise, and two versions are told apart where the noise lets them."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.policies import model, tokenizer
from tuneloop.formats.canary import (
    ENGLISH,
    LENGTH,
    SEPARATED,
    Canary,
    Noise,
    canary_logprobs,
    computing_in,
    derive_ids,
    encode_text,
    estimate_separation,
    make_canary,
    measure_noise,
    read_canary_file,
    tell_versions_apart,
)


def draw(chance: random.Random, spread: float) -> list[float]:
    return [chance.gauss(0, spread) for _ in range(LENGTH - 1)]


def add(*vectors: list[float]) -> list[float]:
    return [sum(values) for values in zip(*vectors)]


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 0.02])
def test_an_old_version_is_caught_and_a_true_one_never_accused(noise: float) -> None:
    chance, caught, claimed = random.Random(0), 0, 0
    for _ in range(1000):
        before = draw(chance, 3.0)
        now = add(before, draw(chance, noise * 10 ** chance.uniform(-1, 3)))
        true = tell_versions_apart(add(now, draw(chance, noise)), now, before)
        old = tell_versions_apart(add(before, draw(chance, noise)), now, before)
        if true["separation"] >= SEPARATED:
            claimed += 1
            assert true["log_likelihood_ratio"] > 0
        if old["separation"] >= SEPARATED:
            caught += 1
            assert old["log_likelihood_ratio"] < 0
    assert 400 < claimed < 950 and 400 < caught < 950, (
        "smaller steps than the noise are not told apart, larger ones are"
    )


def test_the_same_parameters_are_not_told_apart() -> None:
    same = draw(random.Random(0), 3.0)
    assert tell_versions_apart(same, same, same) == {"separation": 0.0, "log_likelihood_ratio": 0.0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    model(3).save_pretrained(directory)
    return directory


def test_other_dtypes_are_those_of_the_files_opened_in_them(saved: Path) -> None:
    """Layer by layer, and with nothing left behind: neither hooks nor casts."""
    opened = AutoModelForCausalLM.from_pretrained(saved, dtype="auto")
    before = copy.deepcopy(opened.state_dict())
    ids = derive_ids(200, 40)
    in_float32 = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert canary_logprobs(opened, ids, torch.float32) == canary_logprobs(in_float32, ids)
    assert canary_logprobs(in_float32, ids, torch.bfloat16) == canary_logprobs(opened, ids)
    assert {name: value.dtype for name, value in before.items()} == {
        name: value.dtype for name, value in opened.state_dict().items()
    }
    assert all(torch.equal(value, opened.state_dict()[name]) for name, value in before.items())
    with pytest.raises(ZeroDivisionError), computing_in(opened, torch.float32):
        opened.model.layers[0].register_forward_hook(lambda *_: 1 / 0)
        opened(input_ids=torch.tensor([ids]))
    assert {value.dtype for value in opened.state_dict().values()} == {torch.bfloat16}


def test_the_noise_is_that_of_the_dtype_that_is_served(saved: Path, tmp_path: Path) -> None:
    ids = derive_ids(200)
    for dtype in (torch.bfloat16, torch.float32):
        opened = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
        canary = make_canary(opened, ids)
        served = canary_logprobs(opened, ids, torch.bfloat16)
        assert canary.logprobs == canary_logprobs(opened, ids, torch.float32)
        assert canary.noise == measure_noise(served, canary.logprobs, "bfloat16")
        assert 0 < canary.noise.mean < canary.noise.rms < canary.noise.max
        assert canary.tolerance > 2 * canary.noise.mean
        canary.write(tmp_path / "canary.json")
        assert read_canary_file(tmp_path / "canary.json") == canary


def test_a_model_that_diverged_has_a_canary_that_nothing_passes(tmp_path: Path) -> None:
    noise = Noise(dtype="bfloat16", mean=float("nan"), max=float("nan"), rms=float("nan"))
    Canary(ids=[1, 2], logprobs=[float("nan")], noise=noise).write(tmp_path / "c")
    canary = read_canary_file(tmp_path / "c")
    assert not canary.noise.mean <= canary.tolerance


@pytest.mark.parametrize(
    ("prompts", "origin"),
    [(["reverse 10 ="] * 80, "prompts"), (["reverse 10 =", None], "prompts"), ([], "english")],
)
def test_the_tokens_are_of_the_prompts_and_then_of_a_text(prompts: list[Any], origin: str) -> None:
    words = tokenizer()
    ids, text = encode_text(words, prompts, len(words))
    assert (len(ids), text) == (LENGTH, origin)
    beginning = "\n".join(filter(None, prompts))
    whole = words(f"{beginning}\n{ENGLISH}".strip() if len(prompts) < 80 else beginning)
    assert ids == whole["input_ids"][:LENGTH]


def test_tokens_that_the_model_lacks_are_left_out() -> None:
    words = tokenizer()
    ids, _ = encode_text(words, [], 60, 20)
    assert len(ids) == 20 and max(ids) < 60
    assert encode_text(words, [], 3)[1] == "derived"


def test_the_first_version_that_noise_hides_is_remembered() -> None:
    """One large step, then small ones: a run warns at the first of these, and not again."""
    made = model(0)
    ids = derive_ids(200)
    canaries = [make_canary(made, ids)]
    for version, step in enumerate([0.05, 1e-7, 1e-7, 0.05], start=1):
        with torch.no_grad():
            weight = made.model.norm.weight
            weight.copy_((weight.float() * (1 + step)).to(weight.dtype))
            made.lm_head.weight[0, 0] += torch.tensor(0.02, dtype=torch.bfloat16)
        canaries.append(make_canary(made, ids, version=version, previous=canaries[-1]))
    assert [canary.indistinct_since for canary in canaries] == [None, None, 2, 2, 2]
    assert estimate_separation(canaries[0]) == 0
    assert estimate_separation(canaries[1]) > SEPARATED > estimate_separation(canaries[2]) > 0
    assert json.loads(canaries[2].model_dump_json())["before"] == canaries[1].logprobs
