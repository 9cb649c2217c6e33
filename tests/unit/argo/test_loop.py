"""A loop as a pipeline states it, and the graph that a pipeline draws."""

from typing import Any

import pytest

from tests.unit import toy
from tuneloop.argo.lint import lint_workflow
from tuneloop.argo.pipeline import build_workflow
from tuneloop.config.loading import find_pipeline, list_pipelines
from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.config.pipeline import PipelineConfig
from tuneloop.core.component import find_component
from tuneloop.core.errors import UserError
from tuneloop.core.program import to_kebab_case
from tuneloop.workflow.loop import Graph, Loop, StageSpec, Step


@pytest.mark.parametrize("name", list_pipelines())
def test_what_is_rendered_says_every_parameter_of_a_stage(name: str) -> None:
    """Resolved once, when it is rendered: what a stage is not told is none, and no default of its program counts."""
    pipeline, seen = find_pipeline(name), set()
    for template in pipeline.build(pipeline.configure())["spec"]["templates"]:
        container = template.get("container", {})
        module = next(
            (word for word in container.get("command", ()) if word.startswith("tuneloop.stages.")),
            "",
        )
        if component := find_component(module):
            flags = [*component.inputs, component.output, *component.Params.model_fields]
            silent = [each for each in flags if f"--{to_kebab_case(each)}" not in container["args"]]
            assert all(component.Params.model_fields[each].default is None for each in silent), (
                module,
                silent,
            )
            seen.add(module)
    assert len(seen) > 3


def looped(**about: Any) -> Loop:
    given: dict[str, Any] = {
        "steps": [
            Step(toy.rollout, policy="policy", iteration="iteration"),
            Step(toy.reward, rollouts="rollout.rollouts"),
            Step(toy.policy_update, policy="policy", rewards="reward.rewards"),
        ],
        "carry": {"policy": "policy-update.checkpoint"},
        "constants": [],
        "reward": "reward.mean-reward",
        "check": Step(toy.evaluate, policy="policy"),
        "finish": [Step(toy.export, policy="policy")],
    }
    return Loop(**{**given, **about})


@pytest.mark.parametrize(
    ("about", "says"),
    [
        (
            {"steps": [Step(toy.reward, rollouts="rollout.rollouts")]},
            "loop.steps.reward: 'rollout.rollouts'",
        ),
        ({"carry": {"policy": "policy-update.model"}}, "loop.carry: 'policy-update.model'"),
        (
            {"reward": "reward.mean_reward"},
            r"loop.reward: 'reward.mean_reward': .*known here: .*reward.mean-reward",
        ),
        ({"check": Step(toy.evaluate, policy="polcy")}, "loop.evaluate: 'polcy'"),
        (
            {"steps": [Step(toy.rollout, optional=True, policy="policy", iteration="iteration")]},
            "loop.steps: 'rollout': only a step of `finish` may be optional",
        ),
    ],
)
def test_a_wire_that_leads_nowhere_is_named(about: dict[str, Any], says: str) -> None:
    assert looped().outputs == ("policy", "iteration", "mean-reward")
    with pytest.raises(UserError, match=says):
        looped(**about)


def test_a_step_names_inputs_that_its_stage_has_and_all_that_it_needs() -> None:
    with pytest.raises(
        UserError, match=r"reward\.rollout: 'rollout\.rollouts': is not an input or parameter"
    ):
        Step(toy.reward, rollout="rollout.rollouts")
    with pytest.raises(UserError, match=r"reward\.rollouts: None: is a required input"):
        Step(toy.reward)


def test_a_step_without_its_spec_is_named() -> None:
    config = LoopPipelineConfig.model_construct()
    specs = [
        StageSpec(stage, stage.settings(without={"seed"})()) for stage in (toy.rollout, toy.reward)
    ]
    with pytest.raises(
        UserError, match="stages: 'policy-update': is a step of the loop and has no StageSpec"
    ):
        build_workflow("toy", config, specs, lambda graph: None, looped())


