"""What docs/extending.md shows is run as it stands there; and one of each row of CONTRIBUTING.md's table is added."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S
from tuneloop.core.artifacts import Artifact

pytestmark = pytest.mark.local
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.mark.slow
def test_the_smallest_of_each_kind_runs(tmp_path: Path) -> None:
    for page in ("extending.md", "stages.md"):
        for name, text in re.findall(
            r"^```\w+\n# (\w+\.\w+)\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M
        ):
            (tmp_path / name).write_text(text)
    script = Path(sys.executable).parent
    for command in re.findall(
        r"^((?:PYTHONPATH=\. )?tuneloop run .*)$", (DOCS / "extending.md").read_text(), re.M
    ):
        env = {**os.environ, "PATH": f"{script}:{os.environ['PATH']}"}
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=env,
            text=True,
            capture_output=True,
            timeout=10 * LIMIT_S,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert (
        Artifact(str(tmp_path / "runs/mine/iterations/1/rollout")).manifest.facts["engine"]
        == "plain"
    )
    assert (
        Artifact(str(tmp_path / "runs/mine/data-prep")).manifest.facts["source"]
        == "my_data:load_splits"
    )
    longest = Artifact(str(tmp_path / "runs/lengths/measure")).manifest.results["longest"]
    assert longest == len("reverse 1234 =")


ADDED = {
    "components/tuneloop/rewards/added.py": '''
"""Whether there is a digit."""
RANGE = (0.0, 1.0)


def score(completion, answer, metadata):
    return float(any(c.isdigit() for c in completion))
''',
    "components/tuneloop/environments/added.py": '''
"""Two turns."""
from tuneloop.environments import Reply


class Twice:
    said = 0

    def step(self, said):
        self.said += 1
        return Reply("again\\n", role="user", done=self.said == 2, reward=1.0)


def create_environment(row):
    return Twice()
''',
    "components/tuneloop/data/added.py": '''
"""Sums."""
from tuneloop.data import Example, Splits


def load_splits(n, seed, *, first: int = 1):
    return Splits.of(Example(prompt=f"{first} + {i} =", answer=str(first + i)) for i in range(n))
''',
    "components/tuneloop/algorithms/added.py": '''
"""GRPO with advantages that are not scaled, and an option."""
from tuneloop.algorithms import grpo


class Algorithm(grpo.Algorithm):
    boost: float = 1.0

    def advantages(self, batch):
        return self.boost * (super().advantages(batch) + 1.0)
''',
    "components/tuneloop/inference/engines/added.py": '''
"""The engine of transformers under another name."""
from tuneloop.inference.capabilities import Capabilities
from tuneloop.inference.engines import transformers

CAPABILITIES = Capabilities()


def check_engine_args(args, prefix="--engine-args "):
    transformers.check_engine_args(args, prefix)


def open_engine(endpoint, args, timeout_s):
    engine = transformers.open_engine(endpoint, args, timeout_s)
    engine.name = "added"
    return engine
''',
    "components/tuneloop/training/backends/added.py": '''
"""A program that trains nothing."""
from dataclasses import dataclass

from tuneloop.training.backends import LLMBackend, build_flags, register_backend


@register_backend("added")
@dataclass(frozen=True, kw_only=True)
class Added(LLMBackend):
    def framework(self):
        return "torch"

    def to_command(self):
        return ["python", "-c", "import sys; print('trained with', sys.argv[1:])"]

    def to_args(self):
        return build_flags(self.args)

    def validate(self):
        self.require("rate")
''',
    "components/tuneloop/trackers/added.py": '''
"""A line for each row."""
from tuneloop import trackers


class Tracker(trackers.Tracker):
    def open_run(self, key, name, pipeline, settings, started):
        self.file = open(self.address, "w")

    def log_rows(self, rows):
        self.file.writelines(f"{sorted(row)}\\n" for row in rows.values())

    def close_run(self, phase, ended, notes):
        self.file.close()
        return f"{phase}: {self.address}"
''',
    "components/tuneloop/inference/fleet/added.py": '''
"""One worker, whose name is the URL's."""
from tuneloop.inference.fleet import Worker


class One:
    endpoint = None

    def __init__(self, url):
        self.url = url

    def discover(self):
        return [Worker(self.url, self.url)]


def open_fleet(url):
    return One(url.replace("added://", "http://"))
''',
    "components/tuneloop/stages/added.py": '''
"""Keep rollouts that have an answer: a stage that reads and writes the same kind of artifact."""
import pyarrow.parquet as pq

from tuneloop.core.component import Input, Results, Stage, component


@component("rollouts", results={"kept": int})
def added(stage: Stage, rollouts: Input, *, least: int = 1) -> Results:
    """Keep rollouts with at least so many tokens."""
    table = pq.read_table(rollouts.path / "rollouts.parquet")
    kept = table.filter([len(ids) >= least for ids in table["completion_ids"].to_pylist()])
    pq.write_table(kept, stage.out / "rollouts.parquet")
    stage.facts.update(rollouts.manifest.facts)
    return {"kept": kept.num_rows}


if __name__ == "__main__":
    added.main()
''',
    "pipelines/added.py": '''
"""One step of the loop, made of what was added."""
from pydantic import BaseModel, ConfigDict

from tuneloop.stages.added import added
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.reward import reward
from tuneloop.stages.rollout import rollout
from tuneloop.workflow.settings import Cluster

