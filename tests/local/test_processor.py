"""A machine that advertises AMX without having it, as far as any machine can play it: `torch.cpu` says that there is
AMX, and here there is none. What vLLM then chooses is an illegal instruction on this machine, too."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.making import checkpoint_artifact
from tests.policies import commit_policy
from tests.waiting import LIMIT_S, free_port, until
from tuneloop.core.processor import advertises_amx

pytestmark = pytest.mark.local

PROGRAM = """
import json, os, sys
import torch

torch.cpu._is_amx_tile_supported = lambda: True
from tuneloop.{package} import {module}

code = {module}.{call}(sys.argv[1:])
found = {{"isa": os.environ.get("ONEDNN_MAX_CPU_ISA"), "amx": torch.cpu._is_amx_tile_supported()}}
print(json.dumps(found), flush=True)
os._exit(code)
"""
LIMITED = {"isa": "AVX512_CORE_FP16", "amx": False}
LINE = "processor: AMX is not used (TUNELOOP_PROCESSOR_CHECK=bad); oneDNN and vLLM are held to AVX512_CORE_FP16"
BFLOAT16 = {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 26,
    "dtype": "bfloat16",
}


def start(module: str, call: str, *arguments: object, answer: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            PROGRAM.format(
                package=module.rpartition(".")[0], module=module.rpartition(".")[2], call=call
            ),
            *map(str, arguments),
        ],
        env={**os.environ, "TUNELOOP_PROCESSOR_CHECK": answer},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_stage_says_so_holds_back_and_records_it(tmp_path: Path) -> None:
    model = checkpoint_artifact(tmp_path / "given").path / "model"
    program = start(
        "stages.base_model",
        "base_model.run",
        "--model",
        model,
        "--checkpoint",
        tmp_path / "made",
        answer="bad",
    )
    told, said = program.communicate()
    assert program.returncode == 0, said
    assert json.loads(told) == LIMITED
    assert said.splitlines().count(LINE) == 1
    manifest = json.loads((tmp_path / "made" / "manifest.json").read_text())
    why = {
        "amx": "not used",
        "why": "TUNELOOP_PROCESSOR_CHECK=bad",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
    }
    assert manifest["provenance"]["processor"] == why


@pytest.mark.slow
def test_a_vllm_server_that_holds_back_serves_and_one_that_does_not_dies(tmp_path: Path) -> None:
    """In bfloat16, whose attention vLLM would compute by AMX."""
    policy = commit_policy(tmp_path / "policy")
    port = free_port()
    arguments = ("--policy", policy.ref, "--port", port, "--engine-args", json.dumps(BFLOAT16))
    server = start("inference.server", "main", *arguments, answer="bad")
    until(lambda: answers(port), child=server)
    assert generate(port) == 8
    server.send_signal(signal.SIGTERM)
    told, said = server.communicate()
    assert server.returncode == 0, said
    assert json.loads(told) == LIMITED
    assert said.splitlines().count(LINE) == 1

    if not advertises_amx():  # where it works, nothing is wrong with a server that uses it
        server = start("inference.server", "main", *arguments, answer="good")
        with contextlib.suppress(OSError, http.client.HTTPException):
            until(lambda: answers(port) or server.poll() is not None)
            generate(port)
        # An illegal instruction, or 75 where vLLM's library for this processor has no kernel for AMX at all.
        assert server.wait(LIMIT_S) in (-signal.SIGILL, 75), server.communicate()


def ask(port: int, path: str, body: object = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    connection.request(
        "GET" if body is None else "POST", path, None if body is None else json.dumps(body)
    )
    reply = connection.getresponse()
    return reply.status, reply.read()


def answers(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError):
        return ask(port, "/health")[0] == 200
    return False


def generate(port: int) -> int:
    """How many tokens it makes."""
    request = {"id": "r", "prompt_ids": [3, 4, 5], "seeds": [0]}
    _, body = ask(
        port,
        "/generate",
        {"requests": [request], "sampling": {"temperature": 0.0, "max_tokens": 8}},
    )
    (line,) = [json.loads(line) for line in body.splitlines() if line]
    return len(line["completions"][0]["ids"])
