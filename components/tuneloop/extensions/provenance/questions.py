"""Questions that a run answers from what it has stored: what made a version, what another reward
would have said.

`commands.py` prints the answers. It reads manifests and samples as they were committed, of older
releases, too.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa

from tuneloop.core.artifacts import dump_canonical_json
from tuneloop.core.errors import UserError
from tuneloop.rewards.scoring import score_all
from tuneloop.runs.committed import Entry
from tuneloop.runs.replay import locate_artifact
from tuneloop.runs.run_record import Run
from tuneloop.runs.stored_checkpoints import describe_versions, find_checkpoint

EXPLAINED = (
    "results",
    "params",
    "facts",
    "notes",
    "provenance",
)
"""The fields of a manifest that are explained: they hold rewards, seeds, sampling options, and
the server.
"""
PROGRAM = ("code", "image", "packages")
"""The entries of a manifest's provenance that are explained first, as they say which program
ran. All of it follows, as one of `EXPLAINED`.
"""
BATCH = 50
"""The number of iterations that share reward processes: to start these takes longer than a simple
reward.
"""
COLUMNS = (
    "request_id",
    "group",
    "prompt",
    "completion",
    "answer",
    "metadata",
    "score",
)
"""The columns of scored rollouts (`formats/rollouts.py`) that a reward and the answer need. A run
whose artifacts lack one is refused."""


def find_artifact(run: Run, name: str) -> Entry:
    """Find the checkpoint of a version, or of an iteration.

    Args:
        run: the run that made it.
        name: ``v4`` for version 4, or ``3`` for iteration 3.

    Returns:
        The checkpoint; the newest artifact of an iteration that has none.

    Raises:
        UserError: the run has no such version or iteration.
    """
    for checkpoint in run.checkpoints:
        if name == f"v{checkpoint.version}":
            return find_checkpoint(run, checkpoint.version)
    artifacts = [entry for entry in run.entries if entry.iteration and str(entry.iteration) == name]
    if not artifacts:
        remedy = f"is not in {run.name}: {list_known(run)}; see `tuneloop weights ls {run.name}`"
        raise UserError("ITERATION|VERSION", name, remedy)
    trained = [entry for entry in artifacts if entry.manifest.role == "trainer"]
    return (trained or artifacts)[-1]


def list_known(run: Run) -> str:
    """List the versions and iterations of a run that `find_artifact` knows."""
    parts: list[str] = []
    if run.checkpoints:
        parts.append(f"it has {describe_versions(run)}")
    if run.iteration:
        parts.append(f"the iterations 1 to {run.iteration}")
    return " and ".join(parts) or "it has made no version yet"


def explain_artifact(
    run: Run,
    entry: Entry,
) -> Iterator[tuple[str, dict[str, str]]]:
    """Explain an artifact and everything it was made from, back to policies.

    Inputs named ``policy`` or ``reference`` are not followed; an input of another name that takes a
    checkpoint would lead back to the start of the run.

    Yields:
        ``key@digest`` of an artifact; and its inputs, its program and the fields of its manifest,
        name → text, "not recorded" if it is empty.
    """
    chain = [entry]
    # The sources of an artifact are appended to the list that is being walked.
    for artifact in chain:
        for name, reference in artifact.manifest.inputs.items():
            # Policies have a chain of their own: each goes back to the start of the run.
            if name in ("policy", "reference"):
                continue
            source = run.find_entry(reference)
            if source and source not in chain:
                chain.append(source)
        texts = _explain_manifest(run, artifact)
        yield (
            f"{artifact.key}@{artifact.manifest.digest}",
            {name: text or "not recorded" for name, text in texts.items()},
        )


def _explain_manifest(
    run: Run,
    entry: Entry,
) -> dict[str, str]:
    """Return what a manifest states of an artifact, name → text; an empty text if it states
    nothing.
    """
    manifest = entry.manifest
    texts: dict[str, str] = {}
    for name, reference in manifest.inputs.items():
        texts[name] = locate_artifact(run, reference)
    # The rows of a rollout say which prompts it was asked.
    if manifest.role == "sampler":
        prompts = [row["id"] for row in run.read_samples(entry, ["id"])]
        texts["asked"] = ", ".join(dict.fromkeys(prompts))
        texts["engine"] = str(manifest.facts.get("engine", ""))
    for name in PROGRAM:
        texts[name] = str(manifest.provenance.get(name, ""))
    for name in EXPLAINED:
        field = getattr(manifest, name)
        if field:
            texts[name] = dump_canonical_json(field)
    # What is not recorded is listed last.
    for name in EXPLAINED:
        texts.setdefault(name, "")
    return texts


def rescore_run(
    run: Run,
    spec: str,
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Judge the stored rollouts by another reward, within the limits of the run's own.

    Args:
        run: the run that has the rollouts.
        spec: the reward, a JSON object name → weight.

    Yields:
        An iteration and its rows, with the new score as ``rescored`` and its distance from
        ``score`` as ``change``, infinite if only one of the two exists.

    Raises:
        UserError: the reward is unknown, or the run has no scores.
    """
    # Where an iteration has two scorers, the later one adds to the scores of the earlier.
    scored = {entry.iteration or 0: entry for entry in run.with_role("scorer")}
    if not scored:
        raise UserError("run", run.name, "has no scored rollouts")
    # Iterations with the same limits share their reward processes.
    for (_, params), batch in groupby(sorted(scored.items()), _find_batch):
        rows: list[dict[str, Any]] = []
        for iteration, entry in batch:
            for row in _read_scored(run, entry):
                rows.append(row | {"iteration": iteration, "reward_spec": spec})
        _rescore_rows(rows, params)
        for iteration, group in groupby(rows, itemgetter("iteration")):
            yield iteration, list(group)


