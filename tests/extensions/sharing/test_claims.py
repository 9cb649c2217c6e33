"""Workflows of runs that share devices: what is rendered, what is refused, and what one machine makes of it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hera.workflows import DAG, Container, Task

from tuneloop.argo.jobset import pod_spec
from tuneloop.argo.lint import lint_workflow
from tuneloop.argo.run_plan import plan_stage, plan_stages
from tuneloop.argo.template import add_exit_handler, define_workflow, stage_template
from tuneloop.cluster.pod_shapes import list_pod_shapes
from tuneloop.cluster.run_workflows import as_template, prepare_workflow
from tuneloop.cluster.schedule import build_check_spec
from tuneloop.config.extended import extend_cluster
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError
from tuneloop.extensions.sharing.claim_steps import list_entry_graphs
from tuneloop.extensions.sharing.claims import find_placement_errors
from tuneloop.extensions.sharing.lease_sidecar import NAME
from tuneloop.extensions.sharing.settings import Share
from tuneloop.extensions.trainers.trainjob import as_workflow
from tuneloop.local.executor import execute_parts
from tuneloop.planning.plan import render_plan
from tuneloop.stages.data_prep import data_prep
from tuneloop.training.backends.native import Native
from tuneloop.workflow.loop import StageSpec
from tuneloop.workflow.settings import QUEUE_LABEL, UNKNOWN, Cluster

DEMO = Share(group="demo", device_class="gpu.example.com")
SHARED = ("cluster.share.group=demo", "cluster.share.device_class=gpu.example.com")


def grpo(*sets: str) -> dict[str, Any]:
    pipeline = find_pipeline("grpo")
    return pipeline.build(pipeline.configure(sets=[*SHARED, *sets]))


def template(made: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in made["spec"]["templates"] if each["name"] == name)


def claim_of(made: dict[str, Any], name: str) -> dict[str, str]:
    (claim,) = json.loads(template(made, name)["podSpecPatch"])["resourceClaims"]
    return claim


def test_every_part_of_a_long_run_makes_its_reservations_first_and_releases_them() -> None:
    made = grpo("cluster.share.roles=apart")
    for name in ("main", "continued"):
        first, *others = template(made, name)["dag"]["tasks"]
        assert first == {"name": "claim", "template": "take-claim"}
        assert all(task["depends"] for task in others)
    assert made["spec"]["onExit"] == "give-claim"
    args = template(made, "take-claim")["container"]["args"]
    assert args[args.index("--claims") + 1 :] == ["claim-trainer", "claim-sampler"]
    assert (
        claim_of(made, "policy-update")["resourceClaimName"]
        == "{{workflow.outputs.parameters.claim-trainer}}"
    )
    assert (
        claim_of(made, "serve")["resourceClaimName"]
        == "{{workflow.outputs.parameters.claim-sampler}}"
    )
    assert QUEUE_LABEL not in template(made, "serve")["metadata"]["labels"], (
        "Kueue takes no direct claims"
    )


def test_a_claim_of_ones_own_is_made_from_a_template_and_queues() -> None:
    made = grpo("cluster.share.runs_per_claim=1", "nodes=2")
    assert "resourceClaimTemplateName" in claim_of(made, "serve")
    assert template(made, "serve")["metadata"]["labels"][QUEUE_LABEL] == "tuneloop-samplers"
    assert (
        "resourceClaimTemplateName" in template(made, "policy-update-job")["resource"]["manifest"]
    )


def test_trainers_and_samplers_want_different_nodes() -> None:
    made = grpo("cluster.share.roles=strict")
    found = {}
    for name in ("policy-update", "serve"):
        near = template(made, name)["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        ((expression,),) = (term["matchExpressions"] for term in near["nodeSelectorTerms"])
        found[name] = (expression["key"], expression["values"])
        assert (
            template(made, name)["metadata"]["labels"]["tuneloop.dev/role"]
            == expression["values"][0]
        )
    assert found == {
        "policy-update": ("tuneloop.dev/role", ["trainer"]),
        "serve": ("tuneloop.dev/role", ["sampler"]),
    }
    assert "affinity" not in template(grpo(), "serve"), "together: wherever the devices are"


@pytest.mark.parametrize(
    ("at", "field", "value"),
    [
        ("serve", "nodeSelector", {"disk": "fast"}),
        ("policy-update", "affinity", {"nodeAffinity": {}}),
        ("policy-update", "podSpecPatch", '{"nodeSelector":{"disk":"fast"}}'),
        (
            "serve",
            "podSpecPatch",
            '{"resourceClaims":[{"name":"mine","resourceClaimName":"mine"}]}',
        ),
        ("", "nodeSelector", {"disk": "fast"}),
    ],
)
def test_a_placement_of_ones_own_is_refused(at: str, field: str, value: Any) -> None:
    made = grpo("cluster.share.roles=apart")
    assert lint_workflow(made) == [] and lint_workflow(as_template(made, "grpo")) == []
    (template(made, at) if at else made["spec"])[field] = value
    (problem,) = lint_workflow(made)
    assert str(problem).startswith(f"templates.{at}." if at else "spec.") and "leave it out" in str(
        problem
    )


def test_a_workflow_that_would_reserve_nothing_is_refused() -> None:
    cluster = extend_cluster().model_validate({"share": DEMO})
    rollout = find_pipeline("grpo").module.rollout
    with define_workflow("forgotten") as built:
        stage = stage_template(rollout, plan_stage(StageSpec(rollout), cluster), cluster)
        with DAG(name="main"):
            stage(name="rollout", arguments={"policy": "p", "prompts": "q", "rollouts": "r"})
    (fault,) = find_placement_errors(built.to_dict())
    assert "give define_workflow() the cluster" in str(fault)


def test_what_cannot_share_says_so() -> None:
    with pytest.raises(
        UserError, match=r"cluster.share.group: 'demo': supports only stages of one pod"
    ):
        grpo("nodes=2")
    with pytest.raises(
        UserError, match=r"cluster.share.roles: 'apart': loop.iterations_per_pod trains and samples"
    ):
        grpo("cluster.share.roles=apart", "loop.iterations_per_pod=2")
    with pytest.raises(UserError, match=r"set one of them"):
        grpo("cluster.sampler.gpus=1")
    with pytest.raises(UserError, match=r"set device_class"):
        find_pipeline("grpo").configure(sets=["cluster.share.group=demo", "cluster.share.count=2"])


def test_a_schedule_only_looks_and_reserves_nothing() -> None:
    made = prepare_workflow(grpo(), run="nightly", store="s3://a/b")
    spec = build_check_spec(made, "nightly")
    assert "onExit" not in spec and "take-claim" not in {each["name"] for each in spec["templates"]}
    assert "depends" not in spec["templates"][-1]["dag"]["tasks"][0]


def test_requests_are_small_limits_big_and_what_cannot_fit_is_refused() -> None:
    made = grpo("cluster.share.request=512Mi", "cluster.share.node_memory=16Gi")
    resources = template(made, "policy-update")["container"]["resources"]
    assert (resources["requests"]["memory"], resources["limits"]["memory"]) == ("512Mi", "2816Mi")
    render_plan("grpo", made)
    with pytest.raises(
        UserError, match=r"'12 GiB': 2 runs request 2 × \(2.75 GiB \+ 4.25 GiB server\) \+ 4 GiB"
    ):
        render_plan("grpo", grpo("cluster.share.node_memory=12Gi"))
    assert (
        "memory"
        in pod_spec("trainer", "trainer", [], [], Cluster())["containers"][0]["resources"][
            "requests"
        ]
    )


def test_where_every_container_has_limits_the_sidecar_and_what_shares_have_enough() -> None:
    made = grpo(
        "cluster.share.request=512Mi", "cluster.limits=true", "base_model=hf://some/large-model"
    )
    shapes = list_pod_shapes(made)
    assert any(NAME in [item["name"] for item in shape.all_containers] for shape in shapes)
    for shape in shapes:
        for resource in ("cpu", "memory"):
            assert not shape.list_lacking("limits", resource), shape.template
    resources = template(made, "policy-update")["container"]["resources"]
    assert (resources["requests"]["memory"], resources["limits"]["memory"]) == ("512Mi", UNKNOWN)


def test_a_graph_that_runs_at_the_end_takes_no_claims() -> None:
    templates: list[Any] = [Container(name="give-claim"), Container(name="report")]
    handler = add_exit_handler(templates, ["give-claim", "report"])
    templates.append(DAG(name="main", tasks=[Task(name="first", template="report")]))
    assert [graph.name for graph in list_entry_graphs(templates, handler)] == ["main"]


def test_a_workflow_of_one_job_reserves_nothing() -> None:
    cluster = extend_cluster().model_validate(
        {"share": DEMO.model_copy(update={"runs_per_claim": 1}), "trainer": {"memory": "4Gi"}}
    )
    arguments = {"policy": "p", "prompts": "q", "checkpoint": "c"}
    made = as_workflow(Native(stage="sft", args=arguments), "tune", cluster)
    assert {item["name"] for item in made["spec"]["templates"]} == {"node", "main"}
    assert "onExit" not in made["spec"]


def test_one_machine_has_no_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same workflow, without a cluster: the group's name stands for the claim's, also for its leases."""
    monkeypatch.chdir(tmp_path)
    cluster = extend_cluster().model_validate({"share": DEMO})
    using = copy.copy(data_prep)
    using.accelerator = True
    spec = StageSpec(using, source_args={"digits": 2}, train=8, eval=4, sft=0)
    plan = plan_stages("shared", [spec], cluster)
    with define_workflow("shared", plan=plan, cluster=cluster) as built:
        stage = stage_template(using, plan.stages["data-prep"], cluster)
        with DAG(name="main"):
            stage(
                name="data-prep",
                arguments={"prompts": "{{workflow.parameters.store}}/shared/data-prep"},
            )
    outcome = execute_parts(
        built.to_dict(), workdir=tmp_path / "work", arguments={"store": "runs"}, warm=False
    )
    assert outcome.phase == "Succeeded"
    assert outcome.outputs["claim"] == "demo"
    assert "shared.onExit" in {
        node.name for node in outcome.nodes.values() if node.template == "give-claim"
    }
