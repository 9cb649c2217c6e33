"""Schedules by the time, and lines: runs that go on from the last good result."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.policies import commit_policy
from tests.unit import toy
from tests.unit.cluster.api import Api, kubeconfig, serving
from tests.unit.inference.test_graph import BETA
from tuneloop.cli import run_cli
from tuneloop.cluster.run_workflows import prepare_workflow
from tuneloop.cluster.schedule import BASE, CRON, TEMPLATES, main
from tuneloop.cluster.submission import Submission
from tuneloop.config.loading import find_pipeline
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.store import Store
from tuneloop.formats.promotions import read_history

NIGHTS = [f"2026-01-0{day}T03:00:00Z" for day in range(1, 6)]


class Line:
    """The schedule `nightly` of a store, whose runs are the toy's."""

    def __init__(self, server: Api, store: Path, outputs: Path) -> None:
        self.server = server
        self.store = str(store)
        self.outputs = outputs

    def tick(self, time: str, *options: str) -> str:
        """Do what the step of the schedule does at a time, and return what it says."""
        arguments = ["--name", "nightly", "--namespace", "tuneloop", "--store", self.store]
        assert main([*arguments, "--time", time, *options]) == 0
        return (self.outputs / "said").read_text()

    def end(self, run: str, phase: str) -> None:
        self.server.objects["workflows", run]["status"] = {"phase": phase}

    def read_base(self, run: str) -> str | None:
        """Return the base model that a run was started with; None: that of the settings."""
        spec = self.server.objects["workflows", run]["spec"]
        values = {item["name"]: item["value"] for item in spec["arguments"]["parameters"]}
        assert values["run"] == run
        base: str | None = values.get(BASE)
        return base

    def write_result(self, run: str, skills: tuple[int, int], *, tuned: bool = False) -> Artifact:
        """Commit what a run commits that evaluates one skill first and ends with another; return
        the version that it exports. A tuned one makes both of a base that it does not evaluate."""
        url = f"{self.store}/{run}"
        inputs: dict[str, str] = {}
        if tuned:
            toy.sft(out=f"{url}/base-model")
            inputs["policy"] = Artifact(f"{url}/base-model").ref
        first = commit_skill(f"{url}/sft", skills[0], inputs)
        toy.evaluate(out=f"{url}/evaluate-before", policy=first.ref)
        policy = commit_skill(f"{url}/trained", skills[1], inputs)
        toy.evaluate(out=f"{url}/evaluate-after", policy=policy.ref)
        toy.export(out=f"{url}/export", policy=policy.ref)
        self.end(run, "Succeeded")
        return policy


def commit_skill(url: str, skill: int, inputs: dict[str, str]) -> Artifact:
    """Commit a policy of the toy, made of these inputs."""
    draft = Draft(url)
    (draft.path / "model").mkdir()
    (draft.path / "model" / "weights.json").write_text(json.dumps({"skill": skill}))
    draft.commit(
        stage="sft", role="trainer", kind="checkpoint", inputs=inputs, facts={"version": 1}
    )
    return Artifact(url)


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    monkeypatch.setenv("TUNELOOP_OUTPUTS", str(outputs))
    with serving() as (server, cluster):
        monkeypatch.setenv("KUBECONFIG", kubeconfig(cluster.host, tmp_path))
        yield Line(server, tmp_path / "store", outputs)


def test_each_run_begins_with_the_last_good_result(line: Line) -> None:
    assert line.tick(NIGHTS[0], "--promote") == "started nightly-20260101-0300"
    assert line.read_base("nightly-20260101-0300") is None
    good = line.write_result("nightly-20260101-0300", (1, 2))

    said = line.tick(NIGHTS[1], "--promote")
    promoted = "promoted: nightly-20260101-0300: mean_reward 0.75 (≥ 0.5)"
    assert said == f"{promoted}; started nightly-20260102-0300"
    assert line.read_base("nightly-20260102-0300") == good.ref
    line.write_result("nightly-20260102-0300", (2, 0))

    # The bad one is refused, and the one before stays.
    said = line.tick(NIGHTS[2], "--promote")
    assert said.startswith("not promoted: nightly-20260102-0300: --min: 'mean_reward=0.75': is not")
    assert said.endswith("; started nightly-20260103-0300")
    assert line.read_base("nightly-20260103-0300") == good.ref
    better = line.write_result("nightly-20260103-0300", (2, 3))

    assert line.tick(NIGHTS[3], "--promote").startswith("promoted: nightly-20260103-0300: mean_")
    assert line.read_base("nightly-20260104-0300") == better.ref
    history, _ = read_history(Store(line.store))
    assert [item["ref"] for item in history] == [good.ref, better.ref]
    assert {item["name"] for item in history} == {"nightly"}


