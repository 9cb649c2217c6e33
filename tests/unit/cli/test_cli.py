import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from tests.local.loops import digests
from tests.objects import served
from tests.planned import carrying, planned
from tests.unit import toy
from tests.waiting import LIMIT_S, free_port, until
from tuneloop.argo import lint
from tuneloop.cli import checks, run_cli
from tuneloop.cli.exits import run_command
from tuneloop.cli.live import Display
from tuneloop.config.loading import find_pipeline
from tuneloop.core.artifacts import dump_checked_json
from tuneloop.core.errors import UserError
from tuneloop.local import journal
from tuneloop.local.journal import Journal, Node, Workflow
from tuneloop.runs import records, run_record
from tuneloop.runs.records import Record
from tuneloop.sharing.lease_storage import open_lease_group

ROOT = Path(__file__).parents[3]
TOY = str(ROOT / "tests" / "unit" / "toy_pipeline.py")
QUICK = ("--no-track", "--no-warm")
HEAVY = {"torch", "vllm", "transformers", "datasets", "kfp", "hera", "mlflow", "kubernetes"}


class Result:
    """Exit code and text of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


LONG = "x" * 10**6
Call = Callable[..., Result]


@pytest.fixture
def call(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Call:
    """Run a command in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> Result:
        code = run_cli(list(words))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def refused(result: Result, *says: str) -> None:
    """A mistake of the user's: exit code 2 and one line on standard error that says what."""
    assert result.code == 2, result.err
    assert result.err.count("\n") == 1 and result.err.startswith("error: "), result.err
    for text in says:
        assert text in result.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan", "sft_then_grpo", f"--{LONG}"), "No such option: --xxxx"),
        (("resume", LONG), ": 'xxxx"),
        (("plan", "sft_then_grpo", "--set", f"seed={LONG}"), "seed: 'xxxx"),
        (("plan", "sft_then_grpo", "--set", f"{LONG}=1"), "xxxx: 1: unknown key"),
        (("plan", "sft_then_grpo", "--set", f"loop={json.dumps({'a': [LONG]})}"), "loop.a: ['xxxx"),
    ],
)
def test_a_message_has_a_part_of_a_long_value_and_its_length(
    words: Sequence[str], says: str, call: Call
) -> None:
    refused(result := call(*words), says, "… (10000", " characters) …x")
    assert len(result.err) < 1500, result.err


def test_a_full_disk_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel's own full device."""
    assert run_command(lambda: Path("/dev/full").write_bytes(b"x") and None) == 75
    err = capsys.readouterr().err
    assert err.startswith(f"unavailable: disk full: {Path.cwd()} ("), err
    assert err.endswith("free space there, then run it again\n")
    with pytest.raises(FileNotFoundError):
        run_command(lambda: Path("/nowhere/x").write_bytes(b"x") and None)


def program(*words: str, **more: object) -> "subprocess.Popen[str]":
    line = [sys.executable, "-m", "tuneloop.cli", *words]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)  # type: ignore[call-overload,no-any-return]


