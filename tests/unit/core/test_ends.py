"""One table of ends: what Argo's expression does, what the next attempt is told, and what the docs say."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.local.making import dag, named, run, shell, task
from tuneloop.config.loading import find_pipeline, list_pipelines
from tuneloop.core.attempts import ATTEMPT, LAST_END, MORE_MEMORY, admit_attempt, check_retried
from tuneloop.core.ends import (
    AWAY,
    AWAY_BUDGET,
    BUDGET,
    BUG,
    END_CLASSES,
    ENGINE,
    EVICTED,
    FOR_NOW,
    GAVE_UP,
    INTERRUPTION,
    KILL,
    MEMORY,
    MEMORY_BUDGET,
    MISTAKE,
    NOT_PROMOTED,
    REJECTED,
    RETRY_SERVER,
    RETRY_STAGE,
    RETRY_STEP,
    SUCCEEDED,
    EndClass,
    build_retry_expression,
    classify_end,
    cut_error,
    describe_exit,
    strip_exit,
)
from tuneloop.core.errors import (
    TERMINATION_LOG,
    Exhausted,
    UserError,
    write_termination_message,
)
from tuneloop.core.store import Store
from tuneloop.local.results import Result
from tuneloop.local.retries import _pause, _refusal
from tuneloop.workflow import expressions

DOCS = Path(__file__).parents[3] / "docs"
ENDS = [
    ("Succeeded", 0, "", SUCCEEDED),
    ("Failed", 2, "main: Error (exit code 2): error: sft.lr: 'x': is not a number", MISTAKE),
    (
        "Failed",
        3,
        "main: Error (exit code 3): not promoted: mean_reward: 0.4: is below 0.5",
        NOT_PROMOTED,
    ),
    (
        "Failed",
        75,
        "main: Error (exit code 75): interrupted: sft: stopped by a signal",
        INTERRUPTION,
    ),
    ("Failed", 75, "exit code 75: interrupted: sft: stopped by a signal", INTERRUPTION),
    ("Failed", 75, "exit code 75: unavailable: store: s3://b: error sending", AWAY),
    (
        "Failed",
        75,
        "main: Error (exit code 75): unavailable: rank 3: store: s3://b: error sending",
        AWAY,
    ),
    ("Failed", 75, "unavailable: turn 3 of group g was lost", AWAY),
    (
        "Failed",
        75,
        "exit code 75: failed for now: reward: 9 of 9, one said interrupted: no",
        FOR_NOW,
    ),
    ("Failed", 75, "main: Error (exit code 75)", FOR_NOW),
    ("Failed", 143, "main: Error (exit code 143)", INTERRUPTION),
    ("Error", -1, "pod deleted", EVICTED),
    ("Error", 137, "pod deleted", EVICTED),
    ("Error", 64, "wait: Error (exit code 64): path does not exist", ENGINE),
    ("Failed", -1, "Pod was rejected: Allocate failed due to no healthy devices present", REJECTED),
    ("Failed", 0, "Pod was rejected: UnexpectedAdmissionError", REJECTED),
    ("Failed", 137, "The node was low on resource: ephemeral-storage.", EVICTED),
    ("Error", 143, "init: Error (exit code 143)", EVICTED),
    ("Failed", 137, "main: OOMKilled (exit code 137)", MEMORY),
    ("Failed", 137, "main: Error (exit code 137)", KILL),
    ("Failed", 132, "exit code 132 (SIGILL, illegal instruction)", KILL),
    ("Failed", 139, "main: Error (exit code 139)", KILL),
    ("Failed", 70, "main: Error (exit code 70): gave up: 4 attempts", GAVE_UP),
    ("Failed", 1, "main: Error (exit code 1): bug: TypeError: x", BUG),
    ("Failed", 101, "main: Error (exit code 101)", BUG),
]


@pytest.mark.parametrize(("phase", "code", "message", "end"), ENDS)
def test_an_end_has_a_class_and_argo_does_what_the_class_says(
    phase: str, code: int, message: str, end: EndClass
) -> None:
    assert classify_end(phase, code, message) is end
    if end is SUCCEEDED:
        return
    last = last_retry(phase, code, message)
    assert expressions.evaluate_boolean(RETRY_STAGE, last) == end.is_retried
    assert expressions.evaluate_boolean(RETRY_SERVER, last) == (not end.ends_server)


def last_retry(phase: str, code: int, message: str) -> dict[str, str]:
    """The tags of a first attempt's end, for an expression."""
    return {
        "lastRetry.status": phase,
        # Argo passes on 0 for a pod that never had a container, and the expression reads -1.
        "lastRetry.exitCode": str(code or -1),
        "lastRetry.message": message,
        "retries": "0",
    }


