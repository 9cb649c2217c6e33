"""The evaluate stage over the transformers engine."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.making import commit
from tests.policies import commit_policy, commit_prompts
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import Retryable, UserError
from tuneloop.formats.rollouts import Request
from tuneloop.formats.tokens import load_tokenizer, stop_ids
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines.transformers import Transformers
from tuneloop.rewards import outages
from tuneloop.rewards.scoring import Escape
from tuneloop.stages.evaluate import SAMPLES, evaluate

PROMPTS = [f"reverse {i} =" for i in range(10, 18)]


def half(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """Judges nothing but the answer: a known share of the prompts is right."""
    return float(int(answer.split()[1]) % 2)


def shy(completion: str, answer: str, metadata: dict[str, Any]) -> None:
    """Never can tell."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return commit_policy(tmp_path_factory.mktemp("policy") / "c", version=2)


def run(out: Path, policy: Artifact, prompts: Artifact, **params: Any) -> list[dict[str, Any]]:
    params = {"engine": "transformers", "max_tokens": 6, **params}
    evaluate(out=str(out), policy=policy.ref, prompts=prompts.ref, **params)
    table = pq.read_table(Artifact(str(out)).path / "samples.parquet")
    assert table.schema == SAMPLES
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def test_scores_what_the_policy_says(tmp_path: Path, policy: Artifact) -> None:
    prompts = commit_prompts(tmp_path / "p", PROMPTS, reward=json.dumps({f"{__name__}:half": 0.5}))
    rows = run(tmp_path / "m", policy, prompts, iteration=7)
    manifest = Artifact(str(tmp_path / "m")).manifest
    assert [row["score"] for row in rows] == [0.0, 0.5] * 4
    assert manifest.results["mean_reward"] == 0.25
    assert manifest.facts["outcomes"] == {
        "score": 8,
        "timeout": 0,
        "infra_error": 0,
        "unverifiable": 0,
        "escape": 0,
    }
    assert (manifest.facts["version"], manifest.facts["digest"]) == (2, policy.manifest.digest)
    metrics = json.loads((Artifact(str(tmp_path / "m")).path / "metrics.jsonl").read_text())
    assert metrics == {"step": 7, "mean_reward": 0.25, "scored": 1.0}
    words, engine = load_tokenizer(policy.path / "model"), Transformers()
    engine.load(policy)
    requests = [Request(text, words.encode(text), [0]) for text in PROMPTS]
    greedy = Sampling(0.0, 6, stop_ids(words, policy.path / "model"))
    said = [group[0].ids for group in engine.generate(requests, greedy, lambda done: None)]
    assert [row["completion"] for row in rows] == words.batch_decode(said, skip_special_tokens=True)


def test_limit_and_repetition(tmp_path: Path, policy: Artifact) -> None:
    prompts = commit_prompts(tmp_path / "p", PROMPTS)
    assert [r["prompt"] for r in run(tmp_path / "a", policy, prompts, limit=3)] == PROMPTS[:3]
    first, again = (run(tmp_path / name, policy, prompts, temperature=1.0) for name in "bc")
    assert first == again
    assert first != run(tmp_path / "d", policy, prompts, temperature=1.0, seed=1)


def test_nothing_scored_is_no_zero(tmp_path: Path, policy: Artifact) -> None:
    prompts = commit_prompts(tmp_path / "p", PROMPTS, reward=json.dumps({f"{__name__}:shy": 1.0}))
    with pytest.raises(UserError, match=r"8 of 8 completions have no score.*could not judge it"):
        run(tmp_path / "m", policy, prompts)


