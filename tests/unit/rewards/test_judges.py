"""Judges that are away, have no room, answer nonsense, or fail for one completion."""

import dataclasses
import importlib.util
import json
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.rewards import judges
from tests.unit.rewards.judges import TOO_MANY, Judge, good, serve_judge
from tests.waiting import LIMIT_S
from tuneloop.core.artifacts import Draft
from tuneloop.core.errors import EXIT_USER, Interrupted, Retryable, UserError
from tuneloop.rewards import RewardUnavailable, outages
from tuneloop.rewards.error_budget import check_error_budget
from tuneloop.rewards.outages import compute_delay, find_outage
from tuneloop.rewards.registry import Call, find_reward
from tuneloop.rewards.score_record import ScoreRecord
from tuneloop.rewards.scoring import Outcome, score_all
from tuneloop.stages.reward import reward

ASK = "tests.unit.rewards.judges:ask_with_urllib"
CLIENTS = ["urllib", "httpx", "requests", "openai"]


@pytest.fixture
def judge() -> Iterator[Judge]:
    with serve_judge() as served:
        yield served


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pauses last milliseconds: how many there are, and what is said, is tested."""
    monkeypatch.setattr(outages, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(outages, "LONGEST_DELAY_S", 0.01)


def build_row(completion: str, name: str = ASK) -> dict[str, Any]:
    spec = json.dumps({name: 1.0})
    return {"completion": completion, "answer": "gold", "reward_spec": spec, "metadata": "{}"}


def score(rows: list[dict[str, Any]], **options: Any) -> list[Outcome]:
    return score_all(rows, timeout_s=60, **options)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", [429, 503])
def test_a_judge_without_room_is_asked_again_until_it_has(
    judge: Judge, client: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each unscored row counted against the budget, and the attempt ended with 75 after 4 tries."""
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"{client} is not installed here")
    refusals = 20
    judge.answer = lambda number, _: (status, {}, b"") if number <= refusals else good(0.25)
    name = f"tests.unit.rewards.judges:ask_with_{client}"
    (outcome,) = score([build_row("a", name)])
    assert (outcome.outcome, outcome.score) == ("score", 0.25)
    assert len(judge.questions) == refusals + 1
    printed = capfd.readouterr().err
    assert printed.count(" is away (") == 1 and str(status) in printed, printed
    assert " is back after " in printed


def test_a_judge_that_is_down_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_judge() as gone:
        port = int(gone.url.rpartition(":")[2].strip("/"))
        address = gone.url
    lines: list[str] = []
    waiting = threading.Event()

    def note(line: str, code: int) -> None:
        lines.append(line)
        waiting.set()

    monkeypatch.setattr(outages, "print_diagnostic", note)
    monkeypatch.setenv(judges.ADDRESS, address)
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.extend(score([build_row("a")])))
    thread.start()
    assert waiting.wait(LIMIT_S)
    with serve_judge(port):
        thread.join(LIMIT_S)
    assert [outcome.score for outcome in outcomes] == [0.5]
    assert "URLError" in lines[0] and "refused" in lines[0], lines


def test_a_stage_that_waits_for_a_judge_can_be_stopped(judge: Judge) -> None:
    judge.answer = lambda number, _: (429, {"Retry-After": "3000"}, b"")

    def stop(count: int) -> None:
        if judge.questions:
            raise Interrupted("asked to")

    with pytest.raises(Interrupted):
        score([build_row("a")], progress=stop)
    assert len(judge.questions) == 1, "it was asked again before the time that it had named"


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (500, b"", "HTTPError: HTTP Error 500: Internal Server Error"),
        (401, b"", "raised HTTPError: HTTP Error 401: Unauthorized"),
        (200, b"I cannot rate this.", "answered is no JSON: 'I cannot rate this.'"),
        (200, b'{"grade": 1}', "raised KeyError: 'score'"),
        (200, b'{"score": 7}', "returned 7.0, outside its RANGE [0, 1]"),
    ],
)
def test_what_a_judge_makes_of_one_completion_costs_that_row_alone(
    judge: Judge, status: int, body: bytes, reason: str
) -> None:
    """A completion that a judge cannot bear must not stop the run, by any number of tries."""
    judge.answer = lambda _, completion: (status, {}, body) if completion == "bad" else good()
    outcomes = score([build_row("a"), build_row("bad"), build_row("c")])
    assert [outcome.score for outcome in outcomes] == [0.5, None, 0.5]
    assert outcomes[1].outcome == "infra_error"
    assert reason in str(outcomes[1].breakdown[ASK])


