"""Runs on a cluster, some side by side, to which the injections of a plan happen."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from tests.certify.check import Standing, compare, inspect_run
from tests.certify.cluster_certificate import ClusterCertificate, ClusterOutcome, RunOutcome
from tests.certify.cluster_faults import FAULTS, IMAGE, Held, Scene, open_store
from tests.certify.cluster_plan import HOGGED, PREEMPTED, ClusterInjection, make_cluster_plan
from tests.certify.held import HELD, HOLDS, MOMENTS
from tests.cluster.conftest import ROOT, STORE, TIGHT, kubectl, prepare_cluster
from tests.cluster.volumes import apply
from tests.unit import toy
from tests.waiting import until
from tuneloop.argo.pod_fields import retried_pod_fields
from tuneloop.cluster.run_workflows import DONE, get_workflow_phase
from tuneloop.cluster.watch import get_pod_stage, read_logs, read_status
from tuneloop.core.attempts import MORE_MEMORY
from tuneloop.core.ends import classify_end
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.store import Store
from tuneloop.kube.connection import Connection, ignore_refusals
from tuneloop.local.journal import Node
from tuneloop.runs import stages
from tuneloop.runs.audit import compute_root
from tuneloop.runs.run_record import Run
from tuneloop.workflow.settings import PRIORITY_LABEL, QUEUE_LABEL, RUN_LABEL, Cluster, Resources

BY_HAND = 3
"""So often a run may have to be submitted again for no injection that asks for it."""
SIZE = Cluster(cpu=Resources(cpu="50m", memory="384Mi", memory_on_retry="512Mi"))
"""Of stages that run out of memory."""
LISTED = (
    "pods,services,jobs,configmaps,secrets,persistentvolumeclaims,leases,rolebindings,"
    "workflows,workflowtaskresults,workloads,localqueues,clusterqueues,jobsets"
)
"""Kinds of objects of which nothing may be left."""
KEPT = ("workflow.argoproj.io", "pod", "workflowtaskresult.argoproj.io", "workload.kueue.x-k8s.io")
"""Of these, what a run that has ended keeps as long as its workflows: docs/cluster.md has it."""
SAID = re.compile(rf"^{HELD}({'|'.join(MOMENTS)}), process (\d+)$", re.M)


def make_cluster_certificate(
    seed: int, injections: int, *, only: int | None = None, kind: str = "", jobs: int = 3
) -> ClusterCertificate:
    """Carry out a plan on the cluster that KUBECONFIG names, and return what it came to.

    Args:
        only: the index of the injection that is made alone.
        kind: only those whose kind contains this.
        jobs: runs at a time.
    """
    began = time.monotonic()
    plan = [
        i for i in make_cluster_plan(injections, seed) if only in (None, i.index) and kind in i.kind
    ]
    cluster = prepare_cluster()
    store, before = f"{STORE}/certify-{uuid.uuid4().hex[:8]}", _list_objects(cluster)
    try:
        calm = _Disturbed(cluster, store, []).follow()
        assert not calm.problems, f"the undisturbed run: {calm.problems}"
        numbers = sorted({each.run for each in plan})
        disturbed = [
            _Disturbed(cluster, store, [i for i in plan if i.run == number]) for number in numbers
        ]
        with ThreadPoolExecutor(jobs) as pool:
            disturbed = [*pool.map(_Disturbed.follow, disturbed)]
        with open_store(cluster):
            standing = inspect_run(calm.scene.run, store)
            made = [each.judge(standing) for each in (calm, *disturbed)]
    finally:
        kubectl(
            "-n",
            cluster.namespace,
            "delete",
            "workflows",
            "-l",
            f"{RUN_LABEL},certify={_name(store)}",
        )
        with open_store(cluster):
            Store(store).delete("")
    left = _wait_for_nothing_left(cluster, before)
    roots = {"here": _compute_root_here(), "undisturbed": standing.root}
    return ClusterCertificate(seed, roots, made[0], made[1:], left, time.monotonic() - began)


class _Disturbed:
    """A run, and what happens to it."""

    def __init__(
        self, cluster: Connection, store: str, injections: Sequence[ClusterInjection]
    ) -> None:
        run = f"c{uuid.uuid4().hex[:8]}"
        self.injections = {each.stage.rpartition("/")[2]: each for each in injections}
        self.scene = Scene(cluster, run, store, draw_workflow(run, injections, _name(store)))
        self.outcomes: dict[ClusterInjection, ClusterOutcome] = {}
        self.problems: list[str] = []
        self.seconds, self.unasked = 0.0, 0
        self._known: set[str] = set()

    def follow(self) -> _Disturbed:
        """Submit the run, make each injection as its program stands still, and see the run end."""
        began = time.monotonic()
        try:
            with _made_for(
                self.scene, any(each.kind == PREEMPTED for each in self.injections.values())
            ):
                self.scene.submit()
                while not self._has_ended():
                    for pod in self.scene.list_pods():
                        self._attend_to(pod)
                    time.sleep(0.5)
        except (AssertionError, UserError, Retryable, OSError) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
            traceback.print_exc()
        self.seconds = time.monotonic() - began
        return self

    def judge(self, calm: Standing) -> RunOutcome:
        """Compare what stands in the store and on the cluster with the undisturbed run."""
        run, cluster = self.scene.run, self.scene.cluster
        found = Standing("", ())
        try:
            found = inspect_run(run, self.scene.store)
            self.problems += compare(found, calm)
        except (UserError, Retryable) as error:
            self.problems.append(f"the audit: {error}")
        self.problems += _list_forbidden(cluster, run)
        self.problems += [
            f"{stage}: a traceback"
            for stage, line in read_logs(cluster, run)
            if "Traceback" in line
        ]
        seen = read_status(cluster, run)
        lost = [
            n for n in seen.nodes.values() if n.type == "Pod" and n.phase in ("Failed", "Error")
        ]
        for injection in self.injections.values():
            own = [
                node
                for node in lost
                if stages.get_stage_name(node) == injection.stage.rpartition("/")[2]
            ]
            outcome = self.outcomes.setdefault(injection, ClusterOutcome(injection))
            outcome.ends = [_name_end(node) for node in own]
            outcome.lost_s = sum(max(0.0, node.finished - node.started) for node in own)
        pods = sum(node.type == "Pod" for node in seen.nodes.values())
        return RunOutcome(
            run,
            found.root,
            [self.outcomes[each] for each in self.injections.values()],
            self.problems,
            workflows=len(seen.workflows),
            pods=pods,
            lost_pods=len(lost),
            lost_s=sum(max(0.0, node.finished - node.started) for node in lost),
            unasked=self.unasked,
            leftovers=found.left,
            seconds=self.seconds,
        )

    def _has_ended(self) -> bool:
        """Say whether the run has succeeded; submit it again where it has failed, as a person would."""
        workflow = self.scene.read_workflow()
        phase = get_workflow_phase(workflow)
        if phase in DONE and phase != "Succeeded":
            said = f"{workflow['metadata']['name']}: {workflow['status'].get('message', '')}"
            assert self.unasked < BY_HAND, f"did not end: {said}"
            print(f"{said}: submitted again", file=sys.stderr, flush=True)
            self.unasked += 1
            self.scene.submit()
        return phase == "Succeeded"

    def _attend_to(self, pod: Any) -> None:
        """Make the injection that a pod stands still for, or let it go on if that was made before."""
        about, injection = pod.metadata, self.injections.get(get_pod_stage(pod))
        if injection is None or about.uid in self._known or about.deletion_timestamp:
            return
        told = None
        with ignore_refusals(400, 404):  # its container has not begun; it is gone
            own = {
                "container": "main",
                "_preload_content": False,
            }  # else some releases of the client give no text
            log = self.scene.cluster.core.read_namespaced_pod_log(
                about.name, about.namespace, **own
            )
            told = SAID.search(log.data.decode(errors="replace"))
        if not told:
            return
        self._known.add(about.uid)
        held = Held(self.scene, pod, int(told[2]), injection)
        if injection in self.outcomes:
            held.release()
        else:
            self._make(held)

    def _make(self, held: Held) -> None:
        injection, began, by_hand = held.injection, time.monotonic(), self.scene.by_hand
        outcome = self.outcomes[injection] = ClusterOutcome(injection, met=True)
        try:
            FAULTS[injection.kind](held)
        except (AssertionError, UserError, Retryable) as error:
            outcome.problem = f"{type(error).__name__}: {error}"
            held.release()
        outcome.by_hand, outcome.seconds = self.scene.by_hand - by_hand, time.monotonic() - began
        print(
            f"{injection}: {outcome.problem or 'made'}, {outcome.seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )


def draw_workflow(
    run: str, injections: Sequence[ClusterInjection], certificate: str
) -> dict[str, Any]:
    """Draw the toy's workflow of one iteration, whose stages stand still where `injections` are made."""
    made: dict[str, Any] = toy.build_argo(toy.Config(iterations=1)).to_dict()
    made["metadata"].setdefault("labels", {})["certify"] = certificate
    items = [{"key": name, "path": path} for name, path in PROGRAMS.items()]
    made["spec"].setdefault("volumes", []).append(
        {"name": "toy", "configMap": {"name": f"{run}-toy", "items": items}}
    )
    holds = {each.stage: each.moment for each in injections}
    hogged = {_find_template(each.stage) for each in injections if each.kind == HOGGED}
    preempted = {_find_template(each.stage) for each in injections if each.kind == PREEMPTED}
    for template in made["spec"]["templates"]:
        container = template.get("container")
        if not container or container["command"][-1] != "tests.unit.toy":
            continue
        container["command"] = ["python", "-m", "tests.certify.held"]
        container["env"] += [
            {"name": "PYTHONPATH", "value": "/toy"},
            {"name": HOLDS, "value": json.dumps(holds)},
        ]
        container.setdefault("volumeMounts", []).append({"name": "toy", "mountPath": "/toy"})
        container["image"] = IMAGE
        container["resources"] = {"requests": {"cpu": "50m", "memory": "256Mi"}}
        if template["name"] in hogged:
            template["podSpecPatch"] = retried_pod_fields("base", "cpu", SIZE)["pod_spec_patch"]
            container["env"].append({"name": MORE_MEMORY, "value": SIZE.cpu.memory_on_retry})
            container["resources"]["limits"] = {"memory": SIZE.cpu.memory}
        if template["name"] in preempted:
            labels = template.setdefault("metadata", {}).setdefault("labels", {})
            labels.update({QUEUE_LABEL: run, PRIORITY_LABEL: "tuneloop-low"})
    return made


