"""Problems with answers that are numbers or formulas."""

import re
from collections.abc import Mapping
from typing import Any

from tuneloop.data import BadValue, Example
from tuneloop.data.layouts import Layout, Values
from tuneloop.data.layouts._parts import (
    find_boxed,
    get_answer,
    get_optional_text,
    get_path,
    get_prompt,
    get_text_of,
    get_value,
    parse_list,
    read_answer,
)

NUMERIC = {"numeric": 1.0}
NO_ANSWERS = ("proof", "not found", "notfound", "none", "n/a")
"""What OpenR1-Math and NuminaMath write for problems that have no answer to compare with."""


def read_gsm8k(values: Values) -> Example:
    """Read GSM8K: the answer follows ``####`` at the end of the worked solution."""
    solution = get_text_of(values, "answer")
    _, mark, answer = solution.rpartition("####")
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
    problem = get_text_of(values, "problem")
    if answer is None:
        return Example(problem, None, demonstration=solution)
    is_boxed = find_boxed(solution) is not None
    return Example(problem, answer, solution if is_boxed else None, demonstration=solution)


def read_openr1(values: Values) -> Example:
    """Read OpenR1-Math: the demonstration is the first generation that was verified, else the
    worked solution."""
    example = read_solved(values)
    generations = values.get("generations") or []
    verdicts = values.get("correctness_math_verify") or []
    if not isinstance(generations, list) or not all(isinstance(t, str) for t in generations):
        raise BadValue("column 'generations' must hold texts")
    if not isinstance(verdicts, list) or not all(v in (True, False, None) for v in verdicts):
        raise BadValue("column 'correctness_math_verify' must hold true and false")
    verified = [text for text, is_right in zip(generations, verdicts) if is_right is True]
    demonstration = verified[0] if verified else example.demonstration
    return Example(example.prompt, example.answer, None, demonstration)


def read_verl(values: Values) -> Example:
    """Read the layout of verl: a chat prompt, and the ground truth in a struct. A ground truth that
    is a JSON list (Skywork-OR1) has the answer as its first entry."""
    truth: Any = get_path(values, "reward_model.ground_truth")
    if isinstance(truth, str) and truth.startswith("["):
        entries = parse_list(truth, "reward_model.ground_truth")
        if len(entries) != 1:
            raise BadValue("column 'reward_model.ground_truth' must hold one answer")
        truth = entries[0]
    answer = read_answer(truth, "reward_model.ground_truth")
    prompt = get_prompt(values, "prompt")
    return Example(prompt, answer, metadata={"data_source": values.get("data_source")})


def read_countdown(values: Values) -> Example:
    """Read Countdown: numbers and the target that they are to make; any equation that does earns
    full marks, so no answer is given."""
    numbers = parse_list(values.get("nums"), "nums")
    target = get_answer(values, "target")
    if not re.fullmatch(r"-?[0-9]+", target):
        raise BadValue("column 'target' must hold a whole number")
    if not numbers or not all(type(number) is int for number in numbers):
        raise BadValue("column 'nums' must hold whole numbers")
    listed = ", ".join(map(str, numbers))
    prompt = (
        f"Using the numbers {listed}, create an expression that equals {target}. Use +, -, * and /, "
        "and each number exactly once. Answer with the expression alone."
    )
    entry: Mapping[str, Any] = {
        "question": prompt,
        "metadata": {"numbers": numbers, "target": int(target)},
    }
    task = {"task": "countdown", "config": {}, "entry": entry}
    return Example(prompt, None, metadata={"reasoning_gym": task})


def read_reasoning_gym(values: Values) -> Example:
    """Read rows that reasoning_gym wrote: their verifier needs the task's name and the entry."""
    question = get_text_of(values, "question")
    metadata = get_value(values, "metadata")
    entry = {"question": question, "answer": values.get("answer"), "metadata": metadata}
    task = {"task": get_text_of(values, "metadata.source_dataset"), "config": {}, "entry": entry}
    answer = get_answer(values, "answer")
    return Example(question, answer, metadata={"reasoning_gym": task})


def _is_gsm8k(values: Values) -> bool:
    return "####" in get_optional_text(values, "answer")


def _has_messages(values: Values) -> bool:
    return isinstance(values.get("prompt"), list)


def _is_list_of_numbers(values: Values) -> bool:
    return isinstance(values.get("nums"), list | str)


def _has_metadata(values: Values) -> bool:
    return isinstance(values.get("metadata"), dict)


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
        fits=_has_messages,
        read=read_verl,
        summary="prompt from prompt, answer from reward_model.ground_truth",
        rewards=NUMERIC,
    ),
    Layout(
        name="countdown",
        title="Countdown",
        columns=("nums", "target"),
        fits=_is_list_of_numbers,
        read=read_countdown,
        summary="prompt from nums and target, judged by reasoning_gym",
        rewards={"reasoning_gym": 1.0},
    ),
    Layout(
        name="reasoning-gym",
        title="reasoning-gym",
        columns=("question", "answer", "metadata.source_dataset"),
        fits=_has_metadata,
        read=read_reasoning_gym,
        summary="prompt from question, answer from answer, judged by the task's own verifier",
        rewards={"reasoning_gym": 1.0},
    ),
)