def test_light_commands_import_nothing_heavy(tmp_path: Path) -> None:
    """One after the other in one process."""
    commands = [
        ["--help"],
        ["schema", TOY],
        ["schema", "sft_then_grpo"],
        ["status"],
        ["run", "--help"],
    ]
    code = f"""
import sys, tuneloop.cli
for words in {commands}:
    code = tuneloop.cli.run_cli(words)
    print(words, code, {HEAVY} & set(sys.modules), file=sys.stderr)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.stderr.splitlines() == [f"{words} 0 set()" for words in commands]


def test_help_imports_little() -> None:
    """That is what it costs: 160 modules a tenth of a second; any of the heavy ones brings hundreds."""
    code = "import sys, tuneloop.cli; tuneloop.cli.run_cli(['--help']); print(len(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stderr) < 310


def test_the_version_is_printed(call: Call) -> None:
    import tuneloop

    assert call("--version").out == f"tuneloop {tuneloop.__version__}\n"


def test_every_option_has_help(call: Call) -> None:
    from typer.main import get_command

    from tuneloop.cli import build_app

    groups = [get_command(build_app())]
    for group in groups:
        for command in getattr(group, "commands", {}).values():
            groups.append(command)
        assert group.help
        for parameter in group.params:
            assert getattr(parameter, "help", None), f"{group.name} {parameter.name}"


@pytest.mark.parametrize("words", [[], ["kfp"], ["weights"]])
def test_help_is_for_who_names_no_command(call: Call, words: list[str]) -> None:
    result = call(*words)
    assert result.code == 2 and re.search(r"^(Commands|Run):\n  \w", result.err, re.M)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["status", "--nonsense"], "No such option"),
        (["stop", "x", "--timeout", "soon"], "'--timeout'"),
        (["resume"], "Missing argument"),
        (["schema", "nope"], "or give the path of a .py file"),
        (["schema", "nope.py"], "no such file"),
        (["render", TOY, "--set", "iteration=2"], "did you mean iterations?"),
        (["render", TOY, "--set", "iterations=many"], "whole number"),
        (["render", TOY, "--set", "iterations=0"], "greater than or equal to 1"),
        (["render", TOY, "--set", "sft.skill=9"], "sft.skill"),
        (["run", TOY, "-c", "missing.yaml"], "missing.yaml"),
        (["run", TOY, "--run", "Not/A/Name"], "lower-case"),
        (["run", TOY, "--run", ""], "lower-case"),
        (
            ["run", "sft", "--set", "base_model=./nope"],
            "base_model: './nope': is not a directory here",
        ),
        (
            ["plan", "grpo", "--set", "cluster.trainer.memory=2GB"],
            "cluster.trainer.memory: '2GB': is not valid; expected: memory that a pod",
        ),
        (
            ["plan", "grpo", "--set", "engine.gpus=2"],
            "engine.gpus: 2: unknown key; did you mean cluster.trainer.gpus or cluster.sampler.gpus or cluster.scorer",
        ),
        (
            ["plan", "grpo", "--set", "cluster.tolerations=[]"],
            "did you mean cluster.trainer.tolerations or",
        ),
        (
            ["plan", "grpo", "--set", "cluster.cpu.gpus=2"],
            "cluster.cpu.gpus: 2: unknown key; did you mean",
        ),
        (
            ["plan", "grpo", "--set", "cluster.trainer.tolerations=[{taint: a}]"],
            "cluster.trainer.tolerations.0.taint: 'a': unknown key; known: key, operator",
        ),
        (
            ["plan", "grpo", "--set", "cluster.cpu.memory_on_retry=4Gi"],
            "memory_on_retry raises the limit that memory sets: set it, too",
        ),
        (["status", "nope"], "known there: none"),
        (["resume", "nope"], "not found"),
        (["stop", "nope"], "not found"),
        (["logs", "nope"], "not found"),
        (["report", "nope"], "not found"),
        (["track", "nope"], "not found"),
        (["weights", "ls", "nope"], "not found"),
        (["weights", "verify", "nope"], "not found"),
        (["status", "--store", "ftp://x"], "ftp://x"),
        (
            ["plan", "grpo", "--set", "update.algorithm=nope"],
            "update.algorithm.kind: 'nope': unknown; known: cispo",
        ),
        (
            ["plan", "grpo", "--set", "data.source=nope"],
            "data.source: 'nope': unknown; known: digits",
        ),
        (
            ["plan", "sft", "--set", "data.source=files"],
            "data.source_args.path: None: is required",
        ),
        (
            ["plan", "sft", "--set", "data=rows.jsonl", "--set", "data.source_args.streaming=x"],
            "data.source_args.streaming: 'x': has to be true or false",
        ),
        (
            ["plan", "grpo", "--set", "engine.kind=nope"],
            "engine.kind: 'nope': unknown; known: endpoint, transformers, vllm, or a dotted path",
        ),
        (
            ["plan", "grpo", "--set", "engine.rollout_endpoint_url=x"],
            "engine.rollout_endpoint_url: 'x': is a setting of kind endpoint, not of vllm",
        ),
        (
            ["plan", "grpo", "--set", "loop.iterations_per_pod=7"],
            "loop.per_workflow: 60: must be a multiple",
        ),
        (
            [
                "plan",
                "grpo",
                "--set",
                "loop.iterations_per_pod=6",
                "--set",
                "loop.asynchronous=true",
            ],
            "loop.asynchronous: True: overlaps stages",
        ),
        (
            [
                "plan",
                "grpo",
                "--set",
                "engine.weights.kind=pull",
                "--set",
                "loop.asynchronous=true",
            ],
            "loop.asynchronous: True: samples with the version before the newest",
        ),
        (
            ["plan", "sft", "--set", "sft.backend=torchtune"],
            "sft.backend: 'torchtune': cannot train for a stage: use native or trl",
        ),
        (
            ["plan", "sft", "--set", "sft.backend=trll"],
            "sft.backend: 'trll': unknown; known: native, torchtune, trl",
        ),
        (
            ["render", "sft_then_grpo", "--set", "sft.backend=trl", "--set", "trainer.lora.r=8"],
            "sft.backend: 'trl': does not support lora, which is Lora(",
        ),
        (
            [
                "render",
                "dpo",
                "--set",
                "preference.backend=trl",
                "--set",
                "preference.algorithm=my:loss",
            ],
            "preference.backend: 'trl': has no algorithm my:loss: choose dpo, ipo or kto",
        ),
        (
            ["render", "sft", "--set", "sft.backend=trl", "--set", "nodes=2"],
            "nodes: 2: is for the backend native: leave it out, or sft.backend",
        ),
        (
            ["render", "dpo", "--set", "preference.backend=trl", "--set", "tokenize=true"],
            "tokenize: True: is for the backend native: leave it out, or preference.backend",
        ),
        (
            ["render", "sft", "--set", "sft.backend_args.x=1"],
            "sft.backend: None: has no backend_args",
        ),
        (
            ["render", "grpo", "--template", "--servers", "x"],
            "--template: 'true': cannot be combined with --servers",
        ),
        (
            ["plan", "sft_then_grpo", "--set", "update.backend=trl"],
            "unknown key; did you mean sft.backend?",
        ),
        (
            ["render", "grpo", "--servers", "rollout"],
            "need engine=vllm, engine.weights=pull and engine.weights.url=URL",
        ),
        (
            ["render", "sft", "--servers", "rollout"],
            "need engine=vllm, engine.weights=pull and engine.weights.url=URL",
        ),
        (["fleet", "autoscale", "http://a:8000", "--max", "2"], "must be service://name.namespace"),
        (
            ["kfp", "render", "grpo", "--set", "loop.asynchronous=true"],
            "is built for Argo and for one machine",
        ),
        (
            [
                "render",
                "grpo",
                "--set",
                "engine.colocate=true",
                "--set",
                "engine.weights.kind=pull",
            ],
            "colocate needs a server that loads checkpoints",
        ),
        (
            ["plan", "grpo", "--set", "engine.colocate=true", "--set", "loop.asynchronous=true"],
            "engine.colocate: True: gives the GPU to one process at a time",
        ),
        (["plan", "grpo", "--set", "cluster.cpu.memory=much"], "cluster.cpu.memory: 'much'"),
        (["plan", "grpo", "--set", "cluster.cpu.cpu=1G"], "cluster.cpu.cpu: '1G'"),
        (["plan", "grpo", "--set", "loop=3"], "loop: 3: is a section"),
        (
            ["submit", "grpo", "--run", "x", "--store", "s3://b", "--server", "h:1"],
            "server: 'h:1': must be an absolute URL",
        ),
        (
            ["cluster", "status", "demo", "--context", "nowhere"],
            "cluster: 'nowhere': no usable cluster",
        ),
        (
            ["submit", "grpo", "--run", "Demo", "--store", "s3://b"],
            "--run: 'Demo': use at most 40 lower-case",
        ),
        (
            ["submit", "grpo", "--run", "x", "--store", "s3://"],
            "store: 's3://': names no bucket; write s3://BUCKET",
        ),
        (["run", "sft", "--set", "nodes=2"], "needs a cluster: submit it"),
    ],
)
def test_mistakes_are_one_line(call: Call, tmp_path: Path, words: list[str], says: str) -> None:
    refused(call(*words), says)
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def test_the_schema_has_every_key(call: Call) -> None:
    schema = json.loads(call("schema", TOY, "--json").out)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["iterations"]["description"] == "at most so many"
    assert schema["properties"].keys() == toy.Config.model_fields.keys()


def test_the_settings_are_printed_as_a_file(call: Call) -> None:
    printed = call("schema", "sft_then_grpo").out
    assert "  # maximum tokens of a completion; " in printed and "  #max_tokens: 8\n" in printed
    below = call("schema", "grpo", "cluster.trainer").out
    assert "    #gpus: 0\n" in below and "sampler" not in below
    refused(call("schema", "grpo", "nope"), "SECTION: 'nope': is no setting and no section of grpo")


def test_render_prints_what_it_writes(call: Call, tmp_path: Path) -> None:
    printed = call("render", TOY, "--set", "iterations=3").out
    call("render", TOY, "--set", "iterations=3", "-o", "w.yaml")
    assert (tmp_path / "w.yaml").read_text() == printed
    refused(call("render", TOY, "-o", "no/such/folder/w.yaml"), "cannot be written")


def test_plan_needs_no_run(call: Call, tmp_path: Path) -> None:
    result = call("plan", TOY, "--set", "iterations=3")
    assert result.code == 0
    assert "toy_pipeline: at most 13 pods" in result.out
    assert list(tmp_path.iterdir()) == []


def test_lint_says_what_it_finds(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("lint", TOY)
    assert (result.code, result.out, result.err) == (0, "toy_pipeline: 0 problems\n", "")
    monkeypatch.setattr(lint, "lint_workflow", lambda workflow: [UserError("spec", 1, "wrong")])
    result = call("lint", TOY)
    assert (result.code, result.out, result.err) == (
        2,
        "toy_pipeline: 1 problem\n",
        "error: spec: 1: wrong\n",
    )


# Before a run


def test_a_taken_port_is_refused() -> None:
    serve = {
        "name": "serve",
        "daemon": True,
        "container": {"readinessProbe": {"httpGet": {"port": 0}}},
    }
    workflow = {"spec": {"templates": [serve]}}
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
        server.listen()
        serve["container"]["readinessProbe"]["httpGet"]["port"] = server.getsockname()[1]  # type: ignore[index]
        [(name, port)] = checks.list_server_ports(workflow)
        assert (name, checks.is_port_taken(port)) == ("serve", True)
    assert not checks.is_port_taken(port)


def test_a_store_that_cannot_be_written_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file/below", "file"):
        refused(
            call("run", TOY, "--store", str(tmp_path / place)),
            "Not a directory; choose a writable place",
        )
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_store_without_keys_is_the_mistake_of_who_asks(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(
        {}, monkeypatch, missing=(400, "GET http://169.254.169.254/latest/meta-data: refused")
    ):
        for words in (["status", "r"], ["weights", "ls", "r"], ["run", TOY]):
            refused(call(*words, "--store", "s3://b"), "no keys; set AWS_ACCESS_KEY_ID")


def test_vllm_is_looked_for_before_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else real(name, *a)
    )
    workflow = toy.build_argo(toy.Config()).to_dict()
    with pytest.raises(UserError, match=r"engine\.kind: 'vllm': vLLM is not installed"):
        checks.check_local_run({"engine": {"kind": "vllm"}}, workflow, str(tmp_path))
    checks.check_local_run({"engine": {"kind": "transformers"}}, workflow, str(tmp_path))


def test_the_demo_takes_the_engine_that_is_there(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for vLLM, chooses, says so, and asks `run` for the rest; here a setting that there is not ends it."""
    import importlib.util

    real = importlib.util.find_spec
    ends = ("demo", "--set", "nonsense=1")

    def lacking(*names: str) -> None:
        """Packages are there or not, whatever this environment has."""
        there = {name: None if name in names else real("json") for name in ("torch", "vllm")}
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *a: there[name] if name in there else real(name, *a),
        )

    lacking("vllm")
    without = call(*ends)
    assert without.out == "demo: engine transformers, as vLLM is not installed here\n"
    refused(without, "nonsense: 1: unknown key")
    lacking()
    assert call(*ends).out.startswith(
        "demo: engine vllm, as vLLM is installed here; without it: --set engine="
    )
    assert call(*ends, "--set", "engine.kind=transformers").out == ""
    lacking("torch")
    refused(call(*ends), "demo: 'torch': is not installed; pip install 'tuneloop[train]'")


