"""Problems with answers that are numbers or formulas.

The reward `numeric` reads the answers as they stand in the data. A solution beside an answer has to
earn full marks from it (`rewards/proof.py`): where a data set's solutions need not, they are
demonstrations alone (`read_solved`, `read_openr1`).
"""

import re
from dataclasses import replace

from tuneloop.core.json_types import JsonObject
from tuneloop.data import BadValue, Example
from tuneloop.data.columns import get_path, read_answer, read_prompt
from tuneloop.data.layouts import Layout, Values
from tuneloop.data.layouts._parts import (
    find_boxed,
    get_answer,
    get_optional_text,
    get_text_of,
    get_value,
    parse_list,
)

NUMERIC = {"numeric": 1.0}
TRUTH = "reward_model.ground_truth"
"""Path of the answer in verl's layout."""
NO_ANSWERS = ("proof", "not found", "notfound", "none", "n/a")
"""What OpenR1-Math and NuminaMath write for problems that have no answer to compare with, in lower
case. Such rows are demonstrations alone. `rewards/numeric.py: NO_ANSWERS` is a list of its own:
what it alone has is an answer here, which that reward cannot judge, so the row counts as one of
``data.wrong_answers``."""


def read_gsm8k(values: Values) -> Example:
    """Read GSM8K: the answer follows ``####`` at the end of the worked solution."""
    solution = get_text_of(values, "answer")
    _, mark, answer = solution.rpartition("####")
    # GSM8K ends every solution so; without the mark a row is of another data set.
    if not mark or not answer.strip():
        raise BadValue("column 'answer' has no answer after ####")
    return Example(get_text_of(values, "question"), answer.strip(), solution)


def read_solved(values: Values) -> Example:
    r"""Read a problem with a worked solution: the answer is the column of that name, or what the
    last ``\boxed{}`` of the solution holds. A proof, which has neither, is a demonstration."""
    solution = get_text_of(values, "solution")
    answer = find_boxed(solution)
    if values.get("answer") not in (None, ""):
        answer = get_answer(values, "answer")
    if answer is not None and answer.strip().lower() in NO_ANSWERS:
        answer = None
    # A solution without a box earns no marks from the reward, though people can read its answer.
    has_proof = answer is not None and find_boxed(solution) is not None
    return Example(
        get_text_of(values, "problem"),
        answer,
        solution=solution if has_proof else None,
        demonstration=solution,
    )


def read_openr1(values: Values) -> Example:
    """Read OpenR1-Math: the demonstration is the first generation that was verified, else the
    worked solution."""
    example = read_solved(values)
    generations = values.get("generations") or []
    verdicts = values.get("correctness_math_verify") or []
    if not isinstance(generations, list):
        raise BadValue("column 'generations' must hold texts")
    if not all(isinstance(generation, str) for generation in generations):
        raise BadValue("column 'generations' must hold texts")
    # Null: the verifier gave up.
    if not isinstance(verdicts, list):
        raise BadValue("column 'correctness_math_verify' must hold true and false")
    if any(verdict not in (True, False, None) for verdict in verdicts):
        raise BadValue("column 'correctness_math_verify' must hold true and false")
    verified = (text for text, is_right in zip(generations, verdicts) if is_right is True)
    demonstration = next(verified, example.demonstration)
    return replace(example, solution=None, demonstration=demonstration)


def read_verl(values: Values) -> Example:
    """Read the layout of verl: a chat prompt, and the ground truth in a struct. A ground truth that
    is a JSON list (Skywork-OR1) has the answer as its first entry."""
    truth = get_path(values, TRUTH)
    if isinstance(truth, str) and truth.startswith("["):
        entries = parse_list(truth, TRUTH)
        if len(entries) != 1:
            raise BadValue(f"column {TRUTH!r} must hold one answer")
        truth = entries[0]
    answer = read_answer(truth, TRUTH)
    # What verl chooses a reward by, for a user's own reward.
    metadata = {"data_source": values.get("data_source")}
    return Example(read_prompt(values, "prompt"), answer, metadata=metadata)


