"""Processes of a run: daemons, signals, and what is left when the executor is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.local.making import Template, dag, given, named, run, shell, task, workflow
from tests.waiting import LIMIT_S, free_port, until
from tuneloop.core.errors import UserError
from tuneloop.local import journal
from tuneloop.local.executor import _list_warm_kinds
from tuneloop.local.processes import WARM, Launcher, Process, base_environment
from tuneloop.local.warm import is_compatible, is_server, is_stage
from tuneloop.runs.run_record import Run

OK = shell("ok", "true")
ROOT = Path(__file__).parents[3]


def server(port: int, probe: dict[str, Any], **more: Any) -> Template:
    """An HTTP server that takes a moment to be ready; asked for /end it ends."""
    source = textwrap.dedent(
        f"""
        import http.server, os, time
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/end":
                    os._exit(9)
                self.send_response(200); self.end_headers(); self.wfile.write(b"%d" % os.getpid())
        time.sleep(0.3)
        http.server.HTTPServer((os.environ.get("POD_IP", "127.0.0.1"), {port}), Handler).serve_forever()
        """
    )
    ports = [{"name": "http", "containerPort": port}]
    container = {
        "image": "none",
        "command": ["python", "-c", source],
        "readinessProbe": probe,
        "ports": ports,
    }
    return {"name": "serve", "daemon": True, "container": container, **more}


def ask(port: int, path: str = "/") -> Template:
    """Writes what the server at ``ip`` answers."""
    source = f"""
        import time, urllib.request
        for attempt in range(6000):
            try:
                answer = urllib.request.urlopen("http://{{{{inputs.parameters.ip}}}}:{port}{path}").read().decode()
                break
            except OSError:
                if {path!r} == "/end":
                    answer = "ended"
                    break
                time.sleep(0.1)
        open("/tmp/out/y", "w").write(answer)
    """
    container = {"image": "none", "command": ["python", "-c", textwrap.dedent(source)]}
    outputs = {"parameters": [{"name": "y", "valueFrom": {"path": "/tmp/out/y"}}]}
    return {
        "name": "ask" + path.strip("/"),
        "inputs": {"parameters": [{"name": "ip"}]},
        "outputs": outputs,
        "container": container,
    }


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (
        FileNotFoundError,
        ProcessLookupError,
    ):  # the latter where it ends between opening and reading
        return True


IP = given(ip="{{tasks.serve.ip}}")


def test_a_daemon_serves_until_its_graph_ends(tmp_path: Path) -> None:
    port = free_port()
    probe = {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": 1,
        "timeoutSeconds": 60,
    }
    inner = dag(
        task("serve", "serve"), task("ask", "ask", depends="serve", arguments=IP), name="inner"
    )
    outcome = run(
        tmp_path,
        server(port, probe),
        ask(port),
        OK,
        inner,
        dag(task("i", "inner"), task("o", "ok", depends="i")),
    )
    nodes = named(outcome)
    assert outcome.phase == "Succeeded"
    assert gone(int(nodes["i.ask"].outputs["y"]))
    assert (nodes["i.serve"].phase, nodes["i.serve"].daemoned) == ("Succeeded", True)
    assert nodes["i.serve"].finished <= nodes["o"].started


def test_servers_of_one_template_listen_at_one_port_of_addresses_of_their_own(
    tmp_path: Path,
) -> None:
    port = free_port()
    serve = server(
        port, {"httpGet": {"port": port}}, retryStrategy={"limit": 1, "retryPolicy": "Always"}
    )
    serve["container"]["env"] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    ]
    tasks, before = [task("serve-1", "serve"), task("serve-2", "serve")], "serve-1 && serve-2"
    for name, template in (("first", "ask"), ("end", "askend"), ("again", "ask")):
        for i in (1, 2):
            tasks.append(
                task(
                    f"{name}-{i}",
                    template,
                    depends=before,
                    arguments=given(ip=f"{{{{tasks.serve-{i}.ip}}}}"),
                )
            )
        before = f"serve-1 && serve-2 && {name}-1 && {name}-2"
    nodes = named(run(tmp_path, serve, ask(port), ask(port, "/end"), dag(*tasks)))
    answers = {
        name: node.outputs["y"]
        for name, node in nodes.items()
        if name.startswith(("first", "again"))
    }
    assert len({*answers.values()}) == 4, (
        "two processes, and after their ends two others at the same addresses"
    )
    assert {nodes[f"first-{i}"].inputs["ip"] for i in (1, 2)} == {"127.0.0.1", "127.0.0.2"}


def test_a_daemon_that_ends_is_started_again(tmp_path: Path) -> None:
    port = free_port()
    serve = server(
        port, {"httpGet": {"port": port}}, retryStrategy={"limit": 1, "retryPolicy": "Always"}
    )
    tasks = (
        task("serve", "serve"),
        task("first", "ask", depends="serve", arguments=IP),
        task("end", "askend", depends="first", arguments=IP),
        task("second", "ask", depends="end", arguments=IP),
        task("ready", "ready", depends="second"),
    )
    # It may answer before the executor has seen that it is ready; one that ends before that was never a daemon.
    seen = f'grep -F \'"name": "w.serve(1)"\' {tmp_path}/nodes.jsonl | grep -q \'"daemoned": true\''
    ready = shell("ready", f"until {seen}; do sleep 0.05; done")
    nodes = named(run(tmp_path, serve, ask(port), ask(port, "/end"), ready, dag(*tasks)))
    assert nodes["first"].outputs != nodes["second"].outputs
    assert (nodes["serve(0)"].phase, nodes["serve(0)"].exit_code) == ("Failed", 9)
    assert (nodes["serve(1)"].phase, nodes["serve"].phase) == ("Succeeded", "Succeeded")


def test_a_daemon_that_never_gets_ready(tmp_path: Path) -> None:
    template = shell("serve", "echo 'error: port 1: taken' >&2; exit 2", daemon=True)
    template["container"]["readinessProbe"] = {"httpGet": {"port": free_port()}}
    outcome = run(
        tmp_path, template, dag(task("serve", "serve"), task("t", "serve", depends="serve"))
    )
    assert outcome.phase == "Failed"
    assert outcome.exit_code == 2
    assert outcome.message == "serve: ended before it was ready: exit code 2: error: port 1: taken"
    assert named(outcome)["t"].phase == "Omitted"


def mortal(tmp_path: Path, **strategy: Any) -> Template:
    """A server that dies by SIGILL once for each time that somebody makes the file ``die``."""
    script = f"""
        while [ ! -e {tmp_path}/die ]; do sleep 0.05; done
        rm {tmp_path}/die; echo 'no such instruction' >&2; kill -ILL $$$$; sleep 600
    """
    return shell("serve", script, daemon=True, retryStrategy={"retryPolicy": "Always", **strategy})


def waiting(name: str, tmp_path: Path, **more: Any) -> Template:
    """Ends once there is the file ``over``, and with 75 if it is asked to end before."""
    return shell(
        name, f"trap 'exit 75' TERM; while [ ! -e {tmp_path}/over ]; do sleep 0.05; done", **more
    )


def test_stages_end_at_once_where_their_server_has_died_for_good(tmp_path: Path) -> None:
    """A death that it is restarted after ends nobody; after the last one the run's reason is the server's."""
    said: list[str] = []

    def on_node(node: journal.Node) -> None:
        if node.display_name == "serve" and node.message:
            said.append(node.message)
        if (node.display_name, node.phase) == ("work(0)", "Running") or (
            node.display_name == "serve(1)" and node.daemoned and node.phase == "Running"
        ):
            (tmp_path / "die").touch()
        if (node.display_name, node.phase) == ("serve", "Failed"):
            (tmp_path / "over").touch()

    work = waiting("work", tmp_path / "never", retryStrategy={"limit": 5, "retryPolicy": "Always"})
    inner = dag(task("work", "work"), task("then", "ok", depends="work"), name="inner")
    tasks = (
        task("serve", "serve"),
        task("beside", "beside"),
        task("inner", "inner", depends="serve"),
        task("later", "ok", depends="inner"),
    )
    templates = (
        mortal(tmp_path, limit=1),
        work,
        waiting("beside", tmp_path),
        OK,
        inner,
        dag(*tasks),
    )
    outcome = run(tmp_path / "run", *templates, options={"on_node": on_node})
    nodes = named(outcome)
    reason = "No more retries left: server died: SIGILL, illegal instruction: no such instruction"
    log = f"{tmp_path}/run/{nodes['serve(0)'].log}"
    assert said == [
        f"server died: SIGILL, illegal instruction; restarting (1 of 1); log: {log}",
        reason,
    ]
    assert (outcome.phase, outcome.exit_code, outcome.message) == ("Failed", 1, f"serve: {reason}")
    assert [nodes[name].exit_code for name in ("serve(0)", "serve(1)")] == [132, 132]
    assert {
        name: nodes[name].phase
        for name in ("beside", "inner", "inner.work", "inner.work(0)", "later")
    } == {
        **{"beside": "Succeeded", "later": "Omitted"},
        **dict.fromkeys(("inner", "inner.work", "inner.work(0)"), "Omitted"),
    }
    assert nodes["inner.work(0)"].message == f"serve: {reason}"
    assert "inner.work(1)" not in nodes


def test_a_graph_does_not_wait_for_a_server_that_nobody_needs_any_more(tmp_path: Path) -> None:
    """It died, and would be started again in an hour."""

    def on_node(node: journal.Node) -> None:
        if (node.display_name, node.phase) == ("work", "Running"):
            (tmp_path / "die").touch()
        if (node.display_name, node.phase) == ("serve(0)", "Failed"):
            (tmp_path / "over").touch()

    serve = mortal(tmp_path, limit=1, backoff={"duration": "1h"})
    tasks = (task("serve", "serve"), task("work", "work", depends="serve"))
    outcome = run(
        tmp_path / "run",
        serve,
        waiting("work", tmp_path),
        dag(*tasks),
        options={"on_node": on_node},
    )
    nodes = named(outcome)
    assert (outcome.phase, nodes["serve"].phase, nodes["serve(0)"].phase) == (
        "Succeeded",
        "Succeeded",
        "Failed",
    )
    assert "serve(1)" not in nodes


# Signals


@contextmanager
def executor(tmp_path: Path, document: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """An executor in a process of its own, with its run in ``tmp_path/run``; exits as the outcome says."""
    (tmp_path / "w.json").write_text(json.dumps(document))
    code = f"""
        import json, pathlib, sys
        from tuneloop.local.executor import execute_workflow
        document = json.load(open({str(tmp_path / "w.json")!r}))
        place = pathlib.Path({str(tmp_path / "run")!r})
        sys.exit(execute_workflow(document, workdir=place, warm=False, grace=60).exit_code)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def long_run(tmp_path: Path) -> dict[str, Any]:
    """A pod with a child in a session of its own; both write their process id."""
    child = f"setsid sh -c 'echo $$$$ > {tmp_path}/b; sleep 3600'"
    script = f"trap 'exit 75' TERM; {child} & echo $$$$ > {tmp_path}/a; wait; wait"
    return workflow(shell("long", script), OK, dag(task("t", "long")), onExit="ok")