# A run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the run `done`, executed by `tuneloop run`."""
    place = tmp_path_factory.mktemp("finished")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = program("run", TOY, "--run", "done", *QUICK, cwd=place, env=env)
    out, err = child.communicate(timeout=LIMIT_S)
    assert child.returncode == 0, out + err
    (place / "out.txt").write_text(out)
    return place


def test_a_run_shows_progress_and_ends_with_its_summary(finished: Path) -> None:
    out = (finished / "out.txt").read_text()
    assert "iteration 1/2  reward 0.500" in out
    assert "iteration 2/2  reward 0.750" in out
    assert "done: succeeded" in out
    assert "0.500 → 1.000 (greedy, held-out prompts, 4 completions; policy version 1 → 3)" in out
    assert "ran on       cpu" in out
    assert f"report       {finished}/runs/done/report.html" in out
    assert "</html>" in (finished / "runs" / "done" / "report.html").read_text()
    record = json.loads((finished / "runs" / "done" / "run.json").read_text())
    assert (record["pipeline"], record["config"]["iterations"]) == ("toy_pipeline", 2)
    assert (
        (finished / "runs" / "done" / "workflow.yaml")
        .read_text()
        .startswith("apiVersion: argoproj.io/v1alpha1\n")
    )


@pytest.mark.local
def test_on_a_terminal_the_run_is_one_live_region(tmp_path: Path) -> None:
    reader, terminal = os.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    line = [
        sys.executable,
        "-m",
        "tuneloop.cli",
        "run",
        TOY,
        "--run",
        "t",
        *QUICK,
        "--set",
        "iterations=1",
    ]
    child = subprocess.Popen(
        line, stdout=terminal, stderr=terminal, stdin=subprocess.DEVNULL, cwd=tmp_path, env=env
    )
    os.close(terminal)
    out = b""
    while data := read(reader):
        out += data
    assert child.wait() == 0, out.decode()
    assert b"\x1b[2K" in out, "lines are redrawn"
    assert b"iteration 1/1  reward 0.500" in out
    assert b"t: succeeded" in out


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux says so at the end of a terminal
        return b""


