"""Which rows go to which part, and what is left out: counted, named and said."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.stages.data_prep import data_prep

SPLITS = ("train", "eval", "sft", "sft_eval", "preference", "preference_eval")


def prepare(path: Path, source: str = "", **params: Any) -> dict[str, list[dict[str, Any]]]:
    """Prepare a source; return the rows of all parts."""
    data_prep(out=str(path), source=source, **params)
    root = Artifact(str(path)).path
    return {
        split: pq.read_table(file).to_pylist()
        if (file := root / f"{split}.parquet").exists()
        else []
        for split in SPLITS
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows as JSON Lines; return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def count_rows(made: dict[str, list[dict[str, Any]]]) -> dict[str, int]:
    """Return the number of rows by part, without empty ones."""
    return {split: len(rows) for split, rows in made.items() if rows}


def build_chat(number: int) -> dict[str, Any]:
    """Build a conversation."""
    reply = {"role": "assistant", "content": f"{number}!"}
    return {"messages": [{"role": "user", "content": f"Say {number}."}, reply]}


def test_a_file_of_chats_needs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "chats.jsonl", [build_chat(number) for number in range(100)])
    made = prepare(tmp_path / "a", file)
    assert count_rows(made) == {"sft": 95, "sft_eval": 5}
    assert all(row["completion"] is None and row["chat"] for row in made["sft"])
    log = capsys.readouterr().err
    line = "data_prep: recognised: chats (messages); conversations from messages, 100 rows in"
    assert f"{line} {file}\n" in log
    assert "data_prep: 95 demonstrations, 5 held out\n" in log


def test_solved_problems_are_prompts_and_demonstrations(tmp_path: Path) -> None:
    rows = [{"question": f"{i} + 1 =", "answer": f"Add.\n#### {i + 1}"} for i in range(200)]
    file = write_rows(tmp_path / "gsm.jsonl", rows)
    made = prepare(tmp_path / "a", file)
    assert count_rows(made) == {"train": 180, "eval": 10, "sft": 180, "sft_eval": 10}
    held_out = {row["prompt"] for split in ("eval", "sft_eval") for row in made[split]}
    assert len(held_out) == 20
    assert held_out.isdisjoint(row["prompt"] for row in made["train"] + made["sft"])
    assert json.loads(made["train"][0]["reward"]) == {"numeric": 1.0}
    assert count_rows(prepare(tmp_path / "b", file, sft=0)) == {"train": 190, "eval": 10}
    numbers = {"eval": 3, "sft": 7, "train": 9}
    made = prepare(tmp_path / "c", file, **numbers)
    assert count_rows(made) == numbers
    prompts = [row["prompt"] for rows in made.values() for row in rows]
    assert len(set(prompts)) == len(prompts)


def test_answers_alone_are_demonstrations_where_nothing_else_is_wanted(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": f"{i}", "answer": i} for i in range(10)])
    assert count_rows(prepare(tmp_path / "a", file)) == {"train": 10}
    assert count_rows(prepare(tmp_path / "b", file, train=0)) == {"sft": 10}
    assert count_rows(prepare(tmp_path / "c", file, sft=4)) == {"train": 6, "sft": 4}


def test_all_demonstrations_of_a_prompt_are_kept_on_one_side(tmp_path: Path) -> None:
    """Forty prompts with four demonstrations each, one of them twice."""
    rows = [
        {"prompt": f"p{number // 5}", "completion": f"c{min(number % 5, 3)}"}
        for number in range(200)
    ]
    made = prepare(tmp_path / "a", write_rows(tmp_path / "x.jsonl", rows))
    sides = [{row["prompt"] for row in made[split]} for split in ("sft", "sft_eval")]
    assert sides[0].isdisjoint(sides[1]) and len(sides[0] | sides[1]) == 40
    for split in ("sft", "sft_eval"):
        for prompt in {row["prompt"] for row in made[split]}:
            found = sorted(row["completion"] for row in made[split] if row["prompt"] == prompt)
            assert found == ["c0", "c1", "c2", "c3"]
    assert len(made["sft_eval"]) >= 10
    assert Artifact(str(tmp_path / "a")).manifest.facts["dropped"] == {"repeated": 40}


def test_pairs_of_one_prompt_are_kept(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"p{number // 2}", "chosen": "good", "rejected": f"bad {number % 2}"}
        for number in range(100)
    ]
    made = prepare(tmp_path / "a", write_rows(tmp_path / "x.jsonl", rows))
    assert sum(count_rows(made).values()) == 100
    sides = [{row["prompt"] for row in made[s]} for s in ("preference", "preference_eval")]
    assert sides[0].isdisjoint(sides[1])


def test_an_answer_that_contradicts_an_earlier_one_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}]
    file = write_rows(tmp_path / "x.jsonl", [*rows, {"prompt": "b", "answer": "1"}, rows[0]])
    prepare(tmp_path / "a", file, sft=0, source_args={"shuffle": False})
    dropped = Artifact(str(tmp_path / "a")).manifest.facts["dropped"]
    assert dropped == {"repeated": 1, "conflicting": 1}
    assert "1 row with the prompt of an earlier row and another answer" in capsys.readouterr().err


def test_held_out_rows_of_another_file_are_never_trained(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "a.jsonl", [{"prompt": f"{i}", "answer": i} for i in range(9)])
    test = write_rows(tmp_path / "b.jsonl", [{"prompt": f"{i}", "answer": i} for i in range(7, 12)])
    made = prepare(tmp_path / "a", train, source_args={"eval": test})
    assert count_rows(made) == {"train": 7, "eval": 5}
    assert Artifact(str(tmp_path / "a")).manifest.facts["dropped"] == {"held_back": 2}


@pytest.mark.parametrize("sizes", [{}, {"sft_eval": 0, "preference_eval": 0}])
def test_a_held_out_file_takes_its_prompts_first(tmp_path: Path, sizes: dict[str, int]) -> None:
    rows = [{"prompt": f"{i}", "answer": f"{i}"} for i in range(77)]
    file = write_rows(tmp_path / "x.jsonl", rows)
    held_out = write_rows(tmp_path / "y.jsonl", rows[40:70])
    made = prepare(tmp_path / "a", file, source_args={"eval": held_out}, **sizes)
    assert count_rows(made) == {"train": 47, "eval": 30}
    assert not {row["prompt"] for row in made["train"]} & {row["prompt"] for row in made["eval"]}
    made = prepare(tmp_path / "b", file, source_args={"eval": file}, **sizes)
    assert count_rows(made) == {"eval": 77}


def test_rows_of_several_forms_go_where_they_belong(tmp_path: Path) -> None:
    """A file of prompts with their completions, where some have a gold answer."""
    rows = [
        {"prompt": f"p{i}", "completion": f"so {i}", **({"answer": f"so {i}"} if i % 2 else {})}
        for i in range(10)
    ]
    made = prepare(tmp_path / "a", write_rows(tmp_path / "x.jsonl", rows))
    assert count_rows(made) == {"train": 5, "sft": 10}


def test_bad_rows_are_dropped_up_to_the_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(build_chat(number)) for number in range(200)]
    lines[16] = '{"messages": ['
    lines[40] = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}'
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(lines))
    made = prepare(tmp_path / "a", str(file))
    assert count_rows(made) == {"sft": 188, "sft_eval": 10}
    log = capsys.readouterr().err
    assert "left out 2 rows that cannot be used: " in log
    reason = f"{file}:41: column 'messages': message 2 of the assistant has no content"
    assert reason in log
    bad = Artifact(str(tmp_path / "a")).manifest.facts["dropped"]["bad_rows"]
    assert bad["count"] == 2 and reason in bad["examples"]
    with pytest.raises(UserError, match=r"data.bad_rows: '2 of 200 rows': .*chats.jsonl:17"):
        prepare(tmp_path / "b", str(file), drop_at_most=0.005)
    with pytest.raises(UserError, match=r"leave them out \(data.bad_rows=drop\)"):
        prepare(tmp_path / "c", str(file), bad_rows="refuse")


def test_data_that_is_bad_all_over_stops_with_ten_examples(tmp_path: Path) -> None:
    good = [build_chat(number) for number in range(25)]
    bad = [{"messages": [{"role": "user", "content": 5}]}] * 3000
    file = write_rows(tmp_path / "x.jsonl", good + bad)
    with pytest.raises(UserError) as caught:
        prepare(tmp_path / "a", file)
    assert str(caught.value).count("x.jsonl:") == 10


def test_bad_rows_of_another_file_are_a_share_of_all_rows(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "x.jsonl", [{"prompt": f"{i}", "answer": "1"} for i in range(30)])
    bad = [{"messages": [{"role": "user", "content": 5}]}] * 11
    chats = [build_chat(number) for number in range(1200)]
    other = write_rows(tmp_path / "y.jsonl", chats + bad)
    made = prepare(tmp_path / "a", file, source_args={"sft": other}, sft_eval=0)
    assert len(made["sft"]) == 1200


def test_columns_name_what_no_layout_has(tmp_path: Path) -> None:
    about = {"gold": 4, "checks": ["assert f(1) == 4"]}
    rows = [{"ask": f"f{i}", "meta": json.dumps(about), "reply": "x = 4"} for i in range(3)]
    file = write_rows(tmp_path / "x.jsonl", rows)
    with pytest.raises(UserError, match=r"has the columns ask, meta, reply.*docs/extending.md"):
        prepare(tmp_path / "x", file)
    columns = {
        "prompt": "ask",
        "answer": "meta.gold",
        "completion": "reply",
        "metadata": {"tests": "meta.checks"},
    }
    made = prepare(tmp_path / "a", file, columns=columns, rewards={"numeric": 1.0})
    assert count_rows(made) == {"train": 3, "sft": 3}
    row = made["train"][0]
    assert row["answer"] == "4" and json.loads(row["metadata"])["tests"] == ["assert f(1) == 4"]
    columns["answer"] = "meta.silver"
    with pytest.raises(UserError, match=r"data.columns.answer: 'meta.silver': no such column"):
        prepare(tmp_path / "b", file, columns=columns)
    with pytest.raises(UserError, match=r"columns.promt: 'ask': unknown key"):
        prepare(tmp_path / "b", file, columns={"promt": "ask"})
    with pytest.raises(UserError, match=r"data.columns: .*is for files; digits makes its own rows"):
        prepare(tmp_path / "b", "digits", columns=columns)


def test_plain_text_stays_plain_for_a_chat_model(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "x.jsonl", [{"text": "Ada walked."}, {"text": "Ben walked."}])
    made = prepare(tmp_path / "a", file, chat=True, system="Be brief.")
    found = {(row["prompt"], row["completion"], row["chat"]) for row in made["sft"]}
    assert found == {("Ada", " walked.", False), ("Ben", " walked.", False)}


def test_prompts_that_the_default_reward_cannot_score_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}", "anwser": f"{i}"} for i in range(9)]
    file = write_rows(tmp_path / "x.jsonl", rows)
    with pytest.raises(UserError, match=r"^data.rewards: .*nothing is read from: anwser.*data.rew"):
        prepare(tmp_path / "a", file)
    assert count_rows(prepare(tmp_path / "b", file, columns={"answer": "anwser"}))
    assert count_rows(prepare(tmp_path / "c", file, rewards={"exact": 1.0})) == {"train": 9}
    asking = [{"messages": [{"role": "user", "content": "Why?"}]}]
    file = write_rows(tmp_path / "y.jsonl", [build_chat(number) for number in range(9)] + asking)
    assert count_rows(prepare(tmp_path / "d", file)) == {"sft": 9, "train": 1}


def test_answers_that_the_default_reward_rejects_ask_for_another(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1", "answer": f"{i + 1}", "how": f"It is {i + 1}"} for i in range(9)]
    file = write_rows(tmp_path / "x.jsonl", rows)
    columns = {"completion": "how"}
    with pytest.raises(UserError, match=r"; choose .*data.rewards=.*numeric.*, or correct them"):
        prepare(tmp_path / "a", file, columns=columns)
    with pytest.raises(UserError, match="; correct them"):
        prepare(tmp_path / "b", file, columns=columns, rewards={"exact": 1.0})
    assert prepare(tmp_path / "c", file, columns=columns, rewards={"numeric": 1.0})["train"]


def test_tools_are_in_every_part(tmp_path: Path) -> None:
    tools = [{"name": "get", "parameters": {"type": "object"}}]
    rows = [{**build_chat(number), "tools": tools} for number in range(3)]
    rows += [build_chat(9)]
    made = prepare(tmp_path / "a", write_rows(tmp_path / "x.jsonl", rows))
    found = [json.loads(row["tools"]) for row in made["sft"] if row["tools"] is not None]
    assert found == [[{"type": "function", "function": tools[0]}]] * 3
    rows = [{"prompt": "a", "answer": "b", "tools": tools}]
    made = prepare(tmp_path / "b", write_rows(tmp_path / "y.jsonl", rows))
    assert json.loads(made["train"][0]["metadata"])["tools"] == found[0]


def test_good_and_bad_completions_keep_their_tools(tmp_path: Path) -> None:
    tools = [{"name": "get", "parameters": {"type": "object"}}]
    good = {"prompt": "a", "completion": "b", "label": True, "tools": tools}
    bad = {"prompt": "a", "completion": "c", "label": False, "tools": tools}
    made = prepare(tmp_path / "a", write_rows(tmp_path / "x.jsonl", [good, bad]), preference=1)
    (pair,) = made["preference"]
    assert json.loads(pair["tools"]) == [{"type": "function", "function": tools[0]}]
    file = write_rows(tmp_path / "y.jsonl", [good, {**bad, "tools": None}])
    assert not prepare(tmp_path / "b", file)["preference"]


def test_a_conversation_has_one_system_message(tmp_path: Path) -> None:
    plain = build_chat(1)
    begun = [{"role": "system", "content": "Be kind."}, *build_chat(2)["messages"]]
    rows = [{**plain, "rule": "Be brief."}, {"messages": begun, "rule": "Be brief."}]
    file = write_rows(tmp_path / "x.jsonl", rows)
    made = prepare(tmp_path / "a", file, columns={"messages": "messages", "system": "rule"})
    heads = sorted(json.loads(row["prompt"])[0]["content"] for row in made["sft"])
    assert heads == ["Be brief.", "Be kind."]
    roles = [[message["role"] for message in json.loads(row["prompt"])] for row in made["sft"]]
    assert roles == [["system", "user", "assistant"]] * 2


def test_a_mixture_has_the_shares_of_its_weights(tmp_path: Path) -> None:
    chats = write_rows(tmp_path / "a.jsonl", [build_chat(number) for number in range(600)])
    pairs = [{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(600)]
    mixture = [
        {"source": chats, "weight": 3},
        {"source": write_rows(tmp_path / "b.jsonl", pairs), "weight": 1},
    ]
    made = prepare(tmp_path / "a", "digits", mixture=mixture)
    rows = made["sft"] + made["sft_eval"]
    whole = sum(row["completion"] is None for row in rows)
    assert 590 < whole <= 600 and 0.7 < whole / len(rows) < 0.8
    again = prepare(tmp_path / "b", "digits", mixture=mixture)
    assert again == made
    with pytest.raises(UserError, match=r"mixture.1.weight: -1"):
        prepare(tmp_path / "c", "digits", mixture=[mixture[0], {**mixture[1], "weight": -1}])


def test_a_mixture_follows_the_settings_of_all_files(tmp_path: Path) -> None:
    asked = [{"ask": f"a{i}", "reply": f"{i}"} for i in range(20)]
    trl = [{"prompt": f"b{i}", "completion": f"{i}"} for i in range(20)]
    held_out = [{"ask": f"c{i}", "reply": f"{i}"} for i in range(5)]
    mixture = [
        {"source": write_rows(tmp_path / "a.jsonl", asked)},
        {
            "source": write_rows(tmp_path / "b.jsonl", trl),
            "columns": {"prompt": "prompt", "answer": "completion"},
        },
    ]
    columns = {"prompt": "ask", "answer": "reply"}
    path = write_rows(tmp_path / "c.jsonl", held_out)
    made = prepare(
        tmp_path / "p", "digits", mixture=mixture, columns=columns, source_args={"eval": path}
    )
    assert {row["prompt"] for row in made["eval"]} == {f"c{i}" for i in range(5)}
    assert {row["prompt"][0] for row in made["train"]} == {"a", "b"}
    with pytest.raises(UserError, match="which has ask, reply; it needs question, answer"):
        prepare(tmp_path / "l", "digits", mixture=mixture, layout="gsm8k")


@pytest.mark.parametrize(
    "arguments",
    [
        {"path": "x.jsonl"},
        {"name": "main"},
        {"revision": "v1"},
        {"streaming": True},
        {"answers": "x.jsonl"},
        {"eval_split": "test"},
        {"sft_split": "test"},
        {"preference_split": "test"},
    ],
)
def test_arguments_of_one_source_are_refused_beside_a_mixture(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    ((name, _),) = arguments.items()
    with pytest.raises(
        UserError, match=rf"source_args\.{name}: .* cannot stand beside data.mixture"
    ):
        prepare(tmp_path, "digits", mixture=[{"source": "a.jsonl"}], source_args=arguments)


def score_costly(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """Score as `exact` does, where every call costs: of 32 answers it may be asked."""
    with Path(answer.partition("@")[2]).open("a") as file:
        file.write("called\n")
    return float(completion == answer)


COSTLY = True


def test_a_reward_whose_calls_cost_proves_a_sample(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    rows = [{"prompt": f"{i}", "answer": f"{i}@{calls}"} for i in range(200)]
    file = write_rows(tmp_path / "x.jsonl", rows)
    prepare(tmp_path / "a", file, rewards={f"{__name__}:score_costly": 1.0})
    assert len(calls.read_text().splitlines()) == 32
    assert Artifact(str(tmp_path / "a")).manifest.facts["unchecked"] == 200 - 32


def test_null_fields_that_are_left_out_are_counted(tmp_path: Path) -> None:
    calls = [{"name": "f", "arguments": {"a": "x"}}, {"name": "g", "arguments": {"b": "y"}}]
    rows = [
        {
            "messages": [
                *build_chat(number)["messages"][:1],
                {"role": "assistant", "tool_calls": [call]},
            ]
        }
        for number, call in enumerate(calls)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    made = prepare(tmp_path / "a", str(tmp_path / "x.parquet"))
    assert not any("null" in row["prompt"] for row in made["sft"])
    assert Artifact(str(tmp_path / "a")).manifest.facts["rows_with_null_fields"] == 2


def test_a_compressed_file_is_named_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(build_chat(1)).encode()))
    assert prepare(tmp_path / "a", str(file))["sft"][0]["row"] == f"{file}:1"
