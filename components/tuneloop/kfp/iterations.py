"""The iterations of a loop in one task: ``python -m tuneloop.kfp.iterations --loop JSON … --executor-input …``

`tuneloop.local.iterations` runs them, beside the rollout server if the engine has one. The task starts after the last
committed iteration and ends after a multiple of ``--per-task``; if more iterations follow, it starts KFP's next run.
It reports the last iteration to KFP, and the curves of the whole run."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tuneloop.core.artifacts import MANIFEST, Manifest, parse_manifest
from tuneloop.core.errors import EXIT_RETRY, Interrupted, Unavailable, report_errors
from tuneloop.core.http import Unanswered, send_request
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.server_token import VARIABLE, create_token_file
from tuneloop.core.store import Store
from tuneloop.kfp import previews
from tuneloop.kfp.api import RunApi
from tuneloop.kfp.io import Task
from tuneloop.kfp.retry import retry_in_process
from tuneloop.kfp.stage import CONTINUED, TARGET, build_handle, encode_parameter
from tuneloop.local.iterations import Iterations, StageEnded
from tuneloop.ui.report import render_metrics
from tuneloop.workflow.loop import output_of, step_of
from tuneloop.workflow.loop_state import LoopState
from tuneloop.workflow.pod_loop import PodLoop

CURVE_POINTS = 500
"""The maximum number of iterations in a curve, evenly spread."""
BOOT_S = 600.0
"""Seconds within which a server must be ready."""
GRACE_S = 30.0
"""Seconds that a server has to end."""


@dataclass(frozen=True)
class Position:
    """The progress of a loop: `last` is the last committed iteration (0: none); `ended` says that none follows it, as
    it is the last or reaches the target reward; `carried` maps the next iteration's values to their handles."""

    last: int
    ended: bool
    carried: Mapping[str, JsonMapping]


def main(argv: Sequence[str]) -> int:
    """Run the iterations of an executor input; return the exit code, that of the stage that failed if one did."""
    parser = argparse.ArgumentParser(prog="tuneloop.kfp.iterations", description=__doc__)
    parser.add_argument(
        "--loop", required=True, metavar="JSON", help="the steps, see tuneloop.workflow.pod_loop"
    )
    parser.add_argument(
        "--iterations", required=True, type=int, help="the number of the last iteration"
    )
    parser.add_argument(
        "--per-task", required=True, type=int, help="a task ends after a multiple of this"
    )
    parser.add_argument("--api", required=True, help="address of the KFP API for pods")
    parser.add_argument(
        "--endpoint", default="", help="URL of rollout servers outside of this task"
    )
    parser.add_argument(
        "--server", type=json.loads, metavar="JSON", help="a rollout server to run, see run_server"
    )
    parser.add_argument("--weights", help="URL of published versions; default: below the run's")
    parser.add_argument("--executor-input", required=True)
    given = parser.parse_args(argv)
    task = Task.read(given.executor_input)
    url = task.parameters["url"]
    target = float(task.parameters[TARGET])
    loop = PodLoop.model_validate_json(given.loop)
    values = {name: handle["ref"] for name, handle in task.inputs.items()}
    values |= {"seed": encode_parameter(task.parameters["seed"])}
    values |= {"endpoint": given.endpoint, "weights": given.weights or f"{url}/weights"}

    api = RunApi(given.api)
    run_id = task.parameters["run_id"]
    trained: Position | None = None

    def find_reached(start: Mapping[str, JsonMapping], after: int = 0) -> Position:
        return find_position(
            loop, url, start, iterations=given.iterations, target_reward=target, after=after
        )

    def run_part(pod: Iterations) -> int:
        """Run the task's part of the loop, unless it is done: a retried task must not run the next part."""
        nonlocal trained
        position = find_reached(task.inputs)
        whole = position.last > 0 and position.last % given.per_task == 0
        if position.ended or trained or (whole and api.find_newer_run(api.read_run(run_id))):
            trained = position
            return 0
        start = {**values, **{k: handle["ref"] for k, handle in position.carried.items()}}
        start["iteration"] = str(position.last + 1)
        with contextlib.ExitStack() as stack:
            if given.server:
                start["endpoint"] = stack.enter_context(run_server(given.server, url, start, pod))
            if code := pod.run(start)[0]:
                return code
        trained = find_reached(position.carried, position.last)
        return 0

    @report_errors
    def run_task() -> int:
        pod = Iterations(
            loop, run=url, last=given.iterations, per_pod=given.per_task, target=target
        )
        try:
            with pod.handle_signals():
                if code := run_part(pod):
                    return code
                assert trained is not None, "it is set where the part is done"
                report_iterations(task, loop, trained)
                if pod.stopped and not trained.ended:
                    raise Interrupted("iterations: stopped by a signal")
                if not trained.ended:
                    made = api.start_next_run(run_id)
                    print(
                        f"after iteration {trained.last} the run continues as {made}",
                        file=sys.stderr,
                    )
                task.finish()
        except StageEnded as error:
            return error.code
        return 0

    return retry_in_process(
        run_task, lambda: " ".join(Store(url).keys("iterations")), url=f"{url}/iterations"
    )


def get_output_name(value: str) -> str:
    """Return the name of the output artifact that holds a value of the loop after the task's last iteration."""
    return f"last_{value}"


