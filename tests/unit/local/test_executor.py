"""Templates, values, failures and what a run leaves behind; `test_parity` has what the controller does in detail."""

import fcntl
import itertools
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.token_services import ROLE
from tests.unit.local.making import Template, dag, given, named, run, shell, task, workflow
from tests.waiting import LIMIT_S
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError
from tuneloop.core.store_credentials import VARIABLE
from tuneloop.local import journal
from tuneloop.local.executor import execute_workflow
from tuneloop.local.journal import Node
from tuneloop.workflow.credentials.irsa import IamRole
from tuneloop.workflow.settings import SANDBOX, SANDBOX_TOKEN, TOKEN_SECRET, Cluster

ECHO = shell(
    "echo", "printf '%s' '{{inputs.parameters.x}}' > /tmp/out/y", inputs=("x",), outputs=("y",)
)
OK = shell("ok", "true")


def loop(iterations: int, stop_at: int | None = None) -> list[Template]:
    """A recursion of one pod an iteration, main → loop → loop → …"""
    more = f"{{{{=asInt(inputs.parameters.i) < {iterations}}}}}"
    early = f" && {{{{=tasks.work.outputs.parameters.y != '{stop_at}'}}}}" if stop_at else ""
    body = dag(
        task("work", "echo", arguments=given(x="{{inputs.parameters.i}}")),
        task(
            "next",
            "loop",
            depends="work",
            when=more + early,
            arguments=given(i="{{=asInt(inputs.parameters.i) + 1}}"),
        ),
        name="loop",
        inputs={"parameters": [{"name": "i"}]},
        outputs={
            "parameters": [
                {
                    "name": "last",
                    "valueFrom": {
                        "expression": "tasks.next.status == 'Succeeded' ? tasks.next.outputs.parameters.last"
                        " : tasks.work.outputs.parameters.y"
                    },
                }
            ]
        },
    )
    show = task(
        "show", "echo", depends="loop", arguments=given(x="{{tasks.loop.outputs.parameters.last}}")
    )
    return [ECHO, body, dag(task("loop", "loop", arguments=given(i="1")), show)]


def test_recursion_stops_early_and_hands_its_last_output_up(tmp_path: Path) -> None:
    nodes = named(run(tmp_path, *loop(20, stop_at=4)))
    assert nodes["show"].outputs == {"y": "4"}
    assert nodes["loop.next.next.next.next"].phase == "Skipped"


@pytest.mark.parametrize(("iterations", "phase"), [(97, "Succeeded"), (98, "Error")])
def test_recursion_ends_where_the_controller_ends_it(
    tmp_path: Path, iterations: int, phase: str
) -> None:
    outcome = run(tmp_path, *loop(iterations))
    assert outcome.phase == phase
    assert sum(
        node.type == "Pod" and node.phase == "Succeeded" for node in outcome.nodes.values()
    ) == 97 + (phase == "Succeeded")
    assert ("Maximum recursion depth exceeded" in outcome.message) == (phase == "Error")


def test_pods_that_mount_the_token_of_the_runs_servers_have_the_same_also_when_it_changes(
    tmp_path: Path,
) -> None:
    volume = {
        "name": "server-token",
        "secret": {"secretName": TOKEN_SECRET, "optional": True, "defaultMode": 288},
    }
    said = shell(
        "ok", 'cat "$TUNELOOP_TOKEN_FILE" > /tmp/out/token', outputs=("token",), volumes=[volume]
    )
    said["container"] |= {
        "env": [{"name": "TUNELOOP_TOKEN_FILE", "value": "/run/tuneloop/server-token/token"}],
        "volumeMounts": [{"name": "server-token", "mountPath": "/run/tuneloop/server-token"}],
    }
    without = shell("without", 'test -z "$TUNELOOP_TOKEN_FILE"')
    graph = dag(task("a", "ok"), task("b", "ok"), task("c", "without"))
    nodes = named(run(tmp_path, said, without, graph))
    token = (tmp_path / "server-token").read_text().strip()
    assert nodes["a"].outputs["token"] == nodes["b"].outputs["token"] == token and len(token) >= 40
    assert (
        nodes["c"].phase == "Succeeded"
        and (tmp_path / "server-token").stat().st_mode & 0o777 == 0o600
    )
    (tmp_path / "server-token").write_text("another\n")
    assert named(run(tmp_path, said, without, graph))["a"].outputs["token"] == "another"


