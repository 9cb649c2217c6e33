"""A gate that noise does not pass, beside the rule of opendatahub's `lora_grpo`: the last reward is above the first."""

import random
from statistics import mean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tuneloop.core.artifacts import Draft
from tuneloop.formats.rollouts import SAMPLES
from tuneloop.runs.cautions import FEWEST_ROWS
from tuneloop.runs.gain import compare_scores, read_scores

PROMPTS = 64
TRIES = 20


def sample(draw: random.Random, skills: dict[str, float], gain: float) -> dict[str, float]:
    """Score one completion of each prompt; a skill is the probability that it is right."""
    return {prompt: float(draw.random() < skill + gain) for prompt, skill in skills.items()}


def count_passes(gain: float) -> tuple[int, int]:
    """Return how many of `TRIES` trained policies pass the other rule, and ours."""
    above = 0
    certain = 0
    for seed in range(TRIES):
        draw = random.Random(seed)
        skills = {str(number): draw.uniform(0.1, 0.6) for number in range(PROMPTS)}
        before = sample(draw, skills, 0.0)
        after = sample(draw, skills, gain)
        above += mean(after.values()) > mean(before.values())
        certain += compare_scores(before, after).is_certain
    return above, certain


def test_noise_does_not_pass() -> None:
    """Training that changed nothing: the rule registers it as often as a coin would."""
    above, certain = count_passes(0.0)
    assert above >= TRIES // 3
    assert certain <= 2


def test_what_was_learned_passes() -> None:
    above, certain = count_passes(0.35)
    assert above == TRIES
    assert certain >= TRIES - 1


def test_prompts_are_paired() -> None:
    """A small gain on every prompt is certain, however much prompts differ."""
    before = {str(number): float(number) for number in range(FEWEST_ROWS)}
    after = {prompt: score + 0.1 for prompt, score in before.items()}
    gain = compare_scores(before, after)
    assert gain.bound == pytest.approx(0.1) and gain.is_certain
    shuffled = dict(zip(before, reversed(after.values())))
    assert not compare_scores(before, shuffled).is_certain
    assert not compare_scores(before, before).is_certain, "the same scores are no gain"


def test_few_prompts_say_nothing() -> None:
    before = {str(number): 0.0 for number in range(FEWEST_ROWS - 1)}
    gain = compare_scores(before, dict.fromkeys(before, 1.0))
    assert not gain.is_certain and str(gain).startswith("19 held-out prompts")
    # Only prompts that both were scored on count.
    assert compare_scores(before, {"another": 1.0}).prompts == 0


def test_scores_are_read_from_an_evaluation(tmp_path: object) -> None:
    url = f"file://{tmp_path}/evaluate"
    draft = Draft(url)
    rows = [{"id": "a", "score": 0.5}, {"id": "b", "score": None}]
    draft.path.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SAMPLES), draft.path / "samples.parquet")
    draft.commit(stage="evaluate", inputs={}, params={})
    assert read_scores(url) == {"a": 0.5}
