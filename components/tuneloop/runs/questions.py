"""Questions that a run answers from what it has stored: what made a version, what another reward would have said."""

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
from tuneloop.runs.replay import locate_artifact
from tuneloop.runs.run_record import Entry, Run

TOLD = ("results", "params", "facts", "notes", "provenance")
"""The fields of a manifest that are explained: they hold rewards, seeds, sampling options, and the server."""
BATCH = 50
"""The number of iterations that share reward processes: to start these takes longer than a simple reward."""
COLUMNS = ("request_id", "group", "prompt", "completion", "answer", "metadata", "score")


def find_made(run: Run, which: str) -> Entry:
    """Find the checkpoint of a version (``v4``) or iteration (``3``; else its newest artifact), or raise UserError."""
    ordered = sorted(run.entries, key=lambda entry: entry.manifest.role == "trainer")
    made = {str(entry.iteration): entry for entry in ordered if entry.iteration}
    made |= {f"v{entry.manifest.facts['version']}": entry for entry in run.checkpoints}
    if which not in made:
        remedy = f"is not in {run.name}, which has come to iteration {run.iteration}; see `tuneloop weights ls`"
        raise UserError("ITERATION|VERSION", which, remedy)
    return made[which]


def explain_artifact(run: Run, entry: Entry) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield an artifact and everything it was made from, back to policies: reference, and the manifest's entries."""
    chain = [entry]
    for made in chain:
        told = {name: locate_artifact(run, ref) for name, ref in made.manifest.inputs.items()}
        sources = [
            run.maker(ref)
            for name, ref in made.manifest.inputs.items()
            if name not in ("policy", "reference")
        ]
        chain += [source for source in sources if source and source not in chain]
        if made.manifest.role == "sampler":
            told["asked"] = ", ".join(dict.fromkeys(row["id"] for row in run.samples(made, ["id"])))
            told["engine"] = str(made.manifest.facts.get("engine", ""))
        told |= {
            name: str(made.manifest.provenance.get(name, ""))
            for name in ("code", "image", "packages")
        }
        told |= {
            name: dump_canonical_json(found)
            for name in TOLD
            if (found := getattr(made.manifest, name))
        }
        yield (
            f"{made.key}@{made.manifest.digest}",
            {name: told.get(name) or "not recorded" for name in (*told, *TOLD)},
        )


def rescore_run(run: Run, spec: str) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Judge the stored rollouts by another reward, a JSON object reward → weight, within the limits of the run's own.
    Yields each iteration and its rows, with the new score as ``rescored`` and its distance from ``score`` as
    ``change``, infinite where only one exists. Raises UserError for an unknown reward, or a run without scores."""
    scored = {
        entry.iteration or 0: entry for entry in run.with_role("scorer")
    }  # a later one adds to an earlier one
    if not scored:
        raise UserError("run", run.name, "has no scored rollouts")
    for (_, params), part in groupby(
        sorted(scored.items()), lambda at: (at[0] // BATCH, at[1].manifest.params)
    ):
        rows = [
            {**row, "iteration": i, "reward_spec": spec}
            for i, entry in part
            for row in _read_scored(run, entry)
        ]
        limits = {
            "timeout_s": params.get("timeout_s", 5.0),
            "memory": params.get("memory_mb", 4096) << 20,
        }
        judged = score_all(
            rows, **limits, punish=params.get("punish", True), workers=os.cpu_count() or 1
        )
        found = [
            params.get("escape_score") if each.outcome == "escape" else each.score
            for each in judged
        ]
        for row, score in zip(
            rows, pa.array(found, pa.float32()).to_pylist()
        ):  # as precise as those that are stored
            change = math.inf if None in (row["score"], score) else abs(score - row["score"])
            row |= {"rescored": score, "change": 0.0 if score == row["score"] else change}
        yield from (
            (iteration, [*each]) for iteration, each in groupby(rows, itemgetter("iteration"))
        )


def count_reordered(rows: Sequence[Mapping[str, Any]]) -> str:
    """Count the groups whose completions have another order by ``rescored``, ties and missing scores included."""
    groups = [[*group] for _, group in groupby(rows, itemgetter("group"))]
    return f"{sum(_rank(group, 'score') != _rank(group, 'rescored') for group in groups)} of {len(groups)}"


def _read_scored(run: Run, entry: Entry) -> list[dict[str, Any]]:
    rows = run.samples(entry, COLUMNS)
    if missing := {*COLUMNS}.difference(*rows[:1]):
        raise UserError(
            "artifact",
            f"{run.url}/{entry.key}",
            f"has no {min(missing)}: it cannot be judged again",
        )
    return rows


def _rank(group: Sequence[Mapping[str, Any]], by: str) -> list[int]:
    order = [None, *sorted({row[by] for row in group} - {None})]
    return [order.index(row[by]) for row in group]