def test_pods_have_the_token_of_the_sandbox_that_this_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of another server's."""
    told = Cluster(sandbox="http://sandbox:8000").sandbox_environment
    volume = {"name": "sandbox", "secret": {"secretName": SANDBOX[0], "optional": True}}
    said = shell(
        "ok", f'cat "${SANDBOX_TOKEN}" > /tmp/out/token', outputs=("token",), volumes=[volume]
    )
    said["container"] |= {
        "env": [{"name": name, "value": value} for name, value in told.items()],
        "volumeMounts": [{"name": "sandbox", "mountPath": SANDBOX[1]}],
    }
    assert named(run(tmp_path / "none", said, dag(task("a", "ok"))))["a"].outputs["token"] == ""
    (tmp_path / "own").write_text("mine\n")
    monkeypatch.setenv(SANDBOX_TOKEN, str(tmp_path / "own"))
    assert named(run(tmp_path / "one", said, dag(task("a", "ok"))))["a"].outputs["token"] == "mine"


def test_pods_open_stores_by_the_credentials_of_this_machine(tmp_path: Path) -> None:
    """A cluster's identity is none here."""
    environment = IamRole(role=ROLE).environment
    said = shell("ok", "env > /tmp/out/environment", outputs=("environment",))
    said["container"]["env"] = [
        {"name": name, "value": value} for name, value in environment.items()
    ]
    text = named(run(tmp_path, said, dag(task("a", "ok"))))["a"].outputs["environment"]
    assert VARIABLE in environment and VARIABLE not in text and "AWS_ROLE_ARN=" not in text


def test_parameters_arguments_over_values_over_defaults(tmp_path: Path) -> None:
    echo = {
        **ECHO,
        "inputs": {"parameters": [{"name": "x", "default": "{{workflow.parameters.b}}!"}]},
    }
    templates = [
        echo,
        dag(
            task("given", "echo", arguments=given(x="{{workflow.parameters.a}}")),
            task("default", "echo"),
        ),
    ]
    outcome = run(
        tmp_path, *templates, parameters={"a": "1", "b": "2"}, options={"arguments": {"a": "one"}}
    )
    nodes = named(outcome)
    assert (nodes["given"].outputs["y"], nodes["default"].outputs["y"]) == ("one", "2!")


def test_entrypoint_and_its_inputs_can_be_chosen(tmp_path: Path) -> None:
    """As a pod does that runs several stages in one."""
    document = workflow(
        ECHO, dag(task("t", "missing-argument"), name="other"), OK, dag(task("x", "ok"))
    )
    document["spec"]["templates"][1]["dag"]["tasks"] = [
        task("t", "echo", arguments=given(x="{{inputs.parameters.p}}"))
    ]
    document["spec"]["templates"][1]["inputs"] = {"parameters": [{"name": "p"}]}
    outcome = execute_workflow(
        document, workdir=tmp_path, warm=False, entrypoint="other", arguments={"p": "v"}
    )
    assert named(outcome)["t"].outputs == {"y": "v"}


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ([ECHO, dag(task("t", "echo"))], "inputs.parameters.x of template echo was not supplied"),
        (
            [ECHO, dag(task("t", "echo", arguments=given(x="{{tasks.u.outputs.parameters.y}}")))],
            "failed to resolve",
        ),
        (
            [
                ECHO,
                OK,
                dag(task("u", "ok"), task("t", "echo", arguments=given(x="{{tasks.u.status}}"))),
            ],
            "failed to",
        ),
        ([OK, dag(task("t", "ok", when="a b"))], "invalid 'when'"),
        ([shell("ok", "true", outputs=("y",)), dag(task("t", "ok"))], "did not write its output y"),
    ],
)
def test_faults_are_errors_of_their_node(
    tmp_path: Path, templates: list[Template], message: str
) -> None:
    outcome = run(tmp_path, *templates)
    assert outcome.phase == "Error"
    assert outcome.exit_code == 1
    assert message in named(outcome)["t"].message
    assert message in outcome.message