RETRIED = [row for row in ENDS if row[3].is_retried]


@pytest.mark.parametrize(("phase", "code", "message", "end"), RETRIED)
def test_a_class_that_is_not_retried_is_started_by_nobody(
    phase: str, code: int, message: str, end: EndClass
) -> None:
    """Its field decides: in Argo's expression, or, where another class has its code, in the next attempt."""
    refused = replace(end, is_retried=False)
    classes = [refused if other is end else other for other in END_CLASSES]
    if expressions.evaluate_boolean(
        build_retry_expression(classes), last_retry(phase, code, message)
    ):
        with pytest.raises(Exhausted, match=end.name):
            check_retried(refused, code, f"{end.name}, {message}")
    check_retried(end, code, message)


@pytest.mark.parametrize(("phase", "code", "message", "end"), RETRIED)
def test_ends_use_up_the_budget_of_their_class(
    phase: str,
    code: int,
    message: str,
    end: EndClass,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(MORE_MEMORY, "8Gi")
    monkeypatch.setenv(LAST_END, f"{phase} {code} {message}")
    store = Store(str(tmp_path))
    limit = end.budget.limit if end.budget else 20
    for number in range(1, limit + 1):
        monkeypatch.setenv(ATTEMPT, str(number))
        admit_attempt(store)
    monkeypatch.setenv(ATTEMPT, str(limit + 1))
    if end.budget is None:
        admit_attempt(store)
    else:
        with pytest.raises((Exhausted, UserError)):
            admit_attempt(store)


def test_an_error_of_the_engine_ends_a_run_that_never_starts() -> None:
    last = {
        "lastRetry.status": "Error",
        "lastRetry.exitCode": "-1",
        "lastRetry.message": "InvalidImageName",
    }
    for expression in (RETRY_STAGE, RETRY_STEP, RETRY_SERVER):
        assert expressions.evaluate_boolean(expression, {**last, "retries": "19"})
        assert not expressions.evaluate_boolean(expression, {**last, "retries": "20"})
        assert expressions.evaluate_boolean(
            expression, {**last, "lastRetry.message": "pod deleted", "retries": "20"}
        )


def test_a_small_step_is_killed_three_times_at_most() -> None:
    last = {"lastRetry.status": "Failed", "lastRetry.exitCode": "137", "lastRetry.message": ""}
    assert expressions.evaluate_boolean(RETRY_STEP, {**last, "retries": "2"})
    assert not expressions.evaluate_boolean(RETRY_STEP, {**last, "retries": "3"})
    assert expressions.evaluate_boolean(
        RETRY_STEP, {**last, "lastRetry.exitCode": "75", "retries": "300"}
    )


def test_an_exit_code_is_named() -> None:
    assert describe_exit(132) == "exit code 132 (SIGILL, illegal instruction)"
    assert describe_exit(139) == "exit code 139 (SIGSEGV, invalid memory reference)"
    named_already = "exit code 75: unavailable: store"
    assert describe_exit(75, named_already) == named_already
    assert (
        describe_exit(139, "exit code 139") == "exit code 139 (SIGSEGV, invalid memory reference)"
    )
    assert [describe_exit(code) for code in (0, 1, 75, 128, 255)] == [
        f"exit code {c}" for c in (0, 1, 75, 128, 255)
    ]


def test_the_docs_have_the_table() -> None:
    lines = (DOCS / "ends.md").read_text().splitlines()
    begin = lines.index("| class | recognized by | started again |") + 2
    rows = [line.strip("| ").split(" | ") for line in lines[begin : begin + len(END_CLASSES)]]
    assert not lines[begin + len(END_CLASSES)]
    assert [row[0] for row in rows] == [end.name for end in END_CLASSES]
    rules = {
        None: "yes, always",
        BUDGET: "yes, within the budget",
        AWAY_BUDGET: f"yes, {AWAY_BUDGET.limit} times in a row without progress",
        MEMORY_BUDGET: "yes, once without progress",
    }
    for end, (_, recognized, rule) in zip(END_CLASSES, rows):
        words, _, remark = rule.partition("; ")
        expected = rules[end.budget] if end.is_retried else "no"
        if end.first_attempts is not None:
            expected += f", if it is among the first {end.first_attempts} attempts, whatever those"
            expected += " before ended by"
        assert words == expected
        # Of these the phase, or the kubelet's reason, tells more than the code.
        if end not in (EVICTED, MEMORY, REJECTED):
            codes = [int(code) for code in re.findall(r"\d+", recognized)]
            assert sorted(codes) == sorted(end.codes)
        assert remark or not end.ends_server
    assert len({end.name for end in END_CLASSES}) == len(END_CLASSES)


def strategies() -> dict[str, dict[str, Any]]:
    """Pipeline and template → retry strategy, of all that is rendered."""
    found = {}
    for name in list_pipelines():
        pipeline = find_pipeline(name)
        for template in pipeline.build(pipeline.configure(None, []))["spec"]["templates"]:
            if "retryStrategy" in template:
                found[f"{name}.{template['name']}"] = template["retryStrategy"]
    return found


def test_no_clock_ends_the_retries_of_what_is_rendered() -> None:
    found = strategies()
    assert len(found) > 10
    for name, strategy in found.items():
        assert strategy["backoff"] == {"duration": "10s"}, name


@pytest.mark.parametrize("hours", [24 * 7])
def test_a_week_with_a_preemption_an_hour(hours: int) -> None:
    """By the controller's own rules (``processNodeRetries``), which the local executor follows."""
    strategy = strategies()["sft_then_grpo.sft"]
    evicted = itertools.cycle([Result("Error", "pod deleted"), Result("Failed", exit_code=143)])
    for number, result in zip(range(hours), evicted):
        code = -1 if result.exit_code is None else result.exit_code
        last = {
            "lastRetry.status": result.phase,
            "lastRetry.exitCode": str(code),
            "retries": str(number),
        }
        last["lastRetry.message"] = result.message
        assert _refusal(strategy, last, result, number) is None, f"after {number + 1} preemptions"
        assert _pause(strategy["backoff"], number) == 10.0


def test_what_a_pod_is_told_of_the_attempt_before(tmp_path: Path) -> None:
    """Also of its termination message, which is what the node says."""
    strategy = {**strategies()["sft.sft"], "backoff": {"duration": "10ms"}}
    script = """
        echo "$TUNELOOP_LAST_END" >> /tmp/out/y
        case {{retries}} in
            0) echo 'unavailable: the store is away' > $TUNELOOP_TERMINATION_LOG; echo noise; exit 75;;
            1) kill -ILL $$$$;;
        esac
    """
    pod = shell("pod", script, outputs=("y",), retryStrategy=strategy)
    last = "{{lastRetry.status}} {{lastRetry.exitCode}} {{lastRetry.message}}"
    pod["container"]["env"] = [{"name": "TUNELOOP_LAST_END", "value": last}]
    outcome = run(tmp_path, pod, dag(task("t", "pod")))
    nodes = named(outcome)
    assert nodes["t(0)"].message == "exit code 75: unavailable: the store is away"
    assert nodes["t(1)"].message.startswith("exit code 132 (SIGILL, illegal instruction)")
    assert nodes["t(2)"].outputs["y"].startswith("Failed 132 exit code 132 (SIGILL")
    assert outcome.exit_code == 0


def test_a_message_keeps_no_tag_for_argo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = tmp_path / "words"
    words.touch()
    monkeypatch.setenv(TERMINATION_LOG, str(words))
    for braces in range(2, 7):
        write_termination_message(f"error: {'{' * braces}workflow.name{'}' * braces}")
        assert "{{" not in words.read_text() and "workflow.name" in words.read_text()


def test_what_a_rank_leaves_is_not_replaced_by_who_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tmp_path / "words"
    words.touch()
    monkeypatch.setenv(TERMINATION_LOG, str(words))
    write_termination_message("unavailable: another process of this stage has ended", replace=False)
    assert words.read_text().startswith("unavailable")
    write_termination_message("failed for now: rank 1: reward")
    write_termination_message("unavailable: another process of this stage has ended", replace=False)
    assert words.read_text() == "failed for now: rank 1: reward"


@pytest.mark.parametrize(
    ("message", "beginning"),
    [
        ("exit code 2: --skill: 2: unknown", "exit code 2"),
        ("Error (exit code 75): unavailable: store\nsecond line", "Error (exit code 75)"),
        ("exit code 139 (SIGSEGV, invalid memory reference): line", describe_exit(139)),
        ("pod deleted", "pod deleted"),
    ],
)
def test_a_message_is_the_exit_and_the_last_line(message: str, beginning: str) -> None:
    assert cut_error(message) == beginning
    if beginning != message:
        assert f"{beginning}: {strip_exit(message)}" == message