def test_reading_commands_on_a_finished_run(call: Call, finished: Path) -> None:
    at = ("--store", str(finished / "runs"))
    status = call("status", "done", *at)
    assert "done  toy_pipeline  succeeded" in status.out
    assert re.search(r"^policy-update +Succeeded +2 ", status.out, re.M)
    assert "0.750 (temperature 1, training prompts, iteration 2)" not in status.out, (
        "the evaluation after is newer"
    )
    assert "done" in call("status", *at).out
    assert "iterations/2/policy-update" in call("weights", "ls", "done", *at).out
    assert (
        call("weights", "verify", "done", "3", *at).out
        == "version 3  iterations/2/policy-update: 2/2 files as committed\n"
    )
    refused(call("weights", "verify", "done", "7", *at), "versions v1, v2, v3")
    assert "no stage" not in call("logs", "done", *at).out
    refused(call("logs", "done", "nope", *at), "those that have: sft")
    assert call("report", "done", "-o", "page.html", *at).out == "page.html\n"
    assert "is not running (succeeded)" in call("stop", "done", *at).out


def test_a_flipped_byte_is_named(call: Call, tmp_path: Path) -> None:
    toy.make(f"{tmp_path}/runs/bad", 1)
    [weights] = (tmp_path / "runs" / "bad" / "sft").rglob("weights.json")
    weights.write_bytes(b"{" + weights.read_bytes()[1:-1] + b" ")
    result = call("weights", "verify", "bad")
    assert result.code == 2
    assert (
        "version 1  sft: 1/2 files as committed\nversion 2  iterations/1/policy-update: 2/2"
        in result.out
    )
    assert str(weights) in result.err


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("iterations", "iterations/1/policy-update, iterations/1/reward, iterations/1/rollout and"),
        ("iterations/1/reward", "iterations/1/reward"),
        ("iterations/2/policy-update", "iterations/2/policy-update"),
        ("export", "export"),
        ("sft/data-", "sft"),
        ("evaluate-after/manifest.json", "evaluate-after"),
    ],
)
def test_a_finished_run_says_what_is_missing_of_it(
    call: Call, finished: Path, tmp_path: Path, lost: str, named: str
) -> None:
    """It was "finished already", 0."""
    at = ("--store", str(finished / "runs"))
    run = finished / "runs" / "done"
    (path,) = run.glob(f"{lost}*") if lost.endswith("-") else [run / lost]
    kept = tmp_path / "kept"
    path.rename(kept)
    try:
        for words in (("run", TOY, "--run", "done", *at), ("resume", "done", *at)):
            refused(call(*words), f"has succeeded, but {named}", "is missing; restore it")
        status = call("status", "done", *at)
        assert status.code == 0 and re.search(rf"missing +{named}", status.out), status.out
        missing = json.loads(call("status", "done", "--json", *at).out)["missing"]
        place = lost.removesuffix("/manifest.json").removesuffix("/data-")
        assert missing and all(f"{key}/".startswith(f"{place}/") for key in missing), missing
        report = call("report", "done", "-o", str(tmp_path / "report.html"), *at)
        if lost.startswith("sft/"):
            # Its curve cannot be drawn.
            refused(report, f"/{lost}", "is missing; restore it from a copy")
        else:
            assert report.code == 0 and f"report: {named}" in report.err, report.err
    finally:
        kept.rename(path)
    assert json.loads(call("status", "done", "--json", *at).out)["missing"] == []
    assert call("run", TOY, "--run", "done", *at).code == 0


def test_the_same_run_again_is_done_and_another_configuration_is_refused(
    call: Call, finished: Path
) -> None:
    at = ("--run", "done", "--store", str(finished / "runs"))
    before = (finished / "runs" / "done" / "nodes.jsonl").read_bytes()
    assert "done: finished already" in call("run", TOY, *at).out
    assert "done: finished already" in call("resume", "done", *at[2:]).out
    assert (finished / "runs" / "done" / "nodes.jsonl").read_bytes() == before
    refused(
        call("run", TOY, *at, "--set", "iterations=3"),
        "exists with another iterations",
        "tuneloop resume done",
    )