def flaky(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """A judge that breaks off for three prompts of four."""
    if int(answer.split()[1]) % 4:
        raise BrokenPipeError("the judge ended")
    return 1.0


def test_the_mean_of_few_is_none(
    tmp_path: Path, policy: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 3 of 4 completions unscored the mean of one was committed, which `promote --min` would go by."""
    monkeypatch.setattr(outages, "FIRST_DELAY_S", 0.001)
    prompts = commit_prompts(tmp_path / "p", PROMPTS, reward=json.dumps({f"{__name__}:flaky": 1.0}))
    reason = r"evaluate: 6 of 8 completions have no score.*flaky: BrokenPipeError: the judge ended"
    with pytest.raises(Retryable, match=reason):
        run(tmp_path / "m", policy, prompts)
    rows = run(tmp_path / "n", policy, prompts, error_budget=0.75)
    assert [row["outcome"] for row in rows].count("score") == 2
    small = {f"{__name__}:below": 1.0}
    prompts = commit_prompts(tmp_path / "q", PROMPTS, reward=json.dumps(small))
    with pytest.raises(UserError, match=r"evaluate.error_budget.*returned -1.0, outside its RANGE"):
        run(tmp_path / "o", policy, prompts)


def hostile(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """Ends its process for one prompt, takes memory for another, and is left by a third."""
    number = int(answer.split()[1])
    if number == 10:
        os._exit(1)
    if number == 11:
        bytearray(2 << 30)
    if number == 12:
        raise Escape("open /etc/passwd")
    return 1.0


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        ({}, [0.0, 0.0, None]),
        ({"punish": False}, [None, None, None]),
        ({"escape_score": -1.0}, [0.0, 0.0, -1.0]),
        ({"memory_mb": 4096, "escape_score": 0.5}, [0.0, 1.0, 0.5]),
    ],
)
def test_completions_are_judged_as_the_stage_reward_does(
    tmp_path: Path, policy: Artifact, options: dict[str, Any], scores: list[float | None]
) -> None:
    spec = json.dumps({f"{__name__}:hostile": 1.0})
    prompts = commit_prompts(tmp_path / "p", PROMPTS, reward=spec)
    options = {"memory_mb": 1024, "error_budget": 0.5} | options
    rows = run(tmp_path / "m", policy, prompts, **options)
    assert [row["score"] for row in rows] == [*scores, 1.0, 1.0, 1.0, 1.0, 1.0]


def below(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """Is below its range."""
    return -1.0


def test_another_artifact_in_place_of_prompts_is_refused(tmp_path: Path, policy: Artifact) -> None:
    with pytest.raises(UserError, match=r"eval\.parquet"):
        run(tmp_path / "m", policy, policy)


def test_without_held_out_prompts_those_of_demonstrations_are_completed(
    tmp_path: Path, policy: Artifact
) -> None:
    """Whole conversations and pairs of prompt and completion; the samples have no score."""
    messages = [
        {"role": "user", "content": "say 12 ="},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "and 7 ="},
        {"role": "assistant", "content": "7"},
    ]
    rows = [
        {"id": "sft-eval-0", "prompt": json.dumps(messages), "chat": True, "completion": None},
        {"id": "sft-eval-1", "prompt": "say 5 =", "chat": False, "completion": " 5"},
    ]
    draft = Draft(str(tmp_path / "prompts"), attempt="data-test")
    pq.write_table(pa.Table.from_pylist(rows), draft.path / "sft_eval.parquet")
    prompts = commit(tmp_path / "prompts", "data_prep")
    evaluate(
        out=str(tmp_path / "out"),
        policy=policy.ref,
        prompts=prompts.ref,
        engine="transformers",
        max_tokens=4,
    )
    metrics = Artifact(str(tmp_path / "out"))
    assert metrics.manifest.results == {"mean_reward": None}
    samples = pq.read_table(metrics.part("samples.parquet")).to_pylist()
    assert [sample["answer"] for sample in samples] == ["7", " 5"]
    assert json.loads(samples[0]["prompt"]) == messages[:-1]
    assert [sample["score"] for sample in samples] == [None, None]
    assert metrics.manifest.facts["outcomes"] == {"unverifiable": 2}


def test_where_nothing_is_held_out_nothing_is_evaluated(tmp_path: Path, policy: Artifact) -> None:
    draft = Draft(str(tmp_path / "prompts"), attempt="data-test")
    (draft.path / "sft.parquet").write_bytes(b"not read")
    prompts = commit(tmp_path / "prompts", "data_prep")
    assert run(tmp_path / "empty", policy, commit_prompts(tmp_path / "p", [])) == []
    evaluate(
        out=str(tmp_path / "out"), policy=policy.ref, prompts=prompts.ref, engine="transformers"
    )
    metrics = Artifact(str(tmp_path / "out"))
    assert metrics.manifest.results == {"mean_reward": None}
    assert pq.read_table(metrics.part("samples.parquet")).num_rows == 0
