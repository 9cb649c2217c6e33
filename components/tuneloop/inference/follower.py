"""A replica follows a root of weight versions (docs/weights.md).

It serves while it pulls, and proves what it pulls. The pointer is polled, and read at once when a
client asks for a version that is not there yet. A version is fetched and its lineage and bytes are
proved in a directory beside the engine. Only then does the engine pause, change in place, have its
tensors read back, and go on. A failure before the change leaves the old version served; one in the
change poisons the engine, and the directory is rebuilt from a full version. The version served is
announced below the root, so that it is kept there (`tuneloop.weights.live`).

`inference/server.py` starts it with ``--weights``, and `inference/http_api.py` asks it in place of
the loop to load and to verify. The tests are `tests/unit/inference/test_follow.py` and
`tests/local/test_pull.py`.
"""

import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from tuneloop.core.errors import Retryable, UserError, print_diagnostic
from tuneloop.core.json_types import JsonObject
from tuneloop.core.store import Store
from tuneloop.core.wording import format_count
from tuneloop.inference.engine_loop import EngineLoop, Mode
from tuneloop.inference.engines._tensors import Readback, digest_model
from tuneloop.inference.refusals import Refused
from tuneloop.inference.served import PROBE, ServedEngine
from tuneloop.weights import live, pointer
from tuneloop.weights.materialize import MARKER, Materialized, materialize_version
from tuneloop.weights.publication import read_publication
from tuneloop.weights.versions import Chain


