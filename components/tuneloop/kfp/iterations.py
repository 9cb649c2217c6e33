"""The iterations of a loop in one task: ``python -m tuneloop.kfp.iterations --loop JSON …``

`tuneloop.local.iterations` runs them, beside the rollout server if the engine has one. The task
starts after the last committed iteration and ends after a multiple of ``--per-task``; if more
iterations follow, it starts KFP's next run. It reports the last iteration to KFP, and the curves of
the whole run.
"""

import argparse
import contextlib
import json
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from tuneloop.core.artifacts import MANIFEST, Manifest, parse_manifest
from tuneloop.core.errors import Interrupted, report_errors
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.store import Store
from tuneloop.kfp.api import RunApi
from tuneloop.kfp.io import Task
from tuneloop.kfp.retry import retry_in_process
from tuneloop.kfp.rollout_server import run_server
from tuneloop.kfp.stage import CHANGES, CONTINUED, TARGET, build_handle
from tuneloop.kfp.task_plan import RUN
from tuneloop.kfp.ui_outputs import CommittedArtifact, LoopProgress, write_loop_outputs
from tuneloop.local.iterations import Iterations, StageEnded
from tuneloop.workflow.loop import output_of, step_of
from tuneloop.workflow.loop_state import LoopState
from tuneloop.workflow.pod_loop import PodLoop

CURVE_POINTS = 500
"""The maximum number of iterations in a curve, evenly spread. One request for each step of each of
them is made when a task ends (`report_iterations`)."""


@dataclass(frozen=True)
class Position:
    """The progress of a loop.

    Attributes:
        last: the last committed iteration, 0 if there is none.
        ended: no iteration follows it: it is the last one, or reaches the target reward.
        carried: value of the loop → its handle, with which the next iteration starts.
    """

    last: int
    ended: bool
    carried: Mapping[str, JsonMapping]


@dataclass(frozen=True)
class CommittedIteration:
    """What an iteration has committed.

    Attributes:
        number: from 1.
        url: where its artifacts lie.
        manifests: step → manifest, of the steps that have committed, and of the evaluation if one
            is due.
        is_complete: all of them have committed.
    """

    number: int
    url: str
    manifests: Mapping[str, Manifest]
    is_complete: bool

    def build_handle(self, wire: str) -> JsonObject:
        """Build the handle of the artifact that ``step.output`` names."""
        step = step_of(wire)
        return build_handle(f"{self.url}/{step}", self.manifests[step])

    def read_reward(self, loop: PodLoop) -> float:
        """Return the reward that may end the loop."""
        results = self.manifests[step_of(loop.reward)].results
        return float(results[_name_reward(loop)])


def main(argv: Sequence[str]) -> int:
    """Run the iterations of an executor input.

    Returns:
        The exit code, that of the stage that failed if one did.
    """
    options = _parse_options(argv)
    task = Task.read(options.executor_input)
    # What a user has set for this run replaces what was compiled.
    vars(options).update(json.loads(task.parameters[CHANGES]))
    url = task.parameters["url"]
    values = build_values(task, options.published or {})
    values["endpoint"] = options.endpoint
    iterations_task = IterationsTask(
        task=task,
        loop=PodLoop.model_validate_json(options.loop),
        api=RunApi(options.api),
        iterations=options.iterations,
        per_task=options.per_task,
        values=values,
        server=options.server,
    )

    def read_progress() -> str:
        return " ".join(Store(url).keys("iterations"))

    return retry_in_process(
        report_errors(iterations_task.run), read_progress, url=f"{url}/iterations"
    )


def build_values(task: Task, published: Mapping[str, str]) -> dict[str, str]:
    """Build what the first iteration starts from, and what every stage gets which has a parameter
    of that name: name → reference or URL.

    Args:
        task: has the artifacts, and the URL of the run.
        published: parameter → URL, with `RUN` for that of the run.
    """
    values: dict[str, str] = {name: handle["ref"] for name, handle in task.inputs.items()}
    for name, location in published.items():
        values[name] = location.replace(RUN, task.parameters["url"])
    return values