def test_a_judge_that_fails_for_all_is_not_tried_four_times_for_each(judge: Judge) -> None:
    """A thousand rows would take hours before the attempt ends with the reason."""
    judge.answer = lambda number, _: (500, {}, b"")
    rows = [build_row(f"{number}") for number in range(9)]
    assert {outcome.outcome for outcome in score(rows)} == {"infra_error"}
    assert len(judge.questions) == outages.TRIES + 8
    judge.questions.clear()
    judge.answer = lambda _, completion: good() if completion == "4" else (500, {}, b"")
    score(rows)
    assert [judge.questions.count(f"{n}") for n in range(9)] == [4, 1, 1, 1, 1, 4, 1, 1, 1]


def test_a_reward_says_itself_that_it_is_away(
    judge: Judge, capfd: pytest.CaptureFixture[str]
) -> None:
    judge.answer = lambda number, _: (418, {}, b"") if number <= 8 else good()
    (outcome,) = score([build_row("a", "tests.unit.rewards.judges:ask_politely")])
    assert outcome.score == 0.5 and "(the queue is full)" in capfd.readouterr().err


def test_what_was_scored_is_not_asked_again(judge: Judge, tmp_path: Path) -> None:
    """Each attempt asked about the whole batch anew."""
    rows = [build_row(f"completion {number}") for number in range(12)]
    record = ScoreRecord()

    def stop(count: int) -> None:
        if count >= 7:
            raise Interrupted("asked to")

    with pytest.raises(Interrupted):
        score(rows, progress=stop, record=record)
    asked = len(judge.questions)
    assert len(record) >= 7
    record.write(tmp_path)
    again = ScoreRecord.read(tmp_path / "scores.jsonl")
    outcomes = score(rows, record=again)
    assert [outcome.score for outcome in outcomes] == [0.5] * 12
    assert len(judge.questions) - asked == 12 - len(record)
    # Other texts, another row and other code are other questions.
    changed = [build_row("another"), *rows[1:]]
    score(changed, record=again)
    assert judge.questions[-1] == "another"
    of_other_code = dataclasses.replace(find_reward(ASK), source="")
    assert again.find(Call(0, rows[0], find_reward(ASK), 1.0)) is not None
    assert again.find(Call(0, rows[0], of_other_code, 1.0)) is None


def test_failures_are_asked_about_again(judge: Judge) -> None:
    judge.answer = lambda number, _: (500, {}, b"")
    record = ScoreRecord()
    rows = [build_row("a")]
    assert score(rows, record=record)[0].score is None
    judge.answer = lambda number, _: good()
    assert score(rows, record=record)[0].score == 0.5


def commit(tmp_path: Path, completions: list[str], name: str = ASK) -> str:
    """Commit rollouts with these completions, judged by the reward `name`."""
    rows = [build_row(completion, name) | {"group": "g"} for completion in completions]
    draft = Draft(str(tmp_path / "rollouts"))
    pq.write_table(pa.Table.from_pylist(rows), draft.path / "rollouts.parquet")
    draft.commit(stage="rollout")
    return str(tmp_path / "rollouts")