def _find_batch(item: tuple[int, Entry]) -> tuple[int, dict[str, Any]]:
    """Return what iterations have in common whose rows are judged together."""
    iteration, entry = item
    return iteration // BATCH, entry.manifest.params


def _rescore_rows(
    rows: Sequence[dict[str, Any]],
    params: Mapping[str, Any],
) -> None:
    """Judge rows within the limits in a scorer's parameters; add ``rescored`` and ``change`` to
    each.

    It repeats what the stage `stages/reward.py` does with these parameters, and their defaults: a
    parameter of the stage that changes a score has to be read here, too, or the scores differ for
    another reason than the reward.
    """
    outcomes = score_all(
        rows,
        timeout_s=params.get("timeout_s", 5.0),
        memory=params.get("memory_mb", 4096) << 20,
        punish=params.get("punish", True),
        escape_score=params.get("escape_score"),
        workers=os.cpu_count() or 1,
    )
    exact_scores = [outcome.score for outcome in outcomes]
    # Stored scores are float32: a more precise one would differ from each.
    scores = pa.array(exact_scores, pa.float32()).to_pylist()
    for row, score in zip(rows, scores):
        row["rescored"] = score
        if score == row["score"]:
            row["change"] = 0.0
        elif score is None or row["score"] is None:
            row["change"] = math.inf
        else:
            row["change"] = abs(score - row["score"])


def count_reordered(rows: Sequence[Mapping[str, Any]]) -> str:
    """Count the groups whose completions have another order by ``rescored``, ties and missing
    scores included.
    """
    groups = [list(group) for _, group in groupby(rows, itemgetter("group"))]
    reordered = [
        group for group in groups if _rank_rows(group, "score") != _rank_rows(group, "rescored")
    ]
    return f"{len(reordered)} of {len(groups)}"


def _read_scored(
    run: Run,
    entry: Entry,
) -> list[dict[str, Any]]:
    """Read the rows of a scorer's artifact; raise UserError if a column is missing that a reward
    needs.
    """
    rows = run.read_samples(entry, COLUMNS)
    # An artifact without rows has no columns.
    present = rows[0].keys() if rows else set()
    missing = set(COLUMNS) - present
    if missing:
        remedy = f"has no {min(missing)}: it cannot be judged again"
        raise UserError("artifact", f"{run.url}/{entry.key}", remedy)
    return rows


def _rank_rows(
    group: Sequence[Mapping[str, Any]],
    column: str,
) -> list[int]:
    """Return the rank of each row by a column of scores: 0 for none, then ascending, equal for
    ties.
    """
    scores: list[float | None] = sorted({row[column] for row in group} - {None})
    scores.insert(0, None)
    return [scores.index(row[column]) for row in group]
