"""Rows and prompts that are too long: dropped, cut off or refused, counted, and named as the user's file names them."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.making import checkpoint_artifact
from tests.policies import commit_policy
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import UserError
from tuneloop.formats.too_long import LengthPolicy
from tuneloop.stages.base_model import base_model
from tuneloop.stages.evaluate import evaluate
from tuneloop.stages.preference import preference
from tuneloop.stages.reference_logprobs import reference_logprobs
from tuneloop.stages.rollout import rollout
from tuneloop.stages.sft import sft
from tuneloop.stages.tokenize_data import tokenize_data

TRAIN = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "warmup_steps": 0,
    "device": "cpu",
    "max_length": 24,
}
SAMPLE = {"engine": "transformers", "max_tokens": 8}


def commit_rows(url: Path, splits: dict[str, list[dict[str, Any]]], **facts: Any) -> Artifact:
    """Commit rows as `data_prep` does, each named by its file and line."""
    draft = Draft(str(url))
    for split, rows in splits.items():
        named = [
            {"id": f"{split}-{number:06d}", "row": f"my.jsonl:{number + 1}", "chat": False, **row}
            for number, row in enumerate(rows)
        ]
        pq.write_table(pa.Table.from_pylist(named), draft.path / f"{split}.parquet")
    draft.commit(stage="data_prep", facts=facts)
    return Artifact(str(url))


def demonstrations(count: int, long: dict[int, str]) -> dict[str, list[dict[str, Any]]]:
    """Demonstrations of 7 tokens; those of `long` have a completion of their own."""
    rows = [{"prompt": "a b =", "completion": long.get(i, "c")} for i in range(count)]
    return {"sft": rows}


def prompt_rows(count: int, long: set[int]) -> list[dict[str, Any]]:
    """Prompts of a few tokens; those of `long` have over eighty, as each digit is one."""
    return [
        {
            "prompt": f"{'7' * 80 if i in long else ''}{i} =",
            "answer": str(i),
            "reward": '{"exact": 1.0}',
            "metadata": "{}",
        }
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return checkpoint_artifact(tmp_path_factory.mktemp("policy") / "p")


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A policy with a context of 64 tokens."""
    return commit_policy(tmp_path_factory.mktemp("sampler") / "p", context=64)


def train(out: Path, policy: Artifact, prompts: Artifact, **params: Any) -> Artifact:
    sft(out=str(out), policy=policy.ref, prompts=prompts.ref, **{**TRAIN, **params})
    return Artifact(str(out))


def test_a_long_demonstration_is_dropped_and_counted(tmp_path: Path, checkpoint: Artifact) -> None:
    splits = demonstrations(150, {7: "x" * 90})
    prompts = commit_rows(tmp_path / "data", splits)
    trained = train(tmp_path / "sft", checkpoint, prompts)
    (counts,) = trained.manifest.facts["too_long"]
    assert counts == {
        "dropped": 1,
        "cut": 0,
        "of": 150,
        "limit": 24,
        "first": ["completion of my.jsonl:8 (96 tokens)"],
    }
    # The same training as without the row.
    splits["sft"].pop(7)
    without = train(tmp_path / "sft2", checkpoint, commit_rows(tmp_path / "data2", splits))
    assert "too_long" not in without.manifest.facts
    weights = [name for name in trained.manifest.files if name.endswith(".safetensors")]
    assert weights
    for name in weights:
        assert trained.manifest.files[name].sha256 == without.manifest.files[name].sha256


def test_a_demonstration_is_cut_off_if_asked_to(tmp_path: Path, checkpoint: Artifact) -> None:
    splits = demonstrations(12, {3: "x" * 90})
    prompts = commit_rows(tmp_path / "data", splits, too_long="truncate")
    tokens = tmp_path / "tokens"
    tokenize_data(out=str(tokens), policy=checkpoint.ref, prompts=prompts.ref)
    for name, data in (("of-rows", prompts), ("of-tokens", Artifact(str(tokens)))):
        trained = train(tmp_path / name, checkpoint, data)
        (counts,) = trained.manifest.facts["too_long"]
        assert (counts["dropped"], counts["cut"], counts["of"]) == (0, 1, 12)
        assert counts["first"] == ["completion of my.jsonl:4 (96 tokens)"]


def test_what_has_no_target_left_is_dropped_also_by_truncate(
    tmp_path: Path, checkpoint: Artifact
) -> None:
    splits = demonstrations(12, {})
    for row in (3, 7):
        splits["sft"][row]["prompt"] = "x" * 50
    prompts = commit_rows(tmp_path / "data", splits, too_long="truncate")
    with pytest.raises(
        UserError, match=r"data\.too_long: '2 of 12 rows': prompt of my\.jsonl:4 \(52 tokens\)"
    ):
        train(tmp_path / "sft", checkpoint, prompts)


