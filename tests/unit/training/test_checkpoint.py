import contextlib
import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.making import checkpoint_artifact, commit, prompts_artifact
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import UserError
from tuneloop.formats.canary import SEPARATED, canary_logprobs
from tuneloop.inference.engines.transformers import open_engine
from tuneloop.inference.generate import StaleWeights, prove_weights
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
    about = json.loads((after.path / "canary.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(after.path / "model", dtype="auto")
    assert about["logprobs"] == canary_logprobs(model, about["ids"])
    assert about["ids"] == json.loads((base.path / "canary.json").read_text())["ids"]


def test_every_version_that_is_served_as_its_neighbour_is_caught(tmp_path):
    """Steps of a millionth move the log-probabilities by far less than the tolerance of their mean."""
    versions = [checkpoint_artifact(tmp_path / "0", dtype=torch.float32)]
    prompts = prompts_artifact(tmp_path / "prompts")
    for number in range(1, 4):
        given = {
            "max_steps": 1,
            "learning_rate": 1e-6,
            "warmup_steps": 0,
            "device": "cpu",
            "seed": number,
        }
        sft(out=str(tmp_path / str(number)), policy=versions[-1].ref, prompts=prompts.ref, **given)
        versions.append(Artifact(str(tmp_path / str(number))))
    for old, new in itertools.pairwise(versions):
        with contextlib.closing(open_engine("", {}, 60.0)) as engine:
            engine.load(new)
            proof = prove_weights(engine, new, 0.05)
            assert proof["separation"] >= SEPARATED and proof["log_likelihood_ratio"] > 0
            engine.load(old, force=True)
            engine.version, engine.digest = new.manifest.facts["version"], new.manifest.digest
            engine.load = lambda policy, force=False: None
            with pytest.raises(StaleWeights, match="are those of the version before"):
                prove_weights(engine, new, 0.05)


def test_version_and_trainer_state(trained):
    base, after = trained
    assert after.manifest.facts["version"] == after.manifest.results["version"] == 5
    assert checkpoint.trainer_state(base) is None
    assert checkpoint.trainer_state(after) == {
        "format": 1,
        "stage": "sft",
        "step": 2,
        "betas": [0.9, 0.95],
    }


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
