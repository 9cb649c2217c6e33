"""Replay: compute an artifact of a run again, from the inputs and parameters that its manifest
names.

A stage is a function of these: a digest that differs is a fault, and the first difference is
named. The run stays as it is.

`tuneloop replay` and `bisect` call it, in the command's own process.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tuneloop.core.artifacts import STATED, Artifact, Manifest, split_ref
from tuneloop.core.component import REPLAY_PARAMS, Component, find_component
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.hooks import find_extension_stage
from tuneloop.core.wording import format_count
from tuneloop.runs.committed import Entry
from tuneloop.runs.run_record import Run

DECIDING = ("device", "threads", "code", "packages")
"""The entries of an artifact's provenance that may change its bits, by the names of
`core/provenance.py: collect_provenance`."""
COMPARED = (
    "format",
    "stage",
    "role",
    "kind",
    "params",
    "inputs",
    "files",
    "results",
    "facts",
)
"""The fields of manifests in the order in which they are compared: what an artifact was made from
comes first. They are those of `core/artifacts.py: STATED`, no more and no fewer: of a difference in
a field that is only there, nothing but "the manifests" is said.
"""
CONTEXT = 60
"""How many characters before the first difference of two lines are shown."""
SHOWN = 200
"""How many characters of each of two lines are shown."""


@dataclasses.dataclass(frozen=True)
class Replay:
    """The comparison of an artifact with the result of computing it again.

    Attributes:
        entry: the artifact of the run.
        manifest: of the result.
        difference: the first one, in words; None if the two are equal.
    """

    entry: Entry
    manifest: Manifest
    difference: str | None


def replay_iteration(
    run: Run,
    iteration: int,
    stage: str | None = None,
) -> Iterator[Replay]:
    """Compute an iteration's artifacts again, in this process and in their order.

    Args:
        run: the run that made them.
        iteration: its number; 0: the artifacts outside the loop.
        stage: only the artifacts of this stage (`Entry.stage`); None: all.

    Raises:
        UserError: there is none, an input is missing, or it was not made by one of tuneloop's own
            stages in one process.
    """
    entries = [entry for entry in run.entries if (entry.iteration or 0) == iteration]
    chosen = [entry for entry in entries if stage in (None, entry.stage)]
    if not chosen:
        names = ", ".join(sorted({entry.stage for entry in entries})) or "none"
        remedy = f"has no {stage or 'artifact'} in {run.name}; known: {names}"
        raise UserError("iteration", iteration, remedy)
    for entry in chosen:
        yield _replay_entry(run, entry)


def find_departure(
    first: Run,
    second: Run,
) -> str | None:
    """Find the first artifact in which two runs differ.

    Returns:
        Its key and how it differs; None if all artifacts that both have are equal.
    """
    counterparts = {entry.key: entry for entry in second.entries}
    # By iteration, since a stage of a resumed run may have begun again after later ones.
    for entry in sorted(
        first.entries,
        key=lambda entry: (entry.iteration or 0, entry.started),
    ):
        counterpart = counterparts.get(entry.key)
        if counterpart and counterpart.manifest.digest != entry.manifest.digest:
            difference = _find_difference(
                Artifact(f"{first.url}/{entry.key}"),
                Artifact(f"{second.url}/{entry.key}"),
            )
            return f"{entry.key}: {difference}"
    return None


def locate_artifact(run: Run, ref: str) -> str:
    """Return the reference to an artifact where the run lies now; `ref` itself if the run does
    not hold it.
    """
    entry = run.find_entry(ref)
    return run.reference(entry) if entry else ref


def _replay_entry(run: Run, entry: Entry) -> Replay:
    """Compute one artifact again, in a temporary directory, and compare."""
    committed = entry.manifest
    component = _find_replayable(run, entry)
    # The run stays as it is: the result is written elsewhere.
    with tempfile.TemporaryDirectory(prefix="tuneloop-replay-") as scratch:
        manifest = component(
            out=scratch,
            **_collect_arguments(run, component, committed),
        )
        if manifest.digest == committed.digest:
            return Replay(entry, manifest, None)
        reasons = [
            _find_difference(
                Artifact(f"{run.url}/{entry.key}"),
                Artifact(scratch),
            )
        ]
    for name in DECIDING:
        former = committed.provenance.get(name)
        current = manifest.provenance.get(name)
        if former != current:
            reasons.append(f"{name} {former} then, {current} now")
    return Replay(entry, manifest, "; ".join(reasons))


def _find_replayable(run: Run, entry: Entry) -> Component:
    """Return the stage that made an artifact; raise UserError if it cannot be computed again
    here.
    """
    stage = entry.manifest.stage
    path = find_extension_stage(stage)
    module = path.partition(":")[0] or f"tuneloop.stages.{stage}"
    component = find_component(module)
    if component is None:
        remedy = "is neither a stage of tuneloop nor of an extension: only these can be replayed"
        raise UserError("stage", stage, remedy)
    # The notes have the number of processes that trained, also for another backend. The provenance
    # has that of the stage's own, which is 1 where that backend starts others.
    processes = entry.manifest.notes.get("world_size", 1)
    # Sums over several processes are rounded otherwise.
    if processes != 1:
        remedy = (
            f"was made by {format_count(processes, 'process', 'processes')}, and another number gives other bits: "
            "run the stage under torchrun"
        )
        raise UserError("artifact", f"{run.url}/{entry.key}", remedy)
    return component


def _collect_arguments(
    run: Run,
    component: Component,
    manifest: Manifest,
) -> dict[str, Any]:
    """Return the parameters and inputs of a stage, as a manifest of its artifact names them."""
    fields = component.Params.model_fields.keys()
    # An artifact of an earlier release may state parameters that the stage no longer has.
    parameters = manifest.params | manifest.notes.get(REPLAY_PARAMS, {})
    arguments = {name: value for name, value in parameters.items() if name in fields}
    # Both names are those of `stages/policy_update.py`.
    if "state_every" in fields:
        # No training continues from the result: its trainer's state is not written.
        arguments["state_every"] = manifest.params["iteration"] + 1
    for name, reference in manifest.inputs.items():
        arguments[name] = locate_artifact(run, reference)
    return arguments


def _find_difference(committed: Artifact, replayed: Artifact) -> str:
    """Find the first difference of two artifacts: in what they were made from, in files, in what
    is said of them.
    """
    first = _list_statements(committed.manifest)
    second = _list_statements(replayed.manifest)
    for field in COMPARED:
        # Of files, the weights come first: the others follow from them.
        names = sorted(
            first[field].keys() | second[field].keys(),
            key=lambda name: (".safetensors" not in name, name),
        )
        for name in names:
            ours = first[field].get(name)
            theirs = second[field].get(name)
            if ours == theirs:
                continue
            if field != "files" or not ours or not theirs:
                return f"{field} {name}".rstrip() + f": {ours!r}, {theirs!r}"
            try:
                difference = _compare_files(committed.part(name), replayed.part(name))
            except Corrupt:
                # Retention deletes the files of old checkpoints, and keeps what is said of them.
                digests = f"SHA-256 {ours['sha256']}, {theirs['sha256']}"
                return f"file {name}: {digests}; its bytes are gone"
            return f"file {name}: {difference}"
    return "the manifests"


def _list_statements(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return what a manifest states: field → name → value; the name is empty for a field without
    names.
    """
    fields = manifest.model_dump(mode="json", include=set(STATED))
    statements: dict[str, dict[str, Any]] = {}
    for field, value in fields.items():
        statements[field] = value if isinstance(value, dict) else {"": value}
    # Of an input only the digest is stated: it may lie anywhere.
    statements["inputs"] = {name: split_ref(ref)[1] for name, ref in manifest.inputs.items()}
    return statements


