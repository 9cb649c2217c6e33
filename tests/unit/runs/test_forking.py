"""Runs that begin where another one stood: with which references, what is refused, and what retention leaves them."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.unit import toy
from tests.unit.cluster.api import serving
from tuneloop.argo.lint import lint_workflow
from tuneloop.argo.loop import CONTINUED
from tuneloop.cli import run_cli
from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.config.loading import find_pipeline
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import UserError
from tuneloop.runs.audit import audit_run
from tuneloop.runs.forking import begin_workflow, record_fork
from tuneloop.runs.retention import find_leftovers
from tuneloop.runs.run_record import Run
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.training.old_checkpoints import delete_old_checkpoints
from tuneloop.workflow.manifest import begin_at_template

TOY = str(Path(__file__).parents[1] / "toy_pipeline.py")


def fork(run: Run, iteration: int, *sets: str, name: str = "y") -> dict[str, Any]:
    """Fork a toy run; the workflow."""
    found = find_pipeline(TOY)
    settings = found.configure(sets=["iterations=9", *sets])
    workflow = begin_workflow(found, settings, run, iteration)
    record_fork(name, workflow, run, settings)
    return workflow


def given(workflow: dict[str, Any]) -> dict[str, str]:
    return {p["name"]: str(p.get("value")) for p in workflow["spec"]["arguments"]["parameters"]}


def go_on(store: Path, name: str, start: dict[str, str], last: int) -> None:
    """Run the toy's iterations from where a fork begins."""
    policy = start["policy"]
    for i in range(int(start["iteration"]), last + 1):
        at = f"{store}/{name}/iterations/{i}"
        toy.rollout(out=f"{at}/rollout", policy=policy, iteration=i)
        toy.reward(out=f"{at}/reward", rollouts=f"{at}/rollout")
        toy.policy_update(
            out=f"{at}/policy-update", policy=policy, rewards=f"{at}/reward", iteration=i
        )
        policy = Artifact(f"{at}/policy-update").ref


def test_a_fork_goes_on_with_the_digests_of_the_run_that_it_left(tmp_path: Path) -> None:
    """From the start, from the middle and from the end; and a fork of a fork."""
    made = toy.make(f"{tmp_path}/x", iterations=4)
    run = Run("x", str(tmp_path))
    for iteration, before in (
        (0, "sft"),
        (2, "iterations/2/policy-update"),
        (4, "iterations/4/policy-update"),
    ):
        workflow = fork(run, iteration, name=f"at-{iteration}")
        start = given(workflow)
        assert workflow["spec"]["entrypoint"] == CONTINUED and not lint_workflow(workflow)
        assert start["iteration"] == str(iteration + 1)
        assert start["policy"] == Artifact(f"{run.url}/{before}").ref
        go_on(tmp_path, f"at-{iteration}", start, 4)
        forked = Run(f"at-{iteration}", str(tmp_path))
        assert forked.origin == {
            "run": "x",
            "iteration": iteration,
            "values": {"policy": start["policy"]},
        }
        assert {e.key.removeprefix("iterations/"): e.manifest.digest for e in forked.entries} == {
            key: made[key].digest for key in made if key[0].isdigit() and int(key[0]) > iteration
        }
        assert not any(proof.problems for proof in audit_run(forked))
    middle = Run("at-2", str(tmp_path))
    start = given(fork(middle, 3, name="again"))
    assert start["policy"] == Artifact(f"{middle.url}/iterations/3/policy-update").ref
    for iteration in (0, 1, 2):
        with pytest.raises(
            UserError,
            match=f"ITERATION: {iteration}: at-2 began after iteration 2 of x; fork that run",
        ):
            fork(middle, iteration, name="before")
    assert (
        given(fork(Run("at-0", str(tmp_path)), 0, name="same"))["policy"]
        == Artifact(f"{run.url}/sft").ref
    )


