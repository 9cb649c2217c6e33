import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.making import (
    checkpoint_artifact,
    commit,
    demonstrations,
    lease_of,
    prompts_artifact,
    sigterm_while_training,
)
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import UserError
from tuneloop.stages.sft import sft
from tuneloop.training import epochs
from tuneloop.training.corpora import read_corpus


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def policy(request, tmp_path_factory) -> Artifact:
    return checkpoint_artifact(tmp_path_factory.mktemp("policy") / request.param, request.param)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Artifact:
    return prompts_artifact(tmp_path_factory.mktemp("prompts"))


def run(out: Path, policy: Artifact, prompts: Artifact, **options) -> Artifact:
    options = {
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "warmup_steps": 2,
        "device": "cpu",
        **options,
    }
    sft(out=str(out), policy=policy.ref, prompts=prompts.ref, **options)
    return Artifact(str(out))


def rows(artifact: Artifact) -> list[dict[str, float]]:
    return [json.loads(line) for line in (artifact.path / "metrics.jsonl").read_text().splitlines()]


def test_loss_is_cross_entropy_of_the_completions(policy, prompts, tmp_path):
    """Against transformers' own loss, over the whole data set as one batch."""
    found = run(tmp_path / "out", policy, prompts, max_steps=1, per_device_train_batch_size=24)
    tokenizer = AutoTokenizer.from_pretrained(policy.path / "model")
    model = AutoModelForCausalLM.from_pretrained(policy.path / "model", dtype=torch.float32)
    total = count = 0
    for row in demonstrations():
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + completion])
        with torch.no_grad():
            mean = model(input_ids=torch.tensor([prompt + completion]), labels=labels).loss
        total, count = total + float(mean) * len(completion), count + len(completion)
    assert rows(found)[0]["targets"] == count
    assert found.manifest.results["loss"] == pytest.approx(total / count, rel=1e-5)


def test_it_learns_and_says_so(policy, prompts, tmp_path):
    found = run(tmp_path / "out", policy, prompts, max_steps=60, learning_rate=1e-2)
    losses = [row["loss"] for row in rows(found)]
    assert losses[-1] < 0.6 * losses[0]
    assert found.manifest.results == {"loss": losses[-1], "version": 1}
    assert found.manifest.notes["device"] == "cpu"
    assert found.manifest.facts["packing"] == "padded"
    assert found.manifest.timings["tokens_per_s"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"packing": "packed"},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "packing": "packed"},
    ],
)
def test_layouts_give_the_same_training(policy, prompts, tmp_path, options):
    whole, cut = (
        rows(run(tmp_path / name, policy, prompts, **o))
        for name, o in (("whole", {}), ("cut", options))
    )
    for key in ("loss", "grad_norm", "learning_rate", "targets"):
        assert [row[key] for row in cut] == pytest.approx([row[key] for row in whole], rel=2e-3), (
            key
        )


def test_every_demonstration_is_seen_once_an_epoch(policy, prompts, tmp_path):
    """An epoch of 24 in steps of 6: the targets of four steps are those of the data, in another order each epoch."""
    found = [
        row["targets"]
        for row in rows(
            run(tmp_path / "o", policy, prompts, max_steps=8, per_device_train_batch_size=6)
        )
    ]
    documents = read_corpus(prompts, policy, "sft")
    assert sum(found[:4]) == sum(found[4:]) == sum(d.target_count for d in documents)
    assert found[:4] != found[4:]