@contextlib.contextmanager
def run_server(
    server: JsonMapping, run: str, values: Mapping[str, str], pod: Iterations
) -> Iterator[str]:
    """Run the rollout server with the policy or the published versions in `values`, and yield its endpoint. `server`
    has ``port``, ``engine_args``, ``pull`` and, if it has its own GPUs, ``devices``. If the server does not become
    ready, raises StageEnded (it exited), Unavailable (it took too long) or Interrupted (`pod` was stopped)."""
    source = ("--weights", values["weights"]) if server["pull"] else ("--policy", values["policy"])
    words = [
        "--host",
        "127.0.0.1",
        "--port",
        str(server["port"]),
        "--engine-args",
        json.dumps(server["engine_args"]),
    ]
    command = [
        sys.executable,
        "-m",
        "tuneloop.inference.server",
        *source,
        *words,
        "--attempts",
        f"{run}/serve",
    ]
    endpoint = f"http://127.0.0.1:{server['port']}"
    devices = {"CUDA_VISIBLE_DEVICES": server["devices"]} if "devices" in server else {}
    directory = tempfile.TemporaryDirectory(prefix="tuneloop-", ignore_cleanup_errors=True)
    create_token_file(Path(directory.name) / "server-token")
    os.environ[VARIABLE] = f"{directory.name}/server-token"  # for the stages, too
    # vLLM has workers: they end with it.
    process = subprocess.Popen(command, start_new_session=True, env={**os.environ, **devices})
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
        del os.environ[VARIABLE]
        directory.cleanup()


def _await_ready(process: subprocess.Popen[bytes], url: str, pod: Iterations) -> None:
    deadline = time.monotonic() + BOOT_S
    while process.poll() is None:
        with contextlib.suppress(Unanswered):
            if send_request("GET", url, timeout_s=5)[0] == 200:
                return
        if pod.stopped:
            raise Interrupted("the rollout server was not ready yet")
        if time.monotonic() > deadline:
            raise Unavailable(f"the rollout server was not ready in {BOOT_S:g} s")
        time.sleep(1)
    # The server has printed why; a killed server is started again.
    raise StageEnded(process.returncode if process.returncode > 0 else EXIT_RETRY)


def report_iterations(task: Task, loop: PodLoop, position: Position) -> None:
    """Report the progress of the loop to KFP."""
    last = position.last
    store = Store(task.parameters["url"])
    stride = -(-last // CURVE_POINTS)
    with ThreadPoolExecutor() as pool:  # the newest is always among them
        shown = range(last, 0, -stride)[::-1]
        made = list(pool.map(lambda i: read_iteration(loop, store, i), shown))
    rows = [
        {
            "iteration": i,
            **{k: v for manifest in each.values() if manifest for k, v in manifest.scalars.items()},
        }
        for i, each in zip(shown, made)
    ]
    reward = output_of(loop.reward).replace("-", "_")
    task.results = {"last_iteration": last, reward: read_reward(loop, made[-1])}
    for name, carried in position.carried.items():
        handle = {**carried, **({} if position.ended else {CONTINUED: last})}
        task.describe(get_output_name(name), handle)
        task.write(get_output_name(name), f"{json.dumps(handle, indent=1)}\n")
    task.describe("results", rows[-1])
    task.write("curves", render_metrics("iterations", rows, "iteration"))
    scored = made[-1][step_of(loop.reward)]
    at = f"{store.url}/iterations/{last}/{step_of(loop.reward)}"
    assert scored is not None, "the last iteration is committed"
    previews.write_artifact_page(task, "preview", at, scored)


def find_position(
    loop: PodLoop,
    run: str,
    start: Mapping[str, JsonMapping],
    *,
    iterations: int,
    target_reward: float,
    after: int = 0,
) -> Position:
    """Find the progress of a loop after the iteration `after`, which is committed, has not ended the loop, and passes
    the handles `start` on. An iteration whose artifacts were deleted is run again, and so are all after it."""
    store = Store(run)

    def read(i: int) -> tuple[JsonObject, float] | None:
        made = read_iteration(loop, store, i)
        if any(manifest is None for manifest in made.values()):
            return None
        at = f"{store.url}/iterations/{i}"
        carried = {
            name: build_handle(f"{at}/{step_of(wire)}", made[step_of(wire)])  # type: ignore[arg-type]
            for name, wire in loop.carry.items()
        }
        return carried, read_reward(loop, made)

    state = LoopState(target_reward=target_reward, iterations=iterations, iteration=after)
    left = range(after + 1, iterations + 1)
    committed = bisect_left(left, True, key=lambda i: read(i) is None)
    carried = {name: dict(start[name]) for name in loop.carry}
    with ThreadPoolExecutor() as pool:
        for i, found in zip(left, pool.map(read, left[:committed])):
            if found is None:
                break
            carried, reward = found
            state = state.after(i, reward)
            if state.is_over:
                break
    return Position(state.iteration, state.is_over, carried)


def read_iteration(loop: PodLoop, store: Store, i: int) -> dict[str, Manifest | None]:
    """Return what each step of iteration `i` has committed, and the evaluation if one is due."""
    due = [loop.check] if loop.check and i % loop.evaluate_every == 0 else []
    names = [step.name for step in (*loop.steps, *due)]
    found = {name: store.get(f"iterations/{i}/{name}/{MANIFEST}") for name in names}
    url = f"{store.url}/iterations/{i}"
    return {
        name: None if data is None else parse_manifest(f"{url}/{name}", data)
        for name, data in found.items()
    }


def read_reward(loop: PodLoop, made: Mapping[str, Manifest | None]) -> float:
    """Return the reward of a committed iteration, which may end the loop."""
    manifest = made[step_of(loop.reward)]
    assert manifest is not None, "the iteration is committed"
    return float(manifest.results[output_of(loop.reward).replace("-", "_")])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
