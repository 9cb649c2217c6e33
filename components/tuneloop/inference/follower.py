"""A replica follows a root of weight versions (docs/weights.md): it serves while it pulls, and proves what it pulls.

The pointer is polled, and read at once when a client asks for a version that is not there yet. A version is fetched and
its lineage and bytes are proved in a directory beside the engine. Only then does the engine pause, change in place,
have its tensors read back, and go on. A failure before the change leaves the old version served; one in the change
poisons the engine, and the directory is rebuilt from a full version. The version served is announced below the root, so
that it is kept there (`tuneloop.weights.live`).
"""

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.store import Store
from tuneloop.inference.engine_loop import EngineLoop, Mode
from tuneloop.inference.engines._readback import read_back
from tuneloop.inference.engines._tensors import Readback, digest_model
from tuneloop.inference.engines.vllm import PROBE, Vllm
from tuneloop.inference.refusals import Refused
from tuneloop.weights import live, pointer
from tuneloop.weights.materialize import MARKER, Materialized, materialize_version
from tuneloop.weights.publication import read_publication
from tuneloop.weights.versions import Chain


class Follower(threading.Thread):
    """Keeps an engine at the latest version below a root, whose pointer it reads every `poll_s` seconds. `directory`,
    in which versions are assembled, is never emptied, so that a restart fetches deltas only. `trouble`: why the latest
    version is not served, or empty. `pulled`: seconds, bytes and tensors of the last pull. `changing`: the version that
    the engine changes to, until its weights are verified; else -1."""

    def __init__(
        self,
        loop: EngineLoop,
        root: str,
        directory: Path,
        poll_s: float,
        mode: Mode,
        base: Path | None,
    ) -> None:
        super().__init__(name="follower", daemon=True)
        self.loop = loop
        self.store = Store(root)
        self.directory = directory
        self.base = base
        self.poll_s = poll_s
        self.mode = mode
        self.trouble = ""
        self.pulled = JsonObject()
        self.changing = -1
        self._wake = threading.Event()
        self._one = threading.RLock()
        self._seen = ""
        self._stopping = False
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._said: tuple[int, float] = (-1, 0.0)

    def run(self) -> None:
        while not self._stopping:
            try:
                self._look()
                self.trouble = ""
            except (
                Exception
            ) as error:  # any error: if the follower died, old weights would be served for ever
                expected = isinstance(error, (UserError, Retryable, Refused))
                trouble = str(error) if expected else f"{type(error).__name__}: {error}"
                if trouble != self.trouble:
                    print(f"serve: {trouble}", file=sys.stderr, flush=True)
                self.trouble = trouble
            self._announce()
            self._wake.wait(self.poll_s)
            self._wake.clear()

    def wake(self) -> None:
        """Read the pointer now, without waiting for the next poll."""
        self._wake.set()

    def stop(self) -> None:
        """End after the current pull, and withdraw the announcement."""
        self._stopping = True
        self.wake()
        if self._said[0] >= 0:
            with suppress(UserError, Retryable):  # a lease that is not removed expires
                live.withdraw_replica(self.store, self._name)

    def reach(self, version: int, digest: str, *, force: bool = False) -> None:
        """Serve `version`, published from the checkpoint `digest`, before returning. Raises Refused: 409 where it is
        not published yet; UserError: another checkpoint was published under this number."""
        chain = Chain(self.store)
        if version not in chain.versions:
            raise Refused(409, f"version {version} is not published below {self.store.url} yet")
        entry = chain.entry(version)
        if entry.index.tuneloop.source not in (None, digest):
            where = f"of {self.store.url} was published from {entry.index.tuneloop.source}, not {digest}"
            raise UserError("version", version, f"{where}; follow the root of this run")
        self._pull(version, force=force)

    def verify(self) -> tuple[int, Readback]:
        """Compare all tensors of the engine with its files; return the version that is served, and the result."""
        engine = self.loop.engine
        with self._one:
            comparison = self.loop.call(
                lambda: (engine.version, read_back(engine.engine, self.directory))
            )
            return comparison.result()

    def _look(self) -> None:
        latest = pointer.read_pointer(self.store)
        with self._one:  # during a change the engine has neither version
            lost = self.loop.trouble and not self.loop.broken and not self.loop.asleep
            if latest is not None and (latest.ref != self._seen or lost):
                self._pull(latest.version)
                self._seen = latest.ref

    def _announce(self) -> None:
        """Announce the served version, if it is new or the last announcement is old."""
        version = self.loop.engine.version
        now = time.monotonic()
        if (
            version < 0
            or self._stopping
            or (version == self._said[0] and now - self._said[1] < live.RENEW_S)
        ):
            return
        self._said = version, now
        try:
            live.announce_version(self.store, self._name, version)
        except (UserError, Retryable) as error:
            remedy = f"pin version {version} where versions are dropped (tuneloop weights gc --pin)"
            print(
                f"serve: cannot announce the served version ({error}); {remedy}",
                file=sys.stderr,
                flush=True,
            )

    def _pull(self, version: int, *, force: bool = False) -> None:
        with self._one:
            if force:
                (self.directory / MARKER).unlink(missing_ok=True)  # rebuild from a full version
            done = materialize_version(
                self.store, version, self.directory, base=self.base, shared=True
            )
            digest = done.source or done.ref
            if (self.loop.engine.version, self.loop.engine.digest) == (
                version,
                digest,
            ) and not force:
                return  # a step that changed nothing gives another version the same digest
            self.pulled = {}
            self.changing = version
            comparisons: list[Readback] = []
            files_digest = digest_model(self.directory)

            def prove(engine: Vllm) -> None:
                comparison = prove_tensors(engine, self.directory)
                comparisons.append(comparison)
                engine.tensor_proof = engine.summarize(comparison, files_digest)

            try:
                took = self.loop.call(
                    self.loop.change, self.directory, version, digest, self.mode, prove
                ).result()
                self.trouble, self.pulled = "", _about(done, took, comparisons[0])
            except Refused:
                (self.directory / MARKER).unlink(missing_ok=True)
                raise
            finally:
                self.changing = -1
            with suppress(
                UserError, Retryable
            ):  # it is for people and reports (`tuneloop.runs.delivery`)
                live.record_pull(self.store, self._name, self.pulled)

    def converged_s(self) -> float | None:
        """Compute the seconds from publishing the version last pulled until it was served; None where unknown."""
        record = read_publication(self.store, self.pulled["version"]) if self.pulled else None
        return None if record is None else max(0.0, self.pulled["served_at"] - record["at"])


def prove_tensors(engine: Vllm, model: Path) -> Readback:
    """Verify that the engine holds every tensor in `model`. Raises RuntimeError if some differ, or cannot be read."""
    comparison = read_back(engine.engine, model, PROBE)
    for names, what in (
        (comparison.different, "differ"),
        (comparison.unread, "cannot be read back from this engine"),
    ):
        if names:
            raise RuntimeError(
                f"{len(names)} of {comparison.tensors} tensors {what}, {names[0]} among them"
            )
    return comparison


def _about(done: Materialized, took: dict[str, float], comparison: Readback) -> JsonObject:
    return {
        "version": done.version,
        "deltas": done.deltas,
        "full": done.full,
        "read_bytes": done.read_bytes,
        **{f"{name}_s": seconds for name, seconds in done.timings.items()},
        **{f"{name}_s": seconds for name, seconds in took.items()},
        "pause_s": took["change"] + took["check"],
        "tensors": comparison.tensors,
        "identical": comparison.identical,
        "served_at": time.time(),
    }