class Follower(threading.Thread):
    """Keeps an engine at the latest version below a root.

    A pull is recorded by `_describe_pull`: `weights/live.py: PULL` lists the fields that
    `runs/delivery.py` requires. ``fetch_s`` and ``apply_s`` are named by the timings of
    `materialize_version`, ``drain_s``, ``change_s`` and ``check_s`` by those of
    `EngineLoop.change`.

    Args:
        loop: of the engine.
        root: URL below which versions are published.
        directory: in which versions are assembled. It is never emptied, so that a restart fetches
            deltas only.
        poll_s: seconds between two reads of the pointer.
        mode: what becomes of running requests when weights change.
        base: the model that versions start on, where version 0 stores none.

    Attributes:
        trouble: why the latest version is not served, or empty.
        pulled: seconds, bytes and tensors of the last pull, as `_describe_pull` returns them; empty
            while a pull changes the engine.
        changing: the version that the engine changes to, until its weights are verified; else -1.
    """

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
        self.pulled: JsonObject = {}
        self.changing = -1
        self._wake = threading.Event()
        # Only one thread changes the engine, or reads its tensors, at a time. It is taken before
        # `loop.call`, never on the engine's thread, which would wait for itself.
        self._lock = threading.RLock()
        self._latest_ref = ""
        self._stopping = False
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._announced_version = -1
        self._announced_at = 0.0

    def run(self) -> None:
        while not self._stopping:
            try:
                self._look()
                self.trouble = ""
            except Exception as error:
                # If the follower died of an error, old weights would be served for ever.
                is_expected = isinstance(error, UserError | Retryable | Refused)
                trouble = str(error) if is_expected else f"{type(error).__name__}: {error}"
                if trouble != self.trouble:
                    print_diagnostic(f"serve: {trouble}", 0)
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
        if self._announced_version >= 0:
            # A lease that is not removed expires.
            with suppress(UserError, Retryable):
                live.withdraw_replica(self.store, self._name)

    def reach(self, version: int, digest: str, *, force: bool = False) -> None:
        """Serve `version`, published from the checkpoint `digest`, before returning.

        Raises:
            Refused: with 409, the version is not published yet.
            UserError: another checkpoint was published under this number.
        """
        chain = Chain(self.store)
        url = self.store.url
        if version not in chain.versions:
            raise Refused(409, f"version {version} is not published below {url} yet")
        source = chain.entry(version).index.tuneloop.source
        if source not in (None, digest):
            problem = f"of {url} was published from {source}, not {digest}"
            raise UserError("version", version, f"{problem}; follow the root of this run")
        self._pull(version, force=force)

    def verify(self) -> tuple[int, Readback]:
        """Compare all tensors of the engine with its files; return the version served, too."""
        engine = self.loop.engine

        def compare() -> tuple[int, Readback]:
            return engine.version, engine.compare_files(self.directory, every=1)

        with self._lock:
            return self.loop.call(compare).result()

    def _look(self) -> None:
        """Pull the latest version, if it is new or the engine has lost its own."""
        latest = pointer.read_pointer(self.store)
        # During a change, which has the lock, the engine has neither version.
        with self._lock:
            is_lost = self.loop.trouble and not self.loop.broken and not self.loop.asleep
            if latest is not None and (latest.ref != self._latest_ref or is_lost):
                self._pull(latest.version)
                self._latest_ref = latest.ref

    def _announce(self) -> None:
        """Announce the served version, if it is new or the last announcement is old."""
        version = self.loop.engine.version
        time_s = time.monotonic()
        # An announcement that is not renewed expires, so that versions are not kept for dead pods.
        is_fresh = time_s - self._announced_at < live.RENEW_S
        if version < 0 or self._stopping or (version == self._announced_version and is_fresh):
            return
        self._announced_version = version
        self._announced_at = time_s
        try:
            live.announce_version(self.store, self._name, version)
        except (UserError, Retryable) as error:
            remedy = f"pin version {version} where versions are dropped (tuneloop weights gc --pin)"
            line = f"serve: cannot announce the served version ({error}); {remedy}"
            print_diagnostic(line, 0)

    def _pull(self, version: int, *, force: bool = False) -> None:
        """Fetch a version, and change to it. `force`: also if it is served, from a full version."""
        engine = self.loop.engine
        with self._lock:
            if force:
                (self.directory / MARKER).unlink(missing_ok=True)
            fetched = materialize_version(
                self.store,
                version,
                self.directory,
                base=self.base,
                shared=True,
            )
            digest = fetched.source or fetched.ref
            # A step that changed nothing gives another version the same digest.
            if (engine.version, engine.digest) == (version, digest) and not force:
                return
            self.pulled = {}
            self.changing = version
            comparisons: list[Readback] = []
            files_digest = digest_model(self.directory)

            def prove(engine: ServedEngine) -> None:
                comparison = prove_tensors(engine, self.directory)
                comparisons.append(comparison)
                engine.tensor_proof = engine.summarize(comparison, files_digest)

            try:
                timings = self.loop.call(
                    self.loop.change,
                    self.directory,
                    version,
                    digest,
                    self.mode,
                    prove,
                ).result()
                self.trouble = ""
                self.pulled = _describe_pull(fetched, timings, comparisons[0])
            except Refused:
                (self.directory / MARKER).unlink(missing_ok=True)
                raise
            finally:
                self.changing = -1
            # The record is for people and reports (`tuneloop.runs.delivery`).
            with suppress(UserError, Retryable):
                live.record_pull(self.store, self._name, self.pulled)

    def converged_s(self) -> float | None:
        """Compute the seconds from publishing the version last pulled until it was served.

        None where they are unknown.
        """
        record = read_publication(self.store, self.pulled["version"]) if self.pulled else None
        return None if record is None else max(0.0, self.pulled["served_at"] - record["at"])


def prove_tensors(engine: ServedEngine, model: Path) -> Readback:
    """Verify that the engine holds every tensor in `model`.

    It is stricter than a server that loads checkpoints (`inference/http_api.py: change_policy`),
    which accepts tensors that cannot be read back.

    Raises:
        RuntimeError: some differ, or cannot be read.
    """
    comparison = engine.compare_files(model, PROBE)
    problems = {
        "differ": comparison.different,
        "cannot be read back from this engine": comparison.unread,
    }
    for problem, names in problems.items():
        if names:
            count = f"{len(names)} of {format_count(comparison.tensors, 'tensor')}"
            raise RuntimeError(f"{count} {problem}, {names[0]} among them")
    return comparison


def _describe_pull(
    fetched: Materialized,
    timings: dict[str, float],
    comparison: Readback,
) -> JsonObject:
    pull: JsonObject = {
        "version": fetched.version,
        "deltas": fetched.deltas,
        "full": fetched.full,
        "read_bytes": fetched.read_bytes,
    }
    for name, seconds in (fetched.timings | timings).items():
        pull[f"{name}_s"] = seconds
    pull["pause_s"] = timings["change"] + timings["check"]
    pull["tensors"] = comparison.tensors
    pull["identical"] = comparison.identical
    pull["served_at"] = time.time()
    return pull
