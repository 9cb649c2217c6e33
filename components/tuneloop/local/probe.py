"""Attack rewards and environments as a policy may; `tuneloop probe` prints what each attack gains.

The attacks are data, one file a class, in ``tuneloop/rewards/attacks``. Each is a completion; for
an environment it is a turn, and once more the argument of its tool. It gains if it scores more than
the best wrong answer, and more than guessing among the answers that it names would (`chance`).
"""

import json
import math
import os
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tuneloop import rewards as family
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.plugins import list_shipped_variants, load_variant
from tuneloop.data import BadRow
from tuneloop.data.readers.json_files import index_lines
from tuneloop.inference.multi_turn import EpisodeOptions
from tuneloop.rewards.scoring import Escape, Outcome, find_reward, score_all

ATTACKS = Path(family.__file__).with_name("attacks")
"""The attacks, and ``row.json``, on which they are tried by default. A reward or environment that
ships has to be able to judge this row: what only one of them needs is a key of the row
(``choices``), of its ``answers`` (another form of the answer, by reward) or ``environment_args``.
How many attacks there are stands in docs/commands.md and docs/training.md.
"""
WRONG = ("", "I do not know.", "The answer is -90417.")
ENDINGS = {
    "": "gained nothing",
    "t": "used up the judge's time",
    "e": "escape",
    "n": "no score",
    "g": "gained",
}
"""Letter → how an attack ended. The command fails at ``n`` and ``g`` (`cli/prove.py:
probe_rewards`); `_classify` chooses the letter by the outcome and the breakdown that
`rewards/scoring.py` gives.
"""
RANGE = (-math.inf, math.inf)
"""The range of `play_turn`, which `rewards/registry.py` reads by this name. A reward that crashes
gets the lowest score of its range; this range has none, so a crash is no score."""


class Attack(NamedTuple):
    """A completion that should gain nothing.

    It is read from an entry of a file in `ATTACKS`: a text, or a table with ``text``, ``times``,
    ``close`` and ``chance`` (`load_attacks`). Any other key is ignored.

    Attributes:
        category: its class: the name of the file that has it.
        chance: the share of the highest score that guessing among the answers it names would gain.
    """

    category: str
    name: str
    text: str
    chance: float


class Trial(NamedTuple):
    """An attack on a reward or an environment.

    Attributes:
        category, name, text: of the attack.
        ending: a key of `ENDINGS`.
        wrong: the most that wrong answers get.
    """

    target: str
    category: str
    name: str
    text: str
    outcome: Outcome
    ending: str
    wrong: float


def try_attacks(
    rewards: Sequence[str],
    environments: Sequence[str],
    data: Path | None,
    timeout_s: float,
) -> list[Trial]:
    """Try all attacks on rewards and environments, by default those that ship, with the first row
    of `data`.

    Raises UserError if one does not exist, or cannot judge this row.
    """
    row = _read_row(data)
    if not rewards and not environments:
        rewards = list_shipped_variants("rewards")
        environments = list_shipped_variants("environments")
    trials: list[Trial] = []
    for name in rewards:
        # Rewards of calls and choices have answers of their own form.
        reward_row = dict(row)
        reward_row["answer"] = row.get("answers", {}).get(name, row["answer"])
        trials += _try_all("--reward", name, name, reward_row, reward_row, timeout_s)
    for name in environments:
        episode = {"id": "probe"} | row
        episode["metadata"] = json.dumps(row)
        options = {
            "environment": name,
            "environment_args": row.get("environment_args", {}).get(name, {}),
        }
        metadata = {"how": options, "row": episode}
        trials += _try_all("--environment", name, f"{__name__}:play_turn", row, metadata, timeout_s)
    return trials


def _read_row(data: Path | None) -> JsonObject:
    """Read the first row of a file, by default of that which ships."""
    with (data or ATTACKS / "row.json").open("rb") as file:
        first = next(iter(index_lines(file, str(data))), None)
    if isinstance(first, BadRow):
        raise UserError("--data", first.row, first.reason)
    row = {} if first is None else dict(first.values)
    if "answer" not in row:
        raise UserError("--data", str(data), "must begin with a row that has the key answer")
    return row


def play_turn(completion: str, answer: str, metadata: JsonObject) -> float:
    """Score one turn in an environment by the reward of its reply.

    The process that judges finds it by its dotted path, as it finds any reward.
    """
    reply = EpisodeOptions(**metadata["how"]).open_environment(metadata["row"]).step(completion)
    if reply.escape:
        raise Escape(reply.escape)
    return float(reply.reward or 0.0)


