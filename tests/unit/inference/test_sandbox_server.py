"""Programs of a policy in a sandbox elsewhere: the real server in a process of its own, and those that judge by it."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from hypothesis import given

from tests.unit.fuzzing import Memory, draw_bodies, run_examples
from tests.unit.inference.rollout_server import ROOT
from tests.unit.inference.test_client import reply
from tests.unit.inference.test_client import serving as answering
from tests.waiting import LIMIT_S, until
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.server_token import VARIABLE
from tuneloop.environments import python
from tuneloop.inference import sandbox_server
from tuneloop.rewards.sandbox import Limits, check_sandbox, run_in_sandbox
from tuneloop.rewards.scoring import Outcome, may_pass, score_all
from tuneloop.workflow.settings import SANDBOX_TOKEN, SANDBOX_VARIABLE

LIMITS = Limits(8, 256 << 20, 1 << 16)
BODY = {
    "program": "print(6 * 7)",
    "stdin": "",
    "call": "1 + 1",
    "seconds": 8,
    "memory": 256 << 20,
    "output": 4096,
}


@contextmanager
def serving(home: Path, *flags: str) -> Iterator[SimpleNamespace]:
    (token := home / "token").write_text("a-token\n")
    command = [sys.executable, "-m", "tuneloop.inference.sandbox_server", "--port", "0", *flags]
    env = {"PYTHONPATH": "components", VARIABLE: str(token)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env) as child:
        try:
            said = child.stderr.readline()
            url = re.search(r"http://\S+", said)[0]
            headers = {"Authorization": "Bearer a-token"}
            with httpx2.Client(base_url=url, headers=headers, timeout=LIMIT_S) as http:
                yield SimpleNamespace(child=child, url=url, http=http, token=token, said=said)
        finally:
            child.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    with serving(tmp_path_factory.mktemp("sandbox"), "--programs", "2") as made:
        memory = Memory(made.child.pid)
        made.note = memory.note
        yield made
        assert made.child.poll() is None, "it serves as before"
        if memory.notes:
            memory.check_growth("sandbox")


@pytest.fixture
def told(server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setenv(SANDBOX_VARIABLE, server.url)
    monkeypatch.setenv(SANDBOX_TOKEN, str(server.token))
    return server


def judge(program: str, timeout_s: float = 60, **limits: float) -> Outcome:
    metadata = json.dumps(
        {"tests": [{"stdin": "", "stdout": "42"}], "code": {"seconds": 8, **limits}}
    )
    row = {
        "completion": program,
        "answer": "",
        "metadata": metadata,
        "reward_spec": '{"code": 1.0}',
    }
    return score_all([row], timeout_s=timeout_s)[0]


@pytest.mark.parametrize(
    ("program", "kind", "about"),
    [
        ("print(6 * 7)", "done", {"stdout": "42\n", "result": "2"}),
        ("1 / 0", "error", {"error": "ZeroDivisionError: division by zero"}),
        ("x = '\ud800'", "error", {}),
        ("while True: pass", "timeout", {}),
        ("a = bytearray(1 << 30)", "memory", {}),
        ("while True: print('a' * 4096)", "output", {}),
        ("import socket; socket.socket()", "escape", {}),
        ("open('/etc/passwd').read()", "escape", {"door": "open /etc/passwd"}),
        (
            "#" * (1 << 24),
            "memory",
            {},
        ),  # a body that is too long: no mistake of who judges the policy
    ],
)
def test_an_ending_is_that_of_the_program(
    program: str, kind: str, about: dict[str, Any], told: SimpleNamespace
) -> None:
    ending = run_in_sandbox(
        program, "", "1 + 1", Limits(1 if kind == "timeout" else 8, 256 << 20, 1 << 16)
    )
    assert ending.kind == kind, ending
    assert {name: getattr(ending, name) for name in about} == about


def test_rewards_and_tools_run_programs_there_alone(
    told: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says whose child it is: in its sandbox, nobody else's than the server's."""
    ask = "import os; print(os.getppid())"
    assert int(run_in_sandbox(ask, "", None, LIMITS).stdout) == told.child.pid
    say = f"{ask}\nprint(42 if os.getppid() == {told.child.pid} else 0)".replace(
        "print(os.getppid())", ""
    )
    assert judge(say).score == 1.0
    assert judge("import socket; socket.socket()").outcome == "escape"
    assert judge("print(41)").score == 0.0
    call = json.dumps({"name": "python", "arguments": {"code": ask}})
    assert python.create_environment({}).step(f"<tool_call>{call}</tool_call>").text == str(
        told.child.pid
    )


