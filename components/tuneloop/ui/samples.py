"""The completions of an iteration or of an evaluation, a page at a time: found, ordered, and with
their tokens.

The page asks for it by `ui/app.py`, and the report by `ui/report.py`. Columns are those of
`formats/rollouts.py`: all of a file but ``prompt_ids`` are sent, and `ui/static/samples.js` shows
those that it names.

In a report the browser searches and sorts: `ui/static/frozen.js: chooseRows` repeats what
`_select_places` and `_sort_places` do here. Only `tests/local/test_ui.py` looks at both.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tuneloop.core.errors import Unavailable, UserError
from tuneloop.formats.rollouts import FILE, REWARDS_FILE, SAMPLES_FILE, read_rows
from tuneloop.runs.committed import Entry
from tuneloop.runs.run_record import Run
from tuneloop.ui.proved_files import ProvedFiles

PAGE_SIZE = 50
"""Completions on a page."""
MOST_TOKENS = 400
"""The tokens of a completion that a page of several shows; a single completion is shown whole."""
BATCH = 1 << 14
"""The number of rows whose texts are in memory at once during a search."""
FILES = (REWARDS_FILE, FILE, SAMPLES_FILE)
"""The files with completions, the one with most columns first."""
TOKENS = ("completion_ids", "logprobs", "loss_mask", "policy_versions")
"""The columns with a value for each token: they are cut to `MOST_TOKENS`, in a report to
`report.py: IDS`. A column of this kind that is not listed makes pages as large as it is."""
FILTERS = ("id", "group", "outcome")
"""The columns by whose value rows are chosen."""
TEXTS = ("prompt", "completion", "answer")
"""The columns that are searched. `ui/static/frozen.js: chooseRows` has a copy of both lists."""


@dataclass(frozen=True)
class CompletionFile:
    """An opened file of completions, the columns for filters, and the values for sorting."""

    file: pq.ParquetFile
    table: pa.Table
    order: Mapping[str, Any]


@dataclass(frozen=True)
class TokenTexts:
    """The piece of each token id, and how pieces become text: ``bytes`` or ``pieces``."""

    pieces: Mapping[int, str]
    decoder: str


def read_page(
    run: Run,
    at: str,
    query: Mapping[str, str],
) -> dict[str, Any]:
    """Read a page of the completions of an iteration or of an evaluation.

    Only the page's row groups and the searched columns are read from the file. The file is proved
    before it is read, and again once it has changed.

    Args:
        at: the number of the iteration, or the key of the evaluation.
        query: filters ``id``, ``group`` or ``outcome``, and ``search``, a text in the row;
            ``place``, the row that is shown whole; ``sort``, by ``score`` or ``advantage``, in
            descending order after ``-``; ``page``, from 1.

    Raises:
        UserError: there are no completions.
        Corrupt: their file differs from its manifest, or cannot be read.
        Unavailable: their file was changed while it was read.
    """
    entries = [entry for entry in run.with_role("scorer", "sampler") if str(entry.iteration) == at]
    if not entries:
        entries = [entry for entry in run.with_role("evaluator") if entry.key == at]
    entry, name = _choose_file(run, at, entries)
    ref = f"{run.url}/{entry.key}@{entry.manifest.digest}"
    page = COMPLETIONS.use(
        ref,
        name,
        lambda opened: _read_rows(opened, query),
    )
    texts, note = _find_token_texts(run, entries)
    ids = {number for row in page["rows"] for number in row.get("completion_ids", ())}
    return page | {
        "key": entry.key,
        "version": run.find_version(entry),
        "size": PAGE_SIZE,
        "iteration": run.iteration,
        "evaluations": [evaluation.key for evaluation in run.with_role("evaluator")],
        "decoder": texts.decoder,
        "pieces": {number: texts.pieces.get(number) for number in ids},
        "note": note,
    }


def _choose_file(
    run: Run,
    at: str,
    entries: Sequence[Entry],
) -> tuple[Entry, str]:
    """Choose the artifact and the file that has most of what a page shows."""
    for name in FILES:
        for entry in reversed(entries):
            if name in entry.manifest.files:
                return entry, name
    remedy = f"has none in {run.name}, which has come to iteration {run.iteration}"
    raise UserError("completions", at, remedy)


def _read_rows(
    opened: CompletionFile,
    query: Mapping[str, str],
) -> dict[str, Any]:
    """Read the rows of the page that is asked for, and what is said of all rows."""
    file = opened.file
    selected = _sort_places(
        opened,
        query,
        _select_places(file, opened.table, query),
    )
    page_number = query.get("page", "")
    # An address may say anything: nine digits are more pages than there are.
    page = max(int(page_number[:9]), 1) if page_number.isdecimal() else 1
    places = selected[PAGE_SIZE * (page - 1) : PAGE_SIZE * page].tolist()
    columns = [column for column in file.schema_arrow.names if column != "prompt_ids"]
    rows = read_rows(file, places, columns)
    limit = None if "place" in query else MOST_TOKENS
    for number, row in zip(places, rows):
        row["length"] = len(row.get("completion_ids", ()))
        row["place"] = number
        row["advantage"] = opened.order["advantage"][number]
        for column in TOKENS:
            if column in row:
                row[column] = row[column][:limit]
    outcomes: list[Any] = []
    if "outcome" in opened.table.column_names:
        outcomes = pc.value_counts(opened.table["outcome"]).to_pylist()
    return {
        "total": opened.table.num_rows,
        "found": len(selected),
        "rows": rows,
        "outcomes": outcomes,
    }


def _sort_places(
    opened: CompletionFile,
    query: Mapping[str, str],
    places: Any,
) -> Any:
    """Return the places of rows in the order that is asked for."""
    sort_key = query.get("sort", "")
    values = opened.order.get(sort_key.removeprefix("-"))
    if values is None:
        return places
    sign = -1 if sort_key.startswith("-") else 1
    # Rows with equal values stay in the order of the file.
    return places[np.argsort(sign * values[places], kind="stable")]


def _find_token_texts(
    run: Run,
    entries: Sequence[Entry],
) -> tuple[TokenTexts, str]:
    """Find the texts of tokens in the policy's tokenizer; without one, say why there are none."""
    policies = [policy for policy in map(run.find_policy, entries) if policy]
    if not policies:
        return NO_TEXTS, ""
    # Where an iteration is asked for, its rollout and its reward have the same policy.
    policy = policies[0]
    if TOKENIZER not in policy.manifest.files:
        return NO_TEXTS, ""
    try:
        ref = f"{run.url}/{policy.key}@{policy.manifest.digest}"
        return TOKEN_TEXTS.open(ref, TOKENIZER).content, ""
    except (UserError, Unavailable) as error:
        # The checkpoint was deleted, its tokenizer is damaged or of another form, or its store is
        # unavailable. The completions are readable without.
        return NO_TEXTS, f"tokens are shown without their texts: {error}"


