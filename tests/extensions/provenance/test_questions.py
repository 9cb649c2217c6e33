"""What a run says of how a version came to be, and of how else its rollouts could have been judged."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit import toy
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.stages.reward import reward

TEXTS = ["42", "41", "42", "7", "42", "42", "1", "2"]
"""Completions of two groups of four; the answer is 42."""


def judge(store: Path, iteration: int, texts: list[str]) -> str:
    """Commit rollouts, score them, and return the reference of the rollouts."""
    place, numbers = f"{store}/r/iterations/{iteration}", range(len(texts))
    draft = Draft(f"{place}/rollout")
    columns = {
        "request_id": [f"i{iteration:06d}-p{i // 4:05d}-s{i % 4:02d}" for i in numbers],
        "group": [f"p{i // 4}" for i in numbers],
        "id": [f"train-{i // 4}" for i in numbers],
        "prompt": [f"the answer ({i // 4})?" for i in numbers],
        "completion": texts,
        **{"answer": ["42"] * len(texts), "metadata": ["{}"] * len(texts)},
        "reward_spec": [json.dumps({"exact": 1.0})] * len(texts),
    }
    pq.write_table(pa.table(columns), draft.path / "rollouts.parquet")
    facts = {"version": iteration, "engine": "transformers", "sampling": {"temperature": 0.7}}
    draft.commit(stage="rollout", role="sampler", facts=facts, params={"seed": 5})
    reward(out=f"{place}/reward", rollouts=f"{place}/rollout")
    return Artifact(f"{place}/rollout").ref


def test_why_names_all_that_made_a_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = judge(tmp_path, 1, TEXTS)
    draft = Draft(f"{tmp_path}/r/iterations/1/policy-update")
    (draft.path / "model").mkdir()
    (draft.path / "model/w").touch()
    scores = Artifact(f"{tmp_path}/r/iterations/1/reward").ref
    draft.commit(
        stage="policy_update", role="trainer", facts={"version": 2}, inputs={"rewards": scores}
    )
    assert run_cli(["why", "r", "v2", "--store", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    names = [line.partition("@")[0] for line in said.splitlines() if not line.startswith(" ")]
    assert names == [f"iterations/1/{name}" for name in ("policy-update", "reward", "rollout")]
    assert rollouts.removeprefix("file://") in said
    for text in (
        "engine       transformers",
        '"temperature":0.7',
        '"seed":5',
        '"exact":0.5',
        "image        none (run out",
    ):
        assert text in said
    assert said.count("image        not recorded") == 2, "of the two that this test has written"
    assert "asked        train-0, train-1\n" in said
    assert run_cli(["why", "r", "1", "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out == said


def test_why_of_a_run_in_the_middle_of_an_iteration_and_of_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = toy.make(f"{tmp_path}/toy", iterations=1)
    toy.rollout(
        out=f"{tmp_path}/toy/iterations/2/rollout",
        policy=f"{tmp_path}/toy/iterations/1/policy-update",
    )
    assert run_cli(["why", "toy", "2", "--store", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("iterations/2/rollout@") and made["1/policy-update"].digest in said
    assert "reward@" not in said, "what made the policy is another question"
    for which in ("3", "v9", "None", "x"):
        assert run_cli(["why", "toy", which, "--store", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert (
            error.startswith(f"error: ITERATION|VERSION: '{which}': is not in toy")
            and error.count("\n") == 1
        )


def rescore(store: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    assert run_cli(["rescore", "r", "--store", str(store), *words]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_same_reward_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for iteration in (1, 2):
        judge(tmp_path, iteration, TEXTS)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    rows = rescore(tmp_path, capsys, "--reward", "exact")
    assert ["1", "0.500", "0.500", "0", "of", "8", "0", "of", "2"] in rows
    assert not any("→" in row for row in rows)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_another_reward_of_ones_own_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It likes what is not 42, and cannot judge 7: the order of the first group changes, as that of the second."""
    judge(tmp_path, 1, TEXTS)
    judge(tmp_path, 2, ["1", "2", "3", "4"])
    monkeypatch.chdir(tmp_path)
    verdict = "lambda completion, answer, metadata: None if completion == '7' else float(completion != answer)"
    (tmp_path / "my_contrary.py").write_text(f"score = {verdict}\n")
    rows = rescore(tmp_path, capsys, "--reward", "my_contrary:score", "--examples", "2")
    assert ["1", "0.500", "0.429", "8", "of", "8", "2", "of", "2"] in rows
    assert ["2", "0.000", "1.000", "4", "of", "4", "0", "of", "1"] in rows, "all alike under both"
    first, second = (row for row in rows if "→" in row)
    assert first[:4] == ["i000001-p00000-s03:", "0.0", "→", "None"], (
        "what has no score differs most"
    )
    assert " ".join(second).endswith("prompt 'the answer (0)?' completion '42' answer '42'")


def test_weights_are_taken_and_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge(tmp_path, 1, TEXTS)
    rows = rescore(tmp_path, capsys, "--reward", '{"exact": 0.5}')
    assert ["1", "0.500", "0.250", "4", "of", "8", "0", "of", "2"] in rows
    toy.make(f"{tmp_path}/toy", iterations=1)
    toy.sft(out=f"{tmp_path}/bare/sft")
    mistakes = {
        ("r", "nowhere"): "rewards: 'nowhere'",
        ("r", '{"exact": "x"}'): "rewards.exact: 'x'",
    }
    mistakes |= {("toy", "exact"): "has no group", ("bare", "exact"): "has no scored rollouts"}
    for (run, asked), says in mistakes.items():
        assert run_cli(["rescore", run, "--reward", asked, "--store", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert says in error and error.startswith("error: ") and error.count("\n") == 1


def test_why_without_a_version_explains_the_newest_and_lists_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.make(f"{tmp_path}/toy", 2)
    assert run_cli(["why", "toy", "--store", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("iterations/2/policy-update@")
    known = "it has the versions v1, v2, v3 and the iterations 1 to 2"
    assert output.err == f"v3, the newest: {known}\n\n"
    assert run_cli(["why", "toy", "v9", "--store", str(tmp_path)]) == 2
    assert known in capsys.readouterr().err


def test_why_lists_the_ends_of_a_long_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.make(f"{tmp_path}/toy", 9)
    assert run_cli(["why", "toy", "v99", "--store", str(tmp_path)]) == 2
    assert "it has the versions v1, v2, …, v10 and" in capsys.readouterr().err
