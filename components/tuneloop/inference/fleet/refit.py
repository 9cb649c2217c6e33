"""Bring every worker of a fleet to one version.

A pass discovers the workers, and pauses, updates, flushes and resumes those that are new; passes
are made until there is none. Workers of one pass are changed at the same time, each paused for its
own update only. `resume_generation` is called even after a failed update: such a worker must refuse
by itself, and the failure is raised here, so that no rollout counts. A fleet that keeps changing is
given up after `PASSES`. A refit can be repeated: a worker that has the version is only resumed, in
case a killed refit left it paused.

The engine `endpoint` calls it before it samples with a new version, and people by `tuneloop fleet
refit`.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Retryable
from tuneloop.core.store import local_path
from tuneloop.core.wording import format_count
from tuneloop.formats.facts import VersionFacts
from tuneloop.inference.fleet import Fleet, Unreachable, Worker

PASSES = 5
"""The maximum number of passes; the last one must discover no new worker."""


@dataclass(frozen=True)
class Target:
    """The version that workers are to serve.

    Attributes:
        label: their answer afterwards, ``<version>@<digest of checkpoint>``.
        model: where they read it, a directory that they see under the same path, or the
            checkpoint's reference.
    """

    label: str
    model: str


@dataclass
class Refitted:
    """The timings of a refit.

    The engine `endpoint` notes its fields as ``refitted`` in a stage's manifest, and
    `runs/delivery.py: REFIT_SHAPE` requires some of them, also of earlier runs.

    Attributes:
        workers: id → seconds for which it was paused; 0 if it had the version already.
        updates: id → seconds of the pause that ``update_weights_from_disk`` took, for workers that
            were changed.
        urls: of the workers.
        passes: how many there were.
        seconds: that they took together.
    """

    workers: dict[str, float] = field(default_factory=dict)
    updates: dict[str, float] = field(default_factory=dict)
    urls: list[str] = field(default_factory=list)
    passes: int = 0
    seconds: float = 0.0


def make_target(policy: Artifact) -> Target:
    """Name a checkpoint: by its directory where the store is a volume, else by its reference.

    `inference/http_api.py: update` takes both forms, and the label by a pattern.
    """
    version = VersionFacts.read(policy).version
    digest = policy.manifest.digest
    local = local_path(policy.url)
    model = f"{local}/{policy.manifest.root}/model" if local else f"{policy.url}@{digest}"
    return Target(f"{version}@{digest}", model)


def refit_fleet(
    fleet: Fleet,
    target: Target,
    *,
    passes: int = PASSES,
    timeout_s: float = 600.0,
    force: bool = False,
) -> Refitted:
    """Bring all workers to `target`.

    Args:
        fleet: of the workers.
        target: the version.
        passes: as `PASSES`.
        timeout_s: seconds of silence after which a worker counts as gone.
        force: update workers that have the version, too.

    Raises:
        Retryable: a worker refused or failed; there is none; the fleet kept changing.
        UserError: as `Fleet.discover`.
    """
    done = Refitted()
    start = time.monotonic()
    lost: Mapping[str, Unreachable] = {}
    while done.passes < passes:
        if done.passes and not done.workers and not lost:
            # There was no worker so far: they may be starting.
            time.sleep(1.0)
        done.passes += 1
        workers = {worker.id: worker for worker in fleet.discover()}
        # A worker that is replaced has another id, and is new.
        new = [worker for name, worker in workers.items() if name not in done.workers]
        if workers and not new:
            done.workers = {name: done.workers[name] for name in workers}
            done.urls = [worker.url for worker in workers.values()]
            done.seconds = time.monotonic() - start
            return done
        lost = _change_workers(new, target, timeout_s, force, done)
    if lost:
        raise next(iter(lost.values()))
    count = (
        f"{format_count(len(done.workers), 'worker')}, and new ones each time"
        if done.workers
        else "no worker"
    )
    remedy = "wait until the fleet is stable, then run it again"
    raise Retryable(f"fleet: {passes} passes found {count}; {remedy}")


def _change_workers(
    workers: list[Worker],
    target: Target,
    timeout_s: float,
    force: bool,
    done: Refitted,
) -> Mapping[str, Unreachable]:
    """Change `workers` at the same time, and add those that have the version to `done`.

    Returns:
        Id → error of those that are gone.
    """
    lost: dict[str, Unreachable] = {}
    futures: dict[str, Future[tuple[float, float]]] = {}
    with ThreadPoolExecutor(max(len(workers), 1)) as pool:
        for worker in workers:
            futures[worker.id] = pool.submit(_change, worker, target, timeout_s, force)
    for name, future in futures.items():
        try:
            paused, updating = future.result()
            done.workers[name] = paused
            if updating:
                done.updates[name] = updating
        except Unreachable as error:
            lost[name] = error
    return lost


def _change(worker: Worker, target: Target, timeout_s: float, force: bool) -> tuple[float, float]:
    """Bring one worker to the version.

    Returns:
        The seconds for which it was paused, and those of its update.
    """
    if not force and worker.version(timeout_s) == target.label:
        # A refit that was killed may have left it paused.
        worker.call("resume_generation", timeout_s)
        return 0.0, 0.0
    start = time.monotonic()
    try:
        worker.call("pause_generation", timeout_s, mode="wait", clear_cache=True)
        paused_at = time.monotonic()
        worker.call(
            "update_weights_from_disk",
            timeout_s,
            model_path=target.model,
            weight_version=target.label,
        )
        updating = time.monotonic() - paused_at
        if "flush_cache" in worker.routes:
            worker.call("flush_cache", timeout_s)
    # See the module: a worker that failed refuses by itself, and must not stay paused.
    finally:
        worker.call("resume_generation", timeout_s)
    paused = time.monotonic() - start
    served = worker.version(timeout_s)
    if served != target.label:
        problem = f"serves {served or 'nothing'} after an update to {target.label}"
        raise Retryable(f"worker {worker}: {problem}")
    return paused, updating