PROGRAMS: Mapping[str, str] = {"toy.py": "tests/unit/toy.py", "held.py": "tests/certify/held.py"}
"""What pods find in a config map: key → path."""


def _find_template(stage: str) -> str:
    """Return the template of the toy that makes an output."""
    return stage.rpartition("/")[2].removesuffix("-before").removesuffix("-after")


@contextmanager
def _made_for(scene: Scene, queue: bool) -> Iterator[None]:
    """What a run needs: its program in a config map, and a queue if Kueue is to preempt it."""
    own = ["-n", scene.cluster.namespace]
    files = [f"--from-file={key}={ROOT / path}" for key, path in PROGRAMS.items()]
    kubectl(*own, "create", "configmap", f"{scene.run}-toy", *files)
    text = TIGHT % {
        "name": scene.run,
        "namespace": scene.cluster.namespace,
        "cpu": "100m",
    }  # one pod of a stage
    try:
        if queue:
            apply(text)
            kubectl(
                *own, "wait", "--for=condition=Active", f"localqueue/{scene.run}", "--timeout=300s"
            )
        yield
    finally:
        kubectl(*own, "delete", "configmap", f"{scene.run}-toy")
        if queue:
            kubectl(
                *own,
                "delete",
                f"localqueue/{scene.run}",
                f"clusterqueue/{scene.run}",
                "--wait=false",
            )


