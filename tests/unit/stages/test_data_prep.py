"""Prompts as committed: disjoint, deterministic, and every gold answer worth full marks."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.data import Example, Splits, files
from tuneloop.stages.data_prep import data_prep


def prepare(path: Path, **params: Any) -> dict[str, list[dict[str, Any]]]:
    params = {"train": 30, "eval": 10, "sft": 20, **params}
    data_prep(out=str(path), **params)
    root = Artifact(str(path)).path
    return {
        name: pq.read_table(root / f"{name}.parquet").to_pylist()
        for name in ("train", "eval", "sft")
    }


def jsonl(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"source": str(path)}


def test_what_is_committed(tmp_path: Path) -> None:
    made = prepare(tmp_path / "a")
    assert {name: len(rows) for name, rows in made.items()} == {"train": 30, "eval": 10, "sft": 20}
    prompts = [row["prompt"] for rows in made.values() for row in rows]
    assert len(set(prompts)) == 60
    first = made["train"][0]
    digits = first["prompt"].split()[1]
    assert first == {
        "id": "train-000000",
        "prompt": f"reverse {digits} =",
        "chat": False,
        "tools": None,
        "row": None,
        "answer": digits[::-1],
        "reward": '{"exact": 1.0}',
        "metadata": json.dumps({"digits": digits}),
    }
    assert made["sft"][0].keys() == {"id", "prompt", "chat", "tools", "row", "completion"}
    manifest = Artifact(str(tmp_path / "a")).manifest
    assert manifest.results == manifest.facts["rows"] == {"train": 30, "eval": 10, "sft": 20}


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        prepare(tmp_path / name, seed=seed)
        digests.append(Artifact(str(tmp_path / name)).manifest.digest)
    assert digests[0] == digests[1] != digests[2]


def test_train_takes_what_the_others_leave(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = prepare(tmp_path / "a", source_args={"digits": 2}, train=1000, sft=50)
    assert {name: len(rows) for name, rows in made.items()} == {"train": 40, "eval": 10, "sft": 50}
    counts = "40 prompts, 10 held out; 50 demonstrations"
    reason = "(1,000 prompts asked for: digits has no more)"
    assert f"{counts} {reason}\n" in "".join(capsys.readouterr())
    prepare(tmp_path / "b", source_args={"digits": 2}, train=40, sft=50)
    assert "asked for" not in "".join(capsys.readouterr())


def test_no_demonstrations(tmp_path: Path) -> None:
    assert prepare(tmp_path / "a", sft=0)["sft"] == []


def test_chats(tmp_path: Path) -> None:
    made = prepare(tmp_path / "a", chat=True, system="Be brief.")
    row = made["train"][0]
    assert row["chat"] is True
    system, user = json.loads(row["prompt"])
    assert system == {"role": "system", "content": "Be brief."}
    assert user["role"] == "user" and user["content"].startswith("reverse ")
    mixed = [{"prompt": [{"role": "user", "content": f"hi {i}"}], "answer": "x"} for i in range(4)]
    made = prepare(tmp_path / "b", **jsonl(tmp_path / "x.jsonl", mixed), eval=1, sft=1)
    assert all(row["chat"] for rows in made.values() for row in rows)
    assert len(json.loads(made["train"][0]["prompt"])) == 1


def test_a_source_of_somebody_elses_needs_no_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import functools
from tuneloop.data.digits import load_splits as digits

def load(n, seed, plain=2, *, model_config: int = 1):
    return digits(n, seed, digits=plain)

partial = functools.partial(load, model_config=3)
"""
    (tmp_path / "my_source.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for number, (name, args) in enumerate(
        {"load": {"plain": 2, "model_config": 4}, "partial": {"plain": 2}}.items()
    ):
        made = prepare(
            tmp_path / str(number),
            source=f"my_source:{name}",
            source_args=args,
            train=5,
            sft=2,
            eval=2,
        )
        assert len(made["train"]) == 5
    with pytest.raises(
        UserError, match=r"source_args\.model_config: 'x': has to be a whole number"
    ):
        prepare(tmp_path / "b", source="my_source:load", source_args={"model_config": "x"})


