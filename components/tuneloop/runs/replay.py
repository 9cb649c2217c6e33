"""Replay: compute an artifact of a run again, from the inputs and parameters that its manifest names. A stage is a
function of these: a digest that differs is a fault, and the first difference is named. The run stays as it is."""

import dataclasses
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tuneloop.core.artifacts import STATED, Artifact, Manifest, split_ref
from tuneloop.core.component import find_component
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.runs.run_record import Entry, Run

DECIDING = ("device", "threads", "code", "packages")
"""The entries of an artifact's provenance that may change its bits."""


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The comparison of an artifact with the result of computing it again."""

    entry: Entry
    manifest: Manifest
    difference: str | None


def replay_iteration(run: Run, iteration: int, stage: str | None = None) -> Iterator[Replayed]:
    """Compute an iteration's artifacts again (0: those outside the loop), in this process and in their order; with
    `stage`, the last part of an artifact's key, only that one. Raises UserError if there is none, an input is missing,
    or it was not made by one of tuneloop's own stages in one process."""
    chosen = [
        e for e in run.entries if (e.iteration or 0) == iteration and stage in (None, e.stage)
    ]
    if not chosen:
        known = (
            ", ".join(sorted({e.stage for e in run.entries if (e.iteration or 0) == iteration}))
            or "none"
        )
        raise UserError(
            "iteration", iteration, f"has no {stage or 'artifact'} in {run.name}; known: {known}"
        )
    for entry in chosen:
        yield _replay(run, entry)


def find_departure(one: Run, two: Run) -> str | None:
    """Find the first artifact in which two runs differ, and how; None if all artifacts that both have are equal."""
    others = {entry.key: entry for entry in two.entries}
    for entry in sorted(one.entries, key=lambda entry: (entry.iteration or 0, entry.started)):
        other = others.get(entry.key)
        if other and other.manifest.digest != entry.manifest.digest:
            ours, theirs = (Artifact(f"{run.url}/{entry.key}") for run in (one, two))
            return f"{entry.key}: {_find_difference(ours, theirs)}"
    return None


def locate_artifact(run: Run, ref: str) -> str:
    """Return the reference to an artifact where the run lies now; `ref` itself where the run does not hold it."""
    here = run.maker(ref)
    return f"{run.url}/{here.key}@{here.manifest.digest}" if here else ref


def _replay(run: Run, entry: Entry) -> Replayed:
    made = entry.manifest
    if (component := find_component(f"tuneloop.stages.{made.stage}")) is None:
        raise UserError(
            "stage", made.stage, "is not one of tuneloop's own: only these can be replayed"
        )
    if (processes := made.notes.get("world_size", 1)) != 1:
        remedy = f"was made by {processes} processes, and another number gives other bits: run the stage under torchrun"
        raise UserError("artifact", f"{run.url}/{entry.key}", remedy)
    with tempfile.TemporaryDirectory(prefix="tuneloop-replay-") as scratch:
        known = component.Params.model_fields.keys()
        given = {name: value for name, value in made.params.items() if name in known}
        if "state_every" in known:  # no training continues from this one
            given["state_every"] = made.params["iteration"] + 1
        given |= {name: locate_artifact(run, ref) for name, ref in made.inputs.items()}
        again = component(out=scratch, **given)
        if again.digest == made.digest:
            return Replayed(entry, again, None)
        difference = _find_difference(Artifact(f"{run.url}/{entry.key}"), Artifact(scratch))
        then, now = made.provenance, again.provenance
        others = [
            f"{k} {then.get(k)} then, {now.get(k)} now"
            for k in DECIDING
            if then.get(k) != now.get(k)
        ]
        return Replayed(entry, again, "; ".join([difference, *others]))


def _find_difference(committed: Artifact, again: Artifact) -> str:
    """Find the first difference of two artifacts: in what they were made from, in files, in what is said of them."""
    one, two = (_state(artifact.manifest) for artifact in (committed, again))
    for field in (*STATED[:6], "files", *STATED[6:8]):
        for name in sorted(
            {*one[field], *two[field]}, key=lambda name: (".safetensors" not in name, name)
        ):
            ours, theirs = (stated[field].get(name) for stated in (one, two))
            if ours != theirs and field == "files" and ours and theirs:
                try:
                    return f"file {name}: {_compare_files(committed.part(name), again.part(name))}"
                except (
                    Corrupt
                ):  # retention deletes the files of old checkpoints, and keeps what is said of them
                    return f"file {name}: SHA-256 {ours['sha256']}, {theirs['sha256']}; its bytes are gone"
            if ours != theirs:
                return f"{field} {name}".rstrip() + f": {ours!r}, {theirs!r}"
    return "the manifests"


def _state(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return what a manifest states: field → name → value; the name is empty for a field without names."""
    told = manifest.model_dump(mode="json", include={*STATED})
    told["inputs"] = {name: split_ref(ref)[1] for name, ref in manifest.inputs.items()}
    return {
        field: value if isinstance(value, dict) else {"": value} for field, value in told.items()
    }


def _compare_files(one: Path, two: Path) -> str:
    """Say where two files differ first: tensor and element, or line."""
    if one.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(one, "pt") as left, safe_open(two, "pt") as right:
            for name in sorted({*left.keys(), *right.keys()}):
                if name not in left.keys() or name not in right.keys():  # noqa: SIM118 (these are no mappings)
                    return f"tensor {name}: only in one of the two"
                ours, theirs = left.get_tensor(name), right.get_tensor(name)
                if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                    return f"tensor {name}: {ours.dtype} {tuple(ours.shape)}, {theirs.dtype} {tuple(theirs.shape)}"
                if (places := (ours.nan_to_num() != theirs.nan_to_num()).nonzero()).numel():
                    at = tuple(places[0].tolist())
                    return f"tensor {name}, element {list(at)}: {ours[at]:g}, {theirs[at]:g} ({len(places)} differ)"
    lines = enumerate(
        zip_longest(one.read_bytes().splitlines(), two.read_bytes().splitlines()), start=1
    )
    number, pair = next(((n, pair) for n, pair in lines if pair[0] != pair[1]), (0, (b"", b"")))
    if not number or one.suffix not in (".json", ".jsonl"):
        return "the bytes differ"
    left, right = ((line or b"").decode() for line in pair)
    start = max(
        0, next((i for i, both in enumerate(zip(left, right)) if both[0] != both[1]), 0) - 60
    )
    return f"line {number}: {left[start:][:200]}, {right[start:][:200]}"