def _compare_files(first: Path, second: Path) -> str:
    """Say where two files differ first: tensor and element, or line."""
    if first.suffix == ".safetensors":
        difference = _compare_tensors(first, second)
        if difference:
            return difference
    if first.suffix in (".json", ".jsonl"):
        return _compare_lines(first.read_bytes(), second.read_bytes())
    return "the bytes differ"


def _compare_tensors(first: Path, second: Path) -> str | None:
    """Name the first tensor in which two files in the safetensors format differ; None if all are
    equal.
    """
    from safetensors import safe_open

    with safe_open(first, "pt") as left_file, safe_open(second, "pt") as right_file:
        left_names = set(left_file.keys())
        right_names = set(right_file.keys())
        for name in sorted(left_names | right_names):
            if name not in left_names or name not in right_names:
                return f"tensor {name}: only in one of the two"
            ours = left_file.get_tensor(name)
            theirs = right_file.get_tensor(name)
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                return (
                    f"tensor {name}: {ours.dtype} {tuple(ours.shape)}, "
                    f"{theirs.dtype} {tuple(theirs.shape)}"
                )
            # A NaN differs even from itself; here it equals any other NaN, and no number.
            are_both_nan = ours.isnan() & theirs.isnan()
            positions = ((ours != theirs) & ~are_both_nan).nonzero()
            if positions.numel():
                index = tuple(positions[0].tolist())
                return (
                    f"tensor {name}, element {list(index)}: "
                    f"{ours[index]:g}, {theirs[index]:g} ({len(positions)} differ)"
                )
    return None


def _compare_lines(first: bytes, second: bytes) -> str:
    """Show the first lines that differ, from a little before the first character that does."""
    pairs = zip_longest(
        first.splitlines(),
        second.splitlines(),
        fillvalue=b"",
    )
    for number, (left_line, right_line) in enumerate(pairs, start=1):
        if left_line != right_line:
            left_text = left_line.decode()
            right_text = right_line.decode()
            start = max(
                0,
                _find_first_difference(left_text, right_text) - CONTEXT,
            )
            end = start + SHOWN
            return f"line {number}: {left_text[start:end]}, {right_text[start:end]}"
    return "the bytes differ"


def _find_first_difference(left_text: str, right_text: str) -> int:
    """Return the index of the first character that differs; where one text begins with the other,
    the index at which the shorter ends.
    """
    for index, (left_character, right_character) in enumerate(zip(left_text, right_text)):
        if left_character != right_character:
            return index
    return min(len(left_text), len(right_text))
