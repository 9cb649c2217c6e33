"""Adapters at the trainer: what they are merged into, what is trained, what is kept."""

import json
import random
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.planned import planned
from tests.unit.training.test_fsdp import ADAM
from tuneloop.argo.memory_estimate import (
    count_adapter_parameters,
    is_memory_estimate_complete,
)
from tuneloop.config.model_facts import shape_of
from tuneloop.core.artifacts import hash_files
from tuneloop.core.errors import UserError
from tuneloop.formats.token_files import Document
from tuneloop.training.fsdp.policy import Policy
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.fsdp.trainer import Trainer
from tuneloop.training.lora import Lora, disable_adapters
from tuneloop.training.scorer import ScoreTrainer

LORA = Lora(r=2, lora_alpha=8)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    rng = random.Random(0)
    return [
        Document([rng.randrange(41) for _ in range(n)], [False] + [True] * (n - 1))
        for n in (2, 30, 5, 17)
    ]


def trained(model: Path, documents: list[Document], steps: int = 3, **about) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer(model, Ranks("cpu"), ADAM, **{"lora": LORA, **about})
    step(trainer, documents, steps)
    return trainer


def step(trainer: Trainer, documents: list[Document], steps: int) -> None:
    for _ in range(steps):
        (-trainer.logprobs(documents)[0].mean()).backward()
        trainer.update()


def logprobs(policy: Policy, documents: list[Document]) -> torch.Tensor:
    with policy.frozen():
        return policy.logprobs(documents)[0]


@pytest.mark.parametrize(
    ("about", "near"),
    [
        ({}, 1e-4),
        ({"lora": Lora(r=4, target_modules=("q_proj", "down_proj"), use_rslora=True)}, 1e-4),
        ({"dtype": "bfloat16"}, 0.05),
    ],
)
def test_the_export_says_what_the_adapters_say(model, documents, tmp_path, about, near):
    """Loaded by transformers, which knows no adapters; far from the base."""
    trainer = trained(model, documents, **about)
    trainer.export(model, tmp_path / "out", "float32")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (
        opened.state_dict().keys()
        == AutoModelForCausalLM.from_pretrained(model).state_dict().keys()
    )
    found, merged, before = (
        logprobs(p, documents)
        for p in (trainer, Policy(tmp_path / "out", Ranks("cpu")), Policy(model, Ranks("cpu")))
    )
    torch.testing.assert_close(merged, found, rtol=near, atol=near)
    assert (before - found).abs().max() > 0.2
    with disable_adapters(trainer.model):
        torch.testing.assert_close(logprobs(trainer, documents), before, rtol=near, atol=near)
    assert logprobs(trainer, documents).equal(found)


def test_only_adapters_are_trained_and_saved(model, documents, tmp_path):
    trainer = trained(model, documents)
    base = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for name, value in trainer.masters().items():
        assert value.equal(base[name.removeprefix("model.")]), name
    layers = [
        m
        for n, m in AutoModelForCausalLM.from_pretrained(model).named_modules()
        if n.endswith("_proj")
    ]
    assert trainer.count() == sum(2 * (layer.in_features + layer.out_features) for layer in layers)
    assert trainer.chosen()["trainable_parameters"] == trainer.count()
    trainer.save(tmp_path / "state")
    kept = HuggingFaceStorageReader(str(tmp_path / "state")).read_metadata().state_dict_metadata
    assert len(kept) == 3 * 2 * len(layers)  # A and B, and two moments each
    assert all(".lora_" in name for name in kept)


def test_adapters_are_as_many_as_the_plan_counts(model, documents):
    shape = shape_of("m", json.loads((model / "config.json").read_text()), model)
    for options, targets in (
        ({"r": 3}, "all-linear"),
        ({"r": 4, "target_modules": ["q_proj", "down_proj"]}, "two"),
    ):
        stage = planned("sft", lora=options)
        assert (
            count_adapter_parameters(stage, shape)
            == trained(model, documents, 0, lora=Lora(**options)).count()
        ), targets
    unknown = planned("sft", lora={"target_modules": ".*_proj"})
    assert count_adapter_parameters(unknown, shape) is None and not is_memory_estimate_complete(
        unknown, shape, 64
    )


def test_saved_and_loaded_goes_on_the_same(model, documents, tmp_path):
    one = trained(model, documents)
    one.save(tmp_path / "a")
    torch.manual_seed(1)  # other adapters to begin with
    two = Trainer(model, Ranks("cpu"), ADAM, lora=LORA)
    two.load(tmp_path / "a", one.step)
    for trainer, name in ((one, "b"), (two, "c")):
        step(trainer, documents, 2)
        trainer.save(tmp_path / name)
    assert hash_files(tmp_path / "b") == hash_files(tmp_path / "c") != hash_files(tmp_path / "a")


def test_a_reward_model_trains_its_head_and_adapters(model, documents, tmp_path):
    torch.manual_seed(0)
    trainer = ScoreTrainer(model, Ranks("cpu"), ADAM, lora=LORA)
    for _ in range(3):
        (trainer.scores(documents) - torch.arange(4.0)).square().mean().backward()
        trainer.update()
    with trainer.frozen():
        found = trainer.scores(documents)
    trainer.export(model, tmp_path / "out", "float32")
    opened = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    )
    for ids, score in zip([d.ids for d in documents], found):
        theirs = opened.score(opened.model(input_ids=torch.tensor([list(ids)])).last_hidden_state)[
            0, -1, 0
        ]
        torch.testing.assert_close(theirs, score, rtol=1e-4, atol=1e-4)
    assert found.abs().max() > 0.05


def test_a_name_in_a_list_that_is_no_module_is_refused(model):
    """peft passes over it where another name matches."""
    with pytest.raises(UserError, match=r"'nonsense': names no layer .* has down_proj, gate_proj"):
        Trainer(model, Ranks("cpu"), ADAM, lora=Lora(target_modules=("q_proj", "nonsense")))


def test_a_name_that_is_no_list_says_what_a_text_is(model):
    with pytest.raises(UserError, match=r"'q_proj': .* a text is a regular expression"):
        Trainer(model, Ranks("cpu"), ADAM, lora=Lora(target_modules="q_proj"))


def test_adapters_that_change_nothing_are_recognized(model, documents):
    trainer = trained(model, documents, steps=0)
    assert trainer.is_unchanged()
    trainer.update()
    assert trainer.is_unchanged(), "a step without a gradient"
    step(trainer, documents, 1)
    assert not trainer.is_unchanged()
    assert not trained(model, documents, steps=0, lora=None).is_unchanged()


@pytest.mark.parametrize(
    "targets", ["nonsense", ("q_proj", "embed_tokens"), ("lm_head",), ("layers",)]
)
def test_target_modules_that_can_not_be(model, targets):
    with pytest.raises(UserError, match=r"lora\.target_modules") as caught:
        Trainer(model, Ranks("cpu"), ADAM, lora=Lora(target_modules=targets))
    assert "\n" not in str(caught.value)