def test_a_run_whose_executor_was_killed_before_its_report_has_one_when_it_is_resumed(
    call: Call, finished: Path
) -> None:
    page = finished / "runs" / "done" / "report.html"
    page.write_text("")
    assert str(page) in call("resume", "done", "--store", str(finished / "runs")).out
    assert "</html>" in page.read_text()


@pytest.mark.local
def test_a_stage_that_fails_says_why_and_a_mended_run_resumes(call: Call) -> None:
    result = call("run", TOY, "--run", "b", "--set", "broken=true", *QUICK)
    assert result.code == 2, result.out + result.err
    refused(Result(2, "", result.err), "has no manifest.json", "tuneloop logs b export")
    assert "b: failed" in result.out
    assert "b  toy_pipeline  failed" in call("status", "b").out
    again = call("resume", "b", *QUICK)
    assert again.code == 2
    assert "has no manifest.json" in again.err


def test_a_run_that_failed_before_its_loop_takes_other_settings(call: Call, tmp_path: Path) -> None:
    at = ("--run", "m", *QUICK, "--set", "iterations=1")
    (tmp_path / "runs/m").mkdir(parents=True)
    (tmp_path / "runs/m/evaluate-before").touch()  # a directory belongs there
    assert "m: failed" in call("run", TOY, *at).out
    (tmp_path / "runs/m/evaluate-before").unlink()
    misfit = call("run", TOY, *at, "--set", "sft.skill=2")
    assert misfit.code == 2 and "--skill: 2" in misfit.err and "is committed already" in misfit.err
    result = call("run", TOY, *at, "--set", "per_workflow=80")
    assert result.code == 0, result.out + result.err
    assert "begins again with another per_workflow, sft.skill" in result.out
    refused(call("run", TOY, *at), "exists with another per_workflow")


@pytest.mark.local
def test_a_killed_run_is_interrupted_and_resumes(call: Call, tmp_path: Path) -> None:
    child = program(
        "run",
        TOY,
        "--run",
        "k",
        *QUICK,
        "--set",
        "iterations=3",
        cwd=tmp_path,
        start_new_session=True,
    )
    until(lambda: (tmp_path / "runs/k/iterations/1/rollout/manifest.json").exists(), child=child)
    child.send_signal(signal.SIGSTOP)  # it is there, and begins no further stage
    assert "k  toy_pipeline  running" in call("status", "k").out
    refused(call("run", TOY, "--run", "k", "--set", "iterations=3", *QUICK), "is running")
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    until(lambda: "interrupted; tuneloop resume k" in call("status", "k").out)
    assert call("resume", "k", *QUICK).code == 0
    assert "k  toy_pipeline  succeeded" in call("status", "k").out


@pytest.mark.local
def test_stop_ends_a_run_so_that_it_resumes(call: Call, tmp_path: Path) -> None:
    child = program("run", TOY, "--run", "s", *QUICK, "--set", "iterations=50", cwd=tmp_path)
    until(lambda: (tmp_path / "runs/s/iterations/1/rollout/manifest.json").exists(), child=child)
    result = call("stop", "s")
    assert "go on with `tuneloop resume s`" in result.out
    child.communicate(timeout=LIMIT_S)
    assert child.returncode == 75
    assert run_record.Run.open("s").iteration < 50


# State that an executor left, written by its own journal


def left(tmp_path: Path, *nodes: Node, phase: str = "Running", message: str = "") -> Path:
    record = records.Record(
        run="r", pipeline="toy_pipeline", path=TOY, config={}, store=f"file://{tmp_path}/runs"
    )
    directory = run_record.Run.create(record, "").directory
    journal = Journal(directory)
    journal.write(Workflow(name="r", pid=os.getpid(), started=1.0, parameters={"iterations": "9"}))
    for node in nodes:
        journal.write(node)
    if phase != "Running":
        journal.write(
            Workflow(name="r", phase=phase, message=message, parameters={"iterations": "9"})
        )
    return directory


def pod(name: str, phase: str = "Succeeded", **more: object) -> Node:
    return Node(
        id=name, name=name, display_name=name, template="t", type="Pod", phase=phase, **more
    )  # type: ignore[arg-type]


