"""Run iterations of a loop in one process.

The program is ``python -m tuneloop.local.iterations --loop JSON --value policy=REF …``. The stages
run one after another, each with the flags that it would have in a pod of its own. Each commits the
same bytes as in its own pod: it seeds every random stream that it draws from, and torch's
determinism and random state are restored after it. A new pod continues after the last committed
stage. Exit codes are those of a stage.

`kfp/iterations.py` runs the same loop as a task of KFP. The words of a loop (wire, carry, check) are
those of `workflow/loop.py`.

Both are the only programs that run several stages in one process: what a stage changes of the
process, `_fresh_state` has to restore.
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tuneloop.core.artifacts import MANIFEST
from tuneloop.core.component import find_component
from tuneloop.core.errors import (
    EXIT_RETRY,
    INTERRUPTED,
    Retryable,
    UserError,
    print_diagnostic,
    report_error,
)
from tuneloop.core.json_types import JsonObject
from tuneloop.core.program import check_addresses, run_component, write_outputs
from tuneloop.core.store import Store
from tuneloop.core.threads import BACKGROUND, forward_signals
from tuneloop.workflow.loop import output_of
from tuneloop.workflow.loop_state import LoopState
from tuneloop.workflow.pod_loop import PodLoop, StageCall, count_iterations

DEFAULT_SEED = 67280421310721
"""The seed of torch's generators in a fresh process (c10/core/GeneratorImpl.h)."""
RECORDS = "pods.json"
"""The file below a run in which each of its pods records what it measured and decided. The next
pods read it: a field that is added is missing in the records of a run that goes on after an
update."""
# The line that a pod prints with its record. docs/cluster.md shows one.
LINE = (
    "pod {pod} runs {iterations} iterations: "
    "{between_s:.3g} s between pods, {start_s:.3g} s start, {each_s:.3g} s each"
)


class StageEnded(Exception):
    """A stage did not commit, or a server ended before it was ready; the pod ends with its exit
    code.
    """

    def __init__(self, code: int) -> None:
        self.code = code