def count_endings(trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    """Count how attacks ended.

    Returns:
        The heads and the rows of a table, a class a row, a target a column.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for trial in trials:
        counts[trial.target, trial.category, trial.ending] += 1
        counts[trial.target, "all", trial.ending] += 1
    # In the order of the trials, each once.
    targets = list(dict.fromkeys(trial.target for trial in trials))
    categories = list(dict.fromkeys(trial.category for trial in trials))
    rows: list[list[str]] = []
    categories.append("all")
    for category in categories:
        row = [category]
        for target in targets:
            numbers = {ending: counts[target, category, ending] for ending in ENDINGS}
            row.append(
                " ".join(f"{number}{ending}" for ending, number in numbers.items() if number)
            )
        rows.append(row)
    heads = ["class"]
    heads += targets
    return heads, rows


def load_attacks(row: JsonMapping) -> Iterator[Attack]:
    """Load the attacks on a row, whose `prompt` and `answer` some of them quote."""
    for path in sorted(ATTACKS.glob("*.toml")):
        for name, entry in tomllib.loads(path.read_text())["attacks"].items():
            attack = entry if isinstance(entry, dict) else {"text": entry}
            times = attack.get("times", 1)
            text = attack["text"] * times + attack.get("close", "") * times
            text = text.replace("{answer}", str(row["answer"]))
            text = text.replace("{prompt}", str(row.get("prompt", "")))
            yield Attack(path.stem, name, text, attack.get("chance", 0.0))


def _try_all(
    field: str,
    target: str,
    reward: str,
    row: JsonMapping,
    metadata: JsonMapping,
    timeout_s: float,
) -> Iterator[Trial]:
    """Try all attacks on one reward or environment.

    Args:
        field: the option that names it.
        target: its name.
        reward: the reward that judges: the target, or `play_turn`.
        row: has the answer.
        metadata: of the row, as the reward gets it.
    """
    attacks = list(load_attacks(row))
    # An environment's tool runs what the policy writes, in a sandbox of its own.
    is_environment = target != reward
    tool = _find_tool(target) if is_environment else None
    if tool is not None:
        name, argument = tool
        attacks += [_send_to_tool(attack, name, argument) for attack in attacks]
    rows = [
        {
            "answer": str(row["answer"]),
            "metadata": json.dumps(metadata),
            "reward_spec": json.dumps({reward: 1.0}),
            "completion": text,
        }
        # The wrong answers come first, and are taken apart below.
        for text in WRONG + tuple(attack.text for attack in attacks)
    ]
    outcomes = score_all(rows, timeout_s=timeout_s, workers=os.cpu_count() or 1, memory=2 << 30)
    wrong_scores: list[float] = []
    for outcome in outcomes[: len(WRONG)]:
        if outcome.score is None:
            problem = f"does not judge a wrong answer ({outcome.breakdown[reward]})"
            raise UserError(field, target, f"{problem}; begin --data with a row that it can")
        wrong_scores.append(outcome.score)
    if is_environment and tool is None:
        print(f"{target}: its module has no TOOL: no tool of it is attacked", file=sys.stderr)
    best_wrong = max(wrong_scores)
    highest = find_reward(reward).high
    for attack, outcome in zip(attacks, outcomes[len(WRONG) :]):
        # A reward without a highest score has no share of it.
        has_chance = attack.chance and math.isfinite(highest)
        guess = attack.chance * (highest - best_wrong) if has_chance else 0.0
        yield Trial(
            target,
            attack.category,
            attack.name,
            attack.text,
            outcome,
            _classify(outcome, best_wrong + guess),
            best_wrong,
        )


def _find_tool(environment: str) -> tuple[str, str] | None:
    """Find the name of an environment's tool, and the argument that holds what the policy writes.

    Its module states both as ``TOOL``.

    Returns:
        None if it does not: then only whole turns are attacked.
    """
    create = load_variant("environments", environment)
    module = create if isinstance(create, ModuleType) else sys.modules[create.__module__]
    tool: tuple[str, str] | None = vars(module).get("TOOL")
    return tool


def _send_to_tool(attack: Attack, tool: str, argument: str) -> Attack:
    """Return an attack as the argument of an environment's tool."""
    call = json.dumps({"name": tool, "arguments": {argument: attack.text}})
    return attack._replace(
        name=f"{attack.name}, to the tool",
        text=f"<tool_call>{call}</tool_call>",
    )


def _classify(outcome: Outcome, allowed: float) -> str:
    """Return the key of `ENDINGS` of an attack that may score `allowed`."""
    if outcome.score is None:
        return "e" if outcome.outcome == "escape" else "n"
    # Sums of weighted scores are rounded.
    if outcome.score > allowed + 1e-9:
        return "g"
    for part, share in outcome.breakdown.items():
        if share and part.endswith((".timeout", ".crash")):
            return "t"
    return ""