def test_a_damaged_run_hides_no_other(call: Call, tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        store = "az://c/x" if name == "d" else f"file://{tmp_path}/runs"
        place = tmp_path / "runs" / name
        place.mkdir(parents=True)
        record = Record(
            run=name, pipeline="toy_pipeline", path=TOY, config={}, store=store, created=ord(name)
        )
        (place / "run.json").write_text(
            "{"
            if name == "a"
            else dump_checked_json(record.model_dump(mode="json"), f"{name}/run.json").decode()
        )
    (tmp_path / "runs" / "c" / "sft").mkdir()
    (tmp_path / "runs" / "c" / "sft" / "manifest.json").write_text("{}")
    result = call("status")
    rows = [line.split()[:3] for line in result.out.splitlines() if line.strip()[:1] in {*"abcd"}]
    assert rows == [
        ["b", "toy_pipeline", "created"],
        ["a", "damaged"],
        ["c", "damaged"],
        ["d", "unreachable"],
    ]
    assert [line.split(":")[0] for line in result.err.splitlines()] == [
        "a",
        "c",
        "d",
    ] and result.code == 0
    assert (
        "/a/run.json': was changed since it was written, or is another file; restore it"
        in result.err
    )
    refused(call("status", "a"), "was changed since it was written")
    refused(call("status", "none"), "known there: a, b, c, d")


def test_status_for_programs(call: Call, finished: Path) -> None:
    at = ("--store", str(finished / "runs"), "--json")
    told = json.loads(call("status", "done", *at).out)
    assert (told["format"], told["run"], told["pipeline"], told["phase"]) == (
        1,
        "done",
        "toy_pipeline",
        "succeeded",
    )
    assert (told["iteration"], told["iterations"], told["message"]) == (2, 2, "")
    assert [(each["mean_reward"], each["policy_version"]) for each in told["evaluations"]] == [
        (0.5, 1),
        (1.0, 3),
    ]
    assert told["newest_batch"]["mean_reward"] == 0.75
    stages = {stage["stage"]: stage for stage in told["stages"]}
    update = stages["policy-update"]
    assert (update["phase"], update["done"], update["retries"], update["iteration"]) == (
        "Succeeded",
        2,
        0,
        2,
    )
    assert stages["evaluate-after"]["results"]["mean_reward"] == 1.0

    listed = json.loads(call("status", *at).out)
    [run] = listed["runs"]
    assert (run["run"], run["phase"], run["mean_reward"]) == ("done", "succeeded", 1.0)
    documented = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/commands.md").read_text(), re.M))
    said = {*told, *listed, *run, *told["evaluations"][0], *update}
    assert said - documented == set(), "every key stands in docs/commands.md"


def test_status_for_programs_has_what_is_wrong_in_it(call: Call, tmp_path: Path) -> None:
    (tmp_path / "runs/bad").mkdir(parents=True)
    (tmp_path / "runs/bad/run.json").write_text("{")
    result = call("status", "--json")
    [run] = json.loads(result.out)["runs"]
    assert (run["run"], run["phase"], run["pipeline"], result.err) == ("bad", "damaged", None, "")
    assert "was changed since it was written" in run["message"]
    refused(call("status", "bad", "--json"), "was changed since it was written")
    refused(call("status", "none", "--json"), "run: 'none': not found")


def test_a_terminal_that_is_narrow_shows_the_names_of_runs(finished: Path) -> None:
    reader, terminal = os.openpty()
    env = {**os.environ, "COLUMNS": "60"}
    line = [sys.executable, "-m", "tuneloop.cli", "status"]
    child = subprocess.Popen(line, stdout=terminal, stderr=terminal, cwd=finished, env=env)
    os.close(terminal)
    out = b""
    while data := read(reader):
        out += data
    assert child.wait() == 0, out.decode()
    [row] = [row for row in out.decode().splitlines() if row.startswith("done ")]
    assert (
        row.split()[:3] == ["done", "toy_pipeline", "succeeded"]
        and "1.000" in row
        and row.endswith("…")
    )


def test_status_counts_retries_and_says_what_was_interrupted(call: Call, tmp_path: Path) -> None:
    tries = [
        pod(f"sft({i})", phase, parent="sft")
        for i, phase in enumerate(("Failed", "Failed", "Running"))
    ]
    left(tmp_path, *tries)
    text = call("status", "r").out
    assert "r  toy_pipeline  interrupted; tuneloop resume r" in text
    row = next(line.split() for line in text.splitlines() if line.strip().startswith("sft"))
    assert row == ["sft", "Interrupted", "2"]
    assert "0 of at most 9" in text


def test_status_of_a_failed_run_says_why(call: Call, tmp_path: Path) -> None:
    left(
        tmp_path, pod("sft", "Failed", message="exit code 1"), phase="Failed", message="sft failed"
    )
    assert "r  toy_pipeline  failed; sft failed; tuneloop resume r" in call("status", "r").out
    listed = call("status", "--json")
    [run] = json.loads(listed.out)["runs"]
    assert (run["phase"], run["message"], listed.err) == ("failed", "sft failed", "")
    assert call("status").err == "", "it could be read"


def test_a_group_in_which_nobody_has_the_turn_is_no_failure(call: Call) -> None:
    told = call("leases", "g", "--store", "runs")
    assert (told.code, told.out) == (0, "no run holds or waits for a lease in group g\n")
    open_lease_group("runs/.leases/g", who="r").update(
        lambda document: document.add_waiter("r.1", "r").grant("r.1")
    )
    assert "  holds  r  since " in call("leases", "g", "--store", "runs").out


def test_stop_gives_back_the_turns_of_a_run_that_was_killed(call: Call, tmp_path: Path) -> None:
    left(tmp_path, pod("sft", "Running"))
    turns = open_lease_group(f"{tmp_path}/runs/.leases/g", who="r")
    turns.update(
        lambda document: (
            document.add_waiter("r.1", "r")
            .grant("r.1")
            .add_waiter("r.2", "r")
            .add_waiter("other.1", "other")
        )
    )
    assert "is not running (interrupted)" in call("stop", "r").out
    document = turns.read()
    assert document.holder is None and [seat.who for seat in document.waiting] == ["other"]


def test_stop_of_an_executor_that_ends_just_now_waits_for_it(call: Call, tmp_path: Path) -> None:
    """Its process was gone, while the run was still held: a traceback."""
    directory = left(tmp_path, pod("sft", "Running"))
    child = subprocess.Popen(["true"])
    child.wait(LIMIT_S)
    journal.Journal(directory).write(Workflow(name="r", pid=child.pid, started=1.0))
    with journal.lock_workdir(directory):
        result = call("stop", "r", "--timeout", "0")
    assert result.code == 75 and "r: still running after 0 s" in result.err, result


def test_status_while_an_executor_holds_the_run(call: Call, tmp_path: Path) -> None:
    directory = left(tmp_path, pod("sft", "Running", progress="3/9"))
    with journal.lock_workdir(directory):
        text = call("status", "r").out
    assert "r  toy_pipeline  running" in text
    assert "Running (3/9)" in text


def test_logs_are_prefixed_and_followed_to_the_end(call: Call, tmp_path: Path) -> None:
    one = pod(
        "rollout", log="logs/one.log", inputs={"rollouts": "x/iterations/3/rollout"}, finished=1.0
    )
    two = pod("sft(0)", "Running", log="logs/two.log", parent="sft")
    directory = left(tmp_path, one, two)
    (directory / "logs").mkdir()
    (directory / "logs" / "one.log").write_text("a\nb")
    (directory / "logs" / "two.log").write_text("c\n")
    assert call("logs", "r").out == "rollout 3 | a\nrollout 3 | b\nsft | c\n"
    assert call("logs", "r", "sft").out == "sft | c\n"
    with journal.lock_workdir(directory):
        child = program("logs", "r", "sft", "-f", cwd=tmp_path)
        assert child.stdout and child.stdout.readline() == "sft | c\n"
        with (directory / "logs" / "two.log").open("a") as file:
            file.write("later\n")
        assert child.stdout.readline() == "sft | later\n"
    assert child.wait(LIMIT_S) == 0


def test_the_display_prints_a_line_an_iteration_with_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "time", lambda: now)
    loop = {"name": "loop", "dag": {"tasks": [{"template": "reward"}, {"template": "loop"}]}}
    workflow = carrying([planned("reward")], [loop], servers=["serve"], iterations="4")
    with Display(run_record.Run("r", str(tmp_path)), workflow) as display:
        for iteration in (1, 2):
            for stage, outputs in (("rollout", {}), ("reward", {"mean-reward": f"0.{iteration}5"})):
                earlier = f"s/r/iterations/{iteration - 1}/policy-update@sha256:00"
                about = {
                    "inputs": {"policy": earlier, "x": f"s/r/iterations/{iteration}/{stage}"},
                    "started": now,
                }
                name = f"{stage}-{iteration}"
                display.node(Node(name, name, f"{stage}(0)", stage, "Pod", "Running", **about))
                display.log(
                    Node(name, name, stage, stage, "Pod"),
                    f"{stage}: 1/2 prompts  0.1 prompts/s  9 s left",
                )
                now += 5
                ended = {**about, "finished": now, "outputs": outputs}
                display.node(Node(name, name, f"{stage}(0)", stage, "Pod", "Succeeded", **ended))
                display.node(
                    Node(f"s-{name}", "serve", "serve", "serve", "Pod", "Running", started=now)
                )  # died before
        display.log(
            Node("i", "i", "iterations", "iterations", "Pod"),
            "iteration 3/4  reward 0.350  0.5 s  (reward 0.5 s)",
        )
        display.node(
            pod(
                "export",
                "Failed",
                exit_code=2,
                message="exit code 2",
                started=110.0,
                finished=111.5,
            )
        )
    assert capsys.readouterr().out.splitlines() == [
        "   0.0 s  rollout: 1/2 prompts  0.1 prompts/s  9 s left",
        "   5.0 s  reward: 1/2 prompts  0.1 prompts/s  9 s left",
        "  10.0 s  iteration 1/4  reward 0.150  10.0 s/iteration  at most 30.0 s left  (rollout 5.0 s, reward 5.0 s)",
        "  10.0 s  rollout: 1/2 prompts  0.1 prompts/s  9 s left",
        "  15.0 s  reward: 1/2 prompts  0.1 prompts/s  9 s left",
        "  20.0 s  iteration 3/4  reward 0.350  0.5 s  (reward 0.5 s)",
        "  20.0 s  export: failed after 1.5 s: exit code 2",
        "  20.0 s  iteration 2/4  reward 0.250  10.0 s/iteration  at most 20.0 s left  (rollout 5.0 s, reward 5.0 s)",
    ]


