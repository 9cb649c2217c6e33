"""The rollout stage over the transformers engine: what it writes, what it proves, what it refuses."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.policies import commit_policy, commit_prompts, model, tokenizer
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.seeds import derive_seed, draw_indices
from tuneloop.formats.canary import derive_ids, make_canary
from tuneloop.formats.rollouts import SCHEMA, open_rows, read_rows
from tuneloop.formats.tokens import load_tokenizer
from tuneloop.inference.engines.transformers import Transformers
from tuneloop.inference.generate import COLUMNS
from tuneloop.inference.proof import StaleWeights, read_canary
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.reward import reward
from tuneloop.stages.rollout import rollout

SMALL = {"engine": "transformers", "prompts_per_iteration": 3, "n": 2, "max_tokens": 5}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return commit_policy(tmp_path_factory.mktemp("policy") / "c", version=2)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return commit_prompts(
        tmp_path_factory.mktemp("prompts") / "p", [f"reverse {i} =" for i in (1, 22, 333, 4444)]
    )


def run(out: Path, policy: Artifact, prompts: Artifact, **params: Any) -> list[dict[str, Any]]:
    rollout(out=str(out), policy=policy.ref, prompts=prompts.ref, **{**SMALL, **params})
    table = pq.read_table(Artifact(str(out)).path / "rollouts.parquet")
    assert table.schema == SCHEMA
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def test_rows(
    tmp_path: Path, policy: Artifact, prompts: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneloop.formats.rollouts.ROWS", 4)
    rows = run(tmp_path / "r", policy, prompts, iteration=3, temperature=0.8)
    assert [row["request_id"] for row in rows] == [
        f"i000003-p{p:05d}-s{s:02d}" for p in range(3) for s in range(2)
    ]
    assert (
        pq.ParquetFile(Artifact(str(tmp_path / "r")).path / "rollouts.parquet").num_row_groups == 2
    )
    words = load_tokenizer(policy.path / "model")
    plain = AutoModelForCausalLM.from_pretrained(policy.path / "model", dtype=torch.float32)
    asked = {row["id"]: row for row in pq.read_table(prompts.path / "train.parquet").to_pylist()}
    for row in rows:
        source = asked[row["id"]]
        assert (row["prompt"], row["answer"], row["reward_spec"]) == (
            source["prompt"], source["answer"], source["reward"]
        )  # fmt: skip
        assert row["prompt_ids"] == words.encode(row["prompt"])
        assert row["completion"] == words.decode(row["completion_ids"], skip_special_tokens=True)
        assert row["policy_versions"] == [2] * len(row["completion_ids"])
        assert row["loss_mask"] == [True] * len(row["completion_ids"])
        ended = row["completion_ids"][-1] == words.eos_token_id
        assert (
            row["finish_reason"] == ("stop" if ended else "length")
            and len(row["completion_ids"]) <= 5
        )
        with torch.no_grad():
            logits = (
                plain(torch.tensor([row["prompt_ids"] + row["completion_ids"]])).logits[0] / 0.8
            )
        start = len(row["prompt_ids"]) - 1
        want = [
            float(logits[start + i].log_softmax(-1)[t]) for i, t in enumerate(row["completion_ids"])
        ]
        assert row["logprobs"] == pytest.approx(want, abs=1e-4)


def test_manifest(tmp_path: Path, policy: Artifact, prompts: Artifact) -> None:
    rows = run(tmp_path / "r", policy, prompts)
    manifest = Artifact(str(tmp_path / "r")).manifest
    assert manifest.results["completions"] == 6
    assert manifest.results["mean_length"] == sum(len(r["completion_ids"]) for r in rows) / 6
    facts = manifest.facts
    assert (facts["version"], facts["digest"], facts["engine"]) == (
        2,
        policy.manifest.digest,
        "transformers",
    )
    assert facts["sampling"] == {
        "temperature": 1.0,
        "max_tokens": 5,
        "n": 2,
        "top_p": 1.0,
        "top_k": -1,
    }
    assert (
        0
        < facts["canary"]["mean_abs_diff"]
        <= facts["canary"]["max_abs_diff"]
        < facts["canary"]["tolerance"]
        == read_canary(policy).tolerance
    )


def test_more_prompts_than_the_update_needs(
    tmp_path: Path, policy: Artifact, prompts: Artifact
) -> None:
    """Its batch is that of a larger one, and the manifest says how many of its groups the update is to keep."""
    whole = run(tmp_path / "w", policy, prompts, prompts_per_iteration=3, iteration=1)
    more = run(
        tmp_path / "m", policy, prompts, prompts_per_iteration=2, oversampled_prompts=3, iteration=1
    )
    assert more == whole
    facts = [Artifact(str(tmp_path / name)).manifest.facts for name in "wm"]
    assert facts[1] == {**facts[0], "groups": {"asked": 3, "wanted": 2}}
    reward(out=str(tmp_path / "r"), rollouts=Artifact(str(tmp_path / "m")).ref)
    assert Artifact(str(tmp_path / "r")).manifest.facts["groups"] == facts[1]["groups"]


def test_is_a_function_of_its_inputs(tmp_path: Path, policy: Artifact, prompts: Artifact) -> None:
    first, again = run(tmp_path / "a", policy, prompts), run(tmp_path / "b", policy, prompts)
    assert first == again
    assert (
        Artifact(str(tmp_path / "a")).manifest.digest
        == Artifact(str(tmp_path / "b")).manifest.digest
    )
    assert run(tmp_path / "c", policy, prompts, seed=1) != first
    later = run(
        tmp_path / "d", policy, prompts, iteration=4
    )  # the same prompts in the first place, other noise
    assert {r["completion"] for r in later} != {r["completion"] for r in first}


def test_chat(tmp_path: Path, policy: Artifact) -> None:
    chat = json.dumps([{"role": "user", "content": "reverse 12 ="}])
    rows = run(
        tmp_path / "r",
        policy,
        commit_prompts(tmp_path / "p", [chat], chat=True),
        prompts_per_iteration=1,
    )
    words = load_tokenizer(policy.path / "model")
    text = words.decode(rows[0]["prompt_ids"])
    assert text == "<|im_start|>user\nreverse 12 =<|im_end|>\n<|im_start|>assistant\n"


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 5), st.integers(0, 20))
def test_batches_go_through_every_epoch(total: int, size: int, seed: int, iteration: int) -> None:
    epochs = partial(derive_seed, seed, "prompts")
    stream = [i for k in range(iteration + 1) for i in draw_indices(total, k * size, size, epochs)]
    for epoch in range(len(stream) // total):
        assert sorted(stream[epoch * total : (epoch + 1) * total]) == list(range(total))
    assert stream[iteration * size :] == draw_indices(total, iteration * size, size, epochs)


def test_epochs_differ() -> None:
    assert (
        len(
            {
                tuple(draw_indices(20, 20 * epoch, 20, partial(derive_seed, 0, "prompts")))
                for epoch in range(5)
            }
        )
        == 5
    )


def test_wrong_weights_are_caught(tmp_path: Path, prompts: Artifact) -> None:
    """The checkpoint's digest is right and its weights are not those that the trainer computed the canary from."""
    wrong = commit_policy(tmp_path / "c", version=1, canary_of=model(5))
    with pytest.raises(
        StaleWeights,
        match=r"log-probabilities of the checkpoint's test text .*differ .* restart the engine",
    ):
        run(tmp_path / "r", wrong, prompts)
    assert not list((tmp_path / "r").iterdir())