def test_one_that_is_weaker_than_asked_for_runs_nothing(
    told: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        told.said.startswith("sandbox: process at")
        and told.http.get("/health").json()["isolation"] == "process"
    )
    assert told.http.post("/run", json=BODY).json()["isolation"] == "process"
    monkeypatch.setenv(SANDBOX_VARIABLE, f"{told.url}#process")
    assert run_in_sandbox("print(1)", "", None, LIMITS).kind == "done"
    monkeypatch.setenv(SANDBOX_VARIABLE, f"{told.url}#gvisor")
    with pytest.raises(
        UserError,
        match=r"TUNELOOP_SANDBOX: .*#gvisor.* answers 400.*proves only the isolation process",
    ):
        run_in_sandbox("print(1)", "", None, LIMITS)
    outcome = judge("print(42)")
    assert outcome.outcome == "infra_error" and "proves only the isolation process" in str(
        outcome.breakdown["code"]
    )


def test_a_kernel_log_is_gvisors_or_proves_nothing() -> None:
    """As gVisor writes its own (pkg/sentry/kernel/syslog.go), and this kernel its own, where everybody may read it."""
    gvisor = b"<6>[    0.000000] Starting gVisor...\n<6>[    0.353492] Digging up root...\n<6>[    4.1] Ready!\n"
    assert sandbox_server.read_isolation(gvisor) == "gvisor"
    for other in (
        b"",
        b"<5>[    0.000000] Linux version 6.18\n" + gvisor,
        b"<6>[  9.1] user: Starting gVisor... now\n",
    ):
        assert sandbox_server.read_isolation(other) == "process"
    assert sandbox_server.read_isolation(sandbox_server.read_kernel_log()) == "process"


@pytest.mark.parametrize(
    "where", ["gvisor", "https://", "ftp://a", "http://a#kata", "http://a/", "http://a b", ""]
)
def test_a_place_that_is_none_is_refused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SANDBOX_VARIABLE, where)
    with pytest.raises(UserError, match="must be process, or a URL"):
        check_sandbox("rewards", "code")


def test_without_the_token_nothing_is_run(
    told: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert httpx2.post(f"{told.url}/run", json=BODY).status_code == 401
    assert httpx2.get(f"{told.url}/health").status_code == 200
    wrong = told.token.with_name("wrong")
    wrong.write_text("another\n")
    monkeypatch.setattr("tuneloop.rewards.sandbox.CONNECT_S", 0.5)
    monkeypatch.setenv(SANDBOX_TOKEN, str(wrong))
    with pytest.raises(OSError, match="answers 401"):  # asked for a while: it may just be changing
        run_in_sandbox("print(1)", "", None, Limits(0.01, 256 << 20, 1 << 16))
    monkeypatch.delenv(SANDBOX_TOKEN)
    with pytest.raises(UserError, match=r"answers 401: .*no token"):
        run_in_sandbox("print(1)", "", None, Limits(0.01, 256 << 20, 1 << 16))


def test_a_token_file_that_is_gone_lets_nobody_in(told: SimpleNamespace) -> None:
    told.token.unlink()
    for headers in ({}, {"Authorization": "Bearer a-token"}):
        assert (
            httpx2.post(f"{told.url}/run", json=BODY, headers=headers, timeout=LIMIT_S).status_code
            == 401
        )
    told.token.write_text("a-token\n")
    assert told.http.post("/run", json=BODY).status_code == 200


def test_a_server_for_others_has_a_token() -> None:
    command = [
        sys.executable,
        "-m",
        "tuneloop.inference.sandbox_server",
        "--host",
        "0.0.0.0",
        "--port",
        "0",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": "components"}
    )
    assert (
        done.returncode == 2
        and "TUNELOOP_TOKEN_FILE: None: must name a file with a token" in done.stderr
    )


def test_a_service_that_is_away_is_the_hosts_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SANDBOX_VARIABLE, "http://127.0.0.1:1")
    monkeypatch.setattr("tuneloop.rewards.sandbox.CONNECT_S", 0.5)
    assert judge("print(42)", seconds=0.01).outcome == "infra_error"
    call = json.dumps({"name": "python", "arguments": {"code": "print(1)"}})
    with pytest.raises(Retryable, match="the sandbox answers 503"):
        python.create_environment({}, seconds=0.01).step(f"<tool_call>{call}</tool_call>")