def test_the_display_says_why_a_stage_or_a_server_is_tried_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(time, "time", lambda: 100.0)
    died = "server died: SIGILL, illegal instruction; restarting (1 of 3); log: runs/r/logs/serve-0.log"
    again = "unavailable: the store is away; retrying in 40 s (attempt 2)"

    def attempts(name: str, message: str, *, ready: bool = False) -> Iterator[Node]:
        """The nodes of two attempts: as the executor tells them."""
        about = {
            "name": name,
            "display_name": name,
            "template": name,
            "started": 90.0,
            "daemoned": ready,
        }
        yield Node(name, type="Retry", phase="Running", **about)
        for number, phase in ((0, "Failed"), (1, "Succeeded")):
            one = {**about, "display_name": f"{name}({number})", "type": "Pod", "parent": name}
            yield Node(f"{name}-{number}", phase="Running", **one)
            yield Node(
                f"{name}-{number}",
                phase=phase,
                finished=95.0,
                message="" if number else "lost",
                **one,
            )
            if not number:
                yield Node(name, type="Retry", phase="Running", message=message, **about)
                yield Node(name, type="Retry", phase="Running", message=message, **about)

    with Display(run_record.Run("r", str(tmp_path)), carrying([])) as display:
        for node in (*attempts("serve", died, ready=True), *attempts("rollout", again)):
            display.node(node)
            with (screen := Console(width=200)).capture() as drawn:
                screen.print(display._draw())
            shown = drawn.get()
            assert (again in shown) == (node.message == again)
        last = {
            "name": "sft",
            "display_name": "sft",
            "template": "sft",
            "started": 90.0,
            "finished": 95.0,
        }
        display.node(Node("sft", type="Retry", phase="Running", **last))
        display.node(
            Node(
                "sft-0",
                **{**last, "display_name": "sft(0)"},
                type="Pod",
                phase="Failed",
                parent="sft",
            )
        )
        display.node(
            Node("sft", type="Retry", phase="Failed", message="exit code 2: error", **last)
        )
        ended = {"message": "serve: server died", "parent": "r"}
        display.node(Node("reward", "reward", "reward", "reward", "Pod", "Omitted", **ended))
    assert [line[10:] for line in capsys.readouterr().out.splitlines()] == [
        "serve: ready in 10.0 s",
        f"serve: {died}",
        "serve: ready in 10.0 s",
        "serve: stopped after 5.0 s",
        f"rollout: {again}",
        "rollout: 5.0 s",
        "sft: failed after 5.0 s: exit code 2",
        "reward: ended after 0.0 s: serve: server died",
    ]


