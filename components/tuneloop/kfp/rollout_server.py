"""The rollout server beside the iterations of a loop, in one task: KFP has no daemons.

On Argo and on one machine the server is a template of its own, `argo/template.py: server_template`.
Tests: `tests/unit/kfp/test_iterations.py`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tuneloop.core.errors import EXIT_RETRY, Interrupted, Unavailable
from tuneloop.core.http import Unanswered, send_request
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.server_token import VARIABLE, create_token_file
from tuneloop.local.iterations import Iterations, StageEnded

BOOT_S = 600.0
"""Seconds within which a server must be ready, as on Argo (`failure_threshold` of the readiness
probe in `argo/template.py: server_template`)."""
HEALTH_TIMEOUT_S = 5.0
"""Seconds that a starting server has to answer a question about its health."""
GRACE_S = 30.0
"""Seconds that a server has to end after SIGTERM, before it is killed: more than it gives to running
answers (`inference/server.py: GRACE_S`)."""


@contextlib.contextmanager
def run_server(
    server: JsonMapping, run: str, values: Mapping[str, str], pod: Iterations
) -> Iterator[str]:
    """Run the rollout server for the block, and yield its endpoint.

    Args:
        server: as `task_plan.py: _describe_server` describes it: ``flags`` (`ServerPlan.flags`),
            ``port``, ``pull`` (the server follows published versions) and, if it has its own GPUs,
            ``devices``.
        run: the URL of the run.
        values: have the reference of the ``policy``, and the URL of the published ``weights``.
        pod: the iterations that the server works for; they know whether the task was told to stop.

    Raises:
        StageEnded: the server exited before it was ready.
        Unavailable: it was not ready within `BOOT_S`.
        Interrupted: `pod` was stopped before it was ready.
    """
    source = "weights" if server["pull"] else "policy"
    command = [sys.executable, "-m", "tuneloop.inference.server"]
    command += [f"--{source}", values[source]]
    command += ["--host", "127.0.0.1", *server["flags"]]
    command += ["--attempts", f"{run}/serve"]
    endpoint = f"http://127.0.0.1:{server['port']}"
    directory = tempfile.TemporaryDirectory(prefix="tuneloop-", ignore_cleanup_errors=True)
    token = Path(directory.name) / "server-token"
    create_token_file(token)
    # The stages inherit it from this process, as the server does.
    os.environ[VARIABLE] = str(token)
    environment = dict(os.environ)
    if "devices" in server:
        environment["CUDA_VISIBLE_DEVICES"] = server["devices"]
    # vLLM has worker processes: in a session of their own they can be ended with it.
    process = subprocess.Popen(command, start_new_session=True, env=environment)
    try:
        _await_ready(process, f"{endpoint}/health", pod)
        yield endpoint
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # The next attempt listens at the same port.
        process.wait()
        del os.environ[VARIABLE]
        directory.cleanup()


def _await_ready(process: subprocess.Popen[bytes], url: str, pod: Iterations) -> None:
    """Wait until `url` answers; the errors are those of `run_server`."""
    deadline = time.monotonic() + BOOT_S
    while process.poll() is None:
        with contextlib.suppress(Unanswered):
            status, _ = send_request("GET", url, timeout_s=HEALTH_TIMEOUT_S)
            if status == 200:
                return
        if pod.stopped:
            raise Interrupted("the rollout server was not ready yet")
        if time.monotonic() > deadline:
            raise Unavailable(f"the rollout server was not ready in {BOOT_S:g} s")
        time.sleep(1)
    # The server has printed why; a killed server is started again.
    raise StageEnded(process.returncode if process.returncode > 0 else EXIT_RETRY)
