"""The collection of attacks, on rewards and environments that judge quickly; tests/local/test_probe.py has others."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tuneloop.cli import run_cli
from tuneloop.core.plugins import list_shipped_variants, load_variant
from tuneloop.inference.multi_turn import EpisodeOptions
from tuneloop.local import probe

GUESS = "tests.guess:create_environment"
ROW = {"answer": "42", "prompt": "How much is six times seven?"}
REWARDS = {
    "naive": "return float(answer in completion)",
    "hasty": "return float(int(completion) == int(answer))",
    "strict": "return float(completion.strip() == answer)",
}


def test_every_class_has_attacks_of_its_own() -> None:
    attacks = list(probe.load_attacks(ROW))
    assert len({text for _, _, text, _ in attacks}) == len(attacks) > 400
    assert min(Counter(category for category, *_ in attacks).values()) >= 12
    assert not any("{answer}" in text or "{prompt}" in text for _, _, text, _ in attacks)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of rewards, in which one works."""
    for name, body in REWARDS.items():
        (tmp_path / f"{name}_reward.py").write_text(
            f"def score(completion, answer, metadata):\n    {body}\n"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    return tmp_path


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("naive", 1, ["naive_reward:score: several_answers: ", ": 1, a wrong answer has 0; "]),
        ("hasty", 2, ["does not judge a wrong answer", "ValueError: invalid literal for int()", "--data"]),
        ("strict", 0, ["class", "several_answers"]),
    ],
)  # fmt: skip
def test_a_reward_of_ones_own(
    name: str, code: int, says: list[str], stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["probe", "--reward", f"{name}_reward:score"]) == code
    said = "".join(capsys.readouterr())
    assert all(words in said for words in says), said
    assert ("several_answers: " in said) == (code == 1)


@pytest.mark.parametrize(("answer", "code"), [("42", 0), ('"."', 1)])
def test_a_row_of_ones_own(
    answer: str, code: int, stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full stop is among the attacks."""
    (stranger / "rows.jsonl").write_text(f'{{"prompt": "?", "answer": {answer}}}\n')
    assert run_cli(["probe", "--reward", "strict_reward:score", "--data", "rows.jsonl"]) == code
    assert ("form_and_length: a short text: 1, " in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ("", [], "--data: 'rows.jsonl': must begin with a row that has the key answer"),
        (
            '{"prompt": "?"}\n',
            [],
            "--data: 'rows.jsonl': must begin with a row that has the key answer",
        ),
        ("7\n", [], "--data: 'rows.jsonl:1': is a number, not a JSON object"),
        (
            '{"answer": "7"}\n',
            ["--reward", "exactly"],
            "rewards: 'exactly': unknown; known: choice, code, ",
        ),
        (
            '{"answer": "7"}\n',
            ["--reward", "format"],
            "--reward: 'format': does not judge a wrong answer",
        ),
        (
            '{"answer": "x"}\n',
            ["--environment", GUESS],
            f"--environment: '{GUESS}': does not judge a wrong answer",
        ),
        ('{"answer": "7"}\n', ["--environment", "gues"], "unknown; known: calculator, python"),
    ],
)
def test_mistakes_are_one_line(
    text: str, words: list[str], says: str, stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stranger / "rows.jsonl").write_text(text)
    given = words or ["--reward", "exact"]
    assert run_cli(["probe", *given, "--data", "rows.jsonl"]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1, error


def find_endings(
    rewards: list[str], environments: list[str], timeout_s: float = 3.0
) -> dict[str, list[str]]:
    """What the attacks come to on the row that ships: ending → attacks."""
    endings: dict[str, list[str]] = {}
    for trial in probe.try_attacks(rewards, environments, None, timeout_s):
        endings.setdefault(trial.ending, []).append(
            f"{trial.category}: {trial.name}: {trial.outcome}"
        )
    return endings


@pytest.mark.parametrize(
    "name",
    [
        "exact",
        "format",
        "length_penalty",
        "environment",
        "reasoning_gym",
        "choice",
        "tool_calls",
        "json_schema",
    ],
)
def test_no_attack_gains_from_a_reward(name: str) -> None:
    endings = find_endings([name], [])
    assert endings.keys() == {""}, [endings.get(letter) for letter in "gnte"]


def test_environments_that_ship_say_where_their_tool_takes_what_the_policy_writes() -> None:
    for name in list_shipped_variants("environments"):
        environment = EpisodeOptions(environment=name).open_environment({"answer": "7"})
        tool, argument = load_variant("environments", name).TOOL
        call = json.dumps({"name": tool, "arguments": {argument: "1 + 1"}})
        reply = environment.step(f"<tool_call>{call}</tool_call>")
        assert not reply.done and "there is only" not in reply.text, reply.text


@pytest.mark.parametrize("name", [GUESS, "calculator"])
def test_no_attack_gains_in_an_environment(name: str) -> None:
    endings = find_endings([], [name])
    assert endings.keys() == {""}, [endings.get(letter) for letter in "gnte"]
