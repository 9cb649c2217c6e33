"""Start a job of several pods, follow it to its end, and pass on its logs and its exit status.

    python -m tuneloop.cluster.launch job.yaml --namespace tuneloop

A workflow engine runs this where it cannot read a job's state itself: Argo for a TrainJob (Argo's
conditions do not reach into its list of conditions), Kubeflow Pipelines for every job. An existing
job of the same name is followed, so that an evicted launcher continues where it was. A failed job
is replaced, which resumes the run; a job that is being deleted is waited for. SIGTERM ends the job,
whose pods commit their resume points, and the launcher exits with 75.
"""

import argparse
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tuneloop.cluster.waiting import JOBSETS, RAYJOBS
from tuneloop.cluster.watch import follow_pod
from tuneloop.core.errors import Interrupted, Retryable, UserError, report_errors
from tuneloop.core.http import Unanswered, send_request
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.threads import forward_signals
from tuneloop.kube.connection import (
    NAMESPACE,
    ApiRefusal,
    Connection,
    connect_to_cluster,
    retry_until_available,
)
from tuneloop.training.torchrun import exit_code


class Kind(NamedTuple):
    """A kind of job: its API, and the label whose value, on its pods, is the job's name."""

    api: tuple[str, str, str]
    pods: str


SUBMITTER_ONLY = (
    "runtimeEnvYAML",
    "entrypointNumCpus",
    "entrypointNumGpus",
    "entrypointResources",
    "metadata",
)
"""Fields of a RayJob that affect the submission of its program, and that only KubeRay's submitter
passes on."""
JOBSET_PODS = "jobset.sigs.k8s.io/jobset-name"
KINDS = {
    "JobSet": Kind(JOBSETS, JOBSET_PODS),
    "TrainJob": Kind(("trainer.kubeflow.org", "v1alpha1", "trainjobs"), JOBSET_PODS),
    "Job": Kind(("batch", "v1", "jobs"), "batch.kubernetes.io/job-name"),
    # The label of the pod that submits.
    "RayJob": Kind(RAYJOBS, "batch.kubernetes.io/job-name"),
}
"""Kind of a manifest → how its jobs are created, followed and ended. `cluster/submit.py: stop_run`
deletes the jobs of all these kinds.

A kind that is added needs its words for success and failure in `read_success`, the reason why it
does not run yet in `cluster/waiting.py: explain_waiting`, and rights in
``manifests/admin/namespace/rights.yaml`` (of the launcher, and of people who stop a run), which
`tests/unit/test_manifests.py` checks. People who watch a run, and the page's account
(``manifests/components/ui/rights.yaml``, which no test checks), need `list` for a kind that
`explain_waiting` lists.
"""


def read_success(status: JsonMapping) -> bool | None:
    """Read whether a job succeeded, of whatever kind; None while it is under way.

    ``terminalState`` is a JobSet's, ``jobStatus`` and ``jobDeploymentStatus`` are a RayJob's; a Job
    and a TrainJob have conditions alone. The words of all kinds are in one set.
    """
    states = {status.get("terminalState"), status.get("jobStatus")}
    for condition in status.get("conditions", ()):
        if condition["status"] == "True":
            states.add(condition["type"])
    # KubeRay could not submit the program: Ray has no state of it.
    is_unsubmitted = status.get("jobDeploymentStatus") == "Failed"
    if is_unsubmitted or states & {"Failed", "FAILED", "STOPPED"}:
        return False
    return True if states & {"Complete", "Completed", "SUCCEEDED"} else None


