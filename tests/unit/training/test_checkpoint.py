import contextlib
import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.making import checkpoint_artifact, commit, prompts_artifact
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import UserError
from tuneloop.formats.canary import SEPARATED, canary_logprobs, measure_noise
from tuneloop.formats.facts import TrainerState
from tuneloop.inference.engines.transformers import open_engine
from tuneloop.inference.proof import StaleWeights, prove_weights, read_canary
from tuneloop.stages.sft import sft
from tuneloop.training import checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Artifact, Artifact]:
    """A base model and what two steps of sft make of it."""
    work = tmp_path_factory.mktemp("work")
    base = checkpoint_artifact(work / "base", dtype=torch.float32, version=4)
    prompts = prompts_artifact(work / "prompts")
    sft(
        out=str(work / "sft"),
        policy=base.ref,
        prompts=prompts.ref,
        max_steps=2,
        device="cpu",
        save_dtype="bfloat16",
    )
    return base, Artifact(str(work / "sft"))


def test_model_is_whole_and_in_save_dtype(trained):
    base, after = trained
    model = AutoModelForCausalLM.from_pretrained(after.path / "model", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert json.loads((after.path / "model/config.json").read_text())["dtype"] == "bfloat16"
    names = {path.name for path in (after.path / "model").iterdir()}
    assert names == {path.name for path in (base.path / "model").iterdir()}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (after.path / "model" / name).read_bytes() == (
            base.path / "model" / name
        ).read_bytes()


def test_canary_is_of_the_weights_as_saved(trained):
    base, after = trained
    before, canary = read_canary(base), read_canary(after)
    model = AutoModelForCausalLM.from_pretrained(after.path / "model", dtype="auto")
    assert canary.logprobs == canary_logprobs(model, canary.ids, torch.float32)
    assert canary.noise == measure_noise(
        canary_logprobs(model, canary.ids), canary.logprobs, "bfloat16"
    )
    assert (canary.ids, canary.text, canary.before) == (before.ids, before.text, before.logprobs)


class Foreign:
    """An engine that can be asked for log-probabilities only, as an endpoint can."""

    name = "foreign"

    def __init__(self, engine, policy):
        self.engine, self.context = engine, engine.context
        self.version, self.digest = policy.manifest.facts["version"], policy.manifest.digest
        self.score = engine.score

    def load(self, policy, *, force=False):
        """Keep what it has."""


@pytest.fixture(scope="module")
def small_steps(tmp_path_factory) -> list[Artifact]:
    """Four versions in float32, with steps of a hundred-millionth."""
    work = tmp_path_factory.mktemp("steps")
    versions = [checkpoint_artifact(work / "0", dtype=torch.float32)]
    prompts = prompts_artifact(work / "prompts")
    for number in range(1, 4):
        given = {
            "max_steps": 1,
            "learning_rate": 1e-8,
            "warmup_steps": 0,
            "device": "cpu",
            "seed": number,
        }
        sft(out=str(work / str(number)), policy=versions[-1].ref, prompts=prompts.ref, **given)
        versions.append(Artifact(str(work / str(number))))
    return versions


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_version_that_is_served_as_its_neighbour_is_caught(small_steps, dtype):
    """Reading back compares in the dtype of the engine, and names a tensor that differs."""
    for old, new in itertools.pairwise(small_steps):
        with contextlib.closing(open_engine("", {"dtype": dtype}, 60.0)) as engine:
            engine.load(new)
            proof = prove_weights(engine, new)
            assert proof.is_by_tensors and proof.tells_versions_apart
            statement = proof.describe(new)
            assert (statement["by"], statement["dtype"]) == ("tensors", dtype)
            assert statement["identical"] == statement["tensors"] > 10
            engine.load(old, force=True)
            engine.version, engine.digest = new.manifest.facts["version"], new.manifest.digest
            engine.load = lambda policy, force=False: None
            with pytest.raises(StaleWeights, match=r"\d+ of \d+ tensors differ from .*among them"):
                prove_weights(engine, new)


def test_a_foreign_float32_engine_tells_versions_apart_and_a_bfloat16_one_says_it_cannot(
    small_steps,
):
    """Small steps move the log-probabilities by far less than the tolerance of their mean."""
    for old, new in itertools.pairwise(small_steps):
        for dtype, apart in (("float32", True), ("bfloat16", False)):
            with contextlib.closing(open_engine("", {"dtype": dtype}, 60.0)) as engine:
                engine.load(new)
                proof = prove_weights(Foreign(engine, new), new)
                statement = proof.describe(new)
                assert (statement["by"], proof.tells_versions_apart) == ("log-probabilities", apart)
                assert (statement["separation"] >= SEPARATED) == apart
                assert statement["learning_rate"] == 1e-8
                engine.load(old)
                stale = Foreign(engine, new)
                if apart:
                    with pytest.raises(StaleWeights, match="are those of the version before"):
                        prove_weights(stale, new)
                else:
                    assert not prove_weights(stale, new).tells_versions_apart
    assert [read_canary(policy).indistinct_since for policy in small_steps] == [None, 1, 1, 1]


def test_a_float16_model_may_be_served_in_bfloat16_where_its_tensors_are_compared(tmp_path):
    """Its own noise is an eighth of bfloat16's, and would refuse right weights."""
    policy = checkpoint_artifact(tmp_path / "c", dtype=torch.float16)
    assert read_canary(policy).noise.dtype == "float16"
    with contextlib.closing(open_engine("", {"dtype": "bfloat16"}, 60.0)) as engine:
        engine.load(policy)
        proof = prove_weights(engine, policy)
        assert proof.is_by_tensors and proof.mean > read_canary(policy).tolerance
        with pytest.raises(StaleWeights, match=r"noise of right weights in float16"):
            prove_weights(Foreign(engine, policy), policy)


def test_version_and_trainer_state(trained):
    base, after = trained
    assert after.manifest.facts["version"] == after.manifest.results["version"] == 5
    assert checkpoint.trainer_state(base) is None
    assert checkpoint.trainer_state(after) == TrainerState("sft", step=2, betas=[0.9, 0.95])


def test_training_goes_on_from_float32_masters(trained, tmp_path):
    """Not from bfloat16 copies: a learning rate too small for these still moves the masters."""
    _, after = trained
    prompts = prompts_artifact(tmp_path / "prompts")
    options = {
        "max_steps": 1,
        "learning_rate": 1e-9,
        "warmup_steps": 0,
        "save_dtype": "float32",
        "device": "cpu",
    }
    sft(out=str(tmp_path / "next"), policy=after.ref, prompts=prompts.ref, **options)
    path = Artifact(str(tmp_path / "next")).path / "model"
    saved = AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict()
    assert any(not value.bfloat16().float().equal(value) for value in saved.values())
    served = AutoModelForCausalLM.from_pretrained(after.path / "model", dtype="auto").state_dict()
    for name, value in saved.items():
        torch.testing.assert_close(value.bfloat16(), served[name])


def test_other_artifacts_are_no_checkpoints(tmp_path):
    prompts = prompts_artifact(tmp_path / "prompts")
    with pytest.raises(UserError, match="give it a checkpoint"):
        checkpoint.model_dir(prompts)
    Draft(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="give it a checkpoint"):
        checkpoint.model_dir(commit(tmp_path / "empty", "export", version=1))