def test_same_inputs_same_bytes_other_seed_other_bytes(policy, prompts, tmp_path):
    one, two, other = (
        run(tmp_path / n, policy, prompts, seed=s).manifest
        for n, s in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one.digest == two.digest != other.digest


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_batches_that_are_prepared_ahead_are_those_prepared_in_turn(
    policy, prompts, tmp_path, monkeypatch, packing
):
    ahead = run(tmp_path / "ahead", policy, prompts, packing=packing)
    monkeypatch.setattr(epochs, "map_ahead", map)
    assert (
        run(tmp_path / "turn", policy, prompts, packing=packing).manifest.digest
        == ahead.manifest.digest
    )


@pytest.mark.parametrize(
    "options", [{"save-steps": 0}, {"save-steps": 4, "lora": '{"r": 2, "lora_dropout": 0.1}'}]
)
def test_stopped_in_mid_epoch_and_resumed_ends_with_the_same_bytes(
    policy, prompts, tmp_path, options, capfd
):
    options = {"max-steps": 12, "per-device-train-batch-size": 5, "device": "cpu", **options}

    def program(out: Path) -> int:
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return sft.run(
            ["--policy", policy.ref, "--prompts", prompts.ref, "--checkpoint", str(out), *flags]
        )

    sigterm_while_training(tmp_path / "stopped")
    assert program(tmp_path / "stopped") == 75
    assert "stopped by a signal" in capfd.readouterr().err
    assert not (tmp_path / "stopped" / "manifest.json").exists()
    assert not list((tmp_path / "stopped").glob("data-*"))  # nothing half-written
    assert program(tmp_path / "stopped") == program(tmp_path / "whole") == 0
    stopped, whole = Artifact(str(tmp_path / "stopped")), Artifact(str(tmp_path / "whole"))
    assert 0 < stopped.manifest.notes["resumed_from"] < 12
    assert "resumed_from" not in whole.manifest.notes
    assert stopped.manifest.digest == whole.manifest.digest
    assert not (tmp_path / "stopped" / "resume").exists()


def bad(match: str, out: Path, policy: Artifact, prompts: Artifact, **options) -> None:
    with pytest.raises(UserError, match=match):
        run(out, policy, prompts, **options)
    assert not out.exists() or not any(out.iterdir())


def test_bad_demonstrations(tmp_path):
    policy, out = checkpoint_artifact(tmp_path / "policy"), tmp_path / "out"
    good = demonstrations(4)
    bad("holds no demonstrations", out, policy, prompts_artifact(tmp_path / "none", []))
    # One row of a few may be dropped, two are too many.
    longer = {"id": "sft-9999", "prompt": "x" * 70, "chat": False, "completion": " y"}
    long = [*good, longer, {**longer, "id": "sft-9997"}]
    bad(
        "prompt of sft-9999.*over the max_length 64",
        out,
        policy,
        prompts_artifact(tmp_path / "a", long),
        max_length=64,
    )
    bad("prompt of sft-9999.*context of 64", out, policy, prompts_artifact(tmp_path / "b", long))
    wordier = {"id": "sft-9998", "prompt": "x", "chat": False, "completion": "y" * 50}
    wordy = [*good, wordier, {**wordier, "id": "sft-9996"}]
    bad(
        "completion of sft-9998.*over the max_length 32",
        out,
        policy,
        prompts_artifact(tmp_path / "c", wordy),
        max_length=32,
    )
    chat = [{**good[0], "chat": True, "prompt": "[]"}]
    bad("no chat template", out, policy, prompts_artifact(tmp_path / "d", chat))


def test_missing_column_or_file(tmp_path):
    policy, whole = checkpoint_artifact(tmp_path / "policy"), prompts_artifact(tmp_path / "whole")
    draft = Draft(str(tmp_path / "cut"), attempt="data-test")
    table = pq.read_table(whole.path / "sft.parquet")
    pq.write_table(table.drop_columns("completion"), draft.path / "sft.parquet")
    bad(
        "'completion': is not a column",
        tmp_path / "out",
        policy,
        commit(tmp_path / "cut", "data_prep"),
    )
    Draft(str(tmp_path / "empty"))
    bad("holds no sft.parquet", tmp_path / "out", policy, commit(tmp_path / "empty", "data_prep"))


def test_bad_surroundings(policy, prompts, tmp_path):
    bad("give it a checkpoint", tmp_path / "o", prompts, prompts)
    bad("1 processes are training", tmp_path / "o", policy, prompts, expected_world_size=2)
    bad(
        "cannot be loaded with nonsense",
        tmp_path / "o",
        policy,
        prompts,
        attn_implementation="nonsense",
    )
    bad("sft.max_steps", tmp_path / "o", policy, prompts, max_steps=0)
    bad("sft.dtype", tmp_path / "o", policy, prompts, dtype="float8")
    if not torch.cuda.is_available():
        bad("no CUDA device", tmp_path / "o", policy, prompts, device="cuda")


def test_a_tokenizer_beyond_the_vocabulary(tmp_path, prompts):
    policy = checkpoint_artifact(tmp_path / "policy")
    draft = Draft(str(tmp_path / "wrong"), attempt="data-test")
    (policy.path / "model").rename(draft.path / "model")
    path = draft.path / "model" / "tokenizer.json"
    about = json.loads(path.read_text())
    about["model"]["vocab"]["9"] = 77
    path.write_text(json.dumps(about))
    wrong = commit(tmp_path / "wrong", "base_model", version=0)
    bad("embeddings for 41 ids only", tmp_path / "out", wrong, prompts)


def test_model_without_tokenizer(tmp_path, prompts):
    policy = checkpoint_artifact(tmp_path / "policy")
    draft = Draft(str(tmp_path / "wrong"), attempt="data-test")
    (policy.path / "model").rename(draft.path / "model")
    for path in (draft.path / "model").glob("tokenizer*"):
        path.unlink()
    bad("tokenizer", tmp_path / "out", commit(tmp_path / "wrong", "base_model", version=0), prompts)


def test_the_device_is_given_back_before_anything_is_written(
    policy, prompts, tmp_path, monkeypatch
):
    with lease_of(tmp_path, monkeypatch) as check_released:
        found = run(tmp_path / "out", policy, prompts, weights=str(tmp_path / "weights"))
        check_released(found, tmp_path / "weights")
    assert run(tmp_path / "alone", policy, prompts).manifest.digest == found.manifest.digest, (
        "the same as without a lease"
    )
