"""Sessions as Jobs of Kubernetes, which store all state about them: annotations have the request and its sender. A Job
has one pod, which is not started again when it fails, as its models are lost. (If Kueue preempts the Job and admits it
again, the new pod has none of the models, and says so.) The worker's key is in the pod's environment: whoever may read
the Jobs of a namespace may use its sessions."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tuneloop.core.json_types import JsonObject
from tuneloop.core.server_token import VARIABLE
from tuneloop.gateway.access import translate_refusals
from tuneloop.gateway.sessions import Phase, Session, Wanted, read_settings
from tuneloop.gateway.worker import KEY
from tuneloop.inference.refusals import Refused
from tuneloop.workflow.settings import QUEUE_LABEL

LABEL = "tuneloop.dev/session"
WANTED, CREATOR, ARTIFACTS = (
    "tuneloop.dev/" + name for name in ("session-wanted", "session-creator", "artifacts")
)
PORT = 8000
TIMEOUT = {"_request_timeout": 30}
"""Timeout of a request to the API server, in seconds."""
JOB = Path(__file__).with_name("session.yaml")


class Jobs:
    """Sessions of a cluster. All calls block, and may come from any thread, as those of `processes.Processes`."""

    def __init__(self, api: Any, config: Path | None) -> None:
        from kubernetes import client

        self.batch = client.BatchV1Api(api)
        self.core = client.CoreV1Api(api)
        self.config = config
        self.apps = client.AppsV1Api(api)
        self.sampler = read_settings(config).sampler

    def create(self, name: str, wanted: Wanted, creator: str, artifacts: str) -> None:
        """Begin a session."""
        with translate_refusals(wanted.namespace):
            self.batch.create_namespaced_job(
                wanted.namespace, self._job(name, wanted, creator, artifacts), **TIMEOUT
            )

    def get(self, namespace: str, name: str) -> Session | None:
        """Return a session, or None, also where it is ending."""
        sessions = self._list(namespace, f"{LABEL}={name}")
        return next(
            (each for each in sessions if each.name == name and each.phase != "ending"), None
        )

    def sessions(self, namespace: str) -> list[Session]:
        """Return the sessions of a namespace, oldest first, and those that are ending."""
        return self._list(namespace, LABEL)

    def end(self, namespace: str, name: str) -> None:
        """End a session, if it exists, after its accepted requests, within its grace period; its artifacts are kept."""
        if (
            self.get(namespace, name) is None
        ):  # the gateway may delete any Job, but must only delete sessions
            return
        try:
            with translate_refusals(namespace):
                self.batch.delete_namespaced_job(
                    name, namespace, propagation_policy="Foreground", **TIMEOUT
                )
        except Refused as refused:
            if self.get(namespace, name) is not None:
                raise refused

    def scale_sampler(self, namespace: str, replicas: int) -> None:
        """Give the sampler of a namespace so many replicas."""
        if self.sampler:
            with translate_refusals(namespace):
                wanted = {"spec": {"replicas": replicas}}
                self.apps.patch_namespaced_deployment_scale(
                    self.sampler.deployment, namespace, wanted, **TIMEOUT
                )

    def drain(self) -> None:
        """Do nothing: Jobs continue without this process. (Other backends end their sessions here.)"""

    def _list(self, namespace: str, selector: str) -> list[Session]:
        with translate_refusals(namespace):
            jobs = self.batch.list_namespaced_job(
                namespace, label_selector=selector, **TIMEOUT
            ).items
            pods = self.core.list_namespaced_pod(
                namespace, label_selector=selector, **TIMEOUT
            ).items
        pod_of = {pod.metadata.labels[LABEL]: pod for pod in pods}
        sessions = [_session(job, pod_of.get(job.metadata.name)) for job in jobs]
        return sorted(sessions, key=lambda session: (session.created, session.name))

    def _job(self, name: str, wanted: Wanted, creator: str, artifacts: str) -> JsonObject:
        pod = read_settings(self.config).worker
        labels = {
            "app.kubernetes.io/part-of": "tuneloop",
            "app.kubernetes.io/component": "session",
            LABEL: name,
        }
        queue = {QUEUE_LABEL: pod.queue} if pod.queue and wanted.accelerators else {}
        devices = {pod.accelerator: str(wanted.accelerators)} if wanted.accelerators else {}
        command = [
            "python",
            "-m",
            "tuneloop.gateway.worker",
            "--session",
            f"{wanted.namespace}.{name}",
        ]
        command += [
            "--artifacts",
            artifacts,
            "--host",
            "$(POD_IP)",
            "--port",
            str(PORT),
            "--idle",
            str(pod.idle),
        ]
        command += ["--grace", str(pod.grace), "--device", "cuda" if wanted.accelerators else "cpu"]
        command += wanted.flags(artifacts.rpartition("/")[0])  # each namespace has its own groups
        job: JsonObject = yaml.safe_load(JOB.read_text())
        annotations = {WANTED: wanted.model_dump_json(), CREATOR: creator, ARTIFACTS: artifacts}
        job["metadata"] = {"name": name, "labels": {**labels, **queue}, "annotations": annotations}
        job["spec"]["template"]["metadata"] = {"labels": labels}
        spec = job["spec"]["template"]["spec"]
        spec["terminationGracePeriodSeconds"] = pod.grace
        (container,) = spec["containers"]
        requests = {"cpu": pod.cpu, "memory": pod.request or pod.memory}
        limits = {"memory": pod.memory, **devices}
        container |= {
            "image": pod.image,
            "command": command,
            "resources": {"requests": requests, "limits": limits},
        }
        variables = {KEY: secrets.token_urlsafe(32), "TUNELOOP_IMAGE": pod.image}
        if self.sampler:
            command += ["--sampler", f"http://{self.sampler.deployment}:{PORT}"]
            variables[VARIABLE] = "/sampler/token"
            container["volumeMounts"].append(
                {"name": "sampler-token", "mountPath": "/sampler", "readOnly": True}
            )
            spec["volumes"].append(
                {"name": "sampler-token", "secret": {"secretName": self.sampler.deployment}}
            )
        container["env"] += [{"name": name, "value": value} for name, value in variables.items()]
        return job


def _session(job: Any, pod: Any) -> Session:
    annotations: Mapping[str, str] = job.metadata.annotations
    env = {each.name: each.value for each in job.spec.template.spec.containers[0].env}
    phase, reason = _phase(job, pod)
    return Session(
        name=job.metadata.name,
        wanted=Wanted.model_validate_json(annotations[WANTED]),
        creator=annotations[CREATOR],
        created=job.metadata.creation_timestamp.isoformat(),
        phase=phase,
        artifacts=annotations[ARTIFACTS],
        key=env[KEY],
        address=f"{pod.status.pod_ip}:{PORT}" if phase == "running" and pod.status.pod_ip else None,
        reason=reason,
    )


def _phase(job: Any, pod: Any) -> tuple[Phase, str]:
    """Return the phase of a session, and why it is not running."""
    if job.metadata.deletion_timestamp is not None:
        return "ending", "was ended; its pod may still exist"
    over = {each.type: each for each in job.status.conditions or () if each.status == "True"}
    if "Failed" in over:
        states = [each.state.terminated for each in (pod and pod.status.container_statuses) or ()]
        words = [f"(exit {each.exit_code}, {each.reason})" for each in states if each][:1]
        return "failed", " ".join(filter(None, (over["Failed"].message, *words)))
    if "Complete" in over:
        return "ended", "was idle"
    if job.spec.suspend:
        return "queued", "waits for quota of its queue"
    if pod is None:
        return "starting", "its pod is not created yet"
    conditions = pod.status.conditions or ()
    if any(each.type == "Ready" and each.status == "True" for each in conditions):
        return "running", ""
    unscheduled = [
        each.message
        for each in conditions
        if each.type == "PodScheduled" and each.status == "False"
    ]
    waiting = [
        each.state.waiting
        for each in pod.status.container_statuses or ()
        if each.state and each.state.waiting
    ]
    return "starting", "; ".join([*map(str, unscheduled), *(f"{each.reason}" for each in waiting)])
