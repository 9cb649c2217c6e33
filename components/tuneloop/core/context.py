"""What a stage's function is given: where to write, what to report, when to stop, how to go on after
a stop.

`core/component.py` makes the `Stage` of a program's attempt, and calls the function with it; a
stage's file needs nothing else of this package. The gateway's session makes one of its own
(`extensions/gateway/resident.py`). With several ranks each has a `Stage`, and what is said to be
called by all ranks waits for all of them.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic

from pydantic import BaseModel
from typing_extensions import TypeVar

from tuneloop.core.artifacts import (
    MANIFEST,
    Artifact,
    Draft,
    Manifest,
    delete_draft,
    dump_canonical_json,
)
from tuneloop.core.errors import Interrupted
from tuneloop.core.json_types import JsonObject
from tuneloop.core.progress import Progress
from tuneloop.core.seeds import derive_seed
from tuneloop.core.store import Store
from tuneloop.core.threads import forward_signals


class Params(BaseModel, frozen=True, extra="forbid", protected_namespaces=()):
    """A stage's parameters; generated from its signature."""

    def to_parameters(self) -> JsonObject:
        """Return the values by the names that the stage has for them."""
        return self.model_dump()


class Options(BaseModel, frozen=True, extra="forbid", protected_namespaces=()):
    """Parameters that several stages share.

    Attributes:
        flags: the fields that are flags, in this order; empty: all fields are. A field that a
            subclass's list leaves out is no parameter, and keeps its default: who adds one looks at
            the lists of `training/options.py`, `stages/policy_update.py`, `stages/rollout.py`,
            `stages/evaluate.py` and `stages/reference_logprobs.py`.
    """

    flags: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the fields that are flags."""
        return cls.flags or tuple(cls.model_fields)


StageParams = TypeVar("StageParams", default=Any)


METRICS = "metrics.jsonl"
"""The file of an artifact to which `Stage.metric` appends its rows. Curves and the report read
it (`tuneloop.runs.committed`), and `kfp/previews.py`; retention keeps it of deleted checkpoints
(`runs/retention.py`, `training/old_checkpoints.py`); `training/epochs.py` saves it with resume
points."""


@dataclasses.dataclass
class Stage(Generic[StageParams]):
    """What a stage's function is given of the run it is part of.

    A function that reads parameters of the stage names them by a protocol, as in
    ``Stage[RetentionParams]``. A new field needs a default: `core/component.py: Component._open`
    and `extensions/gateway/resident.py` make stages.

    Attributes:
        out: the directory for output files, shared by all ranks of a machine, and by all machines
            on a shared volume.
        attempt: the name of this attempt's data directory; all ranks agree on it.
        rank, local_rank, world_size: as torchrun sets them.
        facts: what the manifest will say of the output (JSON); equal work has equal facts, wherever
            it is done. Stages read those of others by the classes of `formats/facts.py`.
        notes: what it will say of this attempt: device, number of processes, what was resumed. The
            digest does not cover them, nor `timings`. Readers ask for some by name, such as
            `world_size` (`runs/replay.py`), `efficiency` (`ui/describe.py`) and those of
            `runs/delivery.py`.
        timings: seconds, and rates whose name ends in ``_per_s``.
        barrier: waits for all ranks; the trainer replaces it once a process group exists.
        stopping: whether SIGTERM or SIGINT has arrived.
        later: the work that `commit_later` defers; it is called with the manifest committed at
            `out_url`.
        tracked: the parameters by which a committed output is recognized as this stage's own.
        inputs: name → reference.
    """

    name: str
    params: StageParams
    out: Path
    out_url: str
    attempt: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    facts: JsonObject = dataclasses.field(default_factory=dict)
    notes: JsonObject = dataclasses.field(default_factory=dict)
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
    barrier: Callable[[], None] = lambda: None
    stopping: bool = False
    later: Callable[[Manifest], None] | None = None
    tracked: JsonObject = dataclasses.field(default_factory=dict)
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def leader(self) -> bool:
        """Whether this is the first rank, which logs and commits."""
        return self.rank == 0

    def log(self, message: str) -> None:
        """Print one line for people, on standard error, from the first rank only."""
        if self.leader:
            print(f"{self.name}: {message}", file=sys.stderr, flush=True)

    def progress(self, total: int, unit: str, earlier: int = 0) -> Progress:
        """Return a display of `total` units, `earlier` of them done before.

        ``update(done, loss=…)`` moves it.
        """
        return Progress(self.name, total, unit, earlier, quiet=not self.leader)

    def seed(self, purpose: str, *index: int | str) -> int:
        """Derive the seed of a named stream, from the stage's ``seed`` parameter (and
        ``iteration``, which is 0 for a stage outside a loop).

        Raises:
            LookupError: the stage has no parameter ``seed``: every run would draw the same.
        """
        params = vars(self.params)
        if "seed" not in params:
            raise LookupError(
                f"{self.name}: a stage that draws random numbers needs a parameter `seed`"
            )
        return derive_seed(params["seed"], purpose, params.get("iteration", 0), *index)

    def metric(self, step: int, **values: float) -> None:
        """Append one row to ``metrics.jsonl``.

        No times may be in it: the file is part of the digest. Each name becomes a curve of its own,
        if the stage's role is one of `runs/run_record.py: RECORDING_ROLES` and the name is none of
        `NO_CURVES` there; `runs/alarms.py` watches some curves by name.
        """
        if self.leader:
            row = dump_canonical_json({"step": step} | values)
            with (self.out / METRICS).open("a") as file:
                file.write(f"{row}\n")

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to ``timings[name]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start

    def check_stop(self) -> None:
        """Leave the stage if SIGTERM has arrived. Raises Interrupted: exit code 75 follows."""
        if self.stopping:
            raise Interrupted(f"{self.name}: stopped by a signal")

    def save_resume(self, step: int, write: Callable[[Path], None]) -> None:
        """Commit what a retry needs to go on from `step`; called by all ranks.

        Older resume points, and those of other inputs or parameters, are deleted. Their folder,
        ``resume``, is named by `runs/retention.py`, `kfp/stage.py` and `core/component.py`, too;
        the last deletes it with the commit. A new resume point is progress for `core/attempts.py`.

        Args:
            write: gets a directory that the ranks of one machine share.
        """
        draft = Draft(f"{self.out_url}/resume/{step:08d}", attempt=self.attempt)
        try:
            write(draft.path)
        except BaseException:
            # On a full disk its files would be in the way of the next attempt. Other ranks may
            # still write to it.
            if self.world_size == 1:
                delete_draft(draft.path)
            raise
        self.bring(draft)
        if self.leader:
            store = Store(self.out_url)
            for name in self.resume_points():
                point = Artifact(f"{self.out_url}/resume/{name}")
                # It would stop the commit of ours, or count as the newest.
                if not self._is_own(point):
                    store.delete(f"resume/{name}/{MANIFEST}")
                    store.delete(f"resume/{name}/{point.manifest.root}")
            draft.commit(
                stage=self.name,
                params=self.tracked,
                inputs=self.inputs,
                facts={"step": step},
            )
            for name in self.resume_points()[:-1]:
                store.delete(f"resume/{name}")
        self.barrier()

    def commit_later(self, name: str, write: Callable[[Path], None], **fields: Any) -> None:
        """Commit an artifact at `name` below the output, once the output is committed; called by
        all ranks.

        A single process writes it on a thread while later stages run (`tuneloop.core.threads`).
        Several processes end with their stage, so they write it in this call.

        A stage calls it once. The one use is the trainer's state at ``state``, which retention
        knows by that name (`training/old_checkpoints.py: STATE`).

        Args:
            write: gets the directory to write to; what it reads must not change until the thread is
                done.
            fields: of the manifest, such as ``kind`` and ``facts``.
        """
        assert self.later is None, "commit_later is called once"
        draft = Draft(f"{self.out_url}/{name}", attempt=self.attempt)
        if self.world_size > 1:
            write(draft.path)
            self.bring(draft)
        else:
            delete_draft(draft.path)

        def commit(manifest: Manifest) -> None:
            try:
                if self.world_size == 1:
                    draft.path.mkdir(parents=True)
                    write(draft.path)
                # A duplicate of this stage that was faster commits its own.
                if manifest.root != self.attempt:
                    delete_draft(draft.path)
                    return
                output = f"{self.out_url}@{manifest.digest}"
                draft.commit(stage=self.name, inputs={manifest.kind: output}, **fields)
            except BaseException:
                delete_draft(draft.path)
                raise

        self.later = commit

    def latest_resume(self) -> Artifact | None:
        """Find the newest resume point that an earlier attempt of this very stage committed."""
        for name in reversed(self.resume_points()):
            point = Artifact(f"{self.out_url}/resume/{name}")
            if self._is_own(point):
                return point
        return None

    def _is_own(self, point: Artifact) -> bool:
        manifest = point.manifest
        return manifest.params == self.tracked and manifest.inputs == self.inputs

    def resume_points(self) -> list[str]:
        """List the names of the resume points below the output, oldest first."""
        keys = Store(self.out_url).keys("resume")
        return sorted(key.split("/")[1] for key in keys if key.endswith(f"/{MANIFEST}"))

    def bring(self, draft: Draft) -> None:
        """Bring what every machine has written to where the leader finds it, before it commits."""
        self.barrier()
        # The leader commits the files of its own machine.
        if self.local_rank == 0 and not self.leader:
            draft.contribute(self.rank)
        self.barrier()


@contextmanager
def handle_signals(stage: Stage) -> Iterator[None]:
    """Set ``stage.stopping`` on SIGTERM and SIGINT, and discard half-written output if the stage
    ends early.
    """
    with forward_signals(lambda number: setattr(stage, "stopping", True)):
        try:
            yield
        except BaseException:
            if stage.leader:
                # Drafts for an object store lie beside each other: the output, and resume points.
                for path in stage.out.parent.glob(f"*{stage.attempt}*"):
                    delete_draft(path)
            raise