class Iterations:
    """The iterations of a loop that one pod runs.

    `main` makes it from the flags that `argo/loop.py: pod_template` renders, and
    `kfp/iterations.py: IterationsTask.run` by its arguments.

    Attributes:
        stopped: a signal has arrived, and no further stage begins.
    """

    def __init__(
        self,
        loop: PodLoop,
        *,
        run: str,
        last: int,
        per_pod: int,
        target: float,
        auto: bool = False,
    ) -> None:
        """Prepare a pod.

        Args:
            run: the URL of the run.
            last: the number of the loop's last iteration.
            per_pod: the pod ends after a multiple of so many iterations.
            target: the mean reward that ends the loop.
            auto: the pod ends after the iteration that `PodLength` chooses, if that is earlier.
        """
        self._loop = loop
        self._run = run
        self._last = last
        self._per_pod = per_pod
        self._state = LoopState(target_reward=target, iterations=last)
        self._auto = auto
        self.stopped = False
        self._seconds: dict[str, float] = {}
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, values: Mapping[str, str]) -> tuple[int, dict[str, str]]:
        """Run the pod's iterations within `handle_signals`.

        Args:
            values: the inputs of the first one, including its number ``iteration``.

        Returns:
            The exit code and, if it is 0, the last one's number, outputs and mean reward.
        """
        code = 0
        # A stage then defers its commit to a thread (`BACKGROUND` of `core/threads.py`), beside
        # which the next stage runs.
        BACKGROUND.is_concurrent = True
        try:
            outputs = self._run_iterations(values)
        except StageEnded as error:
            code = error.code
            outputs = {}
        finally:
            BACKGROUND.is_concurrent = False
        # What the last stage has deferred may fail, too.
        if BACKGROUND.work:
            code = run_component(BACKGROUND.wait) or code
        return code, {} if code else outputs

    def _run_iterations(self, values: Mapping[str, str]) -> dict[str, str]:
        """Run iterations until the loop or the pod is over; return the outputs of the last one."""
        first = int(values["iteration"])
        # A pod ends after a multiple of its number of iterations, wherever it begins.
        next_multiple = first + -first % self._per_pod
        end = max(first, min(self._last, next_multiple))
        length = PodLength(self._run, first) if self._auto else None
        inputs = dict(values)
        for number in itertools.count(first):
            self._seconds = {}
            has_work = length and length.has_work(number, self._loop.steps[-1].name)
            inputs["iteration"] = str(number)
            outputs = self._iterate(inputs)
            # The next iteration begins with what this one carries on.
            inputs |= outputs
            if length and has_work:
                # An evaluation is not counted, as it is rare.
                seconds = sum(self._seconds[step.name] for step in self._loop.steps)
                chosen = length.choose_last(number, seconds, end)
                if chosen:
                    length = None
                    end = chosen
            # While the length is not chosen, the end is not known.
            progress_file = os.environ.get("ARGO_PROGRESS_FILE")
            if not length and progress_file:
                Path(progress_file).write_text(f"{number - first + 1}/{end - first + 1}")
            reward = float(outputs[output_of(self._loop.reward)])
            self._print_times(number, reward)
            self._state = self._state.after(number, reward)
            if self._state.is_over or number == end:
                break
        return outputs

    def _print_times(self, number: int, reward: float) -> None:
        """Print one line for an iteration. The console of `tuneloop run` shows the lines whose
        beginning is as here: `ITERATION` of `cli/live.py`.
        """
        total_s = sum(self._seconds.values())
        stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items())
        line = f"iteration {number}/{self._last}  reward {reward:.3f}  {total_s:.1f} s  ({stages})"
        print(line, file=sys.stderr, flush=True)

    def _iterate(self, inputs: Mapping[str, str]) -> dict[str, str]:
        """Run the stages of an iteration, and return the inputs of the next one and the reward."""
        wires = dict(inputs)
        number = int(inputs["iteration"])
        for step in self._loop.steps:
            wires |= self._call(step, wires)
        outputs = {name: wires[wire] for name, wire in self._loop.carry.items()}
        outputs["iteration"] = inputs["iteration"]
        if self._loop.check and number % self._loop.evaluate_every == 0:
            # The evaluation gets the new policy.
            self._call(self._loop.check, wires | outputs)
        outputs[output_of(self._loop.reward)] = wires[self._loop.reward]
        return outputs

    def _call(self, step: StageCall, wires: Mapping[str, str]) -> dict[str, str]:
        """Run a stage, and return its outputs as wires."""
        if self.stopped:
            line = f"{INTERRUPTED}: iterations: stopped by a signal"
            raise StageEnded(print_diagnostic(line, EXIT_RETRY))
        words = list(step.flags)
        for name, wire in step.wires.items():
            words += [f"--{name}", wires[wire]]
        url = f"{self._run}/iterations/{wires['iteration']}/{step.name}"
        words += [f"--{step.output}", url]
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as outputs, _fresh_state(TUNELOOP_OUTPUTS=outputs):
            code = self._execute(step, words)
            if code:
                raise StageEnded(code)
            paths = list(Path(outputs).iterdir())
            results = {f"{step.name}.{path.name}": path.read_text() for path in paths}
        self._seconds[step.name] = time.monotonic() - started
        return results

    def _execute(self, step: StageCall, words: Sequence[str]) -> int:
        """Run a stage with its flags: here, or in a process of its own if it is another program."""
        command = list(step.command)
        if command[:2] == ["python", "-m"] and len(command) == 3:
            stage = find_component(command[2], step.name, load=True)
            if stage:
                return stage.run(words)
        if command[0] == "python":
            command[0] = sys.executable
        with subprocess.Popen(command + list(words)) as self._child:
            # The signal may have arrived before there was a process to send it to.
            if self.stopped:
                self._child.terminate()
            code = self._child.wait()
            # As a shell reports the signal -code.
            return 128 - code if code < 0 else code

    def handle_signals(self) -> contextlib.AbstractContextManager[None]:
        """Begin no further stage after SIGTERM or SIGINT.

        A stage in a process of its own gets the signal, and one of this process handles it itself.
        The context is to be entered by the main thread.
        """

        def stop(number: int) -> None:
            self.stopped = True
            if self._child:
                self._child.send_signal(number)

        return forward_signals(stop)


