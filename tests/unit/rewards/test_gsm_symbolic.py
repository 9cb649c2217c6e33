"""Gold answers of reasoning_gym's `gsm_symbolic`, by its own verifier and by `numeric`."""

import itertools
import json

from tuneloop.data.reasoning_gym import load_splits
from tuneloop.rewards.numeric import write_answers
from tuneloop.rewards.scoring import score_all

ROWS = 300


def test_gold_answers_of_gsm_symbolic_earn_full_marks() -> None:
    stream = iter(load_splits(ROWS, 7, task="gsm_symbolic").train)
    examples = list(itertools.islice(stream, ROWS))
    rows = []
    for example in examples:
        assert example.answer is not None
        answer = example.answer
        common = {"answer": answer, "metadata": json.dumps(example.metadata)}
        gym = {**common, "reward_spec": '{"reasoning_gym": 1.0}'}
        numeric = {**common, "reward_spec": '{"numeric": 1.0}'}
        rows.append({**gym, "completion": answer})
        rows += [{**numeric, "completion": text} for text in [answer, *write_answers(answer, {})]]
        rows.append({**numeric, "completion": f"\\boxed{{{answer}1}}"})
    scores = [outcome.score for outcome in score_all(rows, timeout_s=60)]
    assert scores == [1.0, 1.0, 1.0, 1.0, 0.0] * ROWS