def test_a_result_is_not_compared_with_what_the_run_made_on_its_way(line: Line) -> None:
    """As in `dpo`, which evaluates the policy after SFT and then that after the pairs."""
    line.tick(NIGHTS[0], "--promote")
    line.write_result("nightly-20260101-0300", (0, 1), tuned=True)
    said = line.tick(NIGHTS[1], "--promote")
    assert "was evaluated alone, without the policy that the run began with; give --min" in said
    good = line.write_result("nightly-20260102-0300", (0, 2), tuned=True)
    said = line.tick(NIGHTS[2], "--promote", "--min", "mean_reward=0.25")
    assert said.startswith("promoted: nightly-20260102-0300: mean_reward 0.75 (≥ 0.25)")
    # Better than after SFT, and worse than what it began with.
    line.write_result("nightly-20260103-0300", (0, 1), tuned=True)
    said = line.tick(NIGHTS[3], "--promote", "--min", "mean_reward=0.25")
    assert said.startswith("not promoted: nightly-20260103-0300: --min: 'mean_reward=0.75': is not")
    assert line.read_base("nightly-20260104-0300") == good.ref


def test_nothing_starts_beside_a_run_or_twice_at_a_time(line: Line) -> None:
    line.tick(NIGHTS[0])
    assert line.tick(NIGHTS[1]) == "skipped: nightly-20260101-0300 is under way"
    line.end("nightly-20260101-0300", "Succeeded")
    assert line.tick(NIGHTS[0]) == "skipped: there is nightly-20260101-0300"
    assert line.tick(NIGHTS[1]) == "started nightly-20260102-0300"
    assert line.read_base("nightly-20260102-0300") is None


def test_a_run_that_is_resumed_keeps_its_base(line: Line) -> None:
    line.tick(NIGHTS[0], "--promote")
    good = line.write_result("nightly-20260101-0300", (1, 2))
    line.tick(NIGHTS[1], "--promote")
    line.end("nightly-20260102-0300", "Failed")
    line.tick(NIGHTS[2], "--promote")
    line.write_result("nightly-20260103-0300", (2, 3))
    assert "started nightly-20260102-0300-2" in line.tick(NIGHTS[1], "--promote")
    resumed = line.server.objects["workflows", "nightly-20260102-0300-2"]
    parameters = {item["name"]: item for item in resumed["spec"]["arguments"]["parameters"]}
    assert parameters[BASE]["value"] == good.ref


@pytest.mark.parametrize(
    ("prepare", "options", "problem"),
    [
        ("evaluate-after", (), "was not evaluated: there is no mean_reward of held-out prompts"),
        ("export", (), "exports no version of its policy"),
        ("evaluate-before", (), "was evaluated alone, without the policy that the run began with"),
        ("", ("--min", "mean_reward=0.9"), "'mean_reward=0.9': is not reached by evaluate-after"),
        ("", ("--min", "score=0.1"), "is not a figure of evaluate-after, which has mean_reward"),
        ("damage", (), "does not pass the audit: trained: trained/"),
    ],
)
def test_a_result_that_cannot_be_judged_is_not_promoted(
    line: Line, prepare: str, options: tuple[str, ...], problem: str
) -> None:
    line.tick(NIGHTS[0], "--promote")
    run = "nightly-20260101-0300"
    policy = line.write_result(run, (1, 2))
    store = Store(line.store)
    if prepare == "damage":
        (policy.path / "model" / "weights.json").write_text('{"skill": 3}')
    elif prepare:
        store.delete(f"{run}/{prepare}")
    said = line.tick(NIGHTS[1], "--promote", *options)
    assert said.startswith(f"not promoted: {run}: ") and problem in said
    assert read_history(store)[0] == []


