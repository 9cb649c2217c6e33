"""Run iterations of a loop in one process: ``python -m tuneloop.local.iterations --loop JSON --value policy=REF …``

The stages run one after another, each with the flags that it would have in a pod of its own. Each commits the same
bytes as in its own pod: it seeds every random stream that it draws from, and torch's determinism and random state are
restored after it. A new pod continues after the last committed stage. Exit codes are those of a stage."""

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
from tuneloop.core.program import run_component, write_outputs
from tuneloop.core.store import Store
from tuneloop.core.threads import BACKGROUND, forward_signals
from tuneloop.workflow.loop import output_of
from tuneloop.workflow.loop_state import LoopState
from tuneloop.workflow.pod_loop import PodLoop, StageCall, count_iterations

DEFAULT_SEED = 67280421310721
"""The seed of torch's generators in a fresh process (c10/core/GeneratorImpl.h)."""
RECORDS = "pods.json"
"""The file below a run in which each of its pods records what it measured and decided."""
LINE = (
    "pod {pod} runs {iterations} iterations: "
    "{between_s:.3g} s between pods, {start_s:.3g} s start, {each_s:.3g} s each"
)


class StageEnded(Exception):
    """A stage did not commit, or a server ended before it was ready; the pod ends with its exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


class Iterations:
    """Runs a loop from some iteration on. The pod ends after a multiple of `per_pod` iterations or, with `auto`, after
    the iteration that `PodLength` chooses, if earlier. `stopped`: a signal has arrived, and no further stage begins."""

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
        """Run the pod's iterations within `handle_signals`. `values` are the inputs of the first one, including its
        number ``iteration``. Returns the exit code and, if it is 0, the last one's number, outputs and mean reward."""
        outputs: dict[str, str] = {}
        code = 0
        first = int(values["iteration"])
        BACKGROUND.is_concurrent = True
        end = max(first, min(self._last, first + -first % self._per_pod))
        try:
            length = PodLength(self._run, first) if self._auto else None
            for number in itertools.count(first):
                self._seconds = {}
                has_work = length and length.has_work(number, self._loop.steps[-1].name)
                outputs = self._iterate({**values, **outputs, "iteration": str(number)})
                took_s = sum(
                    self._seconds[step.name] for step in self._loop.steps
                )  # not an evaluation, which is rare
                if length and has_work and (chosen := length.choose_last(number, took_s, end)):
                    length = None
                    end = chosen
                if not length and (
                    file := os.environ.get("ARGO_PROGRESS_FILE")
                ):  # else the end is not known yet
                    Path(file).write_text(f"{number - first + 1}/{end - first + 1}")
                reward = float(outputs[output_of(self._loop.reward)])
                stages = ", ".join(
                    f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items()
                )
                line = f"iteration {number}/{self._last}  reward {reward:.3f}  {sum(self._seconds.values()):.1f} s"
                print(
                    f"{line}  ({stages})", file=sys.stderr, flush=True
                )  # the console of `tuneloop run` shows it
                self._state = self._state.after(number, reward)
                if self._state.is_over or number == end:
                    break
        except StageEnded as error:
            code = error.code
        finally:
            BACKGROUND.is_concurrent = False
        if BACKGROUND.work:
            code = run_component(BACKGROUND.wait) or code
        return code, {} if code else outputs

    def _iterate(self, values: Mapping[str, str]) -> dict[str, str]:
        known = dict(values)
        number = int(values["iteration"])
        for step in self._loop.steps:
            known |= self._call(step, known)
        carried = {name: known[wire] for name, wire in self._loop.carry.items()}
        if self._loop.check and number % self._loop.evaluate_every == 0:
            self._call(self._loop.check, {**known, **carried})
        reward = self._loop.reward
        return {"iteration": values["iteration"], **carried, output_of(reward): known[reward]}

    def _call(self, step: StageCall, values: Mapping[str, str]) -> dict[str, str]:
        """Run a stage, and return its outputs as wires."""
        if self.stopped:
            raise StageEnded(
                print_diagnostic(f"{INTERRUPTED}: iterations: stopped by a signal", EXIT_RETRY)
            )
        wired = [word for name, wire in step.wires.items() for word in (f"--{name}", values[wire])]
        url = f"{self._run}/iterations/{values['iteration']}/{step.name}"
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as outputs, _fresh_state(TUNELOOP_OUTPUTS=outputs):
            code = self._execute(step, [*step.flags, *wired, f"--{step.output}", url])
            if code:
                raise StageEnded(code)
            results = {path.name: path.read_text() for path in Path(outputs).iterdir()}
        self._seconds[step.name] = time.monotonic() - started
        return {f"{step.name}.{name}": value for name, value in results.items()}

    def _execute(self, step: StageCall, words: Sequence[str]) -> int:
        python, option, module = (*step.command, "", "", "")[:3]
        single = (python, option) == ("python", "-m") and len(step.command) == 3
        if single and (stage := find_component(module, step.name, load=True)):
            return stage.run(words)
        program = [sys.executable if python == "python" else python, *step.command[1:], *words]
        with subprocess.Popen(program) as self._child:
            if self.stopped:
                self._child.terminate()
            code = self._child.wait()
            return 128 - code if code < 0 else code  # as a shell reports the signal -code

    def handle_signals(self) -> contextlib.AbstractContextManager[None]:
        """Begin no further stage after SIGTERM or SIGINT, and send these to a stage in a process of its own; a stage of
        this process handles them itself. To be entered by the main thread."""

        def stop(number: int) -> None:
            self.stopped = True
            if self._child:
                self._child.send_signal(number)

        return forward_signals(stop)


