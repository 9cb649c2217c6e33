"""Programs are judged by what they do, and what they can not do to the machine that judges them."""

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import UserError
from tuneloop.environments import python
from tuneloop.rewards import sandbox
from tuneloop.rewards.scoring import Outcome, score_all
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.reward import reward
from tuneloop.training.samples import read_samples

ADD = "def add(a, b):\n    return a + b\n"
CALL = {"call": "add(1, 2)", "returns": 3}
LIAR = """
class Yes:
    def __eq__(self, other): return True
    def __repr__(self): return "3 or True"
def add(a, b): return Yes()
"""
CLOSES_ALL = """
import os, time
for fd in (1, *range(3, 64)):
    try: os.close(fd)
    except OSError: pass
time.sleep(60)
"""
THREADS = """
import threading, time
while True: threading.Thread(target=time.sleep, args=(60,)).start()
"""
TOKENS = {
    "request_id": "r", "prompt_ids": [1], "completion_ids": [2], "logprobs": [-1.0], "loss_mask": [True],
    "policy_versions": [3], "finish_reason": "stop",
}  # fmt: skip
LIMITS = sandbox.Limits(8, 256 << 20, 1 << 16)
ANY = {"stdin": "", "stdout": "never"}


def judge(program: str, *tests: Any, **limits: float) -> Outcome:
    metadata = json.dumps({"tests": tests, "code": {"seconds": 8, **limits}})
    row = {
        "completion": program,
        "answer": "",
        "metadata": metadata,
        "reward_spec": '{"code": 1.0}',
    }
    return score_all([row], timeout_s=30)[0]


@pytest.mark.parametrize(
    ("program", "tests", "score"),
    [
        (ADD, [CALL, "assert add(2, 2) == 4", "assert 5 == add(2, 3)", "assert add([1], [2]) == [1, 2]"], 1.0),
        (f"My answer:\n```python\n{ADD}```\nDone.", [CALL], 1.0),
        (ADD, [CALL, {"call": "add(1, 2)", "returns": 4}], 0.5),
        ("print(int(input()) + 1)", [{"stdin": "1\n", "stdout": "2"}, {"stdin": "x", "stdout": ""}], 0.5),
        ("import threading as t\na = t.Thread(target=print, args=(7,)); a.start()", [{"stdout": "7"}], 1.0),
        (f"{ADD}\nimport sys; sys.exit(0)", [CALL], 0.0),
        (LIAR, [CALL], 0.0),
        ("def add(a, b): return '3'", [CALL], 0.0),
        ("not python at all", [CALL], 0.0),
    ],
)  # fmt: skip
def test_programs_that_behave(program: str, tests: list[Any], score: float) -> None:
    assert judge(program, *tests).score == score


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ([], "metadata has no tests; the reward code needs `tests`, "),
        ([{"call": "f()"}], "metadata['tests'][0] is no test: {'call': 'f()'}"),
        ([CALL, 7], "metadata['tests'][1] is no test: 7"),
        (["add(1, 2) =="], "metadata['tests'][0] is no test: 'add(1, 2) =='"),
        (["assert 1 / 0"], "the tests in metadata call no function of the program"),
    ],
)
def test_what_is_no_test_is_not_judged_and_the_reason_is_given(
    tests: list[Any], reason: str
) -> None:
    outcome = judge(ADD, *tests)
    assert outcome.outcome == "unverifiable"
    assert reason in str(outcome.breakdown["code"])


@pytest.mark.parametrize(
    ("program", "reason", "limits"),
    [
        ("while True: pass", "timeout", {"seconds": 1}),
        ("import time; time.sleep(60)", "timeout", {"seconds": 1}),
        (CLOSES_ALL, "timeout", {"seconds": 1}),
        ("x = [0] * 10**9", "memory", {}),
        ("while True: print('x' * 10**6)", "output", {}),
        ("1 / 0", "error", {}),
        (THREADS, "error", {}),
    ],
)  # fmt: skip
def test_what_a_program_uses_up(program: str, reason: str, limits: dict[str, float]) -> None:
    outcome = judge(program, ANY, **limits)
    assert (outcome.outcome, outcome.score, outcome.breakdown[f"code.{reason}"]) == (
        "score",
        0.0,
        1.0,
    )