class Forgetful(Transformers):
    """Says that it loaded, and keeps the weights it had, unless forced."""

    stubborn = False

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        super().load(policy)
        if self.stubborn or not force:
            with torch.no_grad():
                self.model.get_input_embeddings().weight.mul_(0.5)
        else:
            self.digest = ""
            super().load(policy)


class Stubborn(Forgetful):
    stubborn = True


class Late(Transformers):
    """Serves another version than it was told."""

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        super().load(policy, force=force)
        self.version -= 1


class Swapped(Transformers):
    """Its weights change while it generates."""

    def score(self, ids: Any) -> list[float]:
        scored = super().score(ids)
        self.version += 1
        return scored


def forgetful(endpoint: str | None, args: Mapping[str, Any], timeout_s: float) -> Transformers:
    return Forgetful()


def stubborn(endpoint: str | None, args: Mapping[str, Any], timeout_s: float) -> Transformers:
    return Stubborn()


def late(endpoint: str | None, args: Mapping[str, Any], timeout_s: float) -> Transformers:
    return Late()


def swapped(endpoint: str | None, args: Mapping[str, Any], timeout_s: float) -> Transformers:
    return Swapped()


def test_stale_weights_are_loaded_once_more(
    tmp_path: Path, policy: Artifact, prompts: Artifact
) -> None:
    assert run(tmp_path / "a", policy, prompts, engine=f"{__name__}:forgetful") == run(
        tmp_path / "b", policy, prompts
    )


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("stubborn", "stale or wrong"),
        ("late", "serves version 1"),
        ("swapped", r"versions \[3\] instead of 2"),
    ],
)
def test_no_proof_no_batch(
    tmp_path: Path, policy: Artifact, prompts: Artifact, engine: str, said: str
) -> None:
    with pytest.raises(StaleWeights, match=said):
        run(tmp_path / "r", policy, prompts, engine=f"{__name__}:{engine}")