class PodLength:
    """Decides how many iterations a pod runs (`count_iterations`), from the times of its first two that have work to
    do. `first`: the number of the iteration that the pod begins with.

    A new pod costs the time between pods, from the last commit before it to its first stage, and the extra time of its
    first iteration over the second, in which libraries are imported and updates replayed. The time between pods is the
    minimum that any pod of this run has measured, so that a wait for quota, a server or a resume does not lengthen
    pods; otherwise runs that wait for one another would lengthen each other's. No result depends on this."""

    def __init__(self, run: str, first: int) -> None:
        self._store = Store(run)
        places = (f"iterations/{first - 1}", f"iterations/{first}") if first > 1 else ("",)
        stats = [Store(f"{run}/{place}").stat().items() for place in places]
        ends = [
            written
            for each in stats
            for key, (_, written) in each
            if key.rpartition("/")[2] == MANIFEST
        ]
        self._gap_s = (
            max(0.0, time.time() - max(ends)) if ends else 0.0
        )  # 0 where the store's clock is ahead: unknown
        self._begun = 0
        self._first_s = 0.0

    def has_work(self, number: int, stage: str) -> bool:
        """Say whether an iteration, which `stage` ends, is not committed yet."""
        return self._store.get(f"iterations/{number}/{stage}/{MANIFEST}") is None

    def choose_last(self, number: int, seconds: float, last: int) -> int | None:
        """Choose the pod's last iteration, at most `last`, after `number` took `seconds`; None: not yet."""
        if not self._begun:
            self._begun = number
            self._first_s = seconds
            if number < last:
                return None
        records = json.loads(self._store.get(RECORDS) or b"[]")
        between_s = min(
            filter(None, [self._gap_s, *(each["gap_s"] for each in records)]), default=0.0
        )
        start_s = max(0.0, self._first_s - seconds)
        count = count_iterations(between_s + start_s, seconds)
        last = min(last, max(number, self._begun + count - 1))
        told = {"pod": len(records) + 1, "first": self._begun, "iterations": last - self._begun + 1}
        measured = {
            "gap_s": self._gap_s,
            "between_s": between_s,
            "start_s": start_s,
            "each_s": seconds,
        }
        self._store.put(RECORDS, json.dumps([*records, told | measured], indent=1).encode())
        print(LINE.format(**told, **measured), file=sys.stderr, flush=True)
        return last


@contextlib.contextmanager
def _fresh_state(**environment: str) -> Iterator[None]:
    """Give a stage `environment`; put the environment, the directory and torch's state back as they were before it."""
    before = dict(os.environ)
    place = Path.cwd()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.chdir(place)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(
            before
        )  # never cleared: a thread may commit meanwhile (`tuneloop.core.threads`)
        if torch := sys.modules.get("torch"):
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = True
            torch.manual_seed(DEFAULT_SEED)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run as a program; never returns."""
    parser = argparse.ArgumentParser(
        prog="python -m tuneloop.local.iterations", description=__doc__
    )
    parser.add_argument(
        "--loop", required=True, metavar="JSON", help="the steps, see tuneloop.workflow.pod_loop"
    )
    parser.add_argument("--run", required=True, metavar="URL", help="of the run")
    parser.add_argument(
        "--iterations", required=True, type=int, help="the number of the last iteration"
    )
    parser.add_argument(
        "--per-pod",
        required=True,
        type=int,
        help="a pod ends after a multiple of so many iterations",
    )
    parser.add_argument(
        "--auto", action="store_true", help="the pod may end earlier, see PodLength"
    )
    parser.add_argument(
        "--target-reward", required=True, type=float, help="mean reward that ends the loop"
    )
    parser.add_argument(
        "--value", action="append", default=[], metavar="NAME=VALUE", help="first iteration's input"
    )
    given = parser.parse_args(argv)
    last = given.iterations
    per_pod = given.per_pod
    target = given.target_reward
    try:
        loop = PodLoop.model_validate_json(given.loop)
        pod = Iterations(
            loop, run=given.run, last=last, per_pod=per_pod, target=target, auto=given.auto
        )
        with pod.handle_signals():
            code, outputs = pod.run(dict(value.partition("=")[::2] for value in given.value))
    except (UserError, Retryable) as error:
        sys.exit(report_error(error))
    if not code:
        write_outputs(outputs)
    sys.exit(code)


if __name__ == "__main__":
    main()