def test_an_attempt_of_the_stage_goes_on_from_the_scores_of_the_one_before(
    judge: Judge, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    completions = [f"completion {number}" for number in range(10)]
    bad = {"completion 3", "completion 6"}
    judge.answer = lambda _, completion: (500, {}, b"") if completion in bad else good()
    rollouts = commit(tmp_path, completions)
    place = str(tmp_path / "rewards")
    with pytest.raises(Retryable, match=r"2 of 10 completions have no score.*HTTP Error 500"):
        reward(out=place, rollouts=rollouts, timeout_s=60)
    judge.questions.clear()
    judge.answer = lambda number, _: good()
    manifest = reward(out=place, rollouts=rollouts, timeout_s=60)
    assert set(judge.questions) == bad and manifest.results["mean_reward"] == 0.5
    assert "goes on with 8 scores of the attempt before" in capfd.readouterr().err
    assert not list((tmp_path / "rewards").glob("resume/*"))


@pytest.mark.parametrize(
    ("name", "body", "remedy"),
    [
        ("return_minus_one", b"", r"returned -1.0, outside its RANGE \[0, 1\].*say RANGE = \(LOW"),
        ("ask_with_urllib", b"I am sorry", r"is no JSON: 'I am sorry'.*RewardUnavailable"),
    ],
)
def test_the_budget_names_the_reward_the_value_and_the_remedy(
    judge: Judge, tmp_path: Path, name: str, body: bytes, remedy: str
) -> None:
    judge.answer = lambda number, _: (200, {}, body)
    dotted = f"tests.unit.rewards.judges:{name}"
    rollouts = commit(tmp_path, ["a", "b"], dotted)
    with pytest.raises(UserError, match=f"{dotted}: .*{remedy}") as raised:
        reward(out=str(tmp_path / "rewards"), rollouts=rollouts, timeout_s=60)
    assert raised.value.exit_code == EXIT_USER


def test_an_answer_of_the_data_that_is_no_json_is_a_fault_of_the_data() -> None:
    row = {"completion": "f()", "answer": "Paris", "reward_spec": '{"tool_calls": 1}'}
    outcomes = score_all([row | {"metadata": ""}], timeout_s=60)
    with pytest.raises(UserError, match=r"is no JSON list of calls.*correct the data or"):
        check_error_budget("reward", outcomes, 0.0)


class Answered(Exception):
    """An error as clients raise it, which carries an answer's headers."""

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status_code = status
        self.headers = headers
        super().__init__(f"status {status}")


def test_a_judge_says_when_it_wants_to_be_asked_again() -> None:
    """In seconds, as a date, or in milliseconds; what is none of these, and what is past, is left out."""
    now = time.time()
    for headers, low, high in (
        ({"Retry-After": "30"}, 30, 30),
        ({"retry-after": judges.format_date(90, now)}, 60, 90),
        ({"Retry-After": judges.format_date(-90, now)}, 0, 0),
        ({"retry-after-ms": "1500"}, 1.5, 1.5),
        ({"Retry-After": "-3"}, 0, 0),
    ):
        outage = find_outage(Answered(429, headers))
        assert outage and outage.is_away and outage.retry_after_s is not None
        assert low <= outage.retry_after_s <= high, headers
    for headers in ({}, {"Retry-After": "soon"}, {"Retry-After": "nan nan"}):
        outage = find_outage(Answered(429, headers))
        assert outage and outage.retry_after_s is None
    assert compute_delay(0, 30) == 30
    assert compute_delay(0, 1e9) == outages.LONGEST_RETRY_AFTER_S
    message = Message()
    message["Retry-After"] = "7"
    error = urllib.error.HTTPError("http://x", 503, "busy", message, None)
    outage = find_outage(error)
    assert outage and outage.retry_after_s == 7


def test_pauses_grow_and_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "FIRST_DELAY_S", 1.0)
    monkeypatch.setattr(outages, "LONGEST_DELAY_S", 60.0)
    for failures, longest in ((0, 1), (1, 2), (3, 8), (6, 60), (10**6, 60)):
        for _ in range(20):
            assert 0.75 * longest <= compute_delay(failures, None) <= longest


@pytest.mark.parametrize(
    ("error", "is_away"),
    [
        (RewardUnavailable(), True),
        (Answered(503, {}), True),
        (ConnectionRefusedError(111, "refused"), True),
        (urllib.error.URLError(ConnectionRefusedError(111, "refused")), True),
        (Answered(500, {}), False),
        (Answered(408, {}), False),
        (TimeoutError("timed out"), False),
        (ConnectionResetError(104, "reset"), False),
        (Answered(400, {}), None),
        (Answered(404, {}), None),
        (ValueError("a"), None),
        (FileNotFoundError("b"), None),
        (KeyError("connection"), None),
    ],
    ids=repr,
)
def test_which_errors_mean_that_a_judge_is_away(error: Exception, is_away: bool | None) -> None:
    wrapped: Callable[[], Exception] = lambda: RuntimeError("the judge failed")  # noqa: E731
    chained = wrapped()
    chained.__cause__ = error
    for raised in (error, chained):
        outage = find_outage(raised)
        assert (outage and outage.is_away) == is_away


def test_trusted_rewards_wait_as_well(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are called by the stage itself."""
    judge.answer = lambda number, _: TOO_MANY if number <= 3 else good()
    monkeypatch.setattr(judges.ask_with_urllib, "TRUSTED", True, raising=False)
    find_reward.cache_clear()
    assert score([build_row("a")])[0].score == 0.5
    find_reward.cache_clear()