def _parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags, which `task_plan.py: _plan_iterations` writes.

    A flag here is an option of the same name there. What a user sets for a run replaces the parsed
    value under that name (`main`), and no `type` converts it then.
    """
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
        "--server",
        type=json.loads,
        metavar="JSON",
        help="a rollout server to run, see tuneloop.kfp.rollout_server",
    )
    parser.add_argument(
        "--published",
        type=json.loads,
        default={},
        metavar="JSON",
        help=f"parameters of all stages that follow from the run's URL, for which {RUN} stands",
    )
    parser.add_argument("--executor-input", required=True)
    return parser.parse_args(argv)


@dataclass
class IterationsTask:
    """A task that runs a part of the loop's iterations.

    Attributes:
        task: the task of KFP.
        loop: its steps and wires.
        api: of the backend that the task runs on.
        iterations: the number of the loop's last iteration.
        per_task: the task ends after a multiple of so many iterations.
        values: what each iteration starts with, but for those that the previous one passes on.
        server: the rollout server to run, see `run_server`.
        trained: the progress once the part of this task is done. It outlives an attempt that fails
            later, so that the next attempt does not run the next part.
    """

    task: Task
    loop: PodLoop
    api: RunApi
    iterations: int
    per_task: int
    values: Mapping[str, str]
    server: JsonObject | None
    trained: Position | None = None

    @property
    def url(self) -> str:
        """The URL of the run."""
        return str(self.task.parameters["url"])

    @property
    def name(self) -> str:
        """The name of the run, the last part of its URL."""
        return self.url.rpartition("/")[2]

    @property
    def target_reward(self) -> float:
        """The mean reward that ends the loop."""
        return float(self.task.parameters[TARGET])

    def run(self) -> int:
        """Run the part, report it, and start the run that continues; return the exit code.

        Raises:
            Interrupted: a signal has arrived before the end of the loop.
        """
        pod = Iterations(
            self.loop,
            run=self.url,
            last=self.iterations,
            per_pod=self.per_task,
            target=self.target_reward,
        )
        try:
            with pod.handle_signals():
                code = self._run_part(pod)
                return code or self._finish(pod)
        except StageEnded as error:
            return error.code

    def _run_part(self, pod: Iterations) -> int:
        """Run the task's part of the loop, unless it is done; return the exit code."""
        position = self._find_position(self.task.inputs)
        if position.ended or self.trained or self._is_continued(position):
            self.trained = position
            return 0
        values = dict(self.values)
        for name, handle in position.carried.items():
            values[name] = handle["ref"]
        values["iteration"] = str(position.last + 1)
        with contextlib.ExitStack() as stack:
            if self.server:
                server = run_server(self.server, self.url, values, pod)
                values["endpoint"] = stack.enter_context(server)
            code, _ = pod.run(values)
        if code == 0:
            self.trained = self._find_position(position.carried, position.last)
        return code

    def _is_continued(self, position: Position) -> bool:
        """Return whether another run continues after this position: the task has been done before,
        and KFP has started it again.
        """
        if position.last == 0 or position.last % self.per_task:
            return False
        run = self.api.read_run(self.task.parameters["run_id"])
        return self.api.find_newer_run(run, self.name) is not None

    def _find_position(self, start: Mapping[str, JsonMapping], after: int = 0) -> Position:
        return find_position(
            self.loop,
            self.url,
            start,
            iterations=self.iterations,
            target_reward=self.target_reward,
            after=after,
        )

    def _finish(self, pod: Iterations) -> int:
        """Report the part to KFP, and start the run that continues if iterations follow."""
        position = self.trained
        assert position is not None, "it is set where the part is done"
        report_iterations(self.task, self.loop, position)
        if not position.ended:
            if pod.stopped:
                raise Interrupted("iterations: stopped by a signal")
            run_id = self.api.start_next_run(self.task.parameters["run_id"], self.name)
            line = f"after iteration {position.last} the run continues as {run_id}"
            print(line, file=sys.stderr)
        return 0


def get_output_name(value: str) -> str:
    """Return the name of the output artifact that holds a value of the loop after the task's last
    iteration.

    `loop.py` declares these outputs, and wires them to the stages after the loop.
    """
    return f"last_{value}"


