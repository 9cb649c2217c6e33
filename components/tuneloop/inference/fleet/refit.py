"""Bring every worker of a fleet to one version: discover, pause, update, flush, resume, and look again until all are.

Workers of one pass are changed at the same time, each paused for its own update only. `resume_generation` is called
even after a failed update: such a worker must refuse by itself, and the failure is raised here, so that no rollout
counts. A fleet that keeps changing is given up after `PASSES`. A refit can be repeated: a worker that has the version
is only resumed, in case a killed refit left it paused.
"""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Retryable
from tuneloop.core.store import local_path
from tuneloop.formats.facts import VersionFacts
from tuneloop.inference.fleet import Fleet, Unreachable, Worker

PASSES = 5


@dataclass(frozen=True)
class Target:
    """The version that workers are to serve. `label`: their answer afterwards, ``<version>@<digest of checkpoint>``.
    `model`: where they read it, a directory that they see under the same path, or the checkpoint's reference."""

    label: str
    model: str


@dataclass
class Refitted:
    """The timings of a refit. `workers`: id → seconds for which it was paused; 0 if it had the version already.
    `updates`: id → seconds of the pause that ``update_weights_from_disk`` took, for workers that were changed."""

    workers: dict[str, float] = field(default_factory=dict)
    updates: dict[str, float] = field(default_factory=dict)
    urls: list[str] = field(default_factory=list)
    passes: int = 0
    seconds: float = 0.0


def make_target(policy: Artifact) -> Target:
    """Name a checkpoint for workers: by its directory where the store is a volume, else by its reference."""
    version = VersionFacts.read(policy).version
    digest = policy.manifest.digest
    local = local_path(policy.url)
    model = f"{local}/{policy.manifest.root}/model" if local else f"{policy.url}@{digest}"
    return Target(f"{version}@{digest}", model)


def refit_fleet(
    fleet: Fleet,
    wanted: Target,
    *,
    passes: int = PASSES,
    timeout_s: float = 600.0,
    force: bool = False,
) -> Refitted:
    """Bring all workers to `wanted`, in at most `passes` looks at the fleet, of which the last has to find no new
    worker. A worker silent for `timeout_s` seconds counts as gone. `force` updates those that have the version, too.
    Raises Retryable: a worker refused or failed; there is none; the fleet kept changing; UserError: as `discover`."""
    done = Refitted()
    start = time.monotonic()
    lost: Mapping[str, Unreachable] = {}
    while done.passes < passes:
        if done.passes and not done.workers and not lost:
            time.sleep(1.0)  # no worker so far: they may be starting
        done.passes += 1
        workers = {worker.id: worker for worker in fleet.discover()}
        new = [worker for name, worker in workers.items() if name not in done.workers]
        if workers and not new:
            done.workers = {name: done.workers[name] for name in workers}
            done.urls = [worker.url for worker in workers.values()]
            done.seconds = time.monotonic() - start
            return done
        lost = _pass(new, wanted, timeout_s, force, done)
    if lost:
        raise next(iter(lost.values()))
    what = f"{len(done.workers)} workers, and new ones each time" if done.workers else "no worker"
    raise Retryable(
        f"fleet: {passes} passes found {what}; wait until the fleet is stable, then run it again"
    )


def _pass(
    workers: list[Worker], wanted: Target, timeout_s: float, force: bool, done: Refitted
) -> Mapping[str, Unreachable]:
    """Change `workers` at the same time, add those that have the version to `done`, and return those that are gone."""
    lost: dict[str, Unreachable] = {}
    with ThreadPoolExecutor(max(len(workers), 1)) as pool:
        futures = {
            worker.id: pool.submit(_change, worker, wanted, timeout_s, force) for worker in workers
        }
    for name, future in futures.items():
        try:
            done.workers[name], updating = future.result()
            done.updates |= {name: updating} if updating else {}
        except Unreachable as error:
            lost[name] = error
    return lost


def _change(worker: Worker, wanted: Target, timeout_s: float, force: bool) -> tuple[float, float]:
    """Bring one worker to the version; return the seconds for which it was paused, and those of its update."""
    if not force and worker.version(timeout_s) == wanted.label:
        worker.call(
            "resume_generation", timeout_s
        )  # a refit that was killed may have left it paused
        return 0.0, 0.0
    start = time.monotonic()
    try:
        worker.call("pause_generation", timeout_s, mode="wait", clear_cache=True)
        still = time.monotonic()
        worker.call(
            "update_weights_from_disk",
            timeout_s,
            model_path=wanted.model,
            weight_version=wanted.label,
        )
        updating = time.monotonic() - still
        if "flush_cache" in worker.routes:
            worker.call("flush_cache", timeout_s)
    finally:
        worker.call("resume_generation", timeout_s)
    paused = time.monotonic() - start
    if (served := worker.version(timeout_s)) != wanted.label:
        raise Retryable(
            f"worker {worker}: serves {served or 'nothing'} after an update to {wanted.label}"
        )
    return paused, updating