@pytest.mark.parametrize(
    ("iteration", "sets", "says"),
    [
        (3, [], "ITERATION: 3: x, in iteration 3 now, has not committed it"),
        (1, ["sft.skill=2"], "sft.skill: 2: x ran sft with 1, and a fork does not repeat that"),
        (
            2,
            ["iterations=2"],
            "loop.iterations: 2: the loop would end with iteration 2: set it higher",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, iteration: int, sets: list[str], says: str
) -> None:
    toy.make(f"{tmp_path}/x", iterations=2)
    toy.rollout(
        out=f"{tmp_path}/x/iterations/3/rollout", policy=f"{tmp_path}/x/iterations/2/policy-update"
    )
    with pytest.raises(UserError) as error:
        fork(Run("x", str(tmp_path)), iteration, *sets)
    assert says in str(error.value)
    assert not (tmp_path / "y").exists() and not (tmp_path / "x/pins").exists()


def test_a_pipeline_that_says_no_loop_has_no_forks(tmp_path: Path) -> None:
    toy.make(f"{tmp_path}/x", iterations=1)
    found = find_pipeline("sft")
    with pytest.raises(UserError, match="ITERATION: 1: x, in iteration 1 now, has not"):
        begin_workflow(found, found.configure(), Run("x", str(tmp_path)), 1)


def test_a_name_is_taken_by_a_run_and_by_another_fork_and_not_by_the_same(tmp_path: Path) -> None:
    toy.make(f"{tmp_path}/x", iterations=2)
    run = Run("x", str(tmp_path))
    fork(run, 1)
    fork(run, 1)
    for iteration, name in ((2, "y"), (1, "x")):
        with pytest.raises(UserError, match=f"--name: '{name}': is the name of another run"):
            fork(run, iteration, name=name)
    with pytest.raises(UserError, match="lower-case"):
        fork(run, 1, name="No/Name")
    assert [
        str(p.relative_to(run.directory))
        for p in (run.directory / "pins").rglob("*")
        if p.is_file()
    ] == ["pins/iterations/1/policy-update/fork-y"]


def test_retention_leaves_what_a_fork_begins_from(tmp_path: Path) -> None:
    """By `gc --keep`, and by the loop itself; other old checkpoints go, and from these nothing is forked."""
    toy.make(f"{tmp_path}/x", iterations=5)
    run = Run("x", str(tmp_path))
    fork(run, 2)
    gone = {
        item.key.split("/")[1]
        for item in find_leftovers(run, keep=1)
        if item.key.startswith("iterations/")
    }
    assert gone == {"1", "3", "4"}
    newest = Artifact(f"{run.url}/iterations/5/policy-update")
    params = SimpleNamespace(save_total_limit=2, keep_every=None)
    stage: Any = SimpleNamespace(params=params, out_url=newest.url, log=lambda text: None)
    delete_old_checkpoints(stage, newest.manifest)
    kept = {
        i
        for i in range(1, 6)
        if any((tmp_path / f"x/iterations/{i}/policy-update").glob("data-*/model/*"))
    }
    assert kept == {2, 4, 5}
    with pytest.raises(
        UserError, match=r"iterations/3/policy-update.*: has lost its files to retention"
    ):
        fork(run, 3, name="late")
    go_on(tmp_path, "y", given(fork(run, 2)), 3)
    assert Run("y", str(tmp_path)).checkpoints


FORMS = {
    "pods": [],
    "stages": ["engine.kind=transformers", "loop.iterations_per_pod=0"],
    "asynchronous": ["loop.asynchronous=true"],
    "replicas": ["engine.replicas=2"],
}


def make_grpo(url: str) -> dict[str, str]:
    """Commit two iterations of `grpo` that hold no data; what the third starts from."""
    config: Any = find_pipeline("grpo").configure()

    def put(
        key: str, stage: str, params: dict[str, Any], *, role: Any = None, **inputs: str
    ) -> str:
        draft = Draft(f"{url}/{key}")
        (draft.path / "model").mkdir()
        (draft.path / "model/w").write_text(key)
        version = {"version": int(key.split("/")[1])} if role == "trainer" else {}
        draft.commit(
            stage=stage,
            role=role,
            params=params,
            facts=version,
            inputs=inputs,
            results={"mean_reward": 0.0},
        )
        return Artifact(f"{url}/{key}").ref

    data = data_prep.validate({**config.data.model_dump(), "seed": 0}).model_dump(mode="json")
    model = base_model.validate(
        {**config.model.model_dump(), "seed": 0, "model": config.base_model}
    )
    prompts = put("data-prep", "data_prep", data)
    start = policy = put("base-model", "base_model", model.model_dump(mode="json"), prompts=prompts)
    for i in (1, 2):
        at = f"iterations/{i}"
        rollouts = put(
            f"{at}/rollout", "rollout", {}, role="sampler", prompts=prompts, policy=policy
        )
        rewards = put(f"{at}/reward", "reward", {}, role="scorer", rollouts=rollouts)
        about = {"policy": policy, "rewards": rewards, "reference": start}
        policy = put(f"{at}/policy-update", "policy_update", {}, role="trainer", **about)
    return {"iteration": "3", "policy": policy, "prompts": prompts, "reference": start}


@pytest.mark.parametrize("form", FORMS)
def test_a_rendered_fork_begins_at_the_next_iteration(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = make_grpo(f"{tmp_path}/x")
    sets = [
        word for each in ("update.learning_rate=0.001", *FORMS[form]) for word in ("--set", each)
    ]
    line = ["submit", "grpo", "--run", "y", "--store", tmp_path.as_uri(), "--dry-run", *sets]
    assert run_cli([*line, "--fork", "x", "2"]) == 0
    workflow = yaml.safe_load(capsys.readouterr().out)
    assert workflow["spec"]["entrypoint"] == CONTINUED
    assert {key: value for key, value in given(workflow).items() if key in wanted} == wanted
    taken = next(t["inputs"] for t in workflow["spec"]["templates"] if t["name"] == CONTINUED)[
        "parameters"
    ]
    assert {p["name"] for p in taken} == wanted.keys(), "nothing that it takes is left open"
    assert run_cli(line) == 0
    plain = yaml.safe_load(capsys.readouterr().out)
    assert plain["spec"]["templates"] == workflow["spec"]["templates"]
    assert not (tmp_path / "y").exists(), "nothing is recorded"
    for words, says in (
        (["x", "9"], "error: ITERATION: 9: x, in iteration 2 now, has not committed it"),
        (["x", "two"], "Invalid value for --fork: Input should be a valid integer"),
        (["nobody", "2"], "error: run: nobody: not found"),
        (["x", "2", "--set", "seed=7"], "error: data-prep.seed: 7: x ran data-prep with 0"),
        (["x", "2", "--set", "data.source_args.digits=3"], "error: data-prep.source_args"),
        (
            ["x", "2", "--set", "loop.iterations=2"],
            "error: loop.iterations: 2: the loop would end with iteration 2",
        ),
    ):
        assert run_cli([*line, "--fork", *words]) == 2
        assert says in capsys.readouterr().err.replace("'", "")


def test_a_fork_on_a_cluster_is_resumed_where_it_stands(tmp_path: Path) -> None:
    make_grpo(f"{tmp_path}/x")
    found, run = find_pipeline("grpo"), Run("x", str(tmp_path))
    settings = found.configure()
    begun = begin_workflow(found, settings, run, 2)
    first = run_workflows.prepare_workflow(begun, run="y", store=str(tmp_path))
    plain = run_workflows.prepare_workflow(found.build(settings), run="y", store=str(tmp_path))
    with serving() as (server, cluster):
        assert argo.create_workflow(cluster, first, "y") == "y"
        server.objects["workflows", "y"]["status"] = {"phase": "Succeeded"}
        later = begin_at_template(first, CONTINUED, {"iteration": "62", "policy": "s3://b/p"})
        assert argo.create_numbered(cluster, later, "y", 2) == "y-2"
        server.objects["workflows", "y-2"]["status"] = {"phase": "Failed"}
        assert argo.create_workflow(cluster, plain, "y") == "y-3"
        assert given(server.objects["workflows", "y-3"])["iteration"] == "62"
        for name in ("y", "y-2", "y-3"):
            del server.objects["workflows", name]
        assert argo.create_workflow(cluster, first, "y") == "y", (
            "from its beginning: what is committed stands"
        )


def test_a_fork_whose_server_pulls_finds_its_first_version_published(tmp_path: Path) -> None:
    from tests.making import tiny_model
    from tuneloop.weights.inspect import list_versions

    make_grpo(f"{tmp_path}/x")
    place = tmp_path / "x/iterations/2/policy-update"
    about = Artifact(str(place)).manifest.model_dump(
        include={"stage", "role", "params", "facts", "inputs", "results"}
    )
    shutil.rmtree(place)
    draft = Draft(str(place))
    tiny_model(draft.path / "model")
    draft.commit(**about)
    found, run = find_pipeline("grpo"), Run("x", str(tmp_path))
    settings = found.configure(sets=["engine.weights.kind=pull"])
    record_fork("y", begin_workflow(found, settings, run, 2), run, settings)
    published = list_versions(f"{tmp_path}/y/weights")
    assert [(each.version, each.latest) for each in published] == [(2, True)]
    assert not (tmp_path / "x/weights").exists()