@pytest.mark.parametrize(
    ("share", "total", "allowed"),
    [(0.01, 50, 1), (0.01, 99, 1), (0.01, 250, 2), (0.01, 1, 0), (0.0, 50, 0), (0.2, 10, 2)],
)
def test_of_a_small_split_one_row_may_be_dropped(share: float, total: int, allowed: int) -> None:
    """One long row among 50 held-out ones ended a stage whose model was loaded."""
    rule = LengthPolicy("drop", share)
    rule.check_share(allowed, total, ["a"], "too long")
    with pytest.raises(UserError, match=rf"{allowed + 1} of {total} rows?'"):
        rule.check_share(allowed + 1, total, ["a"], "too long")


@pytest.mark.parametrize(
    ("facts", "remedy"),
    [
        ({}, r"allow more than 1\.00% of them \(data\.drop_at_most\)"),
        ({"drop_at_most": 0.2}, r"allow more than 20\.00% of them"),
        ({"too_long": "refuse", "drop_at_most": 1.0}, r"set data\.too_long=drop"),
    ],
)
def test_more_than_allowed_ends_before_the_first_step(
    tmp_path: Path, checkpoint: Artifact, facts: dict[str, Any], remedy: str
) -> None:
    long = dict.fromkeys(range(2, 14), "x" * 90)
    prompts = commit_rows(tmp_path / "data", demonstrations(40, long), **facts)
    with pytest.raises(
        UserError, match=rf"12 of 40 rows.*over the max_length 24; raise it.*{remedy}"
    ) as raised:
        train(tmp_path / "sft", checkpoint, prompts)
    # The first ten, by their lines.
    assert str(raised.value.remedy).count("my.jsonl:") == 10
    assert "my.jsonl:3 (96 tokens)" in str(raised.value.remedy)
    assert not list(tmp_path.glob("sft/manifest.json"))


def test_a_pair_is_dropped_whole_by_every_stage_that_reads_it(
    tmp_path: Path, checkpoint: Artifact
) -> None:
    rows = [
        {"prompt": f"{i} =", "chosen": "a", "rejected": "b" * (90 if i == 5 else 2)}
        for i in range(9)
    ]
    prompts = commit_rows(tmp_path / "data", {"preference": rows}, drop_at_most=0.2)
    inputs = {"policy": checkpoint.ref, "prompts": prompts.ref}
    scored = reference_logprobs(out=str(tmp_path / "scored"), **inputs, device="cpu", max_length=24)
    assert scored.results["pairs"] == 8
    trained = preference(
        out=str(tmp_path / "dpo"),
        **inputs,
        logprobs=Artifact(str(tmp_path / "scored")).ref,
        **TRAIN,
    )
    (counts,) = trained.facts["too_long"]
    assert (counts["dropped"], counts["of"]) == (1, 9)
    assert counts["first"] == ["completion of my.jsonl:6 (94 tokens)"]


def test_a_pair_that_is_too_long_is_listed_once(tmp_path: Path, checkpoint: Artifact) -> None:
    """Both sides of two pairs are too long; the rows come in another order than the file's."""
    lengths = {11: (60, 90), 2: (90, 60)}
    order = [11, *range(10), 10]
    rows = []
    for i in order:
        chosen, rejected = lengths.get(i, (1, 2))
        pair = {"prompt": f"{i} =", "chosen": "a" * chosen, "rejected": "b" * rejected}
        rows.append({**pair, "row": f"my.jsonl:{i}"})
    prompts = commit_rows(tmp_path / "data", {"preference": rows})
    inputs = {"policy": checkpoint.ref, "prompts": prompts.ref}
    with pytest.raises(UserError, match=r"2 of 12 rows") as raised:
        reference_logprobs(out=str(tmp_path / "scored"), **inputs, device="cpu", max_length=24)
    names = re.findall(r"my\.jsonl:[0-9]+ \([0-9]+ tokens\)", str(raised.value.remedy))
    assert names == ["my.jsonl:2 (94 tokens)", "my.jsonl:11 (95 tokens)"]


