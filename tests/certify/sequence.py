"""The stages of a small run, one after another in one process, each as the program that a pod starts.

Most stages of the toy pipeline are there, and stages that publish weight versions, write a trainer's state beside their
output, write real rollouts, and go on from a resume point. An attempt begins at the first stage each time: what is
committed ends at once, as in a run that is resumed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.mutations import sample_run
from tests.unit import toy
from tuneloop.core.component import Component
from tuneloop.core.program import encode_flags

RUN = "certified"
Step = tuple[str, Component, dict[str, object]]
"""Where it commits below the run's URL, the stage, and its flags but for that of its output."""
Steps = Callable[[str, Mapping[str, str]], Iterator[Step]]


def list_steps(url: str, refs: Mapping[str, str]) -> Iterator[Step]:
    """Yield the steps of a run at `url`; each is asked for when `refs` has the references of those before it."""
    weights = f"{url}/weights"
    yield "sft", toy.sft, {}
    yield "iterations/1/rollout", toy.rollout, {"policy": refs["sft"], "iteration": 1}
    yield "iterations/1/reward", toy.reward, {"rollouts": refs["iterations/1/rollout"]}
    learned = {"policy": refs["sft"], "rewards": refs["iterations/1/reward"], "iteration": 1}
    yield "iterations/1/policy-update", toy.policy_update, learned
    yield "iterations/2/tune", sample_run.tune, {"iteration": 2, "weights": weights}
    yield (
        "iterations/3/sample",
        sample_run.sample,
        {"policy": refs["iterations/2/tune"], "iteration": 3},
    )
    yield (
        "iterations/3/tune",
        sample_run.tune,
        {"policy": refs["iterations/2/tune"], "iteration": 3, "weights": weights},
    )
    yield "interrupted", sample_run.interrupted, {"policy": refs["iterations/3/tune"]}
    yield "export", toy.export, {"policy": refs["iterations/1/policy-update"]}


def run_sequence(url: str, steps: Steps = list_steps) -> int:
    """Run all steps; return the exit code of the first that does not end well, else 0."""
    refs: dict[str, str] = {}
    for key, stage, flags in steps(url, refs):
        with tempfile.TemporaryDirectory(
            prefix="outputs-"
        ) as outputs:  # the workflow engine's, not a stage's
            os.environ["TUNELOOP_OUTPUTS"] = outputs
            if code := stage.run([*encode_flags(flags), f"--{stage.output}", f"{url}/{key}"]):
                return code
            refs[key] = Path(outputs, stage.output).read_text()
    return 0