class Foreign:
    """An engine in bfloat16 that cannot be asked for its tensors, as an endpoint cannot."""

    name = "foreign"

    def __init__(self) -> None:
        self.inner = Transformers(dtype="bfloat16")
        self.generate = self.inner.generate
        self.score = self.inner.score
        self.report = self.inner.report
        self.close = self.inner.close

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        self.inner.load(policy, force=force)
        self.context = self.inner.context
        self.version, self.digest = self.inner.version, self.inner.digest


def foreign(endpoint: str | None, args: Mapping[str, Any], timeout_s: float) -> Foreign:
    return Foreign()


def commit_steps(root: Path) -> list[Artifact]:
    """A first version, one after a large step, and two after tiny ones."""
    made = model(0)
    versions: list[Artifact] = []
    for version, step in enumerate([0.0, 0.5, 0.004, 0.004]):
        with torch.no_grad():
            made.model.norm.weight[:3] += step
        draft = Draft(str(root / f"v{version}"))
        made.save_pretrained(draft.path / "model")
        tokenizer().save_pretrained(draft.path / "model")
        opened = AutoModelForCausalLM.from_pretrained(draft.path / "model", dtype="auto")
        previous = read_canary(versions[-1]) if versions else None
        ids = previous.ids if previous else derive_ids(200)
        make_canary(opened, ids, version=version, previous=previous).write(
            draft.path / "canary.json"
        )
        draft.commit(
            stage="policy_update", params={"learning_rate": 1e-6}, facts={"version": version}
        )
        versions.append(Artifact(str(root / f"v{version}")))
    return versions


def test_a_run_warns_once_where_nothing_tells_versions_apart(
    tmp_path: Path, prompts: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = commit_steps(tmp_path)
    warnings = []
    for iteration, policy in enumerate(versions):
        out = tmp_path / f"foreign-{iteration}"
        run(out, policy, prompts, engine=f"{__name__}:foreign", iteration=iteration)
        proof = Artifact(str(out)).manifest.facts["proof"]
        assert (proof["by"], proof["tells_versions_apart"]) == ("log-probabilities", iteration < 2)
        warnings.append(capsys.readouterr().err.count("warning: nothing proves that the engine"))
    assert warnings == [0, 0, 1, 0]
    for iteration, policy in enumerate(versions):
        out = tmp_path / f"ours-{iteration}"
        run(out, policy, prompts, iteration=iteration, engine_args={"dtype": "bfloat16"})
        proof = Artifact(str(out)).manifest.facts["proof"]
        assert (proof["by"], proof["tells_versions_apart"]) == ("tensors", True)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"temperature": 0.0}, r"rollout\.temperature"),
        ({"n": 0}, r"rollout\.n"),
        (
            {"max_tokens": 2000},
            r"prompts row p\d: \d+: tokens of prompt and 2000 .* context of 1024; .*max_tokens",
        ),
        ({"engine": "no-such"}, "engines: 'no-such': unknown; known: endpoint, transformers, vllm"),
        (
            {"engine": "vllm", "endpoint": "localhost"},
            "--endpoint: 'localhost': must be an absolute URL",
        ),
        (
            {"engine": "vllm", "engine_args": {"tokenizer": "x"}},
            "--engine-args tokenizer: 'x': is set by tuneloop",
        ),
        ({"engine_args": {"max_model_len": 8}}, "context of 8"),
    ],
)
def test_bad_parameters(
    tmp_path: Path, policy: Artifact, prompts: Artifact, params: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said) as raised:
        run(tmp_path / "r", policy, prompts, **params)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("r/*"))