FORGES = "import os\nfor f in range(3, 64):\n try: os.write(f, {text!r})\n except OSError: pass\n"


@pytest.mark.parametrize(
    "text", [b"x", b"\nrefused: no", b"\nresult 3", b"\nescape\n", b"\xff" * 100]
)
def test_a_program_cannot_forge_its_verdict(text: bytes) -> None:
    """It can write to the descriptor of the notes, but not over the line that says that it was run."""
    outcome = judge(FORGES.format(text=text) + "os._exit(0)", ANY)
    assert (outcome.outcome, outcome.score) == ("score", 0.0)
    call = json.dumps({"name": "python", "arguments": {"code": FORGES.format(text=text)}})
    reply = python.create_environment({}).step(f"<tool_call>{call}</tool_call>")
    assert not reply.escape and not reply.done


ATTACKS = {
    "socket": "import socket; socket.create_connection(('127.0.0.1', PORT))",
    "reads a secret": "try: print(open('SECRET').read())\nexcept BaseException: print('never')",
    "reads its judge's environment": "open('/proc/PARENT/environ', 'rb').read()",
    "lists": "import os; os.listdir('/')",
    "hides in relative paths": "open('../../../../../../SECRET')",
    "writes": "open('SECRET', 'w')",
    "removes": "import os; os.remove('SECRET')",
    "fork bomb": "import os\nwhile True: os.fork()",
    "runs a command": "import subprocess; subprocess.run(['cat', 'SECRET'])",
    "becomes a command": "import os; os.execv('/bin/sh', ['sh'])",
    "kills its judge": "import os; os.kill(os.getppid(), 9)",
    "kills everybody": "import os; os.kill(-1, 9)",
    "kills by a descriptor": "import fcntl; fcntl.fcntl(1, fcntl.F_SETOWN, PARENT)",
    "traces": "import ctypes; ctypes.CDLL(None).ptrace(16, PARENT, 0, 0)",
    "C's own open": "import __main__; __main__.libc.open(b'SECRET', 0)",
    "hidden memory": "import os; os.memfd_create('x')",
    "catches everything": "import signal, os\nsignal.signal(31, 1)\ntry: os.fork()\nfinally: print('never')",
}


@pytest.mark.parametrize("deed", ATTACKS)
def test_an_attempt_to_get_out_is_an_outcome_of_its_own(deed: str, tmp_path: Path) -> None:
    """A listener, a file and a variable that are really there; nothing reaches them, and the score is no 0."""
    secret = tmp_path / "token"
    secret.write_text("never")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        words = {"PORT": server.getsockname()[1], "SECRET": secret, "PARENT": os.getpid()}
        program = ATTACKS[deed]
        for word, value in words.items():
            program = program.replace(word, str(value))
        outcome = judge(program, ANY)
        assert (outcome.outcome, outcome.score) == ("escape", None), outcome
        with pytest.raises(BlockingIOError):
            server.accept()
    assert secret.read_text() == "never"


def test_no_program_runs_after_an_attempt_to_get_out(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[str] = []

    def run(program: str, *arguments: Any) -> Any:
        programs.append(program)
        return sandbox.run_in_sandbox(program, *arguments)

    monkeypatch.setattr(python, "run_in_sandbox", run)
    turn = ""
    for program in ("print(1)", "import os; os.listdir('/')", "print(2)"):
        call = json.dumps({"name": "python", "arguments": {"code": program}})
        turn += f"<tool_call>{call}</tool_call>"
    reply = python.create_environment({}).step(turn)
    assert reply.escape
    assert reply.done
    assert len(programs) == 2


def test_the_environment_is_empty_and_nothing_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "never")
    read, write = os.pipe()
    os.set_inheritable(write, True)
    program = f"import os\nprint(b'never' in b''.join(os.environb.values()), flush=True)\nos.write({write}, b'x')"
    ending = sandbox.run_program(program, "", None, LIMITS)
    os.close(read), os.close(write)
    assert (ending.kind, ending.stdout) == ("error", "False\n")


def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, put: str) -> None:
    """A jail with a line replaced."""
    jail = sandbox.JAIL.read_text()
    assert jail.count(line) == 1
    (tmp_path / "jail.py").write_text(jail.replace(line, put))
    shutil.copy(sandbox.JAIL.with_name("calls.json"), tmp_path)
    monkeypatch.setattr(sandbox, "JAIL", tmp_path / "jail.py")


