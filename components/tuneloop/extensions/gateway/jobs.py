"""Sessions as Jobs of Kubernetes, which store all state about them.

Annotations have the request and its sender. A Job has one pod, which is not started again when it
fails, as its models are lost. (If Kueue preempts the Job and admits it again, the new pod has none
of the models, and says so.) The worker's key is in the pod's environment: whoever may read the Jobs
of a namespace may use its sessions.

`app.py` takes this or `processes.py: Processes` as its backend; both have the same methods. A Job
that an older gateway created is read by a newer one: names of annotations and variables stay. What
the API server is asked needs a right in `manifests/components/gateway/rights.yaml`, or for the
sampler in `manifests/components/sampler/rights.yaml`. Its tests need a cluster:
`tests/cluster/test_gateway.py`.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tuneloop.core.json_types import JsonObject
from tuneloop.core.server_token import VARIABLE
from tuneloop.extensions.gateway.access import translate_refusals
from tuneloop.extensions.gateway.sessions import (
    Phase,
    Session,
    SessionRequest,
    read_settings,
)
from tuneloop.extensions.gateway.worker import KEY
from tuneloop.inference.refusals import Refused
from tuneloop.workflow.settings import QUEUE_LABEL

LABEL = "tuneloop.dev/session"
"""Label of the Job and of its pod: the session's name."""
REQUEST = "tuneloop.dev/session-wanted"
CREATOR = "tuneloop.dev/session-creator"
ARTIFACTS = "tuneloop.dev/artifacts"
"""Annotations of a Job: the `SessionRequest` as JSON, who created it, and the URL of its
artifacts."""
PORT = 8000
"""The port of a worker and of the shared sampler; copies are in `session.yaml` and in
`manifests/components/gateway/network.yaml`."""
TIMEOUT = {"_request_timeout": 30}
"""Timeout of a request to the API server, in seconds."""
JOB = Path(__file__).with_name("session.yaml")
"""The template of a Job, which `Jobs._job` completes."""


class Jobs:
    """Sessions of a cluster.

    All calls block, and may come from any thread, as those of `processes.Processes`.
    """

    def __init__(self, api: Any, config: Path | None) -> None:
        """Use the client `api` of the API server, and the settings of the file `config`."""
        from kubernetes import client

        self.batch = client.BatchV1Api(api)
        self.core = client.CoreV1Api(api)
        self.config = config
        self.apps = client.AppsV1Api(api)
        self.sampler = read_settings(config).sampler

    def create(self, name: str, request: SessionRequest, creator: str, artifacts: str) -> None:
        """Begin a session."""
        job = self._job(name, request, creator, artifacts)
        with translate_refusals(request.namespace):
            self.batch.create_namespaced_job(request.namespace, job, **TIMEOUT)

    def get(self, namespace: str, name: str) -> Session | None:
        """Return a session, or None, also where it is ending."""
        for session in self._list(namespace, f"{LABEL}={name}"):
            if session.name == name and session.phase != "ending":
                return session
        return None

    def sessions(self, namespace: str) -> list[Session]:
        """Return the sessions of a namespace, oldest first, and those that are ending."""
        return self._list(namespace, LABEL)

    def end(self, namespace: str, name: str) -> None:
        """End a session, if it exists, after its accepted requests, within its grace period.

        Its artifacts are kept.
        """
        # The gateway may delete any Job, but must only delete sessions.
        if self.get(namespace, name) is None:
            return
        try:
            with translate_refusals(namespace):
                self.batch.delete_namespaced_job(
                    name, namespace, propagation_policy="Foreground", **TIMEOUT
                )
        except Refused:
            # It may have ended meanwhile.
            if self.get(namespace, name) is not None:
                raise

    def scale_sampler(self, namespace: str, replicas: int) -> None:
        """Scale the sampler of a namespace to so many replicas."""
        if self.sampler:
            scale = {"spec": {"replicas": replicas}}
            with translate_refusals(namespace):
                self.apps.patch_namespaced_deployment_scale(
                    self.sampler.deployment, namespace, scale, **TIMEOUT
                )

    def drain(self) -> None:
        """Do nothing: Jobs continue without this process.

        `Processes`, whose sessions are children of this process, end them here.
        """

    def _list(self, namespace: str, selector: str) -> list[Session]:
        with translate_refusals(namespace):
            jobs = self.batch.list_namespaced_job(namespace, label_selector=selector, **TIMEOUT)
            pods = self.core.list_namespaced_pod(namespace, label_selector=selector, **TIMEOUT)
        pods_by_session = {pod.metadata.labels[LABEL]: pod for pod in pods.items}
        sessions = [_session(job, pods_by_session.get(job.metadata.name)) for job in jobs.items]
        return sorted(sessions, key=lambda session: (session.created, session.name))

    def _job(self, name: str, request: SessionRequest, creator: str, artifacts: str) -> JsonObject:
        """Build the Job of a session from the template `JOB` and the settings.

        The command line is parsed by `worker.py: _parse`; `processes.py: Processes._start` writes
        one with the same flags.
        """
        # Read anew for each session: an administrator may have changed them.
        settings = read_settings(self.config).worker
        labels = {
            "app.kubernetes.io/part-of": "tuneloop",
            "app.kubernetes.io/component": "session",
            LABEL: name,
        }
        limits = {"memory": settings.memory}
        job_labels = dict(labels)
        if request.accelerators:
            limits[settings.accelerator] = str(request.accelerators)
            if settings.queue:
                job_labels[QUEUE_LABEL] = settings.queue
        job: JsonObject = yaml.safe_load(JOB.read_text())
        job["metadata"] = {
            "name": name,
            "labels": job_labels,
            "annotations": {
                REQUEST: request.model_dump_json(),
                CREATOR: creator,
                ARTIFACTS: artifacts,
            },
        }
        job["spec"]["template"]["metadata"] = {"labels": labels}
        spec = job["spec"]["template"]["spec"]
        spec["terminationGracePeriodSeconds"] = settings.grace
        container = spec["containers"][0]
        # A limit of processor time would throttle steps, so there is none.
        requests = {"cpu": settings.cpu, "memory": settings.request or settings.memory}
        command = [
            "python",
            "-m",
            "tuneloop.extensions.gateway.worker",
            "--session",
            f"{request.namespace}.{name}",
            "--artifacts",
            artifacts,
            "--host",
            "$(POD_IP)",
            "--port",
            str(PORT),
            "--idle",
            str(settings.idle),
            "--grace",
            str(settings.grace),
            "--device",
            "cuda" if request.accelerators else "cpu",
        ]
        # Each namespace has its own groups.
        command += request.flags(artifacts.rpartition("/")[0])
        variables = {KEY: secrets.token_urlsafe(32), "TUNELOOP_IMAGE": settings.image}
        if self.sampler:
            command += ["--sampler", f"http://{self.sampler.deployment}:{PORT}"]
            variables[VARIABLE] = "/sampler/token"
            container["volumeMounts"].append(
                {"name": "sampler-token", "mountPath": "/sampler", "readOnly": True}
            )
            spec["volumes"].append(
                {"name": "sampler-token", "secret": {"secretName": self.sampler.deployment}}
            )
        container["image"] = settings.image
        container["command"] = command
        container["resources"] = {"requests": requests, "limits": limits}
        container["env"] += [{"name": name, "value": value} for name, value in variables.items()]
        return job


