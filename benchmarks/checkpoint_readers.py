"""Rollout servers that bring in one checkpoint at the same time: each by a cache of its own, or all by their node's.

    python -m benchmarks.checkpoint_readers [--readers 8] [--megabytes 64] [--line 200]

The store is an S3 in this process, over a line of so many MB/s that all requests share. Every reader is a process that
takes the checkpoint's ``model/`` as a server of a fleet does that is told to (`Artifact.part`), and proves its bytes.
The seconds are from the moment at which all of them have started until the last has ended.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.store_bytes import serve_s3
from tuneloop.core.artifacts import Artifact, Draft

READ = """
import sys
from tuneloop.core.artifacts import Artifact
print("ready", flush=True)
sys.stdin.readline()
Artifact(sys.argv[1]).part("model")
"""


def commit_checkpoint(url: str, size: int) -> str:
    """Commit ``model/model.safetensors`` with `size` random bytes, and return its reference."""
    draft = Draft(url)
    (draft.path / "model").mkdir()
    (draft.path / "model" / "model.safetensors").write_bytes(os.urandom(size))
    draft.commit(stage="benchmark")
    return Artifact(url).ref


def read_at_once(ref: str, caches: Sequence[Path]) -> float:
    """Have one process for each of `caches` read the checkpoint, all at once, and return the seconds it took."""
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READ, ref],
            env={**os.environ, "TUNELOOP_CACHE": str(cache)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for cache in caches
    ]
    for reader in readers:
        assert reader.stdout and reader.stdout.readline() == "ready\n"
    clock = time.perf_counter()
    for reader in readers:
        assert reader.stdin
        reader.stdin.write("\n")
        reader.stdin.flush()
    assert [reader.wait() for reader in readers] == [0] * len(readers)
    return time.perf_counter() - clock


def list_caches(work: Path, readers: int) -> dict[str, list[Path]]:
    """List the cache of each reader, where each has its own, and where they share their node's."""
    own = [work / f"cache-{number}" for number in range(readers)]
    return {"each its own": own, "their node's": [work / "cache"] * readers}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=64, help="of the checkpoint's model/")
    parser.add_argument("--line", type=float, default=200.0, help="MB/s")
    flags = parser.parse_args()
    title = f"{flags.readers} readers of {flags.megabytes} MB, a line of {flags.line:g} MB/s"
    table = Table("cache", "MB from the store", "seconds until the last has it", title=title)
    with tempfile.TemporaryDirectory() as work, serve_s3(Path(work, "objects")) as store:
        ref = commit_checkpoint("s3://bucket/checkpoint", flags.megabytes * 10**6)
        store.bytes_per_s = flags.line * 1e6
        for name, caches in list_caches(Path(work), flags.readers).items():
            store.log.clear()
            seconds = read_at_once(ref, caches)
            table.add_row(name, f"{store.read('/model/') / 1e6:.1f}", f"{seconds:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
