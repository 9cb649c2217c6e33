"""Stages of several pods, as they are rendered."""

import json
from decimal import Decimal
from typing import Any

import pytest
import yaml

from tuneloop.argo.jobset import check_names
from tuneloop.argo.lint import lint_workflow
from tuneloop.cluster.pod_requests import compute_pod_requests
from tuneloop.cluster.run_workflows import find_queued_templates, prepare_workflow
from tuneloop.cluster.schedule import apply_schedule
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError
from tuneloop.kube.connection import Connection
from tuneloop.workflow import manifest


def rendered(*sets: str) -> dict[str, Any]:
    pipeline = find_pipeline("sft_then_grpo")
    made: dict[str, Any] = pipeline.build(pipeline.configure(sets=list(sets)))
    return made


def test_the_stages_that_train_become_jobsets() -> None:
    made = rendered(
        "nodes=3", "processes=2", "cluster.trainer.gpus=2", "cluster.priority=tuneloop-low"
    )
    assert not lint_workflow(made)
    templates = {t["name"]: t for t in made["spec"]["templates"]}
    names = set()
    for stage in ("sft", "policy-update"):
        resource = templates[f"{stage}-job"]["resource"]
        assert (resource["action"], resource["setOwnerReference"]) == ("apply", True)
        job = yaml.safe_load(resource["manifest"])
        names.add(job["metadata"]["name"])
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tuneloop"
        assert job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "tuneloop-low"
        group = job["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert group["completions"] == group["parallelism"] == 3
        (container,) = group["template"]["spec"]["containers"]
        env = {item["name"]: item.get("value") for item in container["env"]}
        assert (env["PET_NNODES"], env["PET_NPROC_PER_NODE"]) == ("3", "2")
        assert env["PET_MASTER_PORT"] == "29500" and "PET_NODE_RANK" in env
        assert env["PET_MASTER_ADDR"] == "{0}-node-0-0.{0}".format(job["metadata"]["name"])
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
        alone = templates[f"{stage}-result"]["container"]
        assert alone["args"] == container["args"]
        assert container["args"][container["args"].index("--expected-world-size") + 1] == "6"
        assert "nvidia.com/gpu" not in json.dumps(alone["resources"])
        # The launcher and the step that reads hold no quota that the job waits for.
        assert "kueue" not in json.dumps(
            [templates[f"{stage}-{part}"].get("metadata") for part in ("job", "result")]
        )
    assert names == {
        "{{workflow.name}}-sft",
        "{{workflow.name}}-policy-update-{{inputs.parameters.iteration}}",
    }


def test_every_pod_is_told_where_programs_of_the_policy_run() -> None:
    """Those of JobSets too, with the file of the token; by default none is told, and runs them itself."""
    url = "http://tuneloop-sandbox.tuneloop-sandbox.svc:8000#gvisor"
    made = rendered("nodes=2", f"cluster.sandbox={url}")
    assert not lint_workflow(made)
    templates = made["spec"]["templates"]
    pods = [(each["container"], each["volumes"]) for each in templates if "container" in each]
    for each in templates:
        if (
            "resource" in each
            and (job := yaml.safe_load(each["resource"]["manifest"]))["kind"] == "JobSet"
        ):
            pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
            pods.append((pod["containers"][0], pod["volumes"]))
    stages = [
        (c, v) for c, v in pods if any(word.startswith("tuneloop.stages.") for word in c["command"])
    ]
    assert len(stages) >= 7
    for container, volumes in stages:
        env = {item["name"]: item.get("value") for item in container["env"]}
        assert env["TUNELOOP_SANDBOX"] == url
        (secret,) = (
            v for v in volumes if v.get("secret", {}).get("secretName") == "tuneloop-sandbox"
        )
        (mount,) = (
            m["mountPath"] for m in container["volumeMounts"] if m["name"] == secret["name"]
        )
        assert (
            env["TUNELOOP_SANDBOX_TOKEN_FILE"] == f"{mount}/token" and secret["secret"]["optional"]
        )
    assert "SANDBOX" not in json.dumps(rendered("nodes=2"))
    with pytest.raises(UserError, match=r"cluster\.sandbox: 'gvisor': is not valid"):
        rendered("cluster.sandbox=gvisor")


def test_one_machine_refuses_them_by_name() -> None:
    made = rendered("nodes=2")["spec"]
    with pytest.raises(UserError, match=r"-job\.resource.*set nodes=1"):
        manifest.check_workflow(made)


def test_more_memory_on_a_retry_is_refused_where_all_attempts_have_one_limit() -> None:
    """By a JobSet, and by Kubeflow Pipelines; a pod of Argo's has it."""
    sft = find_pipeline("sft")
    memory = ["cluster.trainer.memory=2Gi", "cluster.trainer.memory_on_retry=4Gi"]
    assert "asInt(retries) > 0" in json.dumps(sft.build(sft.configure(None, memory)))
    told = r"cluster\.trainer\.memory_on_retry: '4Gi': a job of several pods gives all attempts one limit"
    with pytest.raises(UserError, match=told):
        sft.build(sft.configure(None, ["nodes=2", *memory]))
    told = r"cluster\.trainer\.memory_on_retry: '4Gi': Kubeflow Pipelines gives all attempts"
    with pytest.raises(UserError, match=told):
        sft.module.build_kfp(sft.configure(None, memory))


def test_a_priority_given_at_submission_reaches_the_jobs() -> None:
    made = prepare_workflow(
        rendered("nodes=2"), run="demo", store="s3://b", priority="tuneloop-high"
    )
    labels = find_queued_templates(made)
    assert {"sft-job", "policy-update-job"} <= labels.keys()
    assert {each["kueue.x-k8s.io/priority-class"] for each in labels.values()} == {"tuneloop-high"}


def test_a_name_has_room_for_all_workflows_of_a_long_loop() -> None:
    few = rendered("nodes=2", "loop.iterations=200", "loop.per_workflow=90")
    many = rendered("nodes=2", "loop.iterations=200", "loop.per_workflow=2")
    lengths = range(1, 63)
    longest = {
        count: max(length for length in lengths if accepts_name(workflow, "n" * length))
        for count, workflow in ((3, few), (100, many))
    }
    # RUN-99 and RUN-100.
    assert longest[3] - longest[100] == 1


def accepts_name(workflow: dict[str, Any], run: str) -> bool:
    try:
        check_names(workflow, run)
    except UserError:
        return False
    return True


def test_a_job_asks_for_what_all_its_pods_ask_for() -> None:
    made = rendered("nodes=3", "cluster.trainer={memory: 1Gi, gpus: 8}")
    templates = {t["name"]: t for t in made["spec"]["templates"]}
    assert compute_pod_requests(templates["sft-job"]) == {
        "cpu": Decimal("1.5"),
        "memory": 3 * 2**30,
        "nvidia.com/gpu": 24,
    }


def test_a_pod_of_argos_asks_for_what_argos_own_container_does_beside() -> None:
    made = rendered("cluster.sampler={memory: 1Gi, gpus: 2}", "engine.args.tensor_parallel_size=2")
    (server,) = [t for t in made["spec"]["templates"] if t["name"] == "serve"]
    asked = {"cpu": Decimal("0.51"), "memory": 2**30 + 64 * 2**20, "nvidia.com/gpu": 2}
    assert compute_pod_requests(server, made["spec"]) == asked


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (
            f"a{'0' * 26}",
            "policy-update-1000-node-0-2-x7k2p, which is too long: use a name at least 1 characters shorter",
        ),
        ("2nd", "begin with a letter"),
    ],
)
def test_a_run_whose_pods_could_have_no_name_is_refused(run: str, says: str) -> None:
    """By the rule of JobSet's webhook, which counts the five characters that tell attempts apart."""
    sets = ("loop.iterations=1000", "nodes=3")
    with pytest.raises(UserError, match=f"^--run: '{run}': .*{says}"):
        prepare_workflow(rendered(*sets), run=run, store="s3://b")
    prepare_workflow(rendered(*sets), run=f"a{'0' * 25}", store="s3://b")
    prepare_workflow(rendered("loop.iterations=1000"), run=run, store="s3://b")


def test_a_schedule_leaves_room_for_the_names_of_its_runs() -> None:
    """Refused before anything is asked of the cluster, which is why none is here."""
    nowhere = Connection("tuneloop", "", "", core=None, custom=None, auth=None)
    about = {"store": "s3://b", "cron": "@daily"}
    made = rendered("loop.iterations=1000", "nodes=3")
    with pytest.raises(UserError, match="use a name at least 1 characters shorter"):
        apply_schedule(nowhere, made, name=f"a{'0' * 17}", **about)
    with pytest.raises(AttributeError, match="read_namespace"):
        apply_schedule(nowhere, made, name=f"a{'0' * 16}", **about)