def _session(job: Any, pod: Any) -> Session:
    """Read a session from its Job and its pod, which may be None, as the client returns them."""
    annotations: Mapping[str, str] = job.metadata.annotations
    env = {variable.name: variable.value for variable in job.spec.template.spec.containers[0].env}
    phase, reason = _phase(job, pod)
    is_reachable = phase == "running" and pod.status.pod_ip
    return Session(
        name=job.metadata.name,
        request=SessionRequest.model_validate_json(annotations[REQUEST]),
        creator=annotations[CREATOR],
        created=job.metadata.creation_timestamp.isoformat(),
        phase=phase,
        artifacts=annotations[ARTIFACTS],
        secret=env[KEY],
        address=f"{pod.status.pod_ip}:{PORT}" if is_reachable else None,
        reason=reason,
    )


def _phase(job: Any, pod: Any) -> tuple[Phase, str]:
    """Return the phase of a session, and why it is not running.

    Args:
        job, pod: objects of the Kubernetes client; the pod may be None.
    """
    # The pod may go on for its grace period.
    if job.metadata.deletion_timestamp is not None:
        return "ending", "was ended; its pod may still exist"
    for condition in job.status.conditions or ():
        if condition.status == "True" and condition.type == "Failed":
            return "failed", _explain_failure(condition, pod)
        if condition.status == "True" and condition.type == "Complete":
            return "ended", "was idle"
    if job.spec.suspend:
        return "queued", "waits for quota of its queue"
    if pod is None:
        return "starting", "its pod is not created yet"
    # No node has room, an image cannot be pulled, a volume is missing: Kubernetes says which.
    reasons: list[str] = []
    for condition in pod.status.conditions or ():
        if condition.type == "Ready" and condition.status == "True":
            return "running", ""
        if condition.type == "PodScheduled" and condition.status == "False":
            reasons.append(str(condition.message))
    for status in pod.status.container_statuses or ():
        if status.state and status.state.waiting:
            reasons.append(str(status.state.waiting.reason))
    return "starting", "; ".join(reasons)


def _explain_failure(condition: Any, pod: Any) -> str:
    """Explain why a Job has failed, with the exit code of its container, if that is known."""
    statuses = pod.status.container_statuses if pod else ()
    words = [condition.message or ""]
    for status in statuses or ():
        end = status.state.terminated
        if end:
            words.append(f"(exit {end.exit_code}, {end.reason})")
            break
    return " ".join(filter(None, words))
