"""The kubelet and Argo's executor of simulated nodes, whose pods have a status and no containers (`scale.py`).

kwok makes a pod Running as soon as it is bound. What a pod does then is done here, by the same requests: Argo's `wait`
container creates the WorkflowTaskResult, adds the outputs and marks it complete; a resource template creates its
JobSet and waits for it; the kubelet writes how the containers ended. How long an attempt computes, and whether it is
preempted, is drawn from the seed and the attempt's name, so that the order of events does not matter.

Differences to a real node: a server is ready at once; its task result is complete from the start, as Argo's signal
reaches no simulated pod, and it ends when its workflow has; a deleted pod is gone at once, its grace period unused.
"""

from __future__ import annotations

import contextlib
import json
import random
import sched
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import yaml
from kubernetes.client import ApiException
from scale_api import JSON, Api, Object

from tuneloop.workflow.settings import QUEUE_LABEL, RUN_LABEL

SECONDS = {"data-prep": 3, "base-model": 3, "evaluate": 6, "rollout": 10, "reward": 3}
SECONDS |= {"policy-update": 12, "policy-update-result": 2, "export": 3}
"""Stage → mean seconds of an attempt of the smallest size; drawn between half of it and one and a half."""
PREEMPTED = {"tuneloop-low": 2.0, "tuneloop-normal": 1.0, "tuneloop-high": 0.0}
"""Priority → how many times the share of attempts that is preempted."""
CLIENTS, LOST_SERVER, SERVED = ("rollout", "evaluate"), (75, 30.0), 200.0
"""Who calls a server; how such a stage ends if the server is gone, and after how long; when a server is preempted."""
ARGO, KUEUE, JOBSETS = "argoproj.io/v1alpha1", "kueue.x-k8s.io/v1beta2", "jobset.x-k8s.io/v1alpha2"
WORKFLOW, REPORTED = (
    "workflows.argoproj.io/workflow",
    "workflows.argoproj.io/report-outputs-completed",
)
NODE, NODE_ID = "workflows.argoproj.io/node-name", "workflows.argoproj.io/node-id"
JOBSET, GPU = "jobset.sigs.k8s.io/jobset-name", "nvidia.com/gpu"
METADATA = f"{JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


@dataclass
class Attempt:
    """A stage that computes, in one pod or in those of a JobSet."""

    run: str
    stage: str
    pods: list[Object]
    begun: float
    code: int = 0
    event: sched.Event | None = None


def read_template(pod: Object) -> dict[str, Any]:
    """Return the template that Argo gave to the executor of a pod."""
    env = pod["spec"]["initContainers"][0]["env"]
    template: dict[str, Any] = json.loads(
        next(e["value"] for e in env if e["name"] == "ARGO_TEMPLATE")
    )
    return template


def count_gpus(pod: Object) -> int:
    return sum(
        int(c.get("resources", {}).get("limits", {}).get(GPU, 0)) for c in pod["spec"]["containers"]
    )


def fill_outputs(template: Object, draw: random.Random) -> list[dict[str, Any]]:
    """Fill a stage's outputs: a reference of usual length to what it made, else a number below the loop's target."""
    args = template.get("container", {}).get("args", [])

    def value(name: str) -> str:
        made = args[args.index(f"--{name}") + 1] if f"--{name}" in args else ""
        return (
            f"{made}@xxh3-128:{draw.getrandbits(128):032x}"
            if "://" in made
            else f"{draw.uniform(0, 0.9):.4f}"
        )

    return [
        {**each, "value": value(each["name"])}
        for each in template.get("outputs", {}).get("parameters", ())
    ]