def test_tasks_run_at_the_same_time_up_to_parallelism(tmp_path: Path) -> None:
    """Four that wait for one another, then four that must not overlap."""
    meet = shell(
        "meet", f"touch {tmp_path}/$$$$; for i in $(seq 600); do [ $(ls {tmp_path} | grep -c '^[0-9]*$') = 4 ] && "
        "exit; sleep 0.1; done; exit 1"
    )  # fmt: skip
    four = [task(f"t{index}", "meet") for index in range(4)]
    assert run(tmp_path / "run", meet, dag(*four)).phase == "Succeeded"

    outcome = run(tmp_path / "run", shell("meet", "sleep 0.05"), dag(*four), parallelism=1)
    pods = sorted((n for n in outcome.nodes.values() if n.type == "Pod"), key=lambda n: n.started)
    assert len(pods) == 4 and all(a.finished <= b.started for a, b in itertools.pairwise(pods))


def test_depends_on_results(tmp_path: Path) -> None:
    bad = shell("bad", "exit 3")
    outcome = run(
        tmp_path,
        OK,
        bad,
        dag(
            task("broken", "bad"),
            task("fine", "ok"),
            task("cleanup", "ok", depends="broken.Failed && fine"),
            task("never", "ok", depends="broken.Succeeded || fine.Failed"),
            task("skipped", "ok", when="false"),
            task("after", "ok", depends="skipped && never.Omitted"),
        ),
    )
    phases = {path: node.phase for path, node in named(outcome).items() if path}
    assert phases == {
        "broken": "Failed",
        "fine": "Succeeded",
        "cleanup": "Succeeded",
        "never": "Omitted",
        "skipped": "Skipped",
        "after": "Succeeded",
    }
    assert outcome.phase == "Succeeded"


def test_defaults_of_outputs(tmp_path: Path) -> None:
    silent = shell("silent", "true")
    silent["outputs"] = {
        "parameters": [{"name": "y", "valueFrom": {"path": "/tmp/out/y", "default": "none"}}]
    }
    declared = {
        "name": "z",
        "valueFrom": {"parameter": "{{tasks.skipped.outputs.parameters.y}}", "default": "kept"},
    }
    inner = dag(
        task("a", "silent"),
        task("skipped", "silent", when="false"),
        name="inner",
        outputs={"parameters": [declared]},
    )
    nodes = named(run(tmp_path, silent, inner, dag(task("i", "inner"))))
    assert nodes["i.a"].outputs == {"y": "none"}
    assert nodes["i"].outputs == {"z": "kept"}


def test_global_outputs(tmp_path: Path) -> None:
    public = shell("public", "echo 7 > /tmp/out/y", outputs=("y",))
    public["outputs"]["parameters"][0]["globalName"] = "answer"
    second = task(
        "b", "echo", depends="a", arguments=given(x="{{workflow.outputs.parameters.answer}}")
    )
    outcome = run(tmp_path, public, ECHO, dag(task("a", "public"), second))
    assert outcome.outputs == {"answer": "7"}
    assert named(outcome)["b"].outputs == {"y": "7"}


