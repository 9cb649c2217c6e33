"""Whole pipelines on this machine."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.frozen import read_answers
from tests.local.loops import SMALL, command, digests, finish, kill_when
from tests.waiting import LIMIT_S, free_port, until
from tuneloop.core.artifacts import Artifact
from tuneloop.local import journal
from tuneloop.local.iterations import RECORDS
from tuneloop.stages.sft import sft
from tuneloop.weights.inspect import list_versions

pytestmark = pytest.mark.local


@pytest.mark.slow
def test_same_seed_same_weights_at_every_grain_other_seed_other_weights(tmp_path: Path) -> None:
    """a runs each stage in a process of its own; the pod of b decides for itself, and runs those of both iterations in
    one; c goes only as far as the first."""
    for run, seed, pod, iterations in (("a", 1, 0, 2), ("b", 1, "auto", 2), ("c", 2, 1, 1)):
        settings = {"loop.iterations": iterations, "loop.iterations_per_pod": pod}
        finish(command("run", "sft_then_grpo", "--run", run, store=tmp_path, seed=seed, **settings))
    a, b, c = (digests(tmp_path, run) for run in "abc")
    assert a == b
    found = journal.read_state(tmp_path / "b")
    assert (
        found
        and [n.template for n in found.nodes.values() if n.type == "Pod"].count("iterations") == 1
    )
    decided = json.loads((tmp_path / "b" / RECORDS).read_text())
    assert [(pod["pod"], pod["first"], pod["iterations"]) for pod in decided] == [(1, 1, 2)]
    assert all(
        a[name] != c[name] for name in ("sft", "iterations/1/rollout", "iterations/1/policy-update")
    )


@pytest.mark.slow
def test_two_processes_train_what_one_trains(tmp_path: Path) -> None:
    halves = {"processes": 2, "trainer.per_device_train_batch_size": 8, "loop.iterations": 1}
    finish(command("run", "sft_then_grpo", "--run", "two", store=tmp_path, **halves))
    two = Artifact(f"{tmp_path}/two/sft").manifest
    whole = {**two.params, "per_device_train_batch_size": 16, "expected_world_size": None}
    one = sft(out=f"{tmp_path}/one", **two.inputs, **whole)
    update = Artifact(f"{tmp_path}/two/iterations/1/policy-update").manifest
    assert update.provenance["world_size"] == 2
    assert (one.provenance["world_size"], two.provenance["world_size"]) == (1, 2)
    assert two.results["loss"] == pytest.approx(one.results["loss"], rel=1e-4)


@pytest.mark.slow
def test_tokens_that_a_stage_made_train_the_same(tmp_path: Path) -> None:
    settings = {name: None for name in SMALL if name.split(".")[0] in ("engine", "rollout", "loop")}
    settings |= {"data.sft": 32, "data.train": 8, "data.preference": 16, "data.preference_eval": 4}
    settings |= {"sft.max_steps": 3, "preference.max_steps": 3}
    for run, tokenize in (("rows", False), ("tokens", True)):
        finish(command("run", "dpo", "--run", run, store=tmp_path, **settings, tokenize=tokenize))
    rows, tokens = (
        {
            name: Artifact(f"{tmp_path}/{run}/{name}").manifest.files
            for name in digests(tmp_path, run)
        }
        for run in ("rows", "tokens")
    )
    assert tokens.pop("tokenize-data") and tokens == rows, (
        "the digests name what they were made from"
    )


@pytest.mark.slow
def test_programs_are_learnt_and_tested(tmp_path: Path) -> None:
    """Twenty-four functions, half of them shown: some programs are right, some wrong, some no Python."""
    settings: dict[str, object] = {
        "data.source": "functions",
        "data.source_args": '{"steps": 1, "tests": 2}',
    }
    settings |= {
        "data.source_args.digits": None,
        "data.rewards": '{"code": 1.0}',
        "data.timeout_s": 30,
    }
    settings |= {
        "data.train": 8,
        "data.eval": 4,
        "data.sft": 12,
        "sft.max_steps": 60,
        "loop.iterations": 1,
    }
    settings |= {
        "rollout.max_tokens": 40,
        "evaluate.max_tokens": 40,
        "reward.timeout_s": 30,
        "reward.workers": 2,
    }
    printed = finish(
        command(
            "run",
            "sft_then_grpo",
            "--run",
            "p",
            store=tmp_path,
            **settings,
            **{"evaluate.reward_timeout_s": 30},
        )
    )
    assert "mean reward" in printed
    assert "unchecked" not in Artifact(f"{tmp_path}/p/data-prep").manifest.facts
    facts = Artifact(f"{tmp_path}/p/iterations/1/reward").manifest.facts["reward"]
    assert 0 < facts["breakdown"]["code"] < 1 and facts["outcomes"]["score"] == 16
    assert Artifact(f"{tmp_path}/p/iterations/1/policy-update").manifest.facts["version"] == 2


@pytest.mark.parametrize(
    ("model", "pull"),
    [("tiny-qwen3", False), pytest.param("tiny-llama", True, marks=pytest.mark.slow)],
)
def test_loop_with_real_vllm(tmp_path: Path, model: str, pull: bool) -> None:
    settings = {
        "engine.kind": "vllm",
        "base_model": model,
        "loop.iterations": 2,
        "engine.port": free_port(),
    }
    settings["engine.weights"] = "pull" if pull else "load"
    printed = finish(command("run", "sft_then_grpo", "--run", "v", store=tmp_path, **settings))
    for iteration in (1, 2):
        made = Artifact(f"{tmp_path}/v/iterations/{iteration}/rollout").manifest
        facts = made.facts
        assert facts["engine"].startswith("vllm")
        assert facts["version"] == iteration, "version 0 is the base model, 1 is SFT's"
        assert facts["canary"]["mean_abs_diff"] < facts["canary"]["tolerance"]
        if pull:
            pulled = made.notes["pulled"]
            assert (pulled["version"], pulled["identical"]) == (iteration, pulled["tensors"])
    assert [v.version for v in list_versions(f"{tmp_path}/v/weights")] == (
        [0, 1, 2, 3] if pull else []
    )
    shown = read_answers((tmp_path / "v" / "report.html").read_text())["/runs/v/weights"][
        "deliveries"
    ]
    assert [each["version"] for each in shown] == ([0, 1, 2, 3] if pull else [])
    assert "mean reward" in printed and "cpu" in printed.lower()


@pytest.mark.slow
def test_a_loop_outlives_its_server(tmp_path: Path) -> None:
    """Ended by SIGILL while it generates, in the second iteration: the rollout goes on with what it has."""
    port = free_port()
    settings = {
        "engine.kind": "vllm",
        "base_model": "tiny-qwen3",
        "loop.iterations": 2,
        "engine.port": port,
    }
    settings |= {
        "rollout.prompts_per_iteration": 16,
        "engine.args.max_num_seqs": 2,
    }  # so that it takes a while
    line = command("run", "sft_then_grpo", "--run", "v", store=tmp_path, **settings)
    child = subprocess.Popen(line, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until(lambda: generates(tmp_path / "v", "2"), 10 * LIMIT_S, child)
    os.kill(serving(port), signal.SIGILL)
    printed, _ = child.communicate(timeout=10 * LIMIT_S)
    assert child.returncode == 0, printed[-4000:]
    assert "serve: server died: SIGILL, illegal instruction; restarting (1 of " in printed
    found = journal.read_state(tmp_path / "v")
    assert found
    sampled = [
        node for node in found.nodes.values() if node.template == "rollout" and node.type == "Pod"
    ]
    assert [node.phase for node in sampled] == ["Succeeded", "Succeeded"], (
        "no stage was tried again"
    )
    said = (tmp_path / "v" / sampled[1].log).read_text()
    assert "engine: lost the server" in said and "answers again" in said, said
    for iteration in (1, 2):
        made = Artifact(f"{tmp_path}/v/iterations/{iteration}/rollout")
        rows = pq.read_table(made.path / "rollouts.parquet").to_pylist()
        assert len({row["request_id"] for row in rows}) == len(rows) == 16 * 4
        assert {version for row in rows for version in row["policy_versions"]} == {iteration}
        assert (
            Artifact(f"{tmp_path}/v/iterations/{iteration}/policy-update").manifest.facts["version"]
            == iteration + 1
        )


@pytest.mark.slow
def test_a_loop_goes_on_with_the_replica_that_is_left(tmp_path: Path) -> None:
    """One of two servers is killed while both generate: the other makes the rest of that batch."""
    port = free_port()
    settings = {
        "engine.kind": "vllm",
        "engine.replicas": 2,
        "loop.iterations": 2,
        "engine.port": port,
    }
    settings |= {
        "rollout.prompts_per_iteration": 48,
        "engine.args.max_num_seqs": 1,
    }  # so that it takes seconds
    line = command("run", "sft_then_grpo", "--run", "v", store=tmp_path, **settings)
    child = subprocess.Popen(line, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until(lambda: generates(tmp_path / "v", "1"), 10 * LIMIT_S, child)
    os.kill(serving(port, host=2), signal.SIGKILL)
    printed, _ = child.communicate(timeout=10 * LIMIT_S)
    assert child.returncode == 0, printed[-4000:]
    assert "serve-" in printed and "server died: SIGKILL" in printed
    served = [
        Artifact(f"{tmp_path}/v/iterations/{i}/rollout").manifest.notes["replicas"] for i in (1, 2)
    ]
    assert {*served[0]} == {f"http://127.0.0.{host}:{port}" for host in (1, 2)}
    assert [sum(each["requests"] for each in of.values()) for of in served] == [48, 48]
    assert (
        "lost" in served[0][f"http://127.0.0.2:{port}"]
        and "lost" not in served[0][f"http://127.0.0.1:{port}"]
    )


@pytest.mark.slow
def test_deterministic_runs_with_vllm_have_one_root_whatever_was_killed(tmp_path: Path) -> None:
    """One is left alone. Of the other all is killed in its first rollout, and its server in the second; then vLLM in
    another process makes the second rollout again."""
    settings = {"engine.kind": "vllm", "engine.deterministic": True, "loop.iterations": 2}
    settings |= {
        "rollout.prompts_per_iteration": 32,
        "engine.args.max_num_seqs": 4,
    }  # so that it takes a while
    finish(
        command(
            "run",
            "sft_then_grpo",
            "--run",
            "calm",
            store=tmp_path,
            **settings,
            **{"engine.port": free_port()},
        )
    )
    calm, killed, port = journal.read_state(tmp_path / "calm"), tmp_path / "killed", free_port()
    assert calm
    pods = [
        node.id for node in calm.nodes.values() if node.template == "rollout" and node.type == "Pod"
    ]
    line = command(
        "run",
        "sft_then_grpo",
        "--run",
        "killed",
        store=tmp_path,
        **settings,
        **{"engine.port": port},
    )
    assert kill_when(line, killed, pods[0], lambda: generates(killed, "1")) == "Running"

    line = command("resume", "killed", store=tmp_path)
    child = subprocess.Popen(line, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until(lambda: generates(killed, "2"), 10 * LIMIT_S, child)
    os.kill(serving(port), signal.SIGKILL)
    printed, _ = child.communicate(timeout=10 * LIMIT_S)
    assert child.returncode == 0, printed[-4000:]
    found = journal.read_state(killed)
    assert found and "engine: lost the server" in (killed / found.nodes[pods[1]].log).read_text()

    assert digests(tmp_path, "killed") == digests(tmp_path, "calm")
    assert finish(command("audit", "killed", store=tmp_path)) == finish(
        command("audit", "calm", store=tmp_path)
    )
    assert (
        Artifact(f"{killed}/iterations/2/rollout").manifest.notes["determinism"]["batch_invariant"]
        is False
    )
    again = finish(command("replay", "killed", "2", "--stage", "rollout", store=tmp_path))
    assert "iterations/2/rollout: equal, sha256:" in again


def generates(workdir: Path, iteration: str) -> bool:
    """Whether the rollout of an iteration has been heard of."""
    found = journal.read_state(workdir)
    pods = found.nodes.values() if found else ()
    busy = [
        p
        for p in pods
        if p.template == "rollout" and p.phase == "Running" and "iteration" in p.inputs
    ]
    return any(
        p.inputs["iteration"] == iteration and (workdir / "nodes" / p.id / "progress").exists()
        for p in busy
    )


def serving(port: int, host: int = 1) -> int:
    """The process that listens at a port of 127.0.0.`host`, by its socket: a fork has the command line of what it was
    forked from."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = [
        words[9]
        for words in lines
        if words[1] == f"{host:02X}00007F:{port:04X}" and words[3] == "0A"
    ]
    holders = set()
    for place in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended meanwhile
            holders |= {int(place.parts[2])} if os.readlink(place) == f"socket:[{inode}]" else set()
    (only,) = holders
    return only
