"""What can be done to a run on a cluster while the program of one of its pods stands still."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.certify.cluster_plan import (
    CLUSTER_KINDS,
    HOGGED,
    INPUTS,
    PREEMPTED,
    REMOVED,
    STOPPED,
    TORN,
    ClusterInjection,
)
from tests.certify.held import GO, HOG, HOLDS
from tests.cluster.conftest import kubectl, reach_store
from tests.cluster.making import submit_workflow
from tests.cluster.volumes import apply
from tests.waiting import until
from tuneloop.cluster import submit
from tuneloop.cluster.run_workflows import DONE, find_workflows, get_workflow_phase
from tuneloop.core.artifacts import MANIFEST
from tuneloop.core.errors import EXIT_USER
from tuneloop.core.store import Store
from tuneloop.kube.connection import WORKFLOWS, Connection, ignore_refusals, retry_until_available
from tuneloop.workflow.pod_settings import RESTRICTED_CONTAINER, RESTRICTED_POD
from tuneloop.workflow.settings import PRIORITY_LABEL, QUEUE_LABEL, RUN_LABEL

IMAGE = "tuneloop/base:dev"
CONTROLLER = "argo", "app=workflow-controller"
"""Namespace and labels of Argo's controller."""
EXECUTOR = "rolebinding", "tuneloop-executor"
AWAY_S = 10.0
CHANGES, CHANGE = 40, "tuneloop.dev/certify"
ALONE = threading.Lock()
"""What the whole cluster feels happens to it one at a time."""


@dataclass
class Scene:
    """A run on a cluster.

    Attributes:
        workflow: as it is submitted, and submitted again.
        by_hand: how often somebody had to submit it again.
    """

    cluster: Connection
    run: str
    store: str
    workflow: Mapping[str, Any]
    by_hand: int = 0

    def submit(self) -> None:
        """Submit the run, or go on with it; while nobody else looks at the store, which the preflight would do, too."""
        with ALONE:
            submit_workflow(self.cluster, self.workflow, run=self.run, store=self.store)

    def read_workflow(self) -> Mapping[str, Any]:
        """Read the newest workflow of the run."""
        return retry_until_available(lambda: find_workflows(self.cluster, self.run))[-1]

    def list_pods(self) -> list[Any]:
        """List the pods of the run."""
        return list(
            retry_until_available(lambda: self.cluster.list_pods(f"{RUN_LABEL}={self.run}"))
        )


@dataclass(frozen=True)
class Held:
    """A pod whose program, `process`, stands still for an injection."""

    scene: Scene
    pod: Any
    process: int
    injection: ClusterInjection = field(repr=False)

    @property
    def name(self) -> str:
        return str(self.pod.metadata.name)

    def kubectl(self, *words: str, check: bool = True) -> str:
        """Ask for something in the run's namespace."""
        return kubectl("-n", self.scene.cluster.namespace, *words, check=check)

    def execute(self, script: str) -> None:
        """Run a script in the container, unless that has ended meanwhile."""
        words = ("exec", self.name, "-c", "main", "--", "sh", "-c", f"echo begun; {script}")
        until(lambda: "begun" in self.kubectl(*words, check=False) or self.has_ended(), pause=0.5)

    def has_ended(self) -> bool:
        """Say whether the pod has ended, or is gone."""
        with ignore_refusals(404):
            found = self.scene.cluster.core.read_namespaced_pod(
                self.name, self.scene.cluster.namespace
            )
            return found.metadata.uid != self.pod.metadata.uid or found.status.phase in (
                "Succeeded",
                "Failed",
            )
        return True

    def release(self, order: str = GO) -> None:
        """Tell the program what to do."""
        self.execute(
            f"printf %s '{order}' > /tmp/certify-orders.new; mv /tmp/certify-orders.new /tmp/certify-orders"
        )


Fault = Callable[[Held], None]


def delete_pod(held: Held) -> None:
    """Delete the pod: its processes get SIGTERM."""
    held.kubectl("delete", "pod", held.name, "--wait=false")


def delete_pod_at_once(held: Held) -> None:
    """Delete the pod without grace."""
    held.kubectl("delete", "pod", held.name, "--grace-period=0", "--force", "--wait=false")


def kill_process(held: Held) -> None:
    """Kill the program in its container."""
    held.execute(f"kill -9 {held.process}")


def use_up_memory(held: Held) -> None:
    """Have the program use up the memory of its container."""
    held.release(HOG)


def run_duplicate(held: Held) -> None:
    """Run the same program in another pod, to its end, while this one stands still."""
    name = f"{held.scene.run}-duplicate-{held.injection.index}"
    apply(
        json.dumps(
            copy_pod(held.scene.cluster.core.api_client.sanitize_for_serialization(held.pod), name)
        )
    )
    try:
        phase = until(
            lambda: _read_phase(held, name) in ("Succeeded", "Failed") and _read_phase(held, name),
            pause=0.5,
        )
        assert phase == "Succeeded", (
            f"the duplicate has failed: {held.kubectl('logs', name, check=False)[-1000:]}"
        )
    finally:
        held.kubectl("delete", "pod", name, "--wait=false")
    held.release()


