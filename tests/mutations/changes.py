"""One change at one place of a run's files, as a disk, a person or a program that fails may make it."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from tests.mutations.sample_run import SampleRun
from tuneloop.core.artifacts import CHECKSUM, MANIFEST, _compute_digest, dump_checked_json
from tuneloop.local.journal import SUM

Files = dict[Path, bytes | None]
"""Path → what it holds now; None: it is gone."""
Change = Callable[[SampleRun, Path, random.Random], Files | None]
"""None where the change does not apply to the file."""

KINDS = (
    ("manifest", r"/manifest\.json$"),
    ("record", r"/toy/run\.json$"),
    ("workflow", r"/toy/workflow\.yaml$"),
    ("configuration", r"/toy/config\.yaml$"),
    ("journal", r"/toy/nodes\.jsonl$"),
    ("end of the journal", r"/toy/ended\.json$"),
    ("log", r"/toy/logs/"),
    ("files of pods", r"/toy/nodes/"),
    ("index of the run", r"/toy/index\.zst$"),
    ("report", r"/toy/report\.html$"),
    ("failure", r"/failure\.json$"),
    ("pointer", r"/weights/latest$"),
    ("index of a version", r"/weights/.*\.index\.json$"),
    ("weights of a version", r"/weights/.*\.safetensors$"),
    ("other file of a version", r"/weights/weight_v"),
    ("publication", r"/weights/published/"),
    ("pull", r"/weights/served/"),
    ("replica", r"/weights/live/"),
    ("trainer's state", r"/state/"),
    ("resume point", r"/resume/"),
    ("canary", r"/canary\.json$"),
    ("metrics", r"/metrics\.jsonl$"),
    ("rollouts", r"/rollouts\.(json|parquet)$"),
    ("rewards and samples", r"\.parquet$"),
    ("model", r"/model/|/weights\.json$"),
)

CHECKED = ("manifest", "record", "end of the journal", "failure", "publication", "pull", "replica")
"""Kinds with a checksum of their own."""


def kind_of(path: Path) -> str | None:
    """The kind of a file; None for locks, which hold nothing."""
    name = str(path)
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), None)


def flip_bit(run: SampleRun, path: Path, chance: random.Random) -> Files | None:
    data = bytearray(path.read_bytes())
    if not data:
        return None
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return {path: bytes(data)}


def truncate(run: SampleRun, path: Path, chance: random.Random) -> Files | None:
    data = path.read_bytes()
    return {path: data[: chance.randrange(len(data))]} if data else None


def append_garbage(run: SampleRun, path: Path, chance: random.Random) -> Files:
    more = chance.choice([b"\0" * 8, b"}\n", b"garbage\n", chance.randbytes(20), b" ", b"\n{}\n"])
    return {path: path.read_bytes() + more}


def remove(run: SampleRun, path: Path, chance: random.Random) -> Files:
    return {path: None}


def swap(run: SampleRun, path: Path, chance: random.Random) -> Files | None:
    others = [
        each
        for each in run.kept
        if kind_of(each) == kind_of(path) and run.kept[each][0] != run.kept[path][0]
    ]
    if not others:
        return None
    other = chance.choice(others)
    return {path: run.kept[other][0], other: run.kept[path][0]}


VALUES: dict[str, Callable[[Any, random.Random], Any]] = {
    "number": lambda old, chance: chance.choice([0, -1, 1, 7, 0.5, 1e308, 2**63, 10**30, -0.0]),
    "string": lambda old, chance: chance.choice(
        ["", "x", "0", "../x", "/etc/passwd", "\0", "é", "1e5", "NaN"]
    ),
    "null": lambda old, chance: None,
    "list or object": lambda old, chance: chance.choice(
        [[], {}, [None], {"a": 1}, [[1]], True, False]
    ),
    "near": lambda old, chance: _change_slightly(old, chance),
}


def _change_slightly(old: Any, chance: random.Random) -> Any:
    if isinstance(old, bool) or old is None:
        return not old
    if isinstance(old, int | float):
        return chance.choice([old + 1, old - 1, old * 0.5, -old])
    if isinstance(old, str) and old:
        at = chance.randrange(len(old))
        return old[:at] + chance.choice("0af./x1") + old[at + 1 :]
    return [old]


def list_places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places inside a JSON value."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inside:
        yield (*at, key)
        yield from list_places(each, (*at, key))


def change_json(value: Any, how: str, chance: random.Random) -> Any:
    """Change one place of a JSON value in place, and return the value; None where `how` finds no place."""
    places = [*list_places(value)]
    if not places:
        return None
    *above, last = chance.choice(places)
    inside = value
    for key in above:
        inside = inside[key]
    if how == "missing":
        del inside[last]
    elif how == "extra":
        inside.update(extra=1) if isinstance(inside, dict) else inside.append(inside[0])
    elif how == "swapped":
        keys = [*inside] if isinstance(inside, dict) else [*range(len(inside))]
        other = chance.choice(keys)
        if inside[other] == inside[last]:
            return None
        inside[last], inside[other] = inside[other], inside[last]
    else:
        new = VALUES[how](inside[last], chance)
        if json.dumps(new) == json.dumps(inside[last]):
            return None
        inside[last] = new
    return value


def _change_text(data: bytes, how: str, chance: random.Random) -> bytes | None:
    """Change JSON, or one line of a file of JSON lines."""
    lines = data.split(b"\n")
    try:
        json.loads(data)
        lines = [data]
    except ValueError:
        pass
    at = chance.randrange(len(lines))
    try:
        changed = change_json(json.loads(lines[at]), how, chance)
    except ValueError:
        return None
    lines[at] = json.dumps(changed).encode()
    return None if changed is None else b"\n".join(lines)


def _json_change(how: str) -> Change:
    def change(run: SampleRun, path: Path, chance: random.Random) -> Files | None:
        changed = _change_text(path.read_bytes(), how, chance)
        return None if changed is None else {path: changed}

    return change


def _change_bytes(path: Path, chance: random.Random) -> bytes | None:
    """Some other content of a file."""
    data = path.read_bytes()
    changed = _change_text(data, "near", chance)
    if changed is None and data:
        changed = data[:-1] + bytes([data[-1] ^ 1])
    return changed


def change_with_digest(run: SampleRun, path: Path, chance: random.Random) -> Files | None:
    """A file and what is said of it next to it: an artifact's file with its entry in the manifest; a file of a weight
    version with its index."""
    changed = _change_bytes(path, chance)
    if changed is None:
        return None
    if (kind := kind_of(path)) in CHECKED or kind == "journal":
        return None
    if kind in ("weights of a version", "other file of a version"):
        index = path.with_name("model.safetensors.index.json")
        told = json.loads(index.read_bytes())
        for tensor in told["tuneloop"]["checksums"]:
            told["tuneloop"]["checksums"][tensor] = f"{chance.getrandbits(128):032x}"
        for about in told["tuneloop"]["files"].values():
            if about.get("stored") == path.name and "digest" in about:
                about["digest"] = xxhash.xxh3_128_hexdigest(changed)
        return {path: changed, index: json.dumps(told).encode()}
    for folder in path.parents:
        if (folder / MANIFEST).is_file() and path.name != MANIFEST:
            told = json.loads((folder / MANIFEST).read_bytes())
            name = (
                str(path.relative_to(folder / told["root"]))
                if folder / told["root"] in path.parents
                else ""
            )
            if name not in told["files"]:
                return None
            about = {"size": len(changed), "digest": xxhash.xxh3_128_hexdigest(changed)}
            told["files"][name] = {**about, "sha256": hashlib.sha256(changed).hexdigest()}
            return {path: changed, folder / MANIFEST: json.dumps(told).encode()}
    return None


def forge(run: SampleRun, path: Path, chance: random.Random) -> Files | None:
    """A change that its maker has made to fit: a file with all digests and checksums that are stated with it."""
    changed = _change_text(
        path.read_bytes(), chance.choice([*VALUES, "missing", "swapped"]), chance
    )
    if changed is None:
        return None
    if kind_of(path) == "journal":
        return {path: _sum_lines(changed)}
    if kind_of(path) not in CHECKED:
        return None
    told = json.loads(changed)
    told.pop(CHECKSUM, None)
    if kind_of(path) == "manifest":
        told["digest"] = _compute_digest(told)
    keys = {
        "manifest": MANIFEST,
        "record": "toy/run.json",
        "failure": path.name,
        "end of the journal": path.name,
    }
    key = keys.get(str(kind_of(path)))
    key = key or str(path).partition("/weights/")[2]
    return {path: dump_checked_json(told, key)}


def _sum_lines(data: bytes) -> bytes:
    bodies = (line.rpartition(SUM)[0] for line in data.split(b"\n") if line)
    return b"".join(
        body + SUM + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n' for body in bodies
    )


CHANGES: dict[str, Change] = {
    "bit flipped": flip_bit,
    "truncated": truncate,
    "garbage appended": append_garbage,
    "removed": remove,
    "two files swapped": swap,
    **{f"JSON: {how}": _json_change(how) for how in (*VALUES, "missing", "extra", "swapped")},
    "with its digest": change_with_digest,
    "all made to fit": forge,
}