def test_a_prompt_that_does_not_fit_is_replaced_the_same_way_at_every_attempt(
    tmp_path: Path, sampler: Artifact
) -> None:
    prompts = commit_rows(tmp_path / "data", {"train": prompt_rows(12, {4, 9})})
    skipped: Counter[str] = Counter()
    for iteration in range(3):
        roots = []
        for attempt in ("one", "two"):
            out = tmp_path / f"{attempt}-{iteration}"
            made = rollout(
                out=str(out),
                policy=sampler.ref,
                prompts=prompts.ref,
                iteration=iteration,
                prompts_per_iteration=4,
                n=2,
                **SAMPLE,
            )
            roots.append(made.digest)
        assert roots[0] == roots[1]
        rows = pq.read_table(Artifact(str(out)).path / "rollouts.parquet").to_pylist()
        ids = [row["id"] for row in rows]
        assert len(rows) == 8 and len(set(ids)) == 4
        assert not {"train-000004", "train-000009"} & set(ids)
        skipped.update(made.facts.get("too_long", {}).get("first", []))
    # An epoch of twelve prompts in three batches: each long one was drawn once, or again as a spare.
    names = {text.split(" ")[0] for text in skipped}
    assert names == {"my.jsonl:5", "my.jsonl:10"}


def test_evaluate_skips_what_does_not_fit(tmp_path: Path, sampler: Artifact) -> None:
    data = {"eval": prompt_rows(30, {1})}
    prompts = commit_rows(tmp_path / "data", data, drop_at_most=0.1)
    inputs = {"policy": sampler.ref, "prompts": prompts.ref}
    made = evaluate(out=str(tmp_path / "e"), **inputs, limit=4, **SAMPLE)
    samples = pq.read_table(Artifact(str(tmp_path / "e")).path / "samples.parquet").to_pylist()
    assert sorted(row["id"] for row in samples) == [f"eval-{i:06d}" for i in (0, 2, 3, 4)]
    assert made.facts["too_long"]["skipped"] == 1
    assert made.facts["too_long"]["first"][0].startswith("my.jsonl:2 (")


def test_refused_prompts_are_named_by_their_line(tmp_path: Path, sampler: Artifact) -> None:
    data = {"train": prompt_rows(3, {1}), "eval": prompt_rows(3, {1})}
    prompts = commit_rows(tmp_path / "data", data, too_long="refuse")
    inputs = {"policy": sampler.ref, "prompts": prompts.ref}
    with pytest.raises(UserError, match=r"prompts row my\.jsonl:2: .* exceed the context of 64"):
        rollout(out=str(tmp_path / "r"), **inputs, prompts_per_iteration=3, n=2, **SAMPLE)
    with pytest.raises(UserError, match=r"prompts row my\.jsonl:2: .* exceed the context of 64"):
        evaluate(out=str(tmp_path / "e"), **inputs, **SAMPLE)


def test_all_prompts_are_counted_before_anything_is_trained(tmp_path: Path) -> None:
    rows = prompt_rows(200, {17})
    data = {"train": rows, "sft": demonstrations(2, {})["sft"]}
    prompts = commit_rows(tmp_path / "data", data)
    made = base_model(
        out=str(tmp_path / "b"),
        prompts=prompts.ref,
        completion_tokens={"train": 8, "eval": 8},
        engine_context=64,
    )
    counts = made.facts["prompts"]["train"]
    assert counts["too_long"] == 1 and counts["longest"] > 56
    assert counts["first"][0].startswith("my.jsonl:18 (")
    rows = prompt_rows(20, {17, 18})
    prompts = commit_rows(tmp_path / "small", {"train": rows, "sft": demonstrations(2, {})["sft"]})
    with pytest.raises(
        UserError,
        match=r"data\.too_long: '2 of 20 rows': my\.jsonl:18 .* exceed the context of 64; lower max_tokens",
    ):
        base_model(
            out=str(tmp_path / "c"),
            prompts=prompts.ref,
            completion_tokens={"train": 8},
            engine_context=64,
        )


def test_a_prompt_that_the_template_cannot_render_is_named_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}"
        "{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    chat = '[{"role": "user", "content": "hello"}]'
    system = '[{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}]'
    rows = prompt_rows(4, set())
    for number, row in enumerate(rows):
        row |= {"chat": True, "prompt": system if number == 2 else chat}
    prompts = commit_rows(tmp_path / "data", {"train": rows, "sft": demonstrations(2, {})["sft"]})
    with pytest.raises(
        UserError, match=r"^my\.jsonl:3: conversation: .*no system, please"
    ) as raised:
        base_model(
            out=str(tmp_path / "b"),
            prompts=prompts.ref,
            chat_template=str(template),
            completion_tokens={"train": 8},
        )
    assert "\n" not in str(raised.value)