def read_countdown(values: Values) -> Example:
    """Read Countdown: numbers and the target that they are to make; any equation that does earns
    full marks, so no answer is given."""
    numbers = parse_list(values.get("nums"), "nums")
    target = get_answer(values, "target")
    if not re.fullmatch(r"-?[0-9]+", target):
        raise BadValue("column 'target' must hold a whole number")
    # A boolean is an integer in Python.
    if not numbers or not all(type(number) is int for number in numbers):
        raise BadValue("column 'nums' must hold whole numbers")
    listed = ", ".join(map(str, numbers))
    prompt = (
        f"Using the numbers {listed}, create an expression that equals {target}. Use +, -, * "
        "and /, and each number exactly once. Answer with the expression alone."
    )
    entry = {"question": prompt, "metadata": {"numbers": numbers, "target": int(target)}}
    return _make_task("countdown", entry, None)


def read_reasoning_gym(values: Values) -> Example:
    """Read rows that reasoning_gym wrote: their verifier needs the task's name and the entry."""
    entry = {
        "question": get_text_of(values, "question"),
        "answer": values.get("answer"),
        "metadata": get_value(values, "metadata"),
    }
    task = get_text_of(values, "metadata.source_dataset")
    return _make_task(task, entry, get_answer(values, "answer"))


def _make_task(task: str, entry: JsonObject, answer: str | None) -> Example:
    """Make an example of an entry of reasoning_gym, which the verifier of `task` reads whole.

    `data/reasoning_gym.py` writes the same metadata, and `rewards/reasoning_gym.py` reads it.
    """
    metadata = {"reasoning_gym": {"task": task, "config": {}, "entry": entry}}
    return Example(entry["question"], answer, metadata=metadata)


def _is_gsm8k(values: Values) -> bool:
    return "####" in get_optional_text(values, "answer")


LAYOUTS = (
    Layout(
        name="gsm8k",
        title="GSM8K",
        columns=("question", "answer"),
        fits=_is_gsm8k,
        read=read_gsm8k,
        summary="prompt from question, answer after ####, demonstration from answer",
        rewards=NUMERIC,
    ),
    Layout(
        name="math",
        title="MATH",
        columns=("problem", "solution"),
        read=read_solved,
        summary="prompt from problem, answer from answer or \\boxed{}, demonstration from solution",
        rewards=NUMERIC,
    ),
    Layout(
        name="numina-math",
        title="NuminaMath",
        columns=("problem", "solution", "messages"),
        read=read_solved,
        summary="prompt from problem, answer from \\boxed{}, demonstration from solution",
        rewards=NUMERIC,
    ),
    Layout(
        name="openr1-math",
        title="OpenR1-Math",
        columns=("problem", "solution", "answer", "generations"),
        read=read_openr1,
        summary="prompt from problem, answer from answer, demonstration from generations",
        rewards=NUMERIC,
    ),
    Layout(
        name="verl",
        title="DAPO-Math or Skywork-OR1 (verl)",
        columns=("prompt", "reward_model.ground_truth"),
        types={"prompt": list},
        read=read_verl,
        summary="prompt from prompt, answer from reward_model.ground_truth",
        rewards=NUMERIC,
    ),
    Layout(
        name="countdown",
        title="Countdown",
        columns=("nums", "target"),
        types={"nums": list | str},
        read=read_countdown,
        summary="prompt from nums and target, judged by reasoning_gym",
        rewards={"reasoning_gym": 1.0},
    ),
    Layout(
        name="reasoning-gym",
        title="reasoning-gym",
        columns=("question", "answer", "metadata.source_dataset"),
        types={"metadata": dict},
        read=read_reasoning_gym,
        summary="prompt from question, answer from answer, judged by the task's own verifier",
        rewards={"reasoning_gym": 1.0},
    ),
)