def pids(tmp_path: Path) -> list[int]:
    until(
        lambda: all(
            (tmp_path / name).exists() and (tmp_path / name).read_text().strip() for name in "ab"
        )
    )
    return [int((tmp_path / name).read_text()) for name in "ab"]


def test_a_killed_executor_leaves_no_processes(tmp_path: Path) -> None:
    with executor(tmp_path, long_run(tmp_path)) as process:
        started = pids(tmp_path)
        process.kill()
        until(lambda: all(map(gone, started)))
    now = journal.read_state(tmp_path / "run")
    assert now is not None
    assert (now.workflow.phase, now.alive) == ("Running", False)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signals_end_the_pods_in_grace(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with executor(tmp_path, long_run(tmp_path)) as process:
        started = pids(tmp_path)
        process.send_signal(number)
        assert process.wait(LIMIT_S) == code
        until(lambda: all(map(gone, started)))
    now = journal.read_state(tmp_path / "run")
    assert now is not None
    assert (now.workflow.phase, now.workflow.message) == ("Failed", f"stopped by {number.name}")
    (pod,) = [node for node in now.nodes.values() if node.type == "Pod"]
    assert (pod.phase, pod.exit_code, pod.message) == ("Failed", 75, "stopped")
    # Whoever looks at the run is told that nothing has failed.
    assert Run("run", str(tmp_path)).phase == "interrupted"


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    stubborn = shell(
        "stubborn", f"trap '' TERM; touch {tmp_path}/up; while :; do sleep 0.1; done", daemon=True
    )
    stubborn["podSpecPatch"] = json.dumps({"terminationGracePeriodSeconds": 0.3})
    ready = shell("ready", f"until [ -e {tmp_path}/up ]; do sleep 0.05; done")
    outcome = run(
        tmp_path / "run",
        stubborn,
        ready,
        dag(task("t", "stubborn"), task("ready", "ready", depends="t")),
    )
    assert named(outcome)["t"].exit_code == 137


def test_it_runs_on_a_thread_too(tmp_path: Path) -> None:
    outcomes: list[Any] = []
    thread = threading.Thread(
        target=lambda: outcomes.append(run(tmp_path, OK, dag(task("t", "ok"))))
    )
    thread.start()
    thread.join()
    assert outcomes[0].exit_code == 0


# One warm process for several runs. That of one run is tested in tests/local: it needs torch

SHARED = "from tuneloop.local import warm; warm.LIBRARIES = {'server': ()}; warm.main()"


def test_a_warm_process_whose_executor_was_killed_before_it_looked_ends_at_once(
    tmp_path: Path,
) -> None:
    """It took whoever had adopted it for its parent, and imported for 10 to 23 s more."""
    executor = subprocess.Popen([sys.executable, "-S", "-c", ""])
    executor.wait()
    (tmp_path / "endless.py").write_text("import time\nwhile True: time.sleep(1)\n")
    ours, theirs = socket.socketpair()
    program = (
        "from tuneloop.local import warm; warm.LIBRARIES = {'stages': ['endless']}; warm.main()"
    )
    with ours, theirs:
        words = [sys.executable, "-c", program, "stages", str(theirs.fileno()), str(executor.pid)]
        environment = base_environment({})
        environment["PYTHONPATH"] = f"{environment.get('PYTHONPATH', '')}{os.pathsep}{tmp_path}"
        warm = subprocess.Popen(words, env=environment, pass_fds=[theirs.fileno()])
        assert warm.wait(LIMIT_S) == -signal.SIGKILL


@pytest.fixture
def shared() -> Iterator[str]:
    """Its socket, by a name that is short enough for one. Neither it nor its forks have anything to complain of."""
    with tempfile.TemporaryDirectory() as place:
        path = f"{place}/socket"
        words = [sys.executable, "-c", SHARED, "server", path]
        process = subprocess.Popen(
            words, env=base_environment({}), stderr=subprocess.PIPE, text=True
        )
        until(Path(path).exists, child=process)
        yield path
        process.kill()
        assert process.communicate(timeout=LIMIT_S)[1] == ""


def begin(launcher: Launcher, tmp_path: Path, name: str) -> tuple[Process, int]:
    """A process that waits until the file ``<name>.end`` is there, and its id."""
    program = "import os,sys,time\nopen(sys.argv[1]+'.new','w').write(str(os.getpid()))\n"
    program += "os.rename(sys.argv[1]+'.new',sys.argv[1])\n"
    program += "while not os.path.exists(sys.argv[1]+'.end'): time.sleep(0.01)\n"
    (tmp_path / "waits.py").write_text(program)
    log = tmp_path / f"{name}.log"
    argv = ["python", "-m", "waits", str(tmp_path / name)]
    process = launcher.start(argv, base_environment({}), tmp_path, log, log, patient=True)
    until((tmp_path / name).exists)
    return process, int((tmp_path / name).read_text())


def test_runs_share_a_warm_process(
    tmp_path: Path, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets a fork of its own, which ends all that it started when the run ends; the others go on."""
    monkeypatch.setattr("tuneloop.local.processes.is_stage", lambda argv: True)
    one, two = (Launcher(base_environment({WARM: shared}), warm=["stages"]) for _ in range(2))
    first, mine = begin(one, tmp_path, "one")
    second, theirs = begin(two, tmp_path, "two")
    one.close()
    assert first.ended.is_set() and gone(mine) and not gone(theirs)
    (tmp_path / "two.end").touch()
    assert second.ended.wait(LIMIT_S) and second.code == 0
    two.close()


def test_whoever_connects_to_a_warm_process_may_be_gone_at_once(shared: str) -> None:
    for _ in range(9):
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(shared)
    Launcher(base_environment({WARM: shared}), warm=["stages"]).close()


def test_a_fork_whose_output_is_of_a_process_that_has_ended_ends_too(shared: str) -> None:
    """As those of what `tests.forked` stands for, where that is killed at once."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    place = f"/proc/{ended.pid}/fd"
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(shared)
        heard = channel.makefile()
        assert "ready" in json.loads(heard.readline())
        asked = {"start": 0, "argv": ["python", "-m", "waits"], "env": {}, "cwd": "/"}
        asked |= {"stdout": f"{place}/1", "stderr": f"{place}/2"}
        channel.sendall(json.dumps(asked).encode() + b"\n")
        assert [next(iter(json.loads(heard.readline()))) for _ in "ab"] == ["started", "ended"]


def test_a_fork_has_ended_with_its_exit_code_before_its_memory_is_torn_down(
    tmp_path: Path, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes for ever here: only a kill ends it."""
    monkeypatch.setattr("tuneloop.local.processes.is_stage", lambda argv: True)
    program = (
        "import os, sys, time\nos._exit = lambda code: time.sleep(10**6)\n"
        "open('pid', 'w').write(str(os.getpid()))\n"
    )
    (tmp_path / "ends.py").write_text(program + "sys.exit(256 + 7)")
    launcher = Launcher(base_environment({WARM: shared}), warm=["stages"])
    log = tmp_path / "log"
    process = launcher.start(
        ["python", "-m", "ends"], base_environment({}), tmp_path, log, log, patient=True
    )
    assert process.ended.wait(LIMIT_S) and process.code == 7, log.read_text()
    until(lambda: gone(int((tmp_path / "pid").read_text())))
    launcher.close()


def test_a_fork_that_is_killed_before_its_request_is_replaced(
    tmp_path: Path, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneloop.local.processes.is_stage", lambda argv: True)
    launcher = Launcher(base_environment({WARM: shared}), warm=["stages"])
    _, first = begin(launcher, tmp_path, "one")
    parent = Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1]

    def find_spare() -> list[int]:
        children = subprocess.run(
            ["pgrep", "--parent", parent], capture_output=True, text=True
        ).stdout.split()
        return [int(each) for each in children if int(each) != first]

    (killed,) = until(find_spare)
    os.kill(killed, signal.SIGKILL)
    until(lambda: find_spare() not in ([], [killed]))
    for name in ("two", "three"):
        (tmp_path / f"{name}.end").touch()
        process, _ = begin(launcher, tmp_path, name)
        assert process.ended.wait(LIMIT_S) and process.code == 0
    launcher.close()


def test_a_fork_that_fails_is_tried_again_and_ends_no_other() -> None:
    program = """
        import os, sys
        from tuneloop.local import spawn
        calls, fork = [], os.fork
        def fail():
            calls.append(None)
            if len(calls) in (2, 3):
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return fork()
        os.fork = fail
        spawn.main()
    """
    ours, theirs = socket.socketpair()
    words = [sys.executable, "-c", textwrap.dedent(program), str(theirs.fileno())]
    child = subprocess.Popen(words, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    theirs.close()
    heard = ours.makefile()
    about = {"env": {}, "cwd": "/", "stdout": os.devnull, "stderr": os.devnull}
    for name, words in enumerate((["sleep", "1000"], ["sh", "-c", "exit 3"])):
        ours.sendall(json.dumps({"start": name, "argv": words, **about}).encode() + b"\n")
    told = [json.loads(heard.readline()) for _ in range(3)]
    assert [next(iter(each)) for each in told] == ["started", "started", "ended"]
    assert told[2] == {"ended": 1, "code": 3}
    ours.sendall(json.dumps({"signal": 0, "number": 15}).encode() + b"\n")
    assert json.loads(heard.readline()) == {"ended": 0, "code": 143}
    ours.shutdown(socket.SHUT_WR)
    assert child.communicate(timeout=LIMIT_S)[1] == ""


def test_a_shared_warm_process_of_another_environment_is_not_used(
    tmp_path: Path, shared: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tuneloop.local.processes.is_stage", lambda argv: True)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    launcher = Launcher(base_environment({WARM: shared}), warm=["stages"])
    process, _ = begin(launcher, tmp_path, "one")
    (tmp_path / "one.end").touch()
    assert process.ended.wait(LIMIT_S) and process.code == 0
    launcher.close()
    assert (
        "no warm process: the process of TUNELOOP_WARM was started with other variables"
        in caplog.text
    )


def test_a_shared_warm_process_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"TUNELOOP_WARM.*no warm process listens there.*or unset it"
    ):
        Launcher(base_environment({WARM: str(tmp_path / "nobody")}), warm=["stages"])


@pytest.mark.parametrize(
    ("argv", "kinds"),
    [
        (["python", "-m", "tuneloop.stages.sft", "--lr", "1"], ["stages"]),
        ([sys.executable, "-m", "tuneloop.stages.sft"], ["stages"]),
        (["python", "-m", "tuneloop.inference.server", "--port", "1"], ["server"]),
        (["python", "-m", "tuneloop.training.torchrun", "-m", "tuneloop.stages.sft"], []),
        (["python", "-m", "tuneloop.local.warm"], []),
        (["python", "-m", "tuneloop"], []),
        (["sh", "-c", "python -m tuneloop.inference.server"], []),
        (["sh", "-c", "python -m tuneloop.stages.sft"], []),
        ([], []),
    ],
)
def test_which_commands_can_be_forks_of_which_process(argv: list[str], kinds: list[str]) -> None:
    assert [
        kind for kind, can in (("stages", is_stage(argv)), ("server", is_server(argv))) if can
    ] == kinds
    container = {"image": "none", "command": argv[:3], "args": argv[3:]}
    assert (
        _list_warm_kinds(
            [{"name": "other", "dag": {"tasks": []}}, {"name": "it", "container": container}]
        )
        == kinds
    )


def test_environments_that_take_effect_at_import_must_agree() -> None:
    assert is_compatible({"OMP_NUM_THREADS": "2", "A": "1"}, {"OMP_NUM_THREADS": "2", "A": "2"})
    assert not is_compatible({"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "1"})
    assert not is_compatible({}, {"HF_HOME": "/cache"})
    assert not is_compatible({"VLLM_CPU_KVCACHE_SPACE": "4"}, {"VLLM_CPU_KVCACHE_SPACE": "8"})


def test_the_last_line_of_a_log_is_no_reason_of_a_program_that_was_asked_to_end(
    tmp_path: Path,
) -> None:
    """The cause read "committed already, nothing to do"; it had been printed in an earlier session."""
    ends = shell("ends", "echo 'x: committed already, nothing to do' >&2; kill -TERM $$$$")
    outcome = run(tmp_path, ends, dag(task("t", "ends")))
    assert named(outcome)["t"].message == "exit code 143 (SIGTERM, asked to end)"
    # A second session, in which the program prints nothing before it fails.
    fails = shell("ends", "exit 1")
    outcome = run(tmp_path, fails, dag(task("t", "ends")))
    assert named(outcome)["t"].message == "exit code 1"
    says = shell("ends", 'echo why > "$TUNELOOP_TERMINATION_LOG"; exit 2')
    assert "why" in named(run(tmp_path, says, dag(task("t", "ends"))))["t"].message
    assert named(run(tmp_path, fails, dag(task("t", "ends"))))["t"].message == "exit code 1"


def test_the_end_reaches_a_process_that_was_forked_after_all_were_listed() -> None:
    program = """
        import subprocess
        from tuneloop.local import spawn
        spawn.adopt_orphans()
        child = subprocess.Popen(
            ["sh", "-c", "read line; sleep 1000 & echo $!; wait"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        list_descendants = spawn._list_descendants
        def list_before_the_fork(root):
            pids = list_descendants(root)
            if not child.stdin.closed:
                child.stdin.write("go\\n")
                child.stdin.close()
                assert int(child.stdout.readline()) not in pids
            return pids
        spawn._list_descendants = list_before_the_fork
        spawn.end_all()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.run(command, timeout=LIMIT_S).returncode == 0
