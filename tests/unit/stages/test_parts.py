"""Each stage reads and proves the files that it uses, and no others: damage there is refused, elsewhere unnoticed."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.store_bytes import serve_s3
from tests.policies import commit_policy
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Corrupt
from tuneloop.inference import http_api
from tuneloop.inference.proof import read_canary
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.evaluate import evaluate
from tuneloop.stages.export import export
from tuneloop.stages.model_reward import model_reward
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.preference import preference
from tuneloop.stages.reference_logprobs import reference_logprobs
from tuneloop.stages.reward import reward
from tuneloop.stages.reward_model import reward_model
from tuneloop.stages.rollout import rollout
from tuneloop.stages.sft import sft
from tuneloop.stages.tokenize_data import tokenize_data
from tuneloop.training.checkpoint import RESIDENT
from tuneloop.training.fetch import fetch_artifact

TRAIN = {"max_steps": 1, "max_length": 256, "device": "cpu"}
SAMPLE = {"engine": "transformers", "max_tokens": 2}
ROLLOUT = {**SAMPLE, "n": 2, "prompts_per_iteration": 2}
TO_REFERENCE = {"algorithm_args": {"beta": 0.1}, "device": "cpu"}

CASES: dict[str, tuple[Any, dict[str, Any], str, dict[str, set[str]]]] = {
    "base_model": (base_model, {}, "prompts", {"prompts": {"train.parquet", "sft.parquet"}}),
    "sft": (
        sft,
        TRAIN,
        "policy prompts",
        {"policy": {"model", "trainer", "canary.json"}, "prompts": {"sft.parquet"}},
    ),
    "tokenize_data": (
        *(tokenize_data, {}, "policy prompts"),
        {
            "policy": {"model"},
            "prompts": {"sft.parquet", "preference.parquet", "preference_eval.parquet"},
        },
    ),
    "rollout": (
        *(rollout, ROLLOUT, "policy prompts"),
        {"policy": {"model", "canary.json"}, "prompts": {"train.parquet"}},
    ),
    "evaluate": (
        *(evaluate, SAMPLE, "policy prompts"),
        {"policy": {"model", "canary.json"}, "prompts": {"eval.parquet"}},
    ),
    "reward": (reward, {"error_budget": 1.0}, "rollouts", {"rollouts": {"rollouts.parquet"}}),
    "policy_update": (
        *(policy_update, TO_REFERENCE, "policy rewards reference"),
        {
            "policy": {"model", "trainer", "canary.json"},
            "rewards": {"rewards.parquet"},
            "reference": {"model", "trainer"},
        },
    ),
    "reference_logprobs": (
        *(reference_logprobs, {"max_length": 256, "device": "cpu"}, "policy prompts"),
        {
            "policy": {"model", "trainer"},
            "prompts": {"preference.parquet", "preference_eval.parquet"},
        },
    ),
    "preference": (
        *(preference, TRAIN, "policy prompts logprobs"),
        {
            "policy": {"model", "trainer", "canary.json"},
            "prompts": {"preference.parquet", "preference_eval.parquet"},
            "logprobs": {"preference.parquet"},
        },
    ),
    "reward_model": (
        *(reward_model, TRAIN, "policy prompts"),
        {
            "policy": {"model", "trainer"},
            "prompts": {"preference.parquet", "preference_eval.parquet"},
        },
    ),
    "model_reward": (
        *(model_reward, {"device": "cpu"}, "rollouts scorer"),
        {"rollouts": {"rollouts.parquet"}, "scorer": {"model"}},
    ),
    "export": (export, {}, "policy", {"policy": {"model"}}),
}
"""Stage, its parameters, its inputs, and which parts of each it uses."""
WITHOUT_WEIGHTS = ("tokenize_data",)


def make_artifacts(url: str) -> dict[str, str]:
    """Make one artifact for each name of an input; return their references."""
    sizes = {"train": 8, "eval": 4, "sft": 8, "preference": 6, "preference_eval": 4}
    data_prep(out=f"{url}/prompts", **sizes)
    made = {"prompts": f"{url}/prompts"}
    commit_policy(f"{url}/base")  # type: ignore[arg-type]
    sft(out=f"{url}/sft", policy=f"{url}/base", **made, **TRAIN)
    made |= {"policy": f"{url}/sft", "reference": f"{url}/sft"}
    pair = {"policy": made["policy"], "prompts": made["prompts"]}
    rollout(out=f"{url}/rollouts", **pair, **ROLLOUT)
    reward(out=f"{url}/rewards", rollouts=f"{url}/rollouts", error_budget=1.0)
    reference_logprobs(out=f"{url}/logprobs", **pair, max_length=256, device="cpu")
    reward_model(out=f"{url}/scorer", **pair, **TRAIN)
    made |= {name: f"{url}/{name}" for name in ("rollouts", "rewards", "logprobs", "scorer")}
    return {name: Artifact(each).ref for name, each in made.items()}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_artifacts(str(tmp_path_factory.mktemp("made")))


def copy_damaged(ref: str, target: Path, parts: set[str]) -> str:
    """Copy an artifact, with a byte changed in each file of `parts`."""
    artifact = Artifact(ref)
    shutil.copytree(artifact.url.removeprefix("file://"), target)
    names = [name for name in artifact.manifest.files if top(name) in parts]
    assert names, "nothing to damage: the case proves nothing"
    for name in names:
        path = target / artifact.manifest.root / name
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    return f"{target}@{artifact.manifest.digest}"


def top(name: str) -> str:
    return name.partition("/")[0]


def run(case: str, refs: dict[str, str], out: Path) -> None:
    stage, given, inputs, _ = CASES[case]
    RESIDENT.options = None
    stage(out=str(out), **{name: refs[name] for name in inputs.split()}, **given)


@pytest.mark.parametrize("case", CASES)
def test_what_a_stage_does_not_use_may_be_damaged(
    artifacts: dict[str, str], tmp_path: Path, case: str
) -> None:
    used, refs = CASES[case][3], dict(artifacts)
    for name, parts in used.items():
        if others := {top(file) for file in Artifact(refs[name]).manifest.files} - parts:
            refs[name] = copy_damaged(refs[name], tmp_path / name, others)
    assert refs != artifacts
    run(case, refs, tmp_path / "out")


@pytest.mark.parametrize(
    ("case", "name", "part"),
    [
        (case, name, part)
        for case in CASES
        for name, parts in CASES[case][3].items()
        for part in sorted(parts)
    ],
)
def test_damage_to_what_a_stage_uses_is_refused_in_one_line(
    artifacts: dict[str, str], tmp_path: Path, case: str, name: str, part: str
) -> None:
    refs = {**artifacts, name: copy_damaged(artifacts[name], tmp_path / name, {part})}
    with pytest.raises(
        Corrupt,
        match=rf"^artifact: 'file://{tmp_path}/{name}/.*/{part}.*': differs from .*; restore",
    ):
        run(case, refs, tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()


def test_damage_elsewhere_does_not_matter_to_who_serves_or_fetches_a_model(
    artifacts: dict[str, str], tmp_path: Path
) -> None:
    ref = copy_damaged(artifacts["policy"], tmp_path / "p", {"trainer", "metrics.jsonl"})
    http_api._fetch(ref)
    fetch_artifact(f"{ref}#model", tmp_path / "model")
    assert read_canary(Artifact(ref)).ids
    ref = copy_damaged(artifacts["policy"], tmp_path / "q", {"model"})
    for use in (http_api._fetch, functools.partial(fetch_artifact, into=tmp_path / "other")):
        with pytest.raises(Corrupt, match=r"model/.*differs from its manifest"):
            use(f"{ref}#model" if isinstance(use, functools.partial) else ref)
    assert read_canary(Artifact(ref)).ids, "some kilobytes need not read the model"


def test_bytes_that_a_stage_reads_of_an_object_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage with an empty cache, as in a pod of its own: the files it uses once, and no others."""
    with serve_s3(tmp_path / "objects") as server:
        monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / "making"))
        refs = make_artifacts("s3://bucket/run")
        for case, (_, _, inputs, used) in CASES.items():
            monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / case))
            server.log.clear()
            run(case, refs, tmp_path / "out" / case)
            wanted = {}
            for name in inputs.split():
                about = Artifact(refs[name])
                place = f"{about.url.removeprefix('s3://')}/{about.manifest.root}"
                files = {
                    file: each.size
                    for file, each in about.manifest.files.items()
                    if top(file) in used[name]
                }
                skipped = (".safetensors",) if case in WITHOUT_WEIGHTS else ()
                wanted |= {
                    f"{place}/{file}": size
                    for file, size in files.items()
                    if not file.endswith(skipped)
                }
            read = [
                (key, size)
                for method, key, size in server.log
                if method == "GET" and "/data-" in key
            ]
            assert sorted(read) == sorted(wanted.items()), case