ENDING = {"kind": "done", "stdout": "42\n", "result": None, "door": "", "error": "", "seconds": 0.1}


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"ok", b"\xff", b"[]", b"{}", b"[" * 4000, b'{"ending": 3}', b'{"ending": {"kind": "done"}}',
        *(json.dumps({"ending": ENDING | wrong}).encode() for wrong in (
            {"kind": "fine"}, {"kind": ["done"]}, {"stdout": 3}, {"stdout": None}, {"result": 2}, {"door": {}},
            {"error": []}, {"seconds": "1"}, {"seconds": -1}, {"seconds": float("nan")}, {"seconds": float("inf")},
        )),
    ],
)  # fmt: skip
def test_an_answer_that_is_malformed_is_the_hosts_fault(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(handler: BaseHTTPRequestHandler, _: int) -> None:
        reply(handler, 200)
        handler.wfile.write(answer)

    with answering(send) as url:
        monkeypatch.setenv(SANDBOX_VARIABLE, url)
        with pytest.raises(OSError, match="not an ending of a program"):
            run_in_sandbox("print(42)", "", None, LIMITS)
        outcome = judge("print(42)")
        assert (outcome.outcome, outcome.score) == ("infra_error", None), outcome
        assert "not an ending" in str(outcome.breakdown["code"]) and may_pass(outcome)


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_refusal_that_may_pass_is_asked_again(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"ending": ENDING, "isolation": "process"}
    with answering(
        lambda h, n: reply(h, *((status, {"error": "busy"}) if n < 2 else (200, said)))
    ) as url:
        monkeypatch.setenv(SANDBOX_VARIABLE, url)
        assert run_in_sandbox("print(42)", "", None, LIMITS).stdout == "42\n"


@pytest.mark.parametrize("status", [400, 403, 404])
def test_a_refusal_that_stays_is_the_users_mistake(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(lambda h, _: reply(h, status, {"error": "no"})) as url:
        monkeypatch.setenv(SANDBOX_VARIABLE, url)
        with pytest.raises(UserError, match=f"answers {status}"):
            run_in_sandbox("print(42)", "", None, LIMITS)


def test_a_program_that_waits_for_its_turn_is_not_late(told: SimpleNamespace) -> None:
    """Behind four that sleep for 5 s where two run at a time, for a judge that gives each 8 s: it has its score."""
    with ThreadPoolExecutor(4) as pool:
        sleeper = "import time; time.sleep(60)", "", None, Limits(5, 256 << 20, 4096)
        others = [pool.submit(run_in_sandbox, *sleeper) for _ in range(4)]
        outcome = judge("print(42)", timeout_s=8)
        assert [other.result().kind for other in others] == ["timeout"] * 4
    assert (outcome.outcome, outcome.score) == ("score", 1.0), outcome


def test_more_than_may_wait_are_told_to_ask_again_and_accepted_ones_are_answered_at_the_end(
    tmp_path: Path,
) -> None:
    """Of eight at once, one runs and four wait when it is told to end."""
    sleep = {**BODY, "program": "import time; time.sleep(3); print(42)", "call": None}
    with serving(tmp_path, "--programs", "1") as server, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(server.http.post, "/run", json=sleep) for _ in range(8)]
        until(lambda: sum(each.done() for each in asked) == 3)
        server.child.send_signal(signal.SIGTERM)
        answers = [each.result(LIMIT_S) for each in asked]
        assert sorted(answer.status_code for answer in answers) == [200] * 5 + [503] * 3
        assert all(a.json()["ending"]["stdout"] == "42\n" for a in answers if a.status_code == 200)
        assert all("try again" in a.json()["error"] for a in answers if a.status_code == 503)
        assert server.child.wait(LIMIT_S) == 0


@pytest.mark.parametrize("name", ["seconds", "memory", "output", "program", "isolation"])
def test_a_value_without_a_limit_is_refused_by_its_name(name: str, server: SimpleNamespace) -> None:
    for value in (-1, 10**30, None, []):
        answer = server.http.post("/run", json={**BODY, name: value})
        assert answer.status_code == 400 and answer.json()["error"].startswith(f"{name}: "), (
            answer.text
        )


@pytest.mark.parametrize(
    "name", ["seconds", "isolation", "x" * 10**6], ids=["number", "choice", "key"]
)
def test_a_refusal_has_a_part_of_a_long_value_and_its_length(
    name: str, server: SimpleNamespace
) -> None:
    answer = server.http.post("/run", json={**BODY, name: "x" * 10**6})
    told = answer.json()["error"]
    assert answer.status_code == 400 and told.startswith(f"{name[:99]}"), told
    assert "'xxxxx" in told and "… (1000002 characters) …xxx" in told and len(told) < 700, told


def test_a_body_that_is_long_by_more_than_its_texts_is_not_parsed(server: SimpleNamespace) -> None:
    """As 16 MiB, parsing it and saying what is wrong would keep all others waiting for most of a second."""
    whole = json.dumps(BODY).encode()
    endless = b'{"program": "' + b'\\"' * 2**20
    bodies = [b"", b"1", b"{", b"\xff", b"[" * 511, endless]
    for unit in (b"0,", b"[],", b"[", b'{"":0},', b'"",', b'"a":0,', b"0", b" "):
        bodies += [
            unit * 1000,
            b'{"program": [' + unit * 1000 + whole[1:],
            whole[:-1] + b"," + unit * 1000 + b"}",
        ]
    for body in bodies:
        answer = server.http.post("/run", content=body)
        assert answer.status_code == 400 and answer.json()["error"].startswith("body: "), (
            body[:50],
            answer.text,
        )
    deep = server.http.post("/run", json={**BODY, "program": json.loads("[" * 150 + "]" * 150)})
    assert deep.status_code == 400 and deep.json()["error"].startswith("program: "), deep.text
    long = server.http.post(
        "/run", json={**BODY, "program": "print(len('" + '[{,"' * 2**20 + "'))", "call": None}
    )
    assert long.json()["ending"]["stdout"] == f"{2**22}\n", long.text


@pytest.mark.parametrize("memory", [True, 1, 8 << 20])
def test_memory_in_which_python_does_not_start_is_refused_by_its_name(
    server: SimpleNamespace, memory: object
) -> None:
    answer = server.http.post("/run", json={**BODY, "memory": memory})
    assert answer.status_code == 400 and answer.json()["error"].startswith("memory: "), answer.text


def test_input_that_is_no_text_is_refused_by_its_name(server: SimpleNamespace) -> None:
    answer = server.http.post("/run", content=json.dumps({**BODY, "stdin": "a\ud800"}))
    assert answer.status_code == 400 and answer.json()["error"].startswith("stdin: "), answer.text


def test_fuzz_every_body_has_an_answer_that_is_named(server: SimpleNamespace) -> None:
    @given(draw_bodies([{**BODY, "isolation": "process"}]))
    def check(body: dict[str, Any]) -> None:
        answer = server.http.post("/run", content=json.dumps(body))
        assert answer.status_code in {200, 400}, (answer.status_code, answer.text)
        assert set(answer.json()) in ({"error"}, {"isolation", "ending"})
        server.note()

    run_examples(check)