def schedule(*words: str) -> int:
    name = ["--name", "nightly", "--store", "s3://b/runs", "--cron", "@daily"]
    return run_cli(["schedule", "sft", *name, *words])


def test_the_command_creates_a_line_by_the_time(
    line: Line, capsys: pytest.CaptureFixture[str]
) -> None:
    assert schedule("--always", "--promote", "--min", "mean_reward=0.5") == 0
    assert "nightly: starts a run at @daily;" in capsys.readouterr().out
    objects = line.server.objects
    spec = objects[CRON[2], "nightly"]["spec"]["workflowSpec"]
    assert [template["name"] for template in spec["templates"]] == ["start", "main"]
    arguments = spec["templates"][0]["container"]["args"]
    assert arguments[-3:] == ["--promote", "--min", "mean_reward=0.5"]
    template = objects[TEMPLATES[2], "nightly"]["spec"]
    parameters = {item["name"]: item["value"] for item in template["arguments"]["parameters"]}
    assert parameters[BASE] == "tiny-qwen3"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--min", "mean_reward=1"], "--min: 'mean_reward=1': is for --promote"),
        (["--promote", "--min", "mean_reward"], "write METRIC=VALUE, as in mean_reward=0.9"),
        (["--always", "--name", "n" * 27], "is too long for a schedule by the time: at most 26"),
    ],
)
def test_what_a_schedule_cannot_be(
    line: Line, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    assert schedule(*words) == 2
    assert problem in capsys.readouterr().err
    assert not line.server.objects


def test_a_run_that_was_submitted_by_the_name_of_another_is_equal(
    line: Line, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = commit_policy(Path(line.store, "first", "sft"))
    assignment = "base_model=run://first/sft"
    sft = find_pipeline("sft")
    settings: Any = sft.configure(None, [assignment], line.store)
    assert settings.base_model == policy.ref
    workflow = prepare_workflow(
        sft.build(settings), run="demo", store=line.store, namespace="tuneloop", priority=None
    )
    workflow["metadata"] |= {"name": "demo-1", "creationTimestamp": NIGHTS[0]}
    line.server.objects["workflows", "demo-1"] = workflow
    assert run_cli(["diff", "sft", "--run", "demo", "--set", assignment]) == 0
    assert run_cli(["diff", "sft", "--run", "demo", "--set", "seed=3"]) == 1
    assert policy.ref in capsys.readouterr().out


def test_diff_repeats_what_schedule_was_given(
    line: Line, capsys: pytest.CaptureFixture[str]
) -> None:
    queued = ("--set", "cluster.queue=team")
    assert schedule("--always", "--promote", "--priority", "high", *queued) == 0
    line.server.objects[TEMPLATES[2], "nightly"]["metadata"]["namespace"] = "tuneloop"
    words = ["diff", "sft", "--template", "nightly", *queued]
    assert run_cli([*words, "--priority", "high"]) == 0
    capsys.readouterr()
    assert run_cli(words) == 1
    changed = [text for text in capsys.readouterr().out.splitlines() if text[:1] in "+-"][2:]
    assert {text.strip("- ") for text in changed} == {"kueue.x-k8s.io/priority-class: high"}


def test_diff_repeats_what_submit_was_given(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = tmp_path / "graph.yaml"
    graph.write_text(BETA)
    submission = Submission.plan(
        find_pipeline("grpo"),
        "demo",
        line.store,
        config=None,
        sets=[],
        priority=None,
        namespace="tuneloop",
        fleet=graph,
        origin=None,
        iteration=0,
    )
    workflow = submission.workflow
    workflow["metadata"] |= {"name": "demo-1", "creationTimestamp": NIGHTS[0]}
    line.server.objects["workflows", "demo-1"] = workflow
    words = ["diff", "grpo", "--run", "demo"]
    assert run_cli([*words, "--fleet", str(graph)]) == 0
    assert run_cli(words) == 1
    assert "end-graph" in capsys.readouterr().out
    assert run_cli(["diff", "grpo", "--fleet", str(graph)]) == 2
    assert "is for --run: give both, or neither" in capsys.readouterr().err