@pytest.mark.parametrize(
    ("call", "end"), [("open", ("done", "-1\n")), ("getxattr", ("escape", ""))]
)
def test_the_kernel_guards_where_nobody_watches(
    call: str, end: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the hook: Landlock by itself keeps C's own open from a file, and seccomp other calls."""
    (tmp_path / "token").write_text("never")
    without(monkeypatch, tmp_path, "        watch_audit(notes, readable)", "")
    program = (
        f"import ctypes\nprint(ctypes.CDLL(None).{call}({str(tmp_path / 'token').encode()!r}, 0))"
    )
    ending = sandbox.run_program(program, "", None, LIMITS)
    assert (ending.kind, ending.stdout) == end


def test_a_program_that_can_not_be_shut_in_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that has no Landlock answers so."""
    without(
        monkeypatch,
        tmp_path,
        "CREATE_RULESET = 444",
        "CREATE_RULESET = 9999",
    )
    ran = tmp_path / "ran"
    with pytest.raises(
        OSError, match=r"could not be shut in and was not run: refused: .*not implemented"
    ):
        sandbox.run_program(f"open('{ran}', 'w')", "", None, LIMITS)
    assert not ran.exists()


def test_an_escape_is_kept_out_of_training_or_punished(tmp_path: Path) -> None:
    rows = [
        {
            **TOKENS,
            "completion": text,
            "answer": "",
            "reward_spec": '{"code": 1.0}',
            "metadata": metadata,
            "group": "g",
        }
        for metadata in [json.dumps({"tests": [CALL]})]
        for text in (ADD, "def add(a, b): return 0", "open('/etc/passwd')")
    ]
    draft = Draft(str(tmp_path / "r"))
    pq.write_table(pa.Table.from_pylist(rows), draft.path / "rollouts.parquet")
    draft.commit(stage="rollout", facts={"version": 3})
    given = {"rollouts": str(tmp_path / "r"), "timeout_s": 30}
    with pytest.raises(
        UserError,
        match=r"reward\.error_budget: 0\.05: 1 of 3 .*'escape': 1.*: open /etc/passwd.*escape_score",
    ):
        reward(out=str(tmp_path / "a"), **given)
    asked: Any = [
        ("b", {"error_budget": 0.5}, [1, 0, None]),
        ("c", {"escape_score": -1.0}, [1, 0, -1]),
    ]
    for place, options, scores in asked:
        reward(out=str(tmp_path / place), **given, **options)
        made = Artifact(str(tmp_path / place))
        table = pq.read_table(made.path / "rewards.parquet")
        assert (
            table["score"].to_pylist()
            == scores
            == [sample.score for sample in read_samples(made, 3, 0)]
        )
        assert table["outcome"].to_pylist() == ["score", "score", "escape"]
        assert made.manifest.facts["reward"]["outcomes"]["escape"] == 1
        assert made.manifest.facts["reward"]["breakdown"]["code"] == 0.5


def test_the_source_of_functions_passes_its_own_tests(tmp_path: Path) -> None:
    data_prep(
        out=str(tmp_path / "d"),
        source="functions",
        rewards={"code": 1.0},
        train=3,
        eval=2,
        sft=2,
        timeout_s=30,
    )
    assert Artifact(str(tmp_path / "d")).manifest.facts["rows"] == {"eval": 2, "sft": 2, "train": 3}


def test_harmless_programs_that_look_at_their_own_stack_are_not_escapes() -> None:
    program = "import traceback\ntraceback.print_stack()\nprint(3)"
    assert judge(program, {"stdin": "", "stdout": "3\n"}).score == 1.0


def test_a_budget_shorter_than_a_start_is_a_timeout_and_wrong_limits_are_not_judged() -> None:
    pair, test = "def pair(): return 1, 1", {"call": "pair()", "returns": [1, 1]}
    assert judge(pair, test).score == 1.0, "JSON has no tuples"
    assert judge(pair, test, seconds=0.001).breakdown["code.timeout"] == 1.0
    for limits in (
        {"second": 1},
        {"seconds": "4"},
        {"seconds": 0},
        {"memory_mb": -1},
        {"memory_mb": 8},
    ):
        assert judge(pair, test, **limits).outcome == "unverifiable"