class PodLength:
    """Decides how many iterations a pod runs (`count_iterations`), from the times of its first two
    that have work to do.

    A new pod costs the time between pods, from the last commit before it to its first stage, and
    the extra time of its first iteration over the second, in which libraries are imported and
    updates replayed. The time between pods is the minimum that any pod of this run has measured, so
    that a wait for quota, a server or a resume does not lengthen pods; otherwise runs that wait for
    one another would lengthen each other's. No result depends on this.
    """

    def __init__(self, run: str, first: int) -> None:
        """Measure the time since the last commit below the URL `run`, before iteration `first`."""
        self._store = Store(run)
        folders = (f"iterations/{first - 1}", f"iterations/{first}") if first > 1 else ("",)
        commits: list[float] = []
        for folder in folders:
            for key, (_, written_at) in Store(f"{run}/{folder}").stat().items():
                if key.rpartition("/")[2] == MANIFEST:
                    commits.append(written_at)
        # It is 0, which stands for unknown, where the store's clock is ahead.
        self._gap_s = max(0.0, time.time() - max(commits)) if commits else 0.0
        self._measured_first: int | None = None
        self._first_s = 0.0

    def has_work(self, number: int, stage: str) -> bool:
        """Return whether an iteration, which `stage` ends, is not committed yet."""
        return self._store.get(f"iterations/{number}/{stage}/{MANIFEST}") is None

    def choose_last(self, number: int, seconds: float, last: int) -> int | None:
        """Choose the pod's last iteration, at most `last`, after `number` took `seconds`; None: not
        yet.
        """
        if self._measured_first is None:
            self._measured_first = number
            self._first_s = seconds
            # The second iteration says what each of the others will take.
            if number < last:
                return None
        first = self._measured_first
        records: list[JsonObject] = json.loads(self._store.get(RECORDS) or b"[]")
        gaps = [record["gap_s"] for record in records]
        gaps.append(self._gap_s)
        between_s = min(filter(None, gaps), default=0.0)
        start_s = max(0.0, self._first_s - seconds)
        count = count_iterations(between_s + start_s, seconds)
        last = min(last, max(number, first + count - 1))
        record = {
            "pod": len(records) + 1,
            "first": first,
            "iterations": last - first + 1,
            "gap_s": self._gap_s,
            "between_s": between_s,
            "start_s": start_s,
            "each_s": seconds,
        }
        records.append(record)
        self._store.put(RECORDS, json.dumps(records, indent=1).encode())
        print(LINE.format_map(record), file=sys.stderr, flush=True)
        return last


@contextlib.contextmanager
def _fresh_state(**environment: str) -> Iterator[None]:
    """Run a stage in `environment`, and restore the environment, the directory and torch's state
    after it.
    """
    earlier = dict(os.environ)
    directory = Path.cwd()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.chdir(directory)
        # The environment is changed back name by name and never empty: the thread of a deferred
        # commit may read it meanwhile (`BACKGROUND`).
        for name in os.environ.keys() - earlier.keys():
            del os.environ[name]
        os.environ.update(earlier)
        torch = sys.modules.get("torch")
        if torch:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = True
            torch.manual_seed(DEFAULT_SEED)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run as a program; never returns.

    `argo/loop.py: pod_template` renders the flags, and ``--help`` prints the module's docstring.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tuneloop.local.iterations",
        description=__doc__,
    )
    parser.add_argument(
        "--loop",
        required=True,
        metavar="JSON",
        help="the steps, see tuneloop.workflow.pod_loop",
    )
    parser.add_argument("--run", required=True, metavar="URL", help="of the run")
    parser.add_argument(
        "--iterations",
        required=True,
        type=int,
        help="the number of the last iteration",
    )
    parser.add_argument(
        "--per-pod",
        required=True,
        type=int,
        help="a pod ends after a multiple of so many iterations",
    )
    parser.add_argument(
        "--auto",
        action="store_true",
        help="the pod may end earlier, see PodLength",
    )
    parser.add_argument(
        "--target-reward",
        required=True,
        type=float,
        help="mean reward that ends the loop",
    )
    parser.add_argument(
        "--value",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="first iteration's input",
    )
    options = parser.parse_args(argv)
    values: dict[str, str] = {}
    for value in options.value:
        name, _, text = value.partition("=")
        values[name] = text
    try:
        check_addresses(options.value)
        pod = Iterations(
            PodLoop.model_validate_json(options.loop),
            run=options.run,
            last=options.iterations,
            per_pod=options.per_pod,
            target=options.target_reward,
            auto=options.auto,
        )
        with pod.handle_signals():
            code, outputs = pod.run(values)
    except (UserError, Retryable) as error:
        sys.exit(report_error(error))
    if not code:
        write_outputs(outputs)
    sys.exit(code)


if __name__ == "__main__":
    main()