def test_bad_data(tmp_path: Path, policy: Artifact, prompts: Artifact) -> None:
    with pytest.raises(UserError, match=r"train\.parquet.*has no rows"):
        run(tmp_path / "r", policy, commit_prompts(tmp_path / "empty", []))
    with pytest.raises(UserError, match=r"holds no train\.parquet"):
        run(tmp_path / "r", policy, policy)
    draft = Draft(str(tmp_path / "lacking"))
    pq.write_table(
        pq.read_table(prompts.path / "train.parquet").drop(["answer"]), draft.path / "train.parquet"
    )
    draft.commit(stage="data_prep")
    with pytest.raises(UserError, match="'answer': is not a column"):
        run(tmp_path / "r", policy, Artifact(str(tmp_path / "lacking")))
    with pytest.raises(UserError, match=r"p0: prompt: .*not a JSON list"):
        run(
            tmp_path / "r",
            policy,
            commit_prompts(tmp_path / "chat", ["hello"], chat=True),
            prompts_per_iteration=1,
        )


def test_policy_without_tokenizer(tmp_path: Path, prompts: Artifact) -> None:
    draft = Draft(str(tmp_path / "c"))
    model().save_pretrained(draft.path / "model")
    draft.commit(stage="base_model", facts={"version": 0})
    with pytest.raises(UserError, match=r"has no tokenizer; add its files"):
        run(tmp_path / "r", Artifact(str(tmp_path / "c")), prompts)


def anywhere(endpoint: str | None, args: Mapping[str, Any], timeout_s: float) -> Transformers:
    return Transformers()


def test_where_the_fleet_is_does_not_matter(
    tmp_path: Path, policy: Artifact, prompts: Artifact
) -> None:
    """A run that is resumed with its fleet at another address keeps what it has; with other options it does not."""
    asked = {
        "engine": f"{__name__}:anywhere",
        "engine_args": {"fleet": "http://a:1", "max_staleness": 1},
    }
    rows = run(tmp_path / "r", policy, prompts, **asked)
    made = Artifact(str(tmp_path / "r")).manifest
    assert made.params["engine_args"] == {"max_staleness": 1}
    again = {**asked, "engine_args": {"fleet": "dns://workers:1", "max_staleness": 1}}
    assert run(tmp_path / "r", policy, prompts, **again, endpoint="http://b:1") == rows
    assert Artifact(str(tmp_path / "r")).manifest == made
    with pytest.raises(UserError, match=r"--engine-args.*is committed already, made from"):
        run(tmp_path / "r", policy, prompts, **{**asked, "engine_args": {"fleet": "http://a:1"}})


def test_server_away(tmp_path: Path, policy: Artifact, prompts: Artifact) -> None:
    with pytest.raises(Retryable, match="ConnectionRefused"):
        run(tmp_path / "r", policy, prompts, engine="vllm", endpoint="http://127.0.0.1:9")


def test_vllm_absent(
    tmp_path: Path, policy: Artifact, prompts: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    monkeypatch.setitem(__import__("sys").modules, "vllm.engine", None)
    with pytest.raises(
        UserError, match=r"engine: 'vllm': vLLM is not installed; pip install 'tuneloop\[rollout\]'"
    ):
        run(tmp_path / "r", policy, prompts, engine="vllm")


def test_prompts_come_from_any_row_group_in_any_order(tmp_path: Path) -> None:
    small = {"source_args": {"digits": 4}, "train": 2500, "eval": 1, "sft": 1}
    data_prep(out=str(tmp_path / "p"), **small)
    train = open_rows(
        Artifact(str(tmp_path / "p")), "train.parquet", COLUMNS, "--prompts", "data_prep"
    )
    assert train.num_row_groups == 3 and train.metadata.num_rows == 2500
    places = [2499, 0, 1023, 1024, 0, 2048]
    assert [row["id"] for row in read_rows(train, places, COLUMNS)] == [
        f"train-{place:06d}" for place in places
    ]