def copy_pod(pod: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Build the pod `name` that runs what the main container of a pod of Argo's runs, and which Argo does not know."""
    spec = pod["spec"]
    main = dict(next(each for each in spec["containers"] if each["name"] == "main"))
    main["command"] = main["command"][
        main["command"].index("--") + 1 :
    ]  # what Argo's own program starts
    main["env"] = [each for each in main["env"] if each["name"] != HOLDS]
    mounted = {each["name"] for each in main["volumeMounts"]}
    kept = ("securityContext", "serviceAccountName", "automountServiceAccountToken")
    about = {
        **{key: spec[key] for key in kept if key in spec},
        "restartPolicy": "Never",
        "containers": [main],
        "volumes": [each for each in spec["volumes"] if each["name"] in mounted],
    }
    metadata = {"name": name, "namespace": pod["metadata"]["namespace"]}
    metadata["labels"] = {RUN_LABEL: pod["metadata"]["labels"][RUN_LABEL]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": about}


def stop_and_submit(held: Held) -> None:
    """Do what ``tuneloop cluster stop`` does, and submit the run again."""
    submit.stop_run(held.scene.cluster, held.scene.run, timeout=300)
    held.scene.by_hand += 1
    held.scene.submit()


def kill_controller(held: Held) -> None:
    """Kill Argo's controller; the stage goes on meanwhile."""
    with ALONE:
        _kill_pods(*CONTROLLER, held.release)


def kill_store(held: Held) -> None:
    """Kill the server of the object store; the stage goes on meanwhile."""
    with ALONE:
        namespace, _, selector = _find_store(held)
        _kill_pods(namespace, selector, held.release)


def take_store_away(held: Held) -> None:
    """Have no server of the object store for a while, in which the stage goes on."""
    with ALONE:
        namespace, name, selector = _find_store(held)
        before, scale = (
            _list_ready(namespace, selector),
            ("-n", namespace, "scale", f"deployment/{name}"),
        )
        kubectl(*scale, "--replicas=0")
        try:
            kubectl(
                "-n",
                namespace,
                "delete",
                "pod",
                "-l",
                selector,
                "--grace-period=0",
                "--force",
                "--wait=false",
            )
            until(lambda: not _list_ready(namespace, selector) & before, pause=0.2)
            held.release()
            time.sleep(AWAY_S)
        finally:
            kubectl(*scale, "--replicas=1")
            until(lambda: _list_ready(namespace, selector), pause=0.5)


def change_workflow(held: Held) -> None:
    """Change a label of the Workflow again and again while the controller writes what it sees: it gets 409."""
    cluster, name = held.scene.cluster, held.scene.read_workflow()["metadata"]["name"]

    def write_label(value: str | None) -> None:
        body = {"metadata": {"labels": {CHANGE: value}}}
        cluster.custom.patch_namespaced_custom_object(
            *WORKFLOWS[:2], cluster.namespace, WORKFLOWS[2], name, body
        )

    for number in range(CHANGES):
        write_label(str(number))
        if number == 0:
            held.release()
        time.sleep(0.1)
    write_label(None)


def refuse_executor(held: Held) -> None:
    """Have Argo's executor refused when it reports what the pod has made; until that pod has ended."""
    with ALONE:
        subjects = json.loads(held.kubectl("get", *EXECUTOR, "-o", "json"))["subjects"]
        held.kubectl("patch", *EXECUTOR, "--type=merge", "-p", json.dumps({"subjects": []}))
        try:
            held.release()
            until(held.has_ended, pause=0.5)
        finally:
            held.kubectl(
                "patch", *EXECUTOR, "--type=merge", "-p", json.dumps({"subjects": subjects})
            )


def drain_node(held: Held) -> None:
    """Cordon the pod's node and evict the pod; let pods in again when one has waited for that, or the run has ended."""
    scene, node = held.scene, held.pod.spec.node_name
    with ALONE:
        kubectl("cordon", node)
        try:
            about = {"name": held.name, "namespace": scene.cluster.namespace}
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": about}
            scene.cluster.core.create_namespaced_pod_eviction(
                held.name, scene.cluster.namespace, body
            )
            until(
                lambda: (
                    _is_unschedulable(scene) or get_workflow_phase(scene.read_workflow()) in DONE
                ),
                pause=0.5,
            )
        finally:
            kubectl("uncordon", node)


def preempt_pod(held: Held) -> None:
    """Have Kueue preempt the pod for one of a higher priority."""
    queue, name = held.scene.run, f"{held.scene.run}-preemptor-{held.injection.index}"
    labels = {QUEUE_LABEL: queue, PRIORITY_LABEL: "tuneloop-high"}
    size = {"requests": {"cpu": "100m", "memory": "64Mi"}}
    sleep = {"name": "main", "image": IMAGE, "command": ["sleep", "3600"], "resources": size}
    spec = {
        "restartPolicy": "Never",
        "serviceAccountName": "tuneloop-stage",
        "securityContext": RESTRICTED_POD,
    }
    spec["automountServiceAccountToken"] = False
    spec["containers"] = [
        {**sleep, "imagePullPolicy": "IfNotPresent", "securityContext": RESTRICTED_CONTAINER}
    ]
    about = {"name": name, "namespace": held.scene.cluster.namespace, "labels": labels}
    apply(json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}))
    try:
        until(lambda: _read_phase(held, name) == "Running", pause=0.5)
    finally:
        held.kubectl("delete", "pod", name, "--grace-period=0", "--force", "--wait=false")