def test_reward_arguments_travel_in_the_metadata(tmp_path: Path) -> None:
    args = {"format": {"pattern": r"\d{4}"}, "length_penalty": {"max_length": 9, "buffer": 4}}
    rewards = {"exact": 1.0, "format": 0.5, "length_penalty": 0.1}
    row = prepare(tmp_path / "a", rewards=rewards, reward_args=args)["train"][0]
    assert json.loads(row["reward"]) == rewards
    assert json.loads(row["metadata"])["format"] == args["format"]


def test_reasoning_gym_with_its_verifier(tmp_path: Path) -> None:
    args = {"task": "spell_backward", "config": {"min_word_len": 3, "max_word_len": 6}}
    made = prepare(
        tmp_path / "a", source="reasoning_gym", source_args=args, rewards={"reasoning_gym": 1.0}
    )
    about = json.loads(made["train"][0]["metadata"])["reasoning_gym"]
    assert (
        about["task"] == "spell_backward"
        and about["entry"]["question"] == made["train"][0]["prompt"]
    )


def test_pairs(tmp_path: Path) -> None:
    made = prepare(tmp_path / "a", preference=40, preference_eval=10)
    root = Artifact(str(tmp_path / "a")).path
    pairs = [
        pq.read_table(root / f"{n}.parquet").to_pylist() for n in ("preference", "preference_eval")
    ]
    assert [len(part) for part in pairs] == [40, 10]
    found = [row["prompt"] for rows in (*made.values(), *pairs) for row in rows]
    assert len(set(found)) == len(found)
    for row in pairs[0]:
        digits = row["prompt"].split()[1]
        assert row["chosen"] == f" {digits[::-1]}" != row["rejected"]
        assert row["rejected"] in (f" {digits}", f" {digits[1:]}")


def test_forms_without_answers(tmp_path: Path) -> None:
    """Preference data as TRL has it, an instruction with its input, whole conversations, prompts only."""
    ask = [{"role": "user", "content": "hi"}]
    yes, no = ([{"role": "assistant", "content": text}] for text in ("yes", "no"))
    forms: list[tuple[dict[str, Any], dict[str, Any], dict[str, int], str, dict[str, Any]]] = [
        (
            {"prompt": ask, "chosen": yes, "rejected": no},
            {"prompt": "prompt", "completion": "chosen", "rejected": "rejected"},
            {"preference": 1},
            "preference",
            {"prompt": json.dumps(ask), "chat": True, "chosen": "yes", "rejected": "no"},
        ),
        (
            {"instruction": "Add.", "input": "1 1", "output": "2"},
            {"prompt": "instruction", "input": "input", "completion": "output"},
            {"sft": 1},
            "sft",
            {"prompt": "Add.\n\n1 1", "chat": False, "completion": "2"},
        ),
        (
            {"messages": ask + yes},
            {"messages": "messages"},
            {"sft": 1},
            "sft",
            {"prompt": json.dumps(ask + yes), "chat": True, "completion": None},
        ),
        (
            {"prompt": "hi"},
            {},
            {"train": 1},
            "train",
            {"prompt": "hi", "answer": "", "chat": False},
        ),
    ]
    for number, (row, columns, sizes, split, wanted) in enumerate(forms):
        about = jsonl(tmp_path / f"{number}.jsonl", [row])
        about["columns"] = columns
        path = tmp_path / str(number)
        prepare(path, **about, **{"train": 0, "eval": 0, "sft": 0, **sizes}, rewards={"exact": 1.0})
        (found,) = pq.read_table(Artifact(str(path)).path / f"{split}.parquet").to_pylist()
        assert wanted.items() <= found.items()
        assert Artifact(str(path)).manifest.facts["unchecked"] == 1
    with pytest.raises(UserError, match=r"data_prep.preference: 1: .*only 0 distinct prompts left"):
        prepare(tmp_path / "x", **about, train=0, eval=0, sft=0, preference=1)
    with pytest.raises(UserError, match=r"data_prep.sft: 1: .*only 0 distinct prompts left"):
        prepare(tmp_path / "x", **about, train=0, eval=0, sft=1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"rewards": {}}, "rewards: '{}': must name at least one reward"),
        ({"rewards": {"exactly": 1.0}}, "rewards.exactly: 'exactly': unknown"),
        ({"rewards": {"exact": float("nan")}}, "rewards.exact: nan: must be a finite number"),
        (
            {"rewards": {"format": 1.0}},
            r"data.wrong_answers: '60 of 60 gold answers': earn less.*'reverse \d{4} =': answer '\d{4}'.*judge",
        ),
        (
            {"source": "x.jsonl", "layout": "mesages"},
            "^data_prep.layout: 'mesages': unknown; known: .*messages",
        ),
        ({"train": -1}, "data_prep.train: -1: has to be greater"),
        ({"colour": 1}, "data_prep.colour: 1: unknown key"),
        ({"system": "Be brief."}, "data_prep.system: 'Be brief.': needs --chat true"),
        (
            {"source_args": {"digits": 1}, "eval": 11},
            "data_prep.eval: 11: digits has only 10 distinct prompts left",
        ),
        (
            {"source_args": {"digits": 1}, "eval": 5, "sft": 5},
            "data_prep.train: 30: digits has only 0 distinct prompts left",
        ),
        (
            {"source_args": {"digits": 1}, "eval": 5, "sft": 6},
            "data_prep.sft: 6: digits has only 5 distinct prompts left; ask for fewer",
        ),
        (
            {"source": "tests.unit.stages.test_data_prep:not_json"},
            "data.bad_rows: '1 of 1 rows': cannot be used: 'q': its metadata is not JSON",
        ),
    ],
)
def test_bad_parameters_commit_nothing(
    tmp_path: Path, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "a", **params)
    assert not [p for p in (tmp_path / "a").rglob("*") if p.is_file()]


