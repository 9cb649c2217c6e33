"""The completions of an iteration or of an evaluation, a page at a time: found, ordered, and with their tokens."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.formats.rollouts import FILE, read_rows
from tuneloop.runs.run_record import Run

SIZE = 50
"""Completions on a page."""
MOST = 400
"""The tokens of a completion that a page of several shows; a single completion is shown whole."""
BATCH = 1 << 14
"""The number of rows whose texts are in memory at once during a search."""
FILES = ("rewards.parquet", FILE, "samples.parquet")
TOKENS = ("completion_ids", "logprobs", "loss_mask", "policy_versions")
CHOICES, TEXTS = ("id", "group", "outcome"), ("prompt", "completion", "answer")


def read_page(run: Run, at: str, wanted: Mapping[str, str]) -> dict[str, Any]:
    """Read a page of the completions of `at`, an iteration or the key of an evaluation; only the page's row groups and
    the searched columns are read from the file. `wanted` has filters: ``id``, ``group`` or ``outcome``, and ``search``,
    a text in the row; ``place``, the row that is shown whole; ``sort``, by ``score`` or ``advantage``, in descending
    order after ``-``; ``page``, from 1. Raises UserError if there are no completions."""
    made = [e for e in run.with_role("scorer", "sampler") if str(e.iteration) == at]
    made = made or [e for e in run.with_role("evaluator") if e.key == at]
    held = [(e, name) for name in FILES for e in reversed(made) if name in e.manifest.files]
    if not held:
        raise UserError(
            "completions",
            at,
            f"has none in {run.name}, which has come to iteration {run.iteration}",
        )
    entry, name = held[0]
    file, table, order = open_file(f"{run.url}/{entry.key}@{entry.manifest.digest}", name)
    places = _select_places(file, table, wanted)
    by, number, whole = wanted.get("sort", ""), wanted.get("page", ""), "place" in wanted
    if (values := order.get(by.removeprefix("-"))) is not None:
        places = places[
            np.argsort(-values[places] if by.startswith("-") else values[places], kind="stable")
        ]
    start = SIZE * (max(int(number[:9]), 1) - 1 if number.isdecimal() else 0)
    shown = places[start : start + SIZE].tolist()
    rows = read_rows(
        file, shown, [column for column in file.schema_arrow.names if column != "prompt_ids"]
    )
    for place, row in zip(shown, rows):
        row |= {
            "place": place,
            "length": len(row.get("completion_ids", ())),
            "advantage": order["advantage"][place],
        }
        row |= {
            column: row[column][: None if whole else MOST] for column in TOKENS if column in row
        }
    policy = next((p for e in made if (p := run.policy_of(e))), None)
    try:
        pieces, decoder = (
            _read_pieces(f"{run.url}/{policy.key}@{policy.manifest.digest}") if policy else ({}, "")
        )
    except (
        UserError,
        ValueError,
        KeyError,
        TypeError,
    ):  # the checkpoint is gone, or its tokenizer has another form
        pieces, decoder = {}, ""
    used = {number for row in rows for number in row.get("completion_ids", ())}
    return {
        **{"key": entry.key, "version": run.version_of(entry), "size": SIZE, "decoder": decoder},
        **{
            "iteration": run.iteration,
            "evaluations": [each.key for each in run.with_role("evaluator")],
        },
        **{
            "total": table.num_rows,
            "found": len(places),
            "rows": rows,
            "pieces": {n: pieces.get(n) for n in used},
        },
        "outcomes": pc.value_counts(table["outcome"]).to_pylist()
        if "outcome" in table.column_names
        else [],
    }


@functools.lru_cache(maxsize=8)
def open_file(ref: str, name: str) -> tuple[pq.ParquetFile, pa.Table, dict[str, Any]]:
    """Open a file of completions, verified once, with the columns for filters and the values for sorting."""
    file = pq.ParquetFile(Artifact(ref).part(name))
    table = file.read(
        [column for column in (*CHOICES, "score") if column in file.schema_arrow.names]
    )
    return file, table, _compute_order(table)


@functools.lru_cache(maxsize=4)
def _read_pieces(policy: str) -> tuple[dict[int, str], str]:
    """Read the piece of each token id from the policy's tokenizer, and its kind. Raises UserError where it is gone."""
    about = json.loads(Artifact(policy).part("model/tokenizer.json").read_bytes())
    words = about["model"]["vocab"]  # piece → id; of Unigram pairs of piece and score
    pieces = (
        {n: p for p, n in words.items()}
        if isinstance(words, dict)
        else dict(enumerate(p for p, _ in words))
    )
    kind = "bytes" if '"ByteLevel"' in json.dumps(about["decoder"]) else "pieces"
    return pieces | {each["id"]: each["content"] for each in about["added_tokens"]}, kind


def _select_places(file: pq.ParquetFile, table: pa.Table, wanted: Mapping[str, str]) -> Any:
    """Return the places of the rows that are wanted."""
    keep = np.ones(table.num_rows, bool)
    if place := wanted.get("place"):
        keep = np.arange(table.num_rows).astype(str) == place
    for column in {*CHOICES} & {*table.column_names} & {name for name in wanted if wanted[name]}:
        keep &= pc.fill_null(pc.equal(table[column], wanted[column]), False).to_numpy()
    if text := wanted.get("search"):
        found = [np.zeros(0, bool)]
        for batch in file.iter_batches(BATCH, columns=list(TEXTS)):
            has = (
                pc.fill_null(pc.match_substring(each, text, ignore_case=True), False)
                for each in batch.columns
            )
            found.append(np.any([each.to_numpy(zero_copy_only=False) for each in has], axis=0))
        keep &= np.concatenate(found)
    return np.flatnonzero(keep)


def _compute_order(table: pa.Table) -> dict[str, Any]:
    """Compute the values for sorting, NaN if there is none: the score, and the unscaled advantage, which is the score
    minus its group's mean, as in GRPO (arXiv 2402.03300)."""
    none = np.full(table.num_rows, np.nan)
    scores = table["score"].cast(pa.float64()).to_numpy() if "score" in table.column_names else none
    if "group" not in table.column_names:
        return {"score": scores, "advantage": none}
    groups, has = (
        table["group"].combine_chunks().dictionary_encode().indices.to_numpy(),
        np.isfinite(scores),
    )
    sums = np.bincount(groups[has], scores[has], minlength=table.num_rows)
    counts = np.bincount(groups[has], minlength=table.num_rows)
    return {"score": scores, "advantage": scores - (sums / np.maximum(counts, 1))[groups]}