RUN = "{{workflow.parameters.store}}/{{workflow.parameters.run}}"
OF = "{{tasks.%s.outputs.parameters.%s}}"
Update = policy_update.settings(without={"seed", "iteration"}, algorithm="added")


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    cluster: Cluster = Cluster()
    update: Update = Update()


def build_argo(config):
    from hera.workflows import DAG

    from tuneloop.argo.run_plan import plan_stages
    from tuneloop.argo.template import define_workflow, stage_template
    from tuneloop.workflow.loop import StageSpec

    data = {"source": "added", "source_args": {"first": 7}, "train": 8, "eval": 4, "sft": 0, "rewards": {"added": 1.0}}
    sampling = {"engine": "added", "environment": "added", "prompts_per_iteration": 2, "n": 2, "max_tokens": 4}
    asked = {"data-prep": (data_prep, data), "base-model": (base_model, {}), "rollout": (rollout, sampling),
             "added": (added, {}), "reward": (reward, {}), "policy-update": (policy_update, config.update)}
    specs = [
        StageSpec(stage, **params) if isinstance(params, dict) else StageSpec(stage, params)
        for stage, params in asked.values()
    ]
    plan = plan_stages("added", specs, config.cluster)
    with define_workflow("added", plan=plan, cluster=config.cluster) as built:
        stages = {
            name: stage_template(stage, plan.stages[name], config.cluster)
            for name, (stage, _) in asked.items()
        }
        prompts, policy = OF % ("data-prep", "prompts"), OF % ("base-model", "checkpoint")
        with DAG(name="main"):
            given = {
                "data-prep": {},
                "base-model": {"prompts": prompts},
                "rollout": {"policy": policy, "prompts": prompts},
                "added": {"rollouts": OF % ("rollout", "rollouts")},
                "reward": {"rollouts": OF % ("added", "rollouts-out")},
                "policy-update": {"policy": policy, "rewards": OF % ("reward", "rewards")},
            }
            before = None
            for name, arguments in given.items():
                output = asked[name][0].output.replace("_", "-")
                task = stages[name](name=name, arguments={**arguments, output: f"{RUN}/{name}"})
                before = task if before is None else before >> task
    return built
''',
}
"""One of each row of the table in CONTRIBUTING.md, each in the one file that the table names."""
CHECKS = """
import pytest

from tuneloop.extensions.trainers.trainjob import as_trainjob
from tuneloop.cli import run_cli
from tuneloop.inference.fleet import open_fleet
from tuneloop.training.backends import load_backend, run_here
from tuneloop.workflow.settings import Cluster

assert run_cli(["lint", "added"]) == 0
assert run_cli(["render", "added"]) == 0
(worker,) = open_fleet("added://somewhere:1").discover()
made = load_backend("added")(args={"rate": 3})
assert as_trainjob(made, "name", Cluster())["spec"]["trainer"]["args"] == ["--rate", "3"]
assert run_here(made) == 0
print("fleet of", worker)
golden = ["tests/golden/test_golden.py", "-q", "-p", "no:cacheprovider", "-k", "added or manifests_hold"]
assert [pytest.main([*golden, *more]) for more in (["--update-golden"], [])] == [0, 0]
"""
"""What needs no process of its own: linted, rendered, its golden files written and then compared, and used."""


def test_one_of_each_row_of_the_table_is_one_file(tmp_path: Path) -> None:
    """What CONTRIBUTING.md says of adding an X, done to a copy of the repository: linted, rendered and run."""
    table = re.findall(
        r"^\| [^|]+ \| `((?:components|pipelines)/[^`]+)` \|",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.M,
    )
    assert [path.replace("<name>", "added") for path in table] == list(ADDED)
    for name in ("components", "pipelines", "manifests/components/pipelines", "tests/golden"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in (
        "pyproject.toml",
        "tests/conftest.py",
        "tests/pretrained.py",
        "tests/__init__.py",
    ):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in ADDED.items():
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text(text.lstrip())

    def done(*words: str) -> str:
        env = {
            **os.environ,
            "PYTHONPATH": f"{tmp_path}/components:{tmp_path}",
            "TUNELOOP_TRACKERS": "added+rows.txt",
        }
        found = subprocess.run(
            words, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=10 * LIMIT_S
        )
        assert found.returncode == 0, (
            f"$ {' '.join(words)}\n{found.stdout[-2000:]}\n{found.stderr[-2000:]}"
        )
        return found.stdout

    python, tuneloop = sys.executable, (sys.executable, "-m", "tuneloop.cli")
    assert "0 broken" in done(str(Path(python).parent / "lint-imports"))
    told = done(python, "-c", CHECKS)
    assert "name: policy-update" in told
    assert "trained with ['--rate', '3']" in told and "fleet of http://somewhere:1" in told
    ran = done(
        *tuneloop,
        "run",
        "added",
        "--run",
        "r",
        "--store",
        str(tmp_path / "runs"),
        "--set",
        "update.algorithm_args.boost=2",
    )
    assert (
        "  added        succeeded: rows.txt" in ran
        and "policy_update/" in (tmp_path / "rows.txt").read_text()
    )
    rollouts = Artifact(f"{tmp_path}/runs/r/rollout").manifest
    assert (rollouts.facts["engine"], rollouts.params["environment"]) == ("added", "added")
    assert Artifact(f"{tmp_path}/runs/r/added").manifest.results == {"kept": 4}
    assert Artifact(f"{tmp_path}/runs/r/reward").manifest.facts["reward"]["breakdown"].keys() == {
        "added"
    }
    assert Artifact(f"{tmp_path}/runs/r/policy-update").manifest.facts["objective"]["boost"] == 2.0