def test_gold_answers_that_their_reward_rejects_are_named(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"q{i}", "answer": "4", "how": "it is 5" if i in (3, 7) else "it is 4"}
        for i in range(10)
    ]
    params = jsonl(tmp_path / "x.jsonl", rows)
    params["columns"] = {"completion": "how"}
    with pytest.raises(UserError) as caught:
        prepare(tmp_path / "a", **params, rewards={"numeric": 1.0}, eval=2, sft=3)
    assert "2 of 10 gold answers" in str(caught.value)
    trouble = r"x.jsonl:4, \S+x.jsonl:8: answer '4' as 'it is 5' scored 0.0 {'numeric': 0.0}"
    assert re.search(trouble, str(caught.value))


def test_gold_answers_are_counted_over_all_tables(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{i} =", "answer": str(i), "how": "no" if i in (7, 2000) else str(i)}
        for i in range(2100)
    ]
    params = jsonl(tmp_path / "x.jsonl", rows)
    params["columns"] = {"completion": "how"}
    with pytest.raises(UserError, match="2 of 2100 gold answers"):
        prepare(tmp_path / "a", **params, eval=5, sft=5, train=3000, drop_at_most=0.0005)
    with pytest.raises(UserError, match=r"leave them out \(data.wrong_answers=drop\)"):
        prepare(tmp_path / "a", **params, eval=5, sft=5, train=3000, wrong_answers="refuse")
    made = prepare(tmp_path / "b", **params, eval=5, sft=5, train=3000)
    assert sum(map(len, made.values())) == 2098
    assert [row["id"] for row in made["train"]] == [f"train-{i:06d}" for i in range(2088)]
    dropped = Artifact(str(tmp_path / "b")).manifest.facts["dropped"]["wrong_answers"]
    assert dropped["count"] == 2 and sorted(
        text.split(": ")[0] for text in dropped["examples"]
    ) == [f"{tmp_path}/x.jsonl:{line}" for line in (2001, 8)]


