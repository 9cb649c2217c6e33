"""A queued rollout server whose pod requests less while it sleeps: resized in place, and not Kueue's to delete."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.conftest import ROOT, STORE, kubectl
from tests.cluster.making import submit_workflow
from tests.cluster.test_daemon import SETTINGS
from tests.waiting import LIMIT_S, until
from tuneloop.argo.resize import ACCOUNT, FLAG
from tuneloop.cluster import submit as argo
from tuneloop.cluster.run_workflows import DONE, find_workflows, get_workflow_phase
from tuneloop.cluster.watch import read_logs
from tuneloop.config.loading import find_pipeline
from tuneloop.kube.connection import ApiRefusal, Connection
from tuneloop.workflow.settings import QUEUE_LABEL, RUN_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

AWAKE, ASLEEP = {"cpu": "250m", "memory": "4Gi"}, {"cpu": "50m", "memory": "512Mi"}
SLEEPS = """
import os, time
from tuneloop.inference import server
from tuneloop.inference.engines.vllm import Vllm
begin = Vllm.__init__
Vllm.__init__ = lambda self, args: begin(self, {k: v for k, v in args.items() if k != "enable_sleep_mode"})
Vllm.sleep = lambda self, level: self.poison() if level > 1 else None
Vllm.wake_up = lambda self: time.sleep(8)
os._exit(server.main())
"""
"""The server, with real vLLM, which sleeps on a CPU but for what vLLM does there with its memory. It wakes up as
slowly as a large model, so that a rollout lasts longer than the kubelet takes on a busy machine."""


def sleeping_run() -> dict[str, Any]:
    asked = [f"engine.asleep={json.dumps(ASLEEP)}", f"cluster.sampler.memory={AWAKE['memory']}"]
    pipeline = find_pipeline("grpo")
    sets = [*SETTINGS, "loop.per_workflow=2", "engine.colocate=true", *asked]
    made: dict[str, Any] = pipeline.build(pipeline.configure(sets=sets))
    (serve,) = [each for each in made["spec"]["templates"] if each["name"] == "serve"]
    assert FLAG in serve["container"]["args"] and serve["metadata"]["labels"][QUEUE_LABEL]
    serve["container"]["command"] = ["python", "-c", SLEEPS]
    return made


def watch(cluster: Connection, run: str) -> Callable[[], dict[str, Any] | None]:
    """A look that returns what was seen once the run has ended: the server's pods, and what they requested when."""
    seen: dict[str, Any] = {
        "uids": set(),
        "restarts": set(),
        "with": {},
        "usage": set(),
        "denied": None,
    }

    def look() -> dict[str, Any] | None:
        own = ["-n", cluster.namespace, "get"]
        pods = json.loads(kubectl(*own, "pods", "-l", f"{RUN_LABEL}={run}", "-o", "json"))["items"]
        running = [pod for pod in pods if pod["status"]["phase"] == "Running"]
        for pod in (pod for pod in running if "-serve-" in pod["metadata"]["name"]):
            (main,) = [
                each for each in pod["status"]["containerStatuses"] if each["name"] == "main"
            ]
            requests = main.get("resources", {}).get("requests")
            seen["uids"].add(pod["metadata"]["uid"])
            seen["restarts"].add(main["restartCount"])
            for other in running:
                stage = other["metadata"]["annotations"][
                    "workflows.argoproj.io/node-name"
                ].rpartition(".")[2]
                seen["with"].setdefault(stage.partition("(")[0], []).append(requests)
            workload = pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"]
            admitted = json.loads(kubectl(*own, "workload", workload, "-o", "json"))["status"][
                "admission"
            ]
            (usage,) = admitted["podSetAssignments"]
            seen["usage"].add(json.dumps(usage["resourceUsage"], sort_keys=True))
            if requests == ASLEEP and seen["denied"] is None:
                others = [each["metadata"]["name"] for each in running if each is not pod]
                seen["denied"] = refused(cluster, pod["metadata"]["name"], others)
        return seen if get_workflow_phase(find_workflows(cluster, run)[-1]) in DONE else None

    return look


def refused(cluster: Connection, own: str, others: list[str]) -> list[str] | None:
    """What the policy says to a token of the pod `own` that asks for other limits, and for another pod."""
    if not others:
        return None
    asked = [(own, {"limits": {"memory": "5Gi"}}), (others[0], {"requests": {"cpu": "60m"}})]
    return [resize_as(cluster, own, pod, resources) for pod, resources in asked]


def resize_as(cluster: Connection, own: str, pod: str, resources: dict[str, Any]) -> str:
    headers = {
        "Impersonate-User": f"system:serviceaccount:{cluster.namespace}:{ACCOUNT}",
        "Impersonate-Extra-authentication.kubernetes.io%2Fpod-name": own,
        "Content-Type": "application/strategic-merge-patch+json",
    }
    body = {"spec": {"containers": [{"name": "main", "resources": resources}]}}
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod}/resize"
    try:
        cluster.core.api_client.call_api(
            path, "PATCH", header_params=headers, body=body, _preload_content=False
        )
    except ApiRefusal as refusal:
        return refusal.message
    return "allowed"


def test_a_server_requests_less_while_a_stage_trains_and_is_the_same_pod(
    cluster: Connection, run: str
) -> None:
    rights = ROOT / "manifests" / "components" / "resize"
    kubectl("apply", "-f", str(rights / "rights.yaml"), "-f", str(rights / "policy.yaml"))
    submit_workflow(cluster, sleeping_run(), run=run, store=STORE)
    seen = until(watch(cluster, run), 6 * LIMIT_S, pause=0.5)
    assert argo.wait_for_run(cluster, run) == 0
    lines = [
        line
        for stage, line in read_logs(cluster, run)
        if stage.startswith("serve") and "its pod" in line
    ]
    print(*lines, sep="\n")
    assert len(seen["uids"]) == 1 and seen["restarts"] == {0}
    assert ASLEEP in seen["with"]["policy-update"], seen["with"]
    assert AWAKE in seen["with"]["rollout"], seen["with"]
    assert len(seen["usage"]) == 1, "Kueue counts what it admitted"
    own, other = seen["denied"]
    assert "and no limit" in own and "its own pod alone" in other