def test_a_task_depends_on_those_whose_outputs_it_takes_and_on_no_other() -> None:
    def draw(graph: Graph) -> None:
        first = graph.stage(toy.sft)
        batch = graph.stage(toy.rollout, policy=first.checkpoint)
        scored = graph.stage(toy.reward, rollouts=batch.rollouts)
        graph.stage(toy.policy_update, policy=first.checkpoint, rewards=scored.rewards)
        graph.stage(toy.evaluate, "evaluate-before", policy=first.checkpoint)
        other = graph.stage(toy.sft, "other")
        graph.stage(
            toy.policy_update, "update-other", policy=other.checkpoint, rewards=scored.rewards
        )

    stages = (toy.sft, toy.rollout, toy.reward, toy.policy_update, toy.evaluate)
    specs = [StageSpec(stage, stage.settings(without={"seed"})()) for stage in stages]
    main = build_workflow("toy", PipelineConfig(), specs, draw).to_dict()["spec"]["templates"][-1]
    assert {task["name"]: task.get("depends") for task in main["dag"]["tasks"]} == {
        "sft": None,
        "rollout": "sft",
        "reward": "rollout",
        "policy-update": "reward",
        "evaluate-before": "sft",
        "other": None,
        "update-other": "other && reward",
    }


def test_a_published_version_has_the_same_address_in_every_template() -> None:
    grpo, sets = find_pipeline("grpo"), ["engine.weights.kind=pull", "loop.iterations_per_pod=0"]
    templates = {t["name"]: t for t in grpo.build(grpo.configure(sets=sets))["spec"]["templates"]}
    for name in ("base-model", "policy-update", "serve"):
        words = templates[name]["container"]["args"]
        url = "{{workflow.parameters.store}}/{{workflow.parameters.run}}/weights"
        assert words[words.index("--weights") + 1] == url
    assert "inputs" not in templates["serve"], "it finds the latest version by itself"


def test_each_replica_is_a_task_of_its_own_and_all_of_them_are_the_endpoint() -> None:
    grpo = find_pipeline("grpo")
    made = grpo.build(grpo.configure(sets=["engine.replicas=3", "engine.weights.kind=pull"]))
    assert not lint_workflow(made)
    templates = {t["name"]: t for t in made["spec"]["templates"]}
    assert templates["serve"]["inputs"] == {"parameters": [{"name": "replica"}]}
    assert templates["serve"]["container"]["args"][-1].endswith(
        "/serve-{{inputs.parameters.replica}}"
    )
    names = ["serve-1", "serve-2", "serve-3"]
    for graph, first in (("main", "evaluate-before"), ("continued", "part")):
        tasks = {task["name"]: task for task in templates[graph]["dag"]["tasks"]}
        assert [name for name, task in tasks.items() if task["template"] == "serve"] == names
        assert {*names} <= {*tasks[first]["depends"].split(" && ")}
        endpoint = next(
            p["value"] for p in tasks[first]["arguments"]["parameters"] if p["name"] == "endpoint"
        )
        assert endpoint == ",".join(f"http://{{{{tasks.{name}.ip}}}}:8765" for name in names)


def test_a_model_is_deployed_where_that_is_asked_for_behind_its_evaluation_and_its_export() -> None:
    grpo = find_pipeline("grpo")
    for sets in ([], ["deploy=null"]):
        assert not any(
            each["name"] == "deploy-model"
            for each in grpo.build(grpo.configure(sets=sets))["spec"]["templates"]
        )
    built = grpo.build(grpo.configure(sets=["deploy.at_least=0.8", "loop.per_workflow=30"]))
    assert not lint_workflow(built)
    templates = {each["name"]: each for each in built["spec"]["templates"]}
    pod = templates["deploy-model"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (
        "tuneloop-deployer",
        True,
    )
    assert not {"serviceAccountName", "automountServiceAccountToken"} & {*templates["export"]}
    export, deploy = templates["part"]["dag"]["tasks"][-2:]
    assert (deploy["depends"], deploy["when"]) == ("export", export["when"]), (
        "not before the loop's end"
    )
    given = {each["name"]: each["value"] for each in deploy["arguments"]["parameters"]}
    ran = "{{=tasks.export.status == 'Succeeded' ? tasks.export.outputs.parameters.model : ''}}"
    other = (
        "{{=tasks['evaluate-after'].status == 'Succeeded'"
        " ? tasks['evaluate-after'].outputs.parameters.metrics : ''}}"
    )
    assert (given["model"], given["metrics"]) == (ran, other)
    assert (
        given["promotion"]
        == "{{workflow.parameters.store}}/{{workflow.parameters.run}}/deploy-model"
    )


def test_kubeflow_pipelines_deploy_nothing() -> None:
    grpo = find_pipeline("sft_then_grpo")
    with pytest.raises(
        UserError, match=r"^deploy: .*: is built for Argo and for one machine: leave it out here"
    ):
        grpo.module.build_kfp(grpo.configure(sets=["deploy={}"]))