def build_end(pod: Object, code: int) -> dict[str, Any]:
    """Build the status of a pod whose main container has ended with `code`."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def end(container: Object) -> dict[str, Any]:
        own = code if container["name"] == "main" else 0
        times = {"startedAt": pod["status"].get("startTime", now), "finishedAt": now}
        state = {
            "terminated": {"exitCode": own, "reason": "Error" if own else "Completed", **times}
        }
        about = {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "restartCount": 0,
        }
        return {**about, "ready": False, "state": state}

    containers = list(map(end, pod["spec"]["containers"]))
    return {"status": {"phase": "Failed" if code else "Succeeded", "containerStatuses": containers}}


class Executor:
    """Begins and ends what the pods of some runs do, and measures.

    Args:
        runs: run → how many times the smallest size's seconds its stages take, and its WorkloadPriorityClass.
        share: of the attempts of normal priority that are preempted.

    Attributes:
        clock: of what is to come; its owner runs it.
        failed: what went wrong in a thread.
        waits: kind → seconds.
        lost: cause → seconds, and seconds times GPUs, of each attempt that was killed.
        used, held: GPUs of running pods, by pod; of admitted workloads, by workload.
        evicted: workloads that Kueue evicted for others of higher priority, and when.
        phases: run → how its workflow ended.
        progress: when a stage last began or ended, or a workload was admitted.
    """

    def __init__(
        self, api: Api, seed: int, runs: Mapping[str, tuple[float, str]], share: float
    ) -> None:
        self.api, self.seed, self.runs, self.share = api, seed, runs, share
        self.clock, self.pool, self.lock = (
            sched.scheduler(),
            ThreadPoolExecutor(12),
            threading.RLock(),
        )
        self.failed = list[BaseException]()
        self.waits: dict[str, list[float]] = defaultdict(list)
        self.lost: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.used, self.held, self.phases = dict[str, int](), dict[str, int](), dict[str, str]()
        self.progress = time.monotonic()
        self.attempts = dict[str, Attempt]()  # those that compute, by pod or JobSet
        self.created, self.admitted = (
            dict[str, float](),
            dict[str, float](),
        )  # pods, workloads; by pod or JobSet
        self.begun, self.gone, self.preempted = set[str](), set[str](), set[str]()
        self.evicted = set[tuple[str, str]]()
        self.done = dict[str, int]()  # pods that have ended, with their exit codes
        self.ended = dict[str, float]()  # run → when the stage ended that the next one waits for
        self.gangs: dict[str, dict[str, Object]] = defaultdict(dict)  # JobSet → its running pods
        self.starts = Counter[str]()
        self.launchers = dict[
            str, tuple[Object, int]
        ]()  # JobSet → the pod that waits for it, its number of pods
        self.servers, self.workloads = dict[str, Object](), dict[str, str]()

    def follow_cluster(self) -> None:
        """Start to follow pods, workloads, JobSets, and the labels of workflows."""
        for group, plural, see in (
            *(("v1", "pods", self.see_pod), (KUEUE, "workloads", self.see_workload)),
            *((JOBSETS, "jobsets", self.see_jobset), (ARGO, "workflows", self.see_workflow)),
        ):
            followed = (
                self.api.follow,
                self.api.path(group, plural),
                see,
                METADATA if group == ARGO else JSON,
            )
            threading.Thread(target=self._guard, args=followed, daemon=True).start()

    def _guard(self, work: Callable[..., Any], *args: Any) -> None:
        try:
            work(*args)
        except Exception as error:
            # What was to be written may have been deleted, or be there.
            if not self.api.stopped and not (
                isinstance(error, ApiException) and error.status in (404, 409)
            ):
                self.failed.append(error)

    def do_later(self, work: Callable[..., Any], *args: Any) -> None:
        """Do what waits for the API server in another thread."""
        self.pool.submit(self._guard, work, *args)

    def see_pod(self, pod: Object, gone: bool) -> None:
        """Begin what a running pod does; note what a deleted one had done."""
        about, now = pod["metadata"], time.monotonic()
        uid, run = about["uid"], about.get("labels", {}).get(RUN_LABEL, "")
        if run not in self.runs:
            return
        with self.lock:
            if uid not in self.created:
                self.created[uid] = now
                if NODE_ID in about["annotations"] and run in self.ended:
                    self.waits["next"].append(now - self.ended.pop(run))
            if gone or "deletionTimestamp" in about:
                if uid in self.begun and uid not in self.gone:
                    self.gone.add(uid)
                    self._lose(pod, run, now)
            elif pod["status"].get("phase") == "Running" and uid not in self.begun:
                self.begun.add(uid)
                self.used[uid] = count_gpus(pod)
                self._begin(pod, run, now)
            elif (
                pod["status"].get("phase") == "Running" and uid in self.done
            ):  # kwok, busy, has begun it twice
                self.do_later(self._write_end, pod)

    def _begin(self, pod: Object, run: str, now: float) -> None:
        uid, labels, name = (
            pod["metadata"]["uid"],
            pod["metadata"]["labels"],
            pod["metadata"]["annotations"][NODE],
        )
        if jobset := labels.get(JOBSET):
            self.gangs[jobset][uid] = pod
            if jobset in self.launchers and len(self.gangs[jobset]) == self.launchers[jobset][1]:
                self.starts[jobset] += 1
                name = f"{jobset} {self.starts[jobset]}"
                self._compute(jobset, name, "policy-update", list(self.gangs[jobset].values()), now)
            return
        if QUEUE_LABEL not in labels:
            self.waits["bound"].append(now - self.created[uid])
        elif uid in self.admitted:
            self.waits["running"].append(now - self.admitted[uid])
        self.do_later(self._act, pod, run, now)

    def _act(self, pod: Object, run: str, now: float) -> None:
        """Do what the template of a pod says, as its executor."""
        uid, name, template = (
            pod["metadata"]["uid"],
            pod["metadata"]["annotations"][NODE],
            read_template(pod),
        )
        self._create_result(pod, bool(template.get("daemon")))
        if "resource" in template:
            self._launch(pod, yaml.safe_load(template["resource"]["manifest"]))
            return
        with self.lock:
            if uid in self.gone:
                self.do_later(self._complete_result, pod, 143)
            elif template.get("daemon"):
                self.servers[run] = pod
                self.starts[run] += 1
                if self.starts[run] == 1:
                    self.ended[run] = now
                self._draw_preemption(uid, name, pod, SERVED)
            else:
                self._compute(uid, name, template["name"], [pod], now)

    def _compute(self, key: str, name: str, stage: str, pods: list[Object], now: float) -> None:
        run = pods[0]["metadata"]["labels"][RUN_LABEL]
        seconds = (
            SECONDS[stage]
            * self.runs[run][0]
            * random.Random(f"{self.seed} {name}").uniform(0.5, 1.5)
        )
        attempt = self.attempts[key] = Attempt(run, stage, pods, now)
        if key in self.gangs and self.starts[key] == 1 and key in self.admitted:
            self.waits["running"].append(now - self.admitted[key])
        self._draw_preemption(key, name, pods[0], seconds)
        server = self.servers[run]["status"]["podIP"] if run in self.servers else None
        if stage in CLIENTS and f"http://{server}:" not in json.dumps(
            pods[0]["spec"]["containers"]
        ):
            attempt.code, seconds = LOST_SERVER  # it was told the address of one that is gone
        else:
            self.progress = now
        self._schedule(attempt, key, seconds)

    def _draw_preemption(self, key: str, name: str, pod: Object, seconds: float) -> None:
        draw = random.Random(f"{self.seed} preempt {name}")
        if (
            draw.random()
            < self.share * PREEMPTED[self.runs[pod["metadata"]["labels"][RUN_LABEL]][1]]
        ):
            self.clock.enter(
                seconds * draw.uniform(0.1, 0.9), 0, self.do_later, (self._preempt, key, pod)
            )

    def _preempt(self, key: str, pod: Object) -> None:
        """End an attempt as Kueue does: a pod is deleted, a JobSet's workload is evicted."""
        with self.lock:
            if (
                key not in self.attempts
                and self.servers.get(pod["metadata"]["labels"][RUN_LABEL]) is not pod
            ):
                return
            self.preempted.add(key)
        if key in self.gangs:
            self.api.write(
                "PATCH",
                self.api.path(KUEUE, "workloads", self.workloads[key]),
                {"spec": {"active": False}},
            )
        else:
            self.api.write("DELETE", self.api.path("v1", "pods", pod["metadata"]["name"]))

    def _lose(self, pod: Object, run: str, now: float) -> None:
        uid = pod["metadata"]["uid"]
        key = pod["metadata"]["labels"].get(JOBSET, uid)
        self.used.pop(uid, None)
        self.gangs.get(key, {}).pop(uid, None)
        cause = "injected" if key in self.preempted else "by Kueue"
        if attempt := self.attempts.pop(key, None):
            self._schedule(attempt)
            self._note_loss(attempt, cause, now)
            if key == uid:  # the executor hears SIGTERM, and reports
                self.do_later(self._complete_result, pod, 143)
        elif run in self.servers and self.servers[run]["metadata"]["uid"] == uid:
            del self.servers[run]
            self.lost[f"server, {cause}"].append((0.0, 0.0))
            for at, client in self.attempts.items():
                if client.run == run and client.stage in CLIENTS:
                    client.code = LOST_SERVER[0]
                    self._schedule(client, at, LOST_SERVER[1])
        if attempt or key == uid:
            self.preempted.discard(key)

    def _note_loss(self, attempt: Attempt, cause: str, now: float) -> None:
        seconds = now - attempt.begun
        self.lost[cause].append((seconds, seconds * sum(map(count_gpus, attempt.pods))))

    def _schedule(self, attempt: Attempt, key: str = "", seconds: float = 0.0) -> None:
        """Let an attempt end in `seconds`, and no sooner; without a `key` never."""
        with contextlib.suppress(ValueError):  # there was none, or it begins just now
            self.clock.cancel(attempt.event)  # type: ignore[arg-type]
        if key:
            attempt.event = self.clock.enter(
                seconds, 0, self.do_later, (self._finish, key, attempt)
            )

    def _finish(self, key: str, attempt: Attempt) -> None:
        with self.lock:
            if self.attempts.get(key) is not attempt:
                return
            del self.attempts[key]
        for pod in attempt.pods:
            self._end_pod(pod, attempt.code)
        with self.lock:
            now = time.monotonic()
            if attempt.code:
                self._note_loss(attempt, "server lost", now)
            else:
                self.progress = now
                if key not in self.gangs:  # a JobSet's end is told by its step
                    self.ended[attempt.run] = now

    def _end_pod(self, pod: Object, code: int = 0) -> None:
        about = pod["metadata"]
        if NODE_ID in about["annotations"]:
            self._complete_result(pod, code)
        self.done[about["uid"]] = code
        self._write_end(pod)
        self.used.pop(about["uid"], None)

    def _write_end(self, pod: Object) -> None:
        path = self.api.path("v1", "pods", pod["metadata"]["name"]) + "/status"
        self.api.write("PATCH", path, build_end(pod, self.done[pod["metadata"]["uid"]]))

    def _create_result(self, pod: Object, reported: bool) -> None:
        about = pod["metadata"]
        labels = {WORKFLOW: about["labels"][WORKFLOW], REPORTED: str(reported).lower()}
        metadata = {
            "name": about["annotations"][NODE_ID],
            "ownerReferences": about["ownerReferences"],
        }
        body = {
            "apiVersion": ARGO,
            "kind": "WorkflowTaskResult",
            "metadata": {**metadata, "labels": labels},
        }
        with contextlib.suppress(
            ApiException
        ):  # Argo has made a pod again that was deleted before it was seen to run
            self.api.write("POST", self.api.path(ARGO, "workflowtaskresults"), body)

    def _complete_result(self, pod: Object, code: int) -> None:
        about = pod["metadata"]["annotations"]
        path = self.api.path(ARGO, "workflowtaskresults", about[NODE_ID])
        draw = random.Random(f"{self.seed} outputs {about[NODE]}")
        if not code and (outputs := fill_outputs(read_template(pod), draw)):
            self.api.write("PATCH", path, {"outputs": {"parameters": outputs}})
        self.api.write("PATCH", path, {"metadata": {"labels": {REPORTED: "true"}}})

    def _launch(self, pod: Object, manifest: dict[str, Any]) -> None:
        """Create the JobSet of a resource template, owned by the workflow, as `argoexec resource apply` does."""
        manifest["metadata"]["ownerReferences"] = pod["metadata"]["ownerReferences"]
        count = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"]
        with self.lock:
            self.launchers[manifest["metadata"]["name"]] = pod, count
        self.api.write("POST", self.api.path(JOBSETS, "jobsets"), manifest)

    def see_jobset(self, jobset: Object, gone: bool) -> None:
        """End the step that waits for a JobSet when that has ended."""
        name, status = jobset["metadata"]["name"], jobset.get("status", {})
        with self.lock:
            if not gone and status.get("terminalState") == "Completed" and name in self.launchers:
                pod, _ = self.launchers.pop(name)
                self.ended[pod["metadata"]["labels"][RUN_LABEL]] = time.monotonic()
                self.do_later(self._end_pod, pod)

    def see_workflow(self, workflow: Object, gone: bool) -> None:
        """Note how a workflow ended; its server ends with it."""
        labels = workflow["metadata"].get("labels", {})
        run = labels.get(RUN_LABEL, "")
        with self.lock:
            done = run in self.runs and labels.get("workflows.argoproj.io/completed") == "true"
            if done and not gone and run not in self.phases:
                self.phases[run] = labels["workflows.argoproj.io/phase"]
                if server := self.servers.pop(run, None):
                    self.do_later(self._end_pod, server)

    def see_workload(self, workload: Object, gone: bool) -> None:
        """Note how long a workload waits and what it holds; let one come back that was evicted here."""
        about, now, status = workload["metadata"], time.monotonic(), workload.get("status", {})
        owner = about.get("ownerReferences", [{"kind": "", "uid": about["uid"]}])[0]
        key = owner["name"] if owner["kind"] == "JobSet" else owner["uid"]
        conditions = {each["type"]: each for each in status.get("conditions", ())}
        true = {kind for kind, each in conditions.items() if each["status"] == "True"}
        assigned = (status.get("admission") or {}).get("podSetAssignments", ())
        with self.lock:
            self.workloads[key] = about["name"]
            free = gone or "Finished" in true
            self.held[about["uid"]] = (
                0 if free else sum(int(each["resourceUsage"].get(GPU, 0)) for each in assigned)
            )
            since = self.created.setdefault(about["uid"], now)
            if "Admitted" in true and key not in self.admitted:
                self.admitted[key] = self.progress = now
                self.waits["admitted"].append(now - since)
            if "Evicted" in true and conditions["Evicted"]["reason"] == "Preempted":
                self.evicted.add((about["uid"], conditions["Evicted"]["lastTransitionTime"]))
        if not gone and workload["spec"].get("active") is False and "QuotaReserved" not in true:
            path = self.api.path(KUEUE, "workloads", about["name"])
            self.do_later(self.api.write, "PATCH", path, {"spec": {"active": True}})