def _open_completions(path: Path) -> CompletionFile:
    # The columns of texts and tokens are read when a page shows them.
    file = pq.ParquetFile(path)
    names = file.schema_arrow.names
    table = file.read([column for column in (*FILTERS, "score") if column in names])
    return CompletionFile(file, table, _compute_order(table))


def _read_token_texts(path: Path) -> TokenTexts:
    """Read the piece of each token id from a ``tokenizer.json``, and the kind of its pieces."""
    tokenizer = json.loads(path.read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, dict):
        pieces = {number: piece for piece, number in vocabulary.items()}
    else:
        # Unigram has pairs of piece and score.
        pieces = dict(enumerate(piece for piece, _ in vocabulary))
    for token in tokenizer["added_tokens"]:
        pieces[token["id"]] = token["content"]
    is_byte_level = '"ByteLevel"' in json.dumps(tokenizer["decoder"])
    return TokenTexts(pieces, "bytes" if is_byte_level else "pieces")


TOKENIZER = "model/tokenizer.json"
"""The file of a checkpoint that has the texts of tokens."""
NO_TEXTS = TokenTexts({}, "")
COMPLETIONS = ProvedFiles(_open_completions, capacity=8)
"""The files of completions that this process has open, of all runs."""
TOKEN_TEXTS = ProvedFiles(_read_token_texts, capacity=4)
"""The vocabularies that this process has read, of all runs."""


def _select_places(
    file: pq.ParquetFile,
    table: pa.Table,
    query: Mapping[str, str],
) -> Any:
    """Return the places of the rows that are asked for, an array of whole numbers in ascending
    order.
    """
    is_selected = np.ones(table.num_rows, bool)
    row_number = query.get("place")
    if row_number:
        is_selected = np.arange(table.num_rows).astype(str) == row_number
    for column in FILTERS:
        value = query.get(column)
        if value and column in table.column_names:
            is_equal = pc.equal(table[column], value)
            # A row without the value is null, and not selected.
            is_selected &= pc.fill_null(is_equal, False).to_numpy()
    text = query.get("search")
    if text:
        is_selected &= _search_text(file, text)
    return np.flatnonzero(is_selected)


def _search_text(file: pq.ParquetFile, text: str) -> Any:
    """Return for each row of a file whether it has a text in one of its columns, in upper or
    lower case.
    """
    matches = [np.zeros(0, bool)]
    # The texts of a large file do not fit in memory together.
    for batch in file.iter_batches(BATCH, columns=list(TEXTS)):
        is_match = np.zeros(batch.num_rows, bool)
        for column in batch.columns:
            has_text = pc.match_substring(column, text, ignore_case=True)
            is_match |= pc.fill_null(has_text, False).to_numpy(zero_copy_only=False)
        matches.append(is_match)
    return np.concatenate(matches)


def _compute_order(table: pa.Table) -> dict[str, Any]:
    """Compute the values for sorting, NaN if a row has none, as arrays of float64.

    They are the score, and the unscaled advantage, which is the score minus its group's mean, as in
    GRPO (arXiv 2402.03300), whatever algorithm trained the policy. Its keys are what `read_page`
    can sort by; `ui/static/samples.js: SORTS` offers them.
    """
    size = table.num_rows
    absent = np.full(size, np.nan)
    scores = absent
    if "score" in table.column_names:
        scores = table["score"].cast(pa.float64()).to_numpy()
    if "group" not in table.column_names:
        return {"score": scores, "advantage": absent}
    # Groups are numbered, so that sums over them are one call.
    groups = table["group"].combine_chunks().dictionary_encode().indices.to_numpy()
    is_scored = np.isfinite(scores)
    sums = np.bincount(
        groups[is_scored],
        scores[is_scored],
        minlength=size,
    )
    counts = np.bincount(groups[is_scored], minlength=size)
    means = sums / np.maximum(counts, 1)
    return {
        "score": scores,
        "advantage": scores - means[groups],
    }
