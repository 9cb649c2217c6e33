"""Disks of a few bytes, for tests of what happens when one is full: a tmpfs of its own, where mounting is allowed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class NoMounts(Exception):
    """This machine, or this user, may not mount a file system."""


@dataclass(frozen=True)
class SmallDisk:
    """A mounted disk at `path`."""

    path: Path

    def resize(self, size: int) -> None:
        """Give the disk `size` bytes."""
        _mount("-o", f"remount,size={size}", str(self.path))

    def count_used(self) -> int:
        """Return the bytes that are used."""
        status = os.statvfs(self.path)
        return (status.f_blocks - status.f_bfree) * status.f_frsize


@contextmanager
def mount_small_disk(path: Path, size: int) -> Iterator[SmallDisk]:
    """Mount a disk of `size` bytes at `path` for the block. Raises NoMounts where that is not allowed."""
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "tuneloop-test", str(path))
    try:
        yield SmallDisk(path)
    finally:
        # Lazily, as a process that was ended may still close its files.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _mount(*words: str) -> None:
    try:
        subprocess.run(["mount", *words], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NoMounts("there is no program `mount`") from error
    except subprocess.CalledProcessError as error:
        raise NoMounts(error.stderr.strip()) from error
