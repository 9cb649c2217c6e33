"""The warm process of servers, with the real vLLM."""

import contextlib
import http.client
import json
import signal
from pathlib import Path

import pytest

from tests.policies import commit_policy
from tests.waiting import LIMIT_S, free_port, until
from tuneloop.local.processes import WARM, Launcher, base_environment

pytestmark = [pytest.mark.local, pytest.mark.slow]


def test_a_server_is_a_fork_with_vllm_imported_that_looks_at_no_model_in_a_fresh_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WARM, raising=False)  # a process of its own, with a cache of its own
    environment = base_environment({"VLLM_CACHE_ROOT": str(tmp_path / "cache")})
    log, port = tmp_path / "log", free_port()
    args = json.dumps({"max_model_len": 64, "kv_cache_memory_bytes": 1 << 26})
    policy = commit_policy(tmp_path / "policy")
    launcher = Launcher(environment, ["server"])
    try:
        command = [
            "python",
            "-m",
            "tuneloop.inference.server",
            "--policy",
            policy.ref,
            "--port",
            str(port),
            "--engine-args",
            args,
        ]
        server = launcher.start(command, environment, tmp_path, log, log, patient=True)
        warm = launcher._servers_by_kind["server"]
        assert warm.failure is None
        until(lambda: server.ended.is_set() or answers(port))
        assert not server.ended.is_set(), log.read_text()
        assert server in warm._processes.values()
        assert not list(
            (tmp_path / "cache").rglob("*.json")
        )  # where vLLM notes what such a process found
        server.signal(signal.SIGTERM)
        assert server.ended.wait(LIMIT_S) and server.code == 0, log.read_text()
    finally:
        launcher.close()


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    with contextlib.suppress(ConnectionRefusedError):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False
