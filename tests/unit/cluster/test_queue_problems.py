"""What a ClusterQueue can never give, told before anything is submitted."""

from tuneloop.cluster.queue_problems import find_quota_problems
from tuneloop.workflow.settings import QUEUE_LABEL


def template(name: str, gpus: int, **more: object) -> dict[str, object]:
    limits = {"limits": {"nvidia.com/gpu": str(gpus)}}
    return {"name": name, "metadata": {"labels": {QUEUE_LABEL: "q"}}, "container": {"resources": limits}, **more}


def test_every_stage_that_does_not_fit_beside_the_server_is_told() -> None:
    patch = '{"containers":[{"name":"wait","resources":{"requests":{"cpu":"10m"}}}]}'
    templates = [template("serve", 2, daemon=True), template("update", 8), template("sft", 7), template("small", 6)]
    workflow = {"spec": {"templates": templates, "podSpecPatch": patch}}
    flavor = [{"name": "nvidia.com/gpu", "nominalQuota": "8"}, {"name": "cpu", "nominalQuota": "1"}]
    spec = {"resourceGroups": [{"flavors": [{"resources": flavor}]}]}
    found = {problem.field: problem.value for problem in find_quota_problems(workflow, spec, "q", "cq")}
    assert found == {
        "update": "nvidia.com/gpu: 10 with the server beside it",
        "sft": "nvidia.com/gpu: 9 with the server beside it",
    }
