"""Token ids made once: the same training as from the rows, for any policy with that tokenizer and no other."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.making import checkpoint_artifact, commit, prompts_artifact, sigterm_while_training
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.component import Params, Stage
from tuneloop.core.errors import Interrupted, UserError
from tuneloop.formats.tokens import encode_completion, encode_prompt, load_tokenizer
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.preference import preference
from tuneloop.stages.reference_logprobs import reference_logprobs
from tuneloop.stages.reward_model import reward_model
from tuneloop.stages.sft import sft
from tuneloop.stages.tokenize_data import tokenize_data

TRAIN = {
    "max_steps": 5,
    "per_device_train_batch_size": 7,
    "warmup_steps": 0,
    "device": "cpu",
    "max_length": 64,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return checkpoint_artifact(tmp_path_factory.mktemp("policy") / "p")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    out = str(tmp_path_factory.mktemp("prompts") / "p")
    data_prep(out=out, train=4, eval=2, sft=100, preference=12, preference_eval=6)
    return Artifact(out)


@pytest.fixture(scope="module")
def tokens(
    policy: Artifact, prompts: Artifact, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    return run(tokenize_data, tmp_path_factory.mktemp("tokens") / "t", policy, prompts)


def run(stage: Any, out: Path, policy: Artifact, prompts: Artifact, **given: Any) -> Artifact:
    stage(out=str(out), policy=policy.ref, prompts=prompts.ref, **given)
    return Artifact(str(out))


def test_documents_are_the_rows_in_their_order(
    policy: Artifact, prompts: Artifact, tokens: Artifact
) -> None:
    words = load_tokenizer(policy.path / "model")
    for split, sides in (("sft", ["completion"]), ("preference", ["chosen", "rejected"])):
        rows = pq.read_table(prompts.path / f"{split}.parquet").to_pylist()
        wanted = []
        for row in rows:
            prompt = encode_prompt(words, row["prompt"], row["chat"])
            for side in sides:
                said = encode_completion(words, row[side])
                mask = [False] * len(prompt) + [True] * len(said)
                wanted.append(
                    {
                        "id": row["id"],
                        "row": row.get("row"),
                        "input_ids": prompt + said,
                        "loss_mask": mask,
                    }
                )
        found = pa.ipc.open_file(tokens.path / f"{split}.arrow").read_all().to_pylist()
        assert found == wanted
        assert tokens.manifest.facts["tokens"][split] == sum(
            len(each["input_ids"]) for each in found
        )
    assert tokens.manifest.files.keys() == {
        "sft.arrow",
        "preference.arrow",
        "preference_eval.arrow",
    }
    assert tokens.manifest.results["documents"] == 100 + 2 * 12 + 2 * 6


def test_they_are_a_function_of_rows_and_tokenizer(
    policy: Artifact, prompts: Artifact, tokens: Artifact, tmp_path: Path
) -> None:
    trained = run(sft, tmp_path / "sft", policy, prompts, **TRAIN)
    for name, model in (("again", policy), ("trained", trained)):
        found = run(tokenize_data, tmp_path / name, model, prompts).manifest
        assert (found.files, found.facts) == (tokens.manifest.files, tokens.manifest.facts)


@pytest.mark.parametrize("stage", [sft, preference, reward_model])
def test_training_on_tokens_is_training_on_their_rows(
    policy: Artifact, prompts: Artifact, tokens: Artifact, tmp_path: Path, stage: Any
) -> None:
    made = []
    for name, data in (("rows", prompts), ("tokens", tokens)):
        given: dict[str, Any] = dict(TRAIN)
        if stage is preference:
            scored = run(
                reference_logprobs,
                tmp_path / f"{name}-l",
                policy,
                data,
                device="cpu",
                max_length=64,
            )
            given["logprobs"] = scored.ref
        made.append(run(stage, tmp_path / name, policy, data, **given).manifest)
    assert made[0].files == made[1].files and made[0].results == made[1].results


def test_stopped_and_resumed_on_tokens_ends_with_the_same_bytes(
    policy: Artifact, tokens: Artifact, tmp_path: Path
) -> None:
    sigterm_while_training(tmp_path / "stopped")
    with pytest.raises(Interrupted):
        run(sft, tmp_path / "stopped", policy, tokens, **TRAIN)
    stopped, whole = (
        run(sft, tmp_path / name, policy, tokens, **TRAIN).manifest for name in ("stopped", "whole")
    )
    assert 0 < stopped.notes["resumed_from"] < 5
    assert stopped.digest == whole.digest


def test_another_tokenizer_is_refused(policy: Artifact, tokens: Artifact, tmp_path: Path) -> None:
    draft = Draft(str(tmp_path / "other"), attempt="data-test")
    (checkpoint_artifact(tmp_path / "copy").path / "model").rename(draft.path / "model")
    about = json.loads((file := draft.path / "model" / "tokenizer.json").read_text())
    about["model"]["vocab"] |= {
        "8": about["model"]["vocab"]["9"],
        "9": about["model"]["vocab"]["8"],
    }
    file.write_text(json.dumps(about))
    other = commit(tmp_path / "other", "base_model", version=0)
    with pytest.raises(UserError, match=r"--prompts.*tokenized by another tokenizer"):
        run(sft, tmp_path / "o", other, tokens, **TRAIN)


def test_bad_input(policy: Artifact, prompts: Artifact, tokens: Artifact, tmp_path: Path) -> None:
    for wrong in (prompts_artifact(tmp_path / "none", []), tokens):
        with pytest.raises(UserError, match="holds no rows to tokenize"):
            run(tokenize_data, tmp_path / "o", policy, wrong)
    with pytest.raises(UserError, match="give it a checkpoint"):
        run(tokenize_data, tmp_path / "o", prompts, prompts)
    with pytest.raises(UserError, match=r"of sft-.* over the max_length 4"):
        run(sft, tmp_path / "o", policy, tokens, **{**TRAIN, "max_length": 4})


def test_it_stops_on_a_signal(policy: Artifact, prompts: Artifact, tmp_path: Path) -> None:
    stage = Stage("tokenize_data", Params(), tmp_path, str(tmp_path / "o"), "a", stopping=True)
    with pytest.raises(Interrupted):
        tokenize_data.function(stage, policy, prompts)