def tear_manifest(held: Held) -> None:
    """Cut the manifest of what the stage reads in half; when the run has ended by that, delete the artifact, as the
    stage's last line says, and submit the run again."""
    key = INPUTS[held.injection.stage]
    with _stored(held.scene) as store:
        whole = store.get(f"{key}/{MANIFEST}")
        assert whole
        store.put(f"{key}/{MANIFEST}", whole[: len(whole) // 2])
    _expect_refusal(held)
    with _stored(held.scene) as store:
        store.delete(key)
    held.scene.submit()


def remove_manifest(held: Held) -> None:
    """Delete the manifest of what the stage reads; when the run has ended by that, submit it again."""
    with _stored(held.scene) as store:
        store.delete(f"{INPUTS[held.injection.stage]}/{MANIFEST}")
    _expect_refusal(held)
    held.scene.submit()


FAULTS: Mapping[str, Fault] = {
    TORN: tear_manifest,
    REMOVED: remove_manifest,
    STOPPED: stop_and_submit,
    "pod deleted (SIGTERM)": delete_pod,
    "pod deleted without grace": delete_pod_at_once,
    "process killed (SIGKILL)": kill_process,
    HOGGED: use_up_memory,
    "duplicate pod": run_duplicate,
    "Argo's controller killed": kill_controller,
    "object store killed": kill_store,
    "object store away for 10 s": take_store_away,
    "Workflow changed meanwhile (409)": change_workflow,
    "Argo's executor refused (403)": refuse_executor,
    "node cordoned, pod evicted": drain_node,
    PREEMPTED: preempt_pod,
}
assert [*FAULTS] == [kind.name for kind in CLUSTER_KINDS]


@contextmanager
def _stored(scene: Scene) -> Iterator[Store]:
    """What the run has stored, reached from here."""
    with ALONE, open_store(scene.cluster):
        yield Store(f"{scene.store}/{scene.run}")


@contextmanager
def open_store(cluster: Connection) -> Iterator[None]:
    """Reach the cluster's store from here, by the environment. (`mock.patch.dict` empties it for a moment, in which
    other threads start programs.)"""
    with reach_store(cluster) as settings:
        os.environ.update(settings)
        try:
            yield
        finally:
            for name in settings:
                del os.environ[name]


def _expect_refusal(held: Held) -> None:
    """Let the stage go on, and see that the run ends by the user's mistake."""
    held.scene.by_hand += 1
    held.release()
    ended = until(
        lambda: (w := held.scene.read_workflow()) and get_workflow_phase(w) in DONE and w, pause=0.5
    )
    code = submit.exit_code(ended)
    assert code == EXIT_USER, (
        f"what is damaged was taken: the run ended with {code}, not {EXIT_USER}"
    )


def _find_store(held: Held) -> tuple[str, str, str]:
    """Return namespace, name and labels of the Deployment behind the Service of the object store, of the same name."""
    url = held.kubectl(
        "get", "configmap", "tuneloop-store", "-o", "jsonpath={.data.AWS_ENDPOINT_URL}"
    )
    name, namespace = url.partition("://")[2].split(":")[0].split(".")[:2]
    labels = json.loads(
        kubectl("-n", namespace, "get", "service", name, "-o", "jsonpath={.spec.selector}")
    )
    return namespace, name, ",".join(f"{key}={value}" for key, value in labels.items())


def _kill_pods(namespace: str, selector: str, meanwhile: Callable[[], None]) -> None:
    """Kill what is a Deployment's, and wait until others are ready."""
    before = _list_ready(namespace, selector)
    assert before, f"no pod {selector} is ready in {namespace}"
    kubectl(
        "-n",
        namespace,
        "delete",
        "pod",
        "-l",
        selector,
        "--grace-period=0",
        "--force",
        "--wait=false",
    )
    meanwhile()
    until(lambda: _list_ready(namespace, selector) - before, pause=0.5)


def _list_ready(namespace: str, selector: str) -> set[str]:
    found = json.loads(kubectl("-n", namespace, "get", "pods", "-l", selector, "-o", "json"))[
        "items"
    ]
    return {each["metadata"]["uid"] for each in found if _is_ready(each)}


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def _read_phase(held: Held, name: str) -> str:
    return held.kubectl("get", "pod", name, "-o", "jsonpath={.status.phase}", check=False)


def _is_unschedulable(scene: Scene) -> bool:
    """Say whether a pod of the run waits for a node."""
    conditions = (each for pod in scene.list_pods() for each in pod.status.conditions or ())
    return any(
        each.type == "PodScheduled" and each.reason == "Unschedulable" for each in conditions
    )