def launch_job(
    cluster: Connection, job: JsonMapping, *, poll: float = 1.0, grace: float = 90.0
) -> int:
    """Create `job` unless it exists and has not failed, print the logs of its pods, and wait for
    its end.

    Args:
        cluster: with the namespace of the job.
        job: its manifest.
        poll: seconds between two looks at the job.
        grace: seconds after which a RayJob that KubeRay's pod has not submitted is submitted here.

    Returns:
        0 if it succeeded; else the exit code that explains those of its pods, or 1 without any.

    Raises:
        UserError: a kind that is unknown or not allowed.
        Retryable: the job was deleted while it was followed, or the API server has a problem.
    """
    kind = KINDS.get(str(job.get("kind")))
    if kind is None:
        raise UserError("kind", job.get("kind"), f"cannot be launched; known: {', '.join(KINDS)}")
    _ensure_job(cluster, kind, job, poll)
    followed = FollowedJob(cluster, kind, str(job["metadata"]["name"]), grace)
    while True:
        code = followed.look()
        if code is not None:
            return code
        time.sleep(poll)


def _ensure_job(cluster: Connection, kind: Kind, job: JsonMapping, poll: float) -> None:
    """Create `job`, in place of one of its name that failed, unless one is under way or succeeded."""
    name = job["metadata"]["name"]
    while not _create(cluster, kind, job):
        existing = cluster.find(*kind.api, name)
        if existing is not None and "deletionTimestamp" not in existing["metadata"]:
            if read_success(existing.get("status") or {}) is not False:
                return
            delete_job(cluster, job, wait=True)
        time.sleep(poll)


@dataclass
class FollowedJob:
    """A job that is followed to its end, look by look.

    Attributes:
        cluster: with the namespace of the job.
        kind: of the job.
        name: its name.
        grace: seconds that KubeRay's pod has to submit the program of a RayJob.
        lines: node and text of the lines that were read and not printed.
        readers: pod → the thread that reads its log.
        last_progress: when a RayJob did not wait for its submission, by the monotonic clock.
    """

    cluster: Connection
    kind: Kind
    name: str
    grace: float
    lines: queue.SimpleQueue[tuple[str, str]] = field(default_factory=queue.SimpleQueue)
    readers: dict[str, threading.Thread] = field(default_factory=dict)
    last_progress: float = field(default_factory=time.monotonic)

    def look(self) -> int | None:
        """Print what is new; return the exit code of the job, None while it is under way.

        Raises:
            Retryable: the job was deleted.
        """
        job = retry_until_available(lambda: self.cluster.find(*self.kind.api, self.name))
        if job is None:
            raise Retryable(f"{self.name}: the job was deleted while it was followed")
        status: JsonMapping = job.get("status") or {}
        is_successful = read_success(status)
        self._submit_if_stalled(job)
        selector = f"{self.kind.pods}={self.name}"
        listed = retry_until_available(lambda: self.cluster.list_pods(selector))
        pods = sorted(listed, key=lambda pod: str(pod.metadata.name))
        for pod in pods:
            self._read_log(pod)
        if is_successful is not None:
            for reader in self.readers.values():
                # A node that is gone may keep a connection open: its last lines are not waited for.
                reader.join(timeout=30)
        while not self.lines.empty():
            node, line = self.lines.get()
            print(f"{node}: {line}", flush=True)
        if is_successful is None:
            return None
        return 0 if is_successful else _choose_code(pods, status)

    def _submit_if_stalled(self, job: JsonMapping) -> None:
        """Submit the program of a RayJob whose submitter has not done so in time."""
        status = job.get("status") or {}
        is_stalled = status.get("jobDeploymentStatus") == "Running" and not status.get("jobStatus")
        if is_stalled and time.monotonic() - self.last_progress <= self.grace:
            return
        if is_stalled:
            print(f"{self.name}: {submit_entrypoint(job)}", flush=True)
        self.last_progress = time.monotonic()

    def _read_log(self, pod: Any) -> None:
        """Start to read the log of a pod whose program has started, once."""
        statuses = pod.status.container_statuses or ()
        has_started = any(item.state.running or item.state.terminated for item in statuses)
        if pod.metadata.uid in self.readers or not has_started:
            return
        # Of demo-node-0-1-x7k2p it is node-0-1.
        suffix = str(pod.metadata.name).removeprefix(f"{self.name}-")
        node = suffix.rpartition("-")[0] or suffix
        reader = threading.Thread(
            target=follow_pod,
            args=(self.cluster, pod, node, True, self.lines),
            daemon=True,
        )
        self.readers[pod.metadata.uid] = reader
        reader.start()