def test_environment_of_a_pod(tmp_path: Path) -> None:
    pod = shell("pod", "printf '%s' \"$OUT $A $B $NS $1 $TUNELOOP_IMAGE\" > $OUT/y", outputs=("y",))
    pod["container"]["env"] = [
        {"name": "OUT", "value": "/tmp/out"},
        {"name": "A", "value": "{{workflow.name}}"},
        {"name": "TUNELOOP_IMAGE", "value": "not/used:here"},
        {"name": "NS", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
    ]
    pod["container"]["args"] = ["sh", "$(A)/$$(A)/$(UNKNOWN)"]
    outcome = run(
        tmp_path, pod, dag(task("t", "pod")), options={"env": {"A": "no", "B": "machine"}}
    )
    out, *rest = named(outcome)["t"].outputs["y"].split()
    assert rest == ["w", "machine", "local", "w/$(A)/$(UNKNOWN)"]
    assert Path(out).is_relative_to(tmp_path)


def test_retries_with_backoff_and_expression(tmp_path: Path) -> None:
    strategy = {
        "limit": "5",
        "retryPolicy": "Always",
        "expression": "lastRetry.status == 'Error' || asInt(lastRetry.exitCode) in [75, 137, 143]",
        "backoff": {"duration": "100ms", "factor": 2},
    }
    script = (
        "echo {{retries}} {{lastRetry.exitCode}} > /tmp/out/y; "
        "case {{retries}} in 0) exit 75;; 1) kill -9 $$$$;; esac"
    )
    flaky = shell("flaky", script, outputs=("y",), retryStrategy=strategy)
    start = time.monotonic()
    outcome = run(tmp_path, flaky, dag(task("t", "flaky")))
    nodes = named(outcome)
    assert time.monotonic() - start > 0.3
    assert [nodes[f"t({n})"].exit_code for n in range(3)] == [75, 137, 0]
    assert nodes["t"].type == "Retry"
    assert nodes["t"].outputs == {"y": "2 137"}
    assert outcome.exit_code == 0


@pytest.mark.parametrize(
    ("strategy", "attempts", "message"),
    [
        ({"limit": 2}, 3, "No more retries left: exit code 2"),
        ({"limit": "2", "expression": "asInt(lastRetry.exitCode) == 75"}, 1, "exit code 2"),
        ({"limit": 2, "retryPolicy": "OnError"}, 1, "exit code 2"),
    ],
)
def test_retries_end(tmp_path: Path, strategy: dict[str, Any], attempts: int, message: str) -> None:
    outcome = run(tmp_path, shell("bad", "exit 2", retryStrategy=strategy), dag(task("t", "bad")))
    nodes = named(outcome)
    assert len([path for path in nodes if path.startswith("t(")]) == attempts
    assert nodes["t"].message == message
    assert outcome.exit_code == 2


def test_who_looks_on_is_told_why_a_stage_is_tried_again(tmp_path: Path) -> None:
    said: list[str] = []

    def on_node(node: Node) -> None:
        if node.type == "Retry" and node.message not in ("", *said):
            said.append(node.message)

    script = """
        case {{retries}} in
        0) echo 'unavailable: the store is away' >&2; exit 75;;
        1) echo 'failed for now: too many timeouts' >&2; exit 75;;
        2) echo 'step 7' >&2; kill -SEGV $$$$;;
        esac
    """
    strategy = {"limit": 3, "retryPolicy": "Always", "backoff": {"duration": "10ms"}}
    run(
        tmp_path,
        shell("t", script, retryStrategy=strategy),
        dag(task("t", "t")),
        options={"on_node": on_node},
    )
    assert said == [
        "unavailable: the store is away; retrying in 0.01 s (attempt 2)",
        "failed for now: too many timeouts; retrying in 0.01 s (attempt 3)",
        "killed by a signal: exit code 139 (SIGSEGV, invalid memory reference): step 7; retrying in 0.01 s (attempt 4)",
    ]


def test_retries_of_a_whole_graph(tmp_path: Path) -> None:
    inner = dag(task("a", "once"), name="inner", retryStrategy={"limit": 1})
    once = shell("once", f"test -e {tmp_path}/marker || {{ touch {tmp_path}/marker; exit 1; }}")
    nodes = named(run(tmp_path, once, inner, dag(task("t", "inner"))))
    assert (nodes["t(0)"].phase, nodes["t(1)"].phase, nodes["t"].phase) == (
        "Failed",
        "Succeeded",
        "Succeeded",
    )


def test_a_run_goes_on_where_its_journal_cannot_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The kernel's own full device; it hung."""
    (tmp_path / "nodes.jsonl").symlink_to("/dev/full")
    journal._report_once.cache_clear()
    outcome = run(tmp_path, shell("ok", "true"), dag(task("t", "ok")))
    assert outcome.phase == "Succeeded"
    assert capfd.readouterr().err.count("nodes.jsonl: No space left on device") == 1


def test_exit_handlers_see_how_it_ended(tmp_path: Path) -> None:
    bye = shell("bye", "printf '%s' '{{workflow.status}}' > /tmp/out/y", outputs=("y",))
    outcome = run(tmp_path, shell("bad", "exit 3"), bye, dag(task("t", "bad")), onExit="bye")
    assert named(outcome)["onExit"].outputs["y"] == "Failed"
    assert outcome.phase == "Failed"


def test_an_exit_handler_gets_the_workflows_parameters(tmp_path: Path) -> None:
    outcome = run(
        tmp_path, OK, ECHO, dag(task("t", "ok")), onExit="echo", parameters={"x": "1", "other": "2"}
    )
    assert named(outcome)["onExit"].outputs == {"y": "1"}


def test_a_failing_exit_handler_fails_the_run(tmp_path: Path) -> None:
    assert (
        run(tmp_path, OK, shell("bad", "exit 3"), dag(task("t", "ok")), onExit="bad").phase
        == "Failed"
    )


# What a run leaves behind


def test_state_can_be_read_while_it_runs_and_after(tmp_path: Path) -> None:
    seen: list[journal.State] = []
    wait = f"for i in $(seq 600); do [ -e {tmp_path}/seen ] && exit; sleep 0.1; done; exit 1"
    slow = shell("slow", f"echo 1/4 > $ARGO_PROGRESS_FILE; echo a line; {wait}")
    lines: list[tuple[str, str]] = []

    def on_node(node: Node) -> None:
        if node.progress and not seen:
            now = journal.read_state(tmp_path)
            assert now is not None
            seen.append(now)
            (tmp_path / "seen").touch()

    options = {
        "on_node": on_node,
        "on_log": lambda node, line: lines.append((node.display_name, line)),
    }
    outcome = run(tmp_path, slow, dag(task("t", "slow")), options=options)
    assert lines == [("t", "a line")]
    assert seen[0].alive
    assert seen[0].workflow.phase == "Running"
    assert {node.progress for node in seen[0].nodes.values() if node.type == "Pod"} == {"1/4"}
    after = journal.read_state(tmp_path)
    assert after is not None
    assert not after.alive
    assert after.nodes == outcome.nodes
    assert after.workflow.phase == "Succeeded"


def test_a_second_session_starts_anew_and_keeps_the_logs(tmp_path: Path) -> None:
    pod = shell(
        "pod", "echo once; echo x > /tmp/out/y; exit {{workflow.parameters.code}}", outputs=("y",)
    )
    templates = [pod, dag(task("t", "pod"))]
    assert run(tmp_path, *templates, parameters={"code": "4"}).exit_code == 1
    outcome = run(tmp_path, *templates, parameters={"code": "0"})
    assert outcome.exit_code == 0
    now = journal.read_state(tmp_path)
    assert now is not None
    assert [node.phase for node in now.nodes.values()] == ["Succeeded", "Succeeded"]
    assert (tmp_path / named(outcome)["t"].log).read_text() == "once\nonce\n"


def test_the_reason_of_a_failure_is_the_last_line_of_the_log(tmp_path: Path) -> None:
    outcome = run(
        tmp_path, shell("bad", "echo 'error: --n: 3: too many' >&2; exit 2"), dag(task("t", "bad"))
    )
    assert outcome.message == "t: exit code 2: error: --n: 3: too many"
    assert outcome.exit_code == 2


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    template = {"name": "none", "container": {"image": "none", "command": ["no-such-program"]}}
    outcome = run(tmp_path, template, dag(task("t", "none")))
    assert named(outcome)["t"].exit_code == 127
    assert "no-such-program: " in outcome.message


def test_one_executor_a_directory(tmp_path: Path) -> None:
    with journal.lock_workdir(tmp_path), pytest.raises(UserError, match="is running already"):
        run(tmp_path, OK, dag(task("t", "ok")))


def test_who_looks_whether_a_run_is_alive_keeps_no_executor_off(tmp_path: Path) -> None:
    """Looking takes the lock, too: `status` would make `resume` fail now and then."""

    def execute() -> bool:
        with journal.lock_workdir(tmp_path):
            return True

    assert execute(), "which makes the file"
    with (tmp_path / "lock").open() as looking, ThreadPoolExecutor(1) as pool:
        fcntl.flock(looking, fcntl.LOCK_SH)
        executing = pool.submit(execute)
        with pytest.raises(TimeoutError):
            executing.result(0.2)
        fcntl.flock(looking, fcntl.LOCK_UN)
        assert executing.result(LIMIT_S)


def test_a_server_is_reached_from_this_machine_alone(tmp_path: Path) -> None:
    """It takes orders from whoever reaches it."""
    pipeline = find_pipeline("grpo")
    made = pipeline.build(pipeline.configure(None, ["engine.kind=vllm"]))
    template = next(t for t in made["spec"]["templates"] if t.get("daemon"))
    serve = template["container"]
    said = shell("said", "printf '%s ' \"$@\" > /tmp/out/said", outputs=("said",))
    said["container"] = {**serve, "command": [*said["container"]["command"], "serve"]}
    said["container"]["args"] = [
        re.sub(r"{{(inputs|workflow)\..*}}", "none", word) for word in serve["args"]
    ]
    said["retryStrategy"] = template["retryStrategy"]
    outcome = run(tmp_path, said, dag(task("said", "said")))
    assert " --host 127.0.0.1 --port " in named(outcome)["said"].outputs["said"]
