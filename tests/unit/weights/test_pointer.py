"""The pointer never goes backward and never splits, on files and (in the cluster tier) on S3."""

import multiprocessing
from pathlib import Path

import pytest

from tuneloop.core.store import Store
from tuneloop.weights.pointer import (
    Latest,
    PointerConflict,
    PointerRewind,
    advance_pointer,
    read_pointer,
)


def at(version: int, ref: str = "file:///c") -> Latest:
    return Latest(version=version, ref=f"{ref}{version}")


def test_moves_forward_only(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    assert read_pointer(url) is None
    assert advance_pointer(url, at(1))
    assert not advance_pointer(url, at(1)), "the same move twice is one move"
    assert advance_pointer(url, at(3))
    with pytest.raises(PointerRewind, match="at version 3 already"):
        advance_pointer(url, at(2))
    with pytest.raises(PointerConflict, match="version 3"):
        advance_pointer(url, at(3, "file:///other"))
    assert read_pointer(url) == at(3)


def _climb(url: str, start: int, moved: "multiprocessing.Queue[int]") -> None:
    count = 0
    for version in range(start, 200, 2):
        try:
            count += advance_pointer(url, at(version))
        except PointerRewind:
            continue
    moved.put(count)


def test_two_racing_processes_agree(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    Store(url).create("seen", b"")
    moved: multiprocessing.Queue[int] = multiprocessing.Queue()
    racers = [multiprocessing.Process(target=_climb, args=(url, start, moved)) for start in (0, 1)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    assert read_pointer(url) == at(199)
    assert moved.get() + moved.get() <= 200, "no version is published twice"
    assert not [
        p for p in tmp_path.iterdir() if ".latest." in p.name and not p.name.endswith("lock")
    ], "no leftovers"