def submit_entrypoint(job: JsonMapping) -> str:
    """Submit a RayJob's program to its Ray cluster in place of its submitter, and return the result
    as text.

    The id is the one that KubeRay chose: Ray accepts an id once, so a late submitter finds the
    program and follows it (``BuildJobSubmitCommand`` of KubeRay 1.5). A job with a field of
    `SUBMITTER_ONLY` is left to the submitter.
    """
    fields = [name for name in SUBMITTER_ONLY if job["spec"].get(name)]
    if fields:
        return (
            f"it was not submitted; with spec.{fields[0]} only KubeRay's pod can do so: "
            "see why that did not start"
        )
    status = job.get("status") or {}
    url = f"http://{status['dashboardURL']}/api/jobs/"
    body = {"entrypoint": job["spec"]["entrypoint"], "submission_id": status["jobId"]}
    try:
        code, answer = send_request("POST", url, timeout_s=30, body=body)
    except Unanswered as error:
        return f"it was not submitted, and the request to its head failed: {error}"
    text = answer.decode(errors="replace")
    return f"its submitter did not start, so it was submitted here: HTTP {code}, {text}"


def _create(cluster: Connection, kind: Kind, job: JsonMapping) -> bool:
    """Create `job` unless one of its name exists; return whether it was created."""
    try:
        cluster.create(*kind.api, job)
        return True
    except ApiRefusal as error:
        if error.status == 404:
            group, _, plural = kind.api
            remedy = f"{plural}.{group} is not installed; manifests/third-party/README.md says how"
            raise UserError("kind", job["kind"], remedy) from None
        if error.status != 409:
            raise
        return False


def delete_job(cluster: Connection, job: JsonMapping, *, wait: bool = False) -> None:
    """Delete a job: its pods get SIGTERM. With `wait`, its name is taken until they have ended."""
    # By default a Job's pods would be kept.
    policy = "Foreground" if wait else "Background"
    kind = KINDS[str(job["kind"])]
    cluster.delete(*kind.api, job["metadata"]["name"], propagation_policy=policy)


def _choose_code(pods: Sequence[Any], status: JsonMapping) -> int:
    """Return the exit code of a failed job."""
    # Ray gives its driver's code only in a message.
    failure = re.search(r"failed with exit code (\d+)", str(status.get("message", "")))
    if failure:
        return int(failure[1])
    codes: list[int] = []
    for pod in pods:
        for container in pod.status.container_statuses or ():
            ending = container.state.terminated
            if ending and ending.exit_code:
                code = ending.exit_code
                # A signal is a negative number for torchrun, as for Python.
                codes.append(128 - code if code > 128 else code)
    return exit_code(codes) if codes else 1


@report_errors
def main(argv: Sequence[str]) -> int:
    """Launch the job of a YAML file (``-``: standard input).

    `extensions/trainers/launch.py` and `kfp/stage.py` call it with flags. ``--help`` prints the
    module's docstring.
    """
    import yaml

    parser = argparse.ArgumentParser(prog="tuneloop.cluster.launch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", help="of the job's manifest; -: standard input")
    source.add_argument("--manifest", help="the manifest itself")
    parser.add_argument("--namespace", default=NAMESPACE)
    options = parser.parse_args(argv)
    text = options.manifest
    if text is None:
        text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text()
    job: JsonObject = yaml.safe_load(text)

    def stop(number: int) -> None:
        raise Interrupted(f"{job['metadata']['name']}: stopped by {signal.Signals(number).name}")

    with forward_signals(stop):
        cluster = connect_to_cluster(options.namespace)
        try:
            return launch_job(cluster, job)
        except Interrupted:
            # The engine may start this step again at once: the name has to be free by then.
            delete_job(cluster, job, wait=True)
            raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
