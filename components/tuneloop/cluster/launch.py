"""Start a job of several pods, follow it to its end, and pass on its logs and its exit status.

    python -m tuneloop.cluster.launch job.yaml --namespace tuneloop

A workflow engine runs this where it cannot read a job's state itself: Argo for a TrainJob (Argo's conditions do not
reach into its list of conditions), Kubeflow Pipelines for every job. An existing job of the same name is followed, so
that an evicted launcher continues where it was. A failed job is replaced, which resumes the run; a job that is being
deleted is waited for. SIGTERM ends the job, whose pods commit their resume points, and the launcher exits with 75."""

import argparse
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tuneloop.cluster.watch import JOBSETS, RAYJOBS, follow_pod
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

Object = JsonMapping


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
"""Fields of a RayJob that affect the submission of its program, and that only KubeRay's submitter passes on."""
JOBSET_PODS = "jobset.sigs.k8s.io/jobset-name"
KINDS = {
    "JobSet": Kind(JOBSETS, JOBSET_PODS),
    "TrainJob": Kind(("trainer.kubeflow.org", "v1alpha1", "trainjobs"), JOBSET_PODS),
    "Job": Kind(("batch", "v1", "jobs"), "batch.kubernetes.io/job-name"),
    "RayJob": Kind(RAYJOBS, "batch.kubernetes.io/job-name"),  # of the pod that submits
}


def read_success(status: Object) -> bool | None:
    """Read whether a job succeeded, of whatever kind; None while it is under way."""
    said = {item["type"] for item in status.get("conditions", ()) if item["status"] == "True"}
    said |= {status.get("terminalState"), status.get("jobStatus")}
    if (
        said & {"Failed", "FAILED", "STOPPED"} or status.get("jobDeploymentStatus") == "Failed"
    ):  # Ray's: not submitted
        return False
    return True if said & {"Complete", "Completed", "SUCCEEDED"} else None


def launch_job(cluster: Connection, job: Object, *, poll: float = 1.0, grace: float = 90.0) -> int:
    """Create `job` unless it exists and has not failed, print the logs of its pods, and wait for its
    end.

    Args:
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
    name = str(job["metadata"]["name"])
    while not _create(cluster, kind, job):
        found = cluster.find(*kind.api, name)
        leaving = found is not None and "deletionTimestamp" in found["metadata"]
        if (
            found is not None
            and not leaving
            and read_success(found.get("status") or {}) is not False
        ):
            break
        if found is not None and not leaving:
            delete_job(cluster, job, wait=True)
        time.sleep(poll)
    lines: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    read: dict[str, threading.Thread] = {}
    since = time.monotonic()
    while True:
        standing = retry_until_available(lambda: cluster.find(*kind.api, name))
        if standing is None:
            raise Retryable(f"{name}: the job was deleted while it was followed")
        status: Object = standing.get("status") or {}
        done = read_success(status)
        stalled = status.get("jobDeploymentStatus") == "Running" and not status.get("jobStatus")
        since = since if stalled else time.monotonic()
        if stalled and time.monotonic() - since > grace:
            print(f"{name}: {submit_entrypoint(standing)}", flush=True)
            since = time.monotonic()
        listed = retry_until_available(lambda: cluster.list_pods(f"{kind.pods}={name}"))
        pods = sorted(listed, key=lambda pod: str(pod.metadata.name))
        for pod in pods:
            states = [each.state for each in pod.status.container_statuses or ()]
            if pod.metadata.uid not in read and any(
                state.running or state.terminated for state in states
            ):
                own = str(pod.metadata.name).removeprefix(f"{name}-")  # node-0-1-x7k2p
                arguments = (cluster, pod, own.rpartition("-")[0] or own, True, lines)
                read[pod.metadata.uid] = threading.Thread(
                    target=follow_pod, args=arguments, daemon=True
                )
                read[pod.metadata.uid].start()
        if done is not None:
            for reader in read.values():
                reader.join(timeout=30)
        while not lines.empty():
            print("{}: {}".format(*lines.get()), flush=True)
        if done is not None:
            return 0 if done else _code(pods, status)
        time.sleep(poll)


def submit_entrypoint(job: Object) -> str:
    """Submit a RayJob's program to its Ray cluster in place of its submitter, and return the result
    as text.

    The id is the one that KubeRay chose: Ray accepts an id once, so a late submitter finds the
    program and follows it (``BuildJobSubmitCommand`` of KubeRay 1.5). A job with a field of
    `SUBMITTER_ONLY` is left to the submitter.
    """
    fields = [field for field in SUBMITTER_ONLY if job["spec"].get(field)]
    if fields:
        return (
            f"it was not submitted; with spec.{fields[0]} only KubeRay's pod can do so: "
            "see why that did not start"
        )
    status = job.get("status") or {}
    body = {"entrypoint": job["spec"]["entrypoint"], "submission_id": status["jobId"]}
    try:
        code, answer = send_request(
            "POST", f"http://{status['dashboardURL']}/api/jobs/", timeout_s=30, body=body
        )
    except Unanswered as error:
        return f"it was not submitted, and the request to its head failed: {error}"
    return f"its submitter did not start, so it was submitted here: HTTP {code}, {answer.decode(errors='replace')}"


def _create(cluster: Connection, kind: Kind, job: Object) -> bool:
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


def delete_job(cluster: Connection, job: Object, *, wait: bool = False) -> None:
    """Delete a job without waiting: its pods get SIGTERM. With `wait`, its name is taken until they have ended."""
    policy = "Foreground" if wait else "Background"  # by default a Job's pods would be kept
    cluster.delete(*KINDS[str(job["kind"])].api, job["metadata"]["name"], propagation_policy=policy)


def _code(pods: Sequence[Any], status: Object) -> int:
    """Return the exit code of a failed job; Ray gives its driver's code only in a message."""
    failure = re.search(r"failed with exit code (\d+)", str(status.get("message", "")))
    if failure:
        return int(failure[1])
    ended = [
        s.state.terminated
        for pod in pods
        for s in pod.status.container_statuses or ()
        if s.state.terminated
    ]
    codes = [
        128 - state.exit_code if state.exit_code > 128 else state.exit_code
        for state in ended
        if state.exit_code
    ]
    return exit_code(codes) if codes else 1


@report_errors
def main(argv: Sequence[str]) -> int:
    """Launch the job of a YAML file (``-``: standard input)."""
    import yaml

    parser = argparse.ArgumentParser(prog="tuneloop.cluster.launch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", help="of the job's manifest; -: standard input")
    source.add_argument("--manifest", help="the manifest itself")
    parser.add_argument("--namespace", default=NAMESPACE)
    given = parser.parse_args(argv)
    text = given.manifest or (
        sys.stdin.read() if given.file == "-" else Path(given.file).read_text()
    )
    job: JsonObject = yaml.safe_load(text)

    def stop(number: int) -> None:
        raise Interrupted(f"{job['metadata']['name']}: stopped by {signal.Signals(number).name}")

    with forward_signals(stop):
        cluster = connect_to_cluster(given.namespace)
        try:
            return launch_job(cluster, job)
        except Interrupted:
            delete_job(cluster, job, wait=True)
            raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
