"""The loss on held-out demonstrations, and epochs in place of steps."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.making import (
    checkpoint_artifact,
    commit,
    demonstrations,
    prompts_artifact,
    sigterm_while_training,
)
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import Interrupted, UserError
from tuneloop.stages.sft import sft

HELD_OUT = demonstrations(10, seed=7)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return checkpoint_artifact(tmp_path_factory.mktemp("policy") / "qwen3", "qwen3")


def make_prompts(directory: Path) -> Artifact:
    """Commit the demonstrations of `prompts_artifact`, and `HELD_OUT` beside them."""
    source = prompts_artifact(directory / "source")
    draft = Draft(str(directory / "prompts"), attempt="data-test")
    for name in source.manifest.files:
        (draft.path / name).write_bytes(source.part(name).read_bytes())
    pq.write_table(pa.Table.from_pylist(HELD_OUT), draft.path / "sft_eval.parquet")
    return commit(directory / "prompts", "data_prep")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make_prompts(tmp_path_factory.mktemp("prompts"))


def tune(out: Path, policy: Artifact, prompts: Artifact, **options: object) -> Artifact:
    """Run `sft` with small settings."""
    settings = {"max_steps": 6, "per_device_train_batch_size": 8, "warmup_steps": 2} | options
    sft(out=str(out), policy=policy.ref, prompts=prompts.ref, device="cpu", **settings)
    return Artifact(str(out))


def read_metrics(artifact: Artifact) -> list[dict[str, float]]:
    return [json.loads(line) for line in artifact.part("metrics.jsonl").read_text().splitlines()]


def compute_reference_loss(model_directory: Path) -> tuple[float, int]:
    """Compute the loss with transformers alone, one demonstration at a time; and the targets."""
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    total = 0.0
    count = 0
    for row in HELD_OUT:
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + completion])
        with torch.no_grad():
            mean = model(input_ids=torch.tensor([prompt + completion]), labels=labels).loss
        total += float(mean) * len(completion)
        count += len(completion)
    return total / count, count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_before_and_after_is_that_of_transformers(policy, prompts, tmp_path, dtype):
    options = {"learning_rate": 1e-2, "eval_steps": 4, "save_dtype": dtype}
    tuned = tune(tmp_path / "out", policy, prompts, **options)
    metrics = read_metrics(tuned)
    measured = [row for row in metrics if "eval_loss" in row]
    before, targets = compute_reference_loss(policy.part("model"))
    after, _ = compute_reference_loss(tuned.part("model"))
    assert [row["step"] for row in measured] == [0, 4, 6]
    assert measured[0]["eval_loss"] == pytest.approx(before, rel=1e-5)
    assert measured[-1]["eval_loss"] == pytest.approx(after, rel=1e-5)
    assert measured[-1]["eval_perplexity"] == pytest.approx(math.exp(after), rel=1e-4)
    assert tuned.manifest.facts["held_out"] == {
        "demonstrations": len(HELD_OUT),
        "targets": targets,
        "loss_before": measured[0]["eval_loss"],
        "loss_after": measured[-1]["eval_loss"],
    }


def test_measuring_changes_nothing_that_is_trained(policy, prompts, tmp_path):
    measured = tune(tmp_path / "measured", policy, prompts, eval_steps=1)
    without = prompts_artifact(tmp_path / "prompts")
    plain = tune(tmp_path / "plain", policy, without)
    assert "held_out" not in plain.manifest.facts
    name = "model/model.safetensors"
    assert measured.manifest.files[name].sha256 == plain.manifest.files[name].sha256


def test_epochs_become_steps(policy, prompts, tmp_path):
    """24 demonstrations in batches of 8 are 3 steps; one and a half epochs are 5."""
    tuned = tune(tmp_path / "out", policy, prompts, epochs=1.5)
    assert max(row["step"] for row in read_metrics(tuned)) == 5
    assert tuned.manifest.facts["step"] == 5


def test_a_held_out_demonstration_that_is_too_long_is_refused(policy, prompts, tmp_path):
    with pytest.raises(UserError, match="max_length"):
        tune(tmp_path / "out", policy, prompts, max_length=4)


def test_a_resumed_run_has_the_same_measurements(policy, prompts, tmp_path):
    """The loss before the first step is recorded once, by the attempt that was stopped."""
    undisturbed = tune(tmp_path / "undisturbed", policy, prompts, eval_steps=2)
    sigterm_while_training(tmp_path / "resumed")
    with pytest.raises(Interrupted):
        tune(tmp_path / "resumed", policy, prompts, eval_steps=2)
    resumed = tune(tmp_path / "resumed", policy, prompts, eval_steps=2)
    assert "resumed_from" in resumed.manifest.notes
    assert read_metrics(resumed) == read_metrics(undisturbed)
    assert resumed.manifest.facts["held_out"] == undisturbed.manifest.facts["held_out"]