def test_settings_may_be_mended_until_the_loop_has_made_a_version(
    call: Call, tmp_path: Path
) -> None:
    """A wrong setting of an update is found out when the first batch of rollouts is there."""
    config = find_pipeline(TOY).configure(sets=["iterations=1"]).model_dump(mode="json")
    for name in ("early", "late"):
        store = f"file://{tmp_path}/runs"
        run_record.Run.create(
            Record(run=name, pipeline="toy_pipeline", path=TOY, config=config, store=store), ""
        )
        toy.make(f"{store}/{name}", 1, whole=False)
    shutil.rmtree(tmp_path / "runs/early/iterations/1/policy-update")
    mended = ("iterations=1", "--set", "per_workflow=80", *QUICK)
    refused(
        call("run", TOY, "--run", "late", "--set", *mended),
        "exists with another per_workflow",
        "resume late",
    )
    result = call("run", TOY, "--run", "early", "--set", *mended)
    assert result.code == 0, result.out + result.err
    assert (
        "begins again with another per_workflow" in result.out and "early: succeeded" in result.out
    )


def test_a_fork_runs_from_where_the_other_stood_to_the_same_digests(
    call: Call, tmp_path: Path
) -> None:
    """As long as it has the same settings; with others it is a run of its own from there."""
    assert call("run", TOY, "--run", "whole", *QUICK, "--set", "iterations=3").code == 0
    result = call("fork", "whole", "1", *QUICK)
    assert result.code == 0 and "3 of at most 3, forked from whole after 1" in result.out
    made = {at: digests(tmp_path / "runs", at) for at in ("whole", "whole-at-1")}
    once = {
        "sft",
        "evaluate-before",
        *(key for key in made["whole"] if key.startswith("iterations/1/")),
    }
    assert made["whole-at-1"] == {
        key: digest for key, digest in made["whole"].items() if key not in once
    }
    assert "forked from whole after 1" in call("status", "whole-at-1").out
    told = json.loads(call("status", "whole-at-1", "--json").out)
    assert (told["forked_from"]["run"], told["forked_from"]["iteration"]) == ("whole", 1)
    assert json.loads(call("status", "whole", "--json").out)["forked_from"] is None
    assert call("audit", "whole-at-1").code == 0
    assert "iterations/1/policy-update@sha256:" in call("why", "whole-at-1", "2").out
    assert "finished already" in call("resume", "whole-at-1").out
    other = call(
        "fork",
        "whole-at-1",
        "3",
        "--name",
        "long",
        *QUICK,
        "--set",
        "iterations=4",
        "--set",
        "per_workflow=1",
    )
    assert other.code == 0 and "4 of at most 4, forked from whole-at-1 after 3" in other.out


def test_what_cannot_be_forked_is_one_line(call: Call, tmp_path: Path) -> None:
    toy.make(f"{tmp_path}/runs/bare", 1)
    config = find_pipeline(TOY).configure(sets=["iterations=2"]).model_dump(mode="json")
    record = Record(
        run="x", pipeline="toy_pipeline", path=TOY, config=config, store=f"file://{tmp_path}/runs"
    )
    run_record.Run.create(record, "")
    toy.make(f"{tmp_path}/runs/x", 1, whole=False)
    refused(
        call("fork", "bare", "1"),
        "was not started here; on a cluster: `tuneloop submit --fork bare 1`",
    )
    refused(call("fork", "x", "2"), "ITERATION: 2: x, in iteration 1 now, has not committed it")
    refused(call("fork", "x", "1", "--set", "sft.skill=2"), "sft.skill: 2: x ran sft with 1")
    refused(call("fork", "x", "1", "--set", "iteration=2"), "did you mean iterations?")
    refused(
        call("fork", "x", "1", "--name", "x"),
        "is the name of a run; `tuneloop resume x` continues it",
    )
    refused(call("fork", "x", "1", "--name", "bare"), "--name: 'bare': is the name of another run")
    refused(
        call("fork", "x", "1", "--name", "a/b"), "--name: 'a/b': use at most 40 lower-case letters"
    )
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["bare", "x"]
    assert not (tmp_path / "runs/x/pins").exists()


def test_a_page_over_nothing_is_refused(call: Call, tmp_path: Path) -> None:
    refused(
        call("ui", "--store", f"{tmp_path}/none"),
        "--store: '",
        "none': is not a directory; correct it",
    )
    refused(
        call("ui"), "--store: 'runs': is not a directory; correct it, or start a run there first"
    )


def test_a_command_ends_whatever_threads_still_run() -> None:
    """Of libraries, in native code: taking the interpreter apart beside them may abort the process."""
    program = (
        "import atexit, threading, time; from tuneloop.core.threads import end_process;"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('joined'))).start();"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start();"
        "atexit.register(lambda: print('registered')); print('said', end=' '); end_process(3)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(), done.stderr) == (
        3,
        ["said", "joined", "registered"],
        "",
    )


def test_a_run_says_where_its_mirrors_are(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'components'}:{ROOT}")
    monkeypatch.setenv("TUNELOOP_TRACKERS", "nonsense")
    refused(
        call("run", TOY, "--run", "mine", "--no-warm"),
        "trackers: 'nonsense': unknown; known: mlflow",
    )
    assert not list(tmp_path.rglob("run.json")), "nothing is written of a run that is refused"
    monkeypatch.setenv("TUNELOOP_TRACKERS", f"tensorboard+{tmp_path}/curves")
    done = call("run", TOY, "--run", "mine", "--no-warm")
    assert done.code == 0, done.err
    (at,) = re.findall(r"^  tensorboard  (\S+/curves/mine-\w{8})$", done.out, re.M)
    (first,) = Path(at).iterdir()
    assert call("track", "mine").out == f"{at}\n" and not first.exists()