def report_iterations(task: Task, loop: PodLoop, position: Position) -> None:
    """Report the progress of the loop to KFP: handles, and what the UI shows.

    `loop.py: _build_iterations_signature` declares what is written here: an output or a result
    needs an entry in both, but for those of `ui_outputs.py: UI_OUTPUTS`.

    Raises:
        UserError: the component declares an output that is not written here.
    """
    last = position.last
    store = Store(task.parameters["url"])
    stride = -(-last // CURVE_POINTS)
    # Counted from the end, so that the newest iteration is always among them.
    numbers = range(last, 0, -stride)[::-1]
    with ThreadPoolExecutor() as pool:
        iterations = list(pool.map(partial(read_iteration, loop, store), numbers))
    rows: list[JsonObject] = []
    for iteration in iterations:
        row: JsonObject = {"iteration": iteration.number}
        for manifest in iteration.manifests.values():
            row.update(manifest.scalars)
        rows.append(row)
    newest = iterations[-1]
    task.results = {"last_iteration": last, _name_reward(loop): newest.read_reward(loop)}
    for value, carried in position.carried.items():
        name = get_output_name(value)
        handle = dict(carried)
        if not position.ended:
            handle[CONTINUED] = last
        task.describe(name, handle)
        task.write(name, f"{json.dumps(handle, indent=1)}\n")
    scorer = step_of(loop.reward)
    rewards = CommittedArtifact(f"{newest.url}/{scorer}", newest.manifests[scorer])
    write_loop_outputs(task, LoopProgress(rows, rewards))
    task.finish()


def find_position(
    loop: PodLoop,
    run: str,
    start: Mapping[str, JsonMapping],
    *,
    iterations: int,
    target_reward: float,
    after: int = 0,
) -> Position:
    """Find the progress of a loop in what its run has committed.

    An iteration whose artifacts were deleted is run again, and so are all after it.

    Args:
        loop: its steps, and the values that an iteration passes to the next.
        run: the URL of the run.
        start: value of the loop → handle, with which the iteration behind `after` starts.
        iterations: the number of the loop's last iteration.
        target_reward: the mean reward that ends the loop.
        after: an iteration that is committed and has not ended the loop; 0 for none.
    """
    store = Store(run)
    remaining = range(after + 1, iterations + 1)

    def is_missing(number: int) -> bool:
        return not read_iteration(loop, store, number).is_complete

    # Iterations are committed in order: few requests find the newest of thousands.
    committed = bisect_left(remaining, True, key=is_missing)
    state = LoopState(target_reward=target_reward, iterations=iterations, iteration=after)
    carried = {name: dict(start[name]) for name in loop.carry}
    with ThreadPoolExecutor() as pool:
        read = partial(read_iteration, loop, store)
        for iteration in pool.map(read, remaining[:committed]):
            # The search passes over an earlier iteration that was deleted.
            if not iteration.is_complete:
                break
            carried = {name: iteration.build_handle(wire) for name, wire in loop.carry.items()}
            state = state.after(iteration.number, iteration.read_reward(loop))
            if state.is_over:
                break
    return Position(state.iteration, state.is_over, carried)


def read_iteration(loop: PodLoop, store: Store, number: int) -> CommittedIteration:
    """Read what each step of an iteration has committed, and the evaluation if one is due.

    If a run goes on with a step or an evaluation that it did not have before, its earlier
    iterations are incomplete: they are run again, in which committed stages end at once.
    """
    steps = list(loop.steps)
    if loop.check and number % loop.evaluate_every == 0:
        steps.append(loop.check)
    url = f"{store.url}/iterations/{number}"
    manifests: dict[str, Manifest] = {}
    for step in steps:
        data = store.get(f"iterations/{number}/{step.name}/{MANIFEST}")
        if data is not None:
            manifests[step.name] = parse_manifest(f"{url}/{step.name}", data)
    return CommittedIteration(number, url, manifests, len(manifests) == len(steps))


def _name_reward(loop: PodLoop) -> str:
    """Return the result that holds the reward, as manifests and KFP's parameters spell it."""
    return output_of(loop.reward).replace("-", "_")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
