"""Several iterations in one task: ``python -m tuneloop.kfp.iterations --loop JSON … --executor-input …``

`tuneloop.local.iterations` runs them, with the rollout server beside it if the engine has one. Each stage commits, and
a task that is tried again finds what is committed. What the task tells KFP is said of its last iteration, and its
curves go over all that it ran.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tuneloop.core.artifacts import Manifest, find_manifest
from tuneloop.core.errors import EXIT_RETRY, INTERRUPTED, UNAVAILABLE, UserError, print_diagnostic, report_error
from tuneloop.core.http import Unanswered, send_request
from tuneloop.core.store import Store
from tuneloop.kfp import previews
from tuneloop.kfp.io import Task
from tuneloop.kfp.retry import retry_in_process
from tuneloop.kfp.stage import TARGET, encode_parameter, find_last_iteration, hand_over, report_skipped_stage
from tuneloop.local.iterations import Iterations
from tuneloop.workflow.pod_loop import PodLoop

RESULTS = {"last_iteration": int, "mean_reward": float}
"""Output parameters: the last iteration that was done, and what its rollouts earned."""
BOOT_S = 600.0
"""Seconds in which a server is to be ready."""
GRACE_S = 30.0
"""Seconds that a server has for its end."""


def main(argv: Sequence[str]) -> int:
    """Run the iterations of an executor input; returns the exit code, that of the stage that failed if one did."""
    parser = argparse.ArgumentParser(prog="tuneloop.kfp.iterations", description=__doc__)
    parser.add_argument("--loop", required=True, metavar="JSON", help="the steps, see tuneloop.workflow.pod_loop")
    parser.add_argument("--iterations", required=True, type=int, help="the number of the last")
    parser.add_argument("--per-pod", required=True, type=int, help="iterations after whose multiples a task ends")
    parser.add_argument("--endpoint", default="", help="of rollout servers that somebody else runs")
    parser.add_argument("--server", type=json.loads, metavar="JSON", help="port, engine_args and pull of one to run")
    parser.add_argument("--weights", help="URL of published versions; default: below the run's")
    parser.add_argument("--executor-input", required=True)
    given = parser.parse_args(argv)
    task = Task.read(given.executor_input)
    if (iteration := find_last_iteration(task)) is not None:
        report_skipped_stage(task, "checkpoint", RESULTS, iteration)
        return 0
    url, last = task.parameters["url"], 0
    values = {name: handle["ref"] for name, handle in task.inputs.items()}
    values |= {name: encode_parameter(task.parameters[name]) for name in ("iteration", "seed")}
    values |= {"endpoint": given.endpoint, "weights": given.weights or f"{url}/weights"}
    limits: Any = {"last": given.iterations, "per_pod": given.per_pod, "target": task.parameters[TARGET]}
    loop = PodLoop.model_validate_json(given.loop)

    def run() -> int:
        nonlocal last
        pod = Iterations(loop, run=url, **limits)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(pod.handle_signals())
                if given.server:
                    values["endpoint"] = stack.enter_context(run_server(given.server, url, values, pod))
                code, outputs = pod.run(values)
        except ServerEnded as error:
            return error.code
        except UserError as error:
            return report_error(error)
        last = int(outputs.get("iteration", 0))
        return code

    code = retry_in_process(run, lambda: " ".join(Store(url).keys("iterations")))
    if code == 0:
        report_iterations(task, last)
    return code


class ServerEnded(Exception):
    """The rollout server did not become ready; the task ends with this exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


@contextlib.contextmanager
def run_server(server: Mapping[str, Any], run: str, values: Mapping[str, str], pod: Iterations) -> Iterator[str]:
    """Run the rollout server, from the policy or the published versions in `values`; yields its endpoint.

    Args:
        server: ``port``, ``engine_args`` and ``pull``.
        run: URL of the run.
        pod: what asks the server; once it is stopped, nobody waits for the server to be ready.

    Raises:
        ServerEnded: it did not become ready.
    """
    source = ("--weights", values["weights"]) if server["pull"] else ("--policy", values["policy"])
    words = ["--host", "127.0.0.1", "--port", str(server["port"]), "--engine-args", json.dumps(server["engine_args"])]
    command = [sys.executable, "-m", "tuneloop.inference.server", *source, *words, "--attempts", f"{run}/serve"]
    endpoint = f"http://127.0.0.1:{server['port']}"
    process = subprocess.Popen(command, start_new_session=True)  # vLLM has workers: they end with it
    try:
        _await_ready(process, f"{endpoint}/health", pod)
        yield endpoint
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()  # the next attempt listens at the same port


def _await_ready(process: subprocess.Popen[bytes], url: str, pod: Iterations) -> None:
    deadline = time.monotonic() + BOOT_S
    while process.poll() is None:
        with contextlib.suppress(Unanswered):
            if send_request("GET", url, timeout_s=5)[0] == 200:
                return
        if pod.stopped:
            raise ServerEnded(print_diagnostic(f"{INTERRUPTED}: the rollout server was not ready yet", EXIT_RETRY))
        if time.monotonic() > deadline:
            raise ServerEnded(
                print_diagnostic(f"{UNAVAILABLE}: the rollout server was not ready in {BOOT_S:g} s", EXIT_RETRY)
            )
        time.sleep(1)
    # It has said why; one that was killed is started again.
    raise ServerEnded(process.returncode if process.returncode > 0 else EXIT_RETRY)


def report_iterations(task: Task, last: int) -> None:
    """Tell KFP what was committed, of which the iteration `last` was the last."""
    urls = {i: f"{task.parameters['url']}/iterations/{i}" for i in range(int(task.parameters["iteration"]), last + 1)}
    rows = [
        {"iteration": i, **_made(f"{url}/reward").scalars, **_made(f"{url}/policy-update").scalars}
        for i, url in urls.items()
    ]
    policy, rewards = f"{urls[last]}/policy-update", f"{urls[last]}/reward"
    update, scored = _made(policy), _made(rewards)
    task.results = {"last_iteration": last, "mean_reward": scored.results["mean_reward"]}
    hand_over(task, "checkpoint", policy, update, scored.results["mean_reward"], last)
    task.describe("results", rows[-1])
    previews.write_artifact_page(task, "preview", rewards, scored)
    previews.write_confidence(task, "confidence", rewards, scored)
    task.write("curves", previews.render_charts(rows, "iteration"))
    task.finish()


def _made(url: str) -> Manifest:
    manifest = find_manifest(url)
    assert manifest is not None, f"the task has just committed {url}"
    return manifest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