MEASURED = """
import resource, sys
from tuneloop.stages.data_prep import data_prep
data_prep(out=sys.argv[2], source=sys.argv[1], train=1000000, eval=10, sft=10)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Thirty-six megabytes more of rows."""
    peaks = []
    for rows in (1100, 5500):
        path = tmp_path / f"{rows}.jsonl"
        with path.open("w") as file:
            for i in range(rows):
                file.write(json.dumps({"prompt": f"{i:08192d}", "answer": f"{i}"}) + "\n")
        words = [sys.executable, "-c", MEASURED, str(path), str(tmp_path / f"out{rows}")]
        peaks.append(
            float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        )
        assert Artifact(str(tmp_path / f"out{rows}")).manifest.results["train"] == rows - 20
    assert peaks[1] - peaks[0] < 25, peaks  # 131 where all rows were held


def overlapping(n: int, seed: int, *, prompts: tuple[str, ...]) -> Splits:
    def part() -> Any:
        return (Example(text, text or "empty") for text in prompts)

    return Splits(train=part(), eval=part(), sft=part())


def not_json(n: int, seed: int) -> Splits:
    return Splits.of([Example("q", "a", metadata={"x": {1, 2}})])


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_splits_are_disjoint_whatever_the_source(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str], eval: int, sft: int
) -> None:
    source = {
        "source": "tests.unit.stages.test_data_prep:overlapping",
        "source_args": {"prompts": prompts},
    }
    path = tmp_path_factory.mktemp("x") / "a"
    if len(set(prompts)) < eval + sft + 1:
        with pytest.raises(UserError, match="has only"):
            prepare(path, **source, eval=eval, sft=sft)
        return
    made = prepare(path, **source, eval=eval, sft=sft)
    found = [row["prompt"] for rows in made.values() for row in rows]
    assert len(found) == len(set(found)) == min(len(set(prompts)), eval + sft + 30)


def test_a_file_that_changed_is_no_resume(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "d.jsonl", [{"prompt": "1+1", "answer": "2"}])
    first = prepare(tmp_path / "p", **source, eval=0, sft=0)
    assert prepare(tmp_path / "p", **source, eval=0, sft=0) == first
    jsonl(tmp_path / "d.jsonl", [{"prompt": "1+2", "answer": "3"}])
    with pytest.raises(UserError, match=r"source-digest.*committed already.*another run name"):
        prepare(tmp_path / "p", **source, eval=0, sft=0)
    (tmp_path / "d.jsonl").unlink()
    assert prepare(tmp_path / "p", **source, eval=0, sft=0) == first, (
        "what is committed needs no source"
    )


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        ({"path": "rows", "eval_split": "test"}, "rows/test.jsonl"),
        ({"path": "rows", "sft_split": "test"}, "rows/test.jsonl"),
        ({"path": "rows", "preference_split": "test"}, "rows/test.jsonl"),
        ({"path": "rows", "split": "test", "eval": "rows"}, "rows/train.jsonl"),
        ({"mixture": [{"source": "rows", "split": "test"}]}, "rows/test.jsonl"),
        ({"path": "rows/test.jsonl"}, "rows/possible_answer/test.jsonl"),
        ({"mixture": [{"source": "rows/test.jsonl"}]}, "rows/possible_answer/test.jsonl"),
        ({"mixture": [{"source": "rows"}], "sft": "rows/test.jsonl"}, "rows/test.jsonl"),
        ({"path": "rows", "answers": "rows/test.jsonl"}, "rows/test.jsonl"),
    ],
)
def test_every_file_that_is_read_is_digested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], changed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows" / "possible_answer").mkdir(parents=True)
    for name in ("train.jsonl", "test.jsonl", "possible_answer/test.jsonl"):
        jsonl(tmp_path / "rows" / name, [{"id": 1, "prompt": "1+1", "answer": "2"}])
    first = files.digest_source(arguments)
    assert first is not None
    assert files.digest_source(arguments) == first
    jsonl(tmp_path / changed, [{"id": 1, "prompt": "1+2", "answer": "3"}])
    assert files.digest_source(arguments) != first


def test_a_folder_that_changed_is_another_source(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\n1+1,2\n")
    first = files.digest_source({"path": str(tmp_path)})
    assert files.digest_source({"path": str(tmp_path)}) == first
    (tmp_path / "a.csv").write_text("prompt,answer\n1+2,3\n")
    assert files.digest_source({"path": str(tmp_path)}) != first
