"""Attack rewards and environments as a policy may; `tuneloop probe` prints what each attack gains.

The attacks are data, one file a class, in ``tuneloop/rewards/attacks``. Each is a completion; for an environment it is
a turn, and once more the argument of its tool. It gains if it scores more than the best wrong answer, and than guessing
among the answers that it names would (`chance`)."""

import json
import math
import os
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tuneloop import rewards as family
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.plugins import list_shipped_variants
from tuneloop.data import BadRow
from tuneloop.data.readers.json_files import index_lines
from tuneloop.inference.multi_turn import EpisodeOptions
from tuneloop.rewards.scoring import Escape, Outcome, find_reward, score_all

ATTACKS = Path(family.__file__).with_name("attacks")
WRONG = ("", "I do not know.", "The answer is -90417.")
ENDINGS = {
    "": "gained nothing",
    "t": "used up the judge's time",
    "e": "escape",
    "n": "no score",
    "g": "gained",
}
RANGE = (
    -math.inf,
    math.inf,
)  # of `play_turn`: without a least score, a turn that ends its process has none


class Trial(NamedTuple):
    """An attack on a reward or an environment, its end (of `ENDINGS`), and the most that wrong answers get."""

    target: str
    category: str
    name: str
    text: str
    outcome: Outcome
    ending: str
    wrong: float


def try_attacks(
    rewards: Sequence[str], environments: Sequence[str], data: Path | None, timeout_s: float
) -> list[Trial]:
    """Try all attacks on rewards and environments, by default those that ship, with the first row of `data`. Raises
    UserError where one does not exist, or cannot judge this row."""
    with (data or ATTACKS / "row.json").open("rb") as file:
        first = next(iter(index_lines(file, str(data))), None)
    if isinstance(first, BadRow):
        raise UserError("--data", first.row, first.reason)
    row = {} if first is None else dict(first.values)
    if "answer" not in row:
        raise UserError("--data", str(data), "must begin with a row that has the key answer")
    if not rewards and not environments:
        rewards = list_shipped_variants("rewards")
        environments = list_shipped_variants("environments")
    trials: list[Trial] = []
    for name in rewards:
        # Rewards of calls and choices have answers of their own form.
        own = {**row, "answer": row.get("answers", {}).get(name, row["answer"])}
        trials += _try_all("--reward", name, name, own, own, timeout_s)
    for name in environments:
        how = {
            "environment": name,
            "environment_args": row.get("environment_args", {}).get(name, {}),
        }
        metadata = {"how": how, "row": {"id": "probe", **row, "metadata": json.dumps(row)}}
        trials += _try_all("--environment", name, f"{__name__}:play_turn", row, metadata, timeout_s)
    return trials


def play_turn(completion: str, answer: str, metadata: JsonObject) -> float:
    """Score one turn in an environment by the reward of its reply."""
    reply = EpisodeOptions(**metadata["how"]).open_environment(metadata["row"]).step(completion)
    if reply.escape:
        raise Escape(reply.escape)
    return float(reply.reward or 0.0)


def count_endings(trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    """Count how attacks ended: the heads and the rows of a table, a class a row, a target a column."""
    counts = Counter((t.target, key, t.ending) for t in trials for key in (t.category, "all"))
    targets = list(dict.fromkeys(t.target for t in trials))
    keys = [*dict.fromkeys(t.category for t in trials), "all"]
    cells = {
        (k, t): [f"{counts[t, k, e]}{e}" for e in ENDINGS if counts[t, k, e]]
        for t in targets
        for k in keys
    }
    return ["class", *targets], [[k, *(" ".join(cells[k, t]) for t in targets)] for k in keys]


def load_attacks(row: JsonMapping) -> Iterator[tuple[str, str, str, float]]:
    """Load the class, name, text and chance of the attacks on a row, whose `prompt` and `answer` some of them say."""
    for path in sorted(ATTACKS.glob("*.toml")):
        for name, given in tomllib.loads(path.read_text())["attacks"].items():
            about = given if isinstance(given, dict) else {"text": given}
            text = about["text"] * about.get("times", 1) + about.get("close", "") * about.get(
                "times", 1
            )
            text = text.replace("{answer}", str(row["answer"])).replace(
                "{prompt}", str(row.get("prompt", ""))
            )
            yield path.stem, name, text, about.get("chance", 0.0)


def _try_all(
    field: str, target: str, reward: str, row: Any, metadata: Any, timeout_s: float
) -> Iterator[Trial]:
    attacks = list(load_attacks(row))
    for category, name, text, chance in tuple(attacks) if target != reward else ():
        call = json.dumps({"name": target, "arguments": {"code": text, "expression": text}})
        attacks.append((category, f"{name}, to the tool", f"<tool_call>{call}</tool_call>", chance))
    known = {
        "answer": str(row["answer"]),
        "metadata": json.dumps(metadata),
        "reward_spec": json.dumps({reward: 1.0}),
    }
    rows = [
        {**known, "completion": text} for text in (*WRONG, *(text for _, _, text, _ in attacks))
    ]
    outcomes = score_all(rows, timeout_s=timeout_s, workers=os.cpu_count() or 1, memory=2 << 30)
    wrong = [one.score for one in outcomes[: len(WRONG)] if one.score is not None]
    if len(wrong) < len(WRONG):
        said = next(one.breakdown[reward] for one in outcomes if one.score is None)
        raise UserError(
            field,
            target,
            f"does not judge a wrong answer ({said}); begin --data with a row that it can",
        )
    least = max(wrong)
    most = find_reward(reward).high
    for attack, outcome in zip(attacks, outcomes[len(WRONG) :]):
        guess = attack[3] * (most - least) if attack[3] and math.isfinite(most) else 0.0
        yield Trial(target, *attack[:3], outcome, _classify(outcome, least + guess), least)


def _classify(outcome: Outcome, allowed: float) -> str:
    if outcome.score is None:
        return "e" if outcome.outcome == "escape" else "n"
    ended = any(
        share for part, share in outcome.breakdown.items() if part.endswith((".timeout", ".crash"))
    )
    return "g" if outcome.score > allowed + 1e-9 else "t" if ended else ""