def _name(store: str) -> str:
    return store.rpartition("/")[2]


def _name_end(node: Node) -> str:
    if node.exit_code is None and (
        "shutdown" in node.message or "ended with the workflow" in node.message
    ):
        return "stopped"
    return classify_end(
        node.phase, -1 if node.exit_code is None else node.exit_code, node.message
    ).name


def _compute_root_here() -> str:
    """Compute the root of the same run, made in this process."""
    with tempfile.TemporaryDirectory() as store:
        toy.make(f"{store}/here", iterations=1)
        return compute_root(Run.open("here", store))


def _list_forbidden(cluster: Connection, run: str) -> list[str]:
    """List what a run that has ended has on the cluster, beside what it keeps."""
    found = kubectl(
        "-n", cluster.namespace, "get", LISTED, "-l", f"{RUN_LABEL}={run}", "-o", "name"
    ).split()
    left = [f"left on the cluster: {name}" for name in found if name.partition("/")[0] not in KEPT]
    live = [
        pod
        for pod in cluster.list_pods(f"{RUN_LABEL}={run}")
        if pod.status.phase in ("Pending", "Running")
    ]
    return left + [
        f"left on the cluster: pod {pod.metadata.name}, {pod.status.phase}" for pod in live
    ]


def _list_objects(cluster: Connection) -> set[str]:
    return {*kubectl("-n", cluster.namespace, "get", LISTED, "-o", "name").split()}


def _wait_for_nothing_left(cluster: Connection, before: set[str]) -> list[str]:
    """Return what the namespace has that it had not before; empty as soon as there is nothing."""
    look = partial(_list_objects, cluster)
    try:
        until(lambda: not look() - before, pause=1.0)
    except AssertionError:
        return sorted(look() - before)
    return []
