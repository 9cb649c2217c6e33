"""The completions of an iteration, a page at a time: each token coloured by what the engine thought of it."""

import functools
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.formats.rollouts import FILE, read_rows
from tuneloop.runs.run_record import Run

SIZE = 50
"""Completions on a page."""


@dataclass(frozen=True)
class Page:
    """One page of an iteration's completions.

    Attributes:
        rows: as stored, with the scores of the same rows where they have been scored.
        number: from 1; `last` is the number of the last one.
        pieces: the text of each token id, where the tokenizer of the policy can be had.
    """

    iteration: int
    rows: Sequence[Mapping[str, Any]]
    number: int
    last: int
    pieces: Mapping[int, str]


def read_page(run: Run, iteration: int, number: int) -> Page:
    """Read the completions of a page; of the files the row groups that it lies in.

    Raises:
        UserError: the run has no rollouts of that iteration.
    """
    entry = next((e for e in run.with_role("sampler") if e.iteration == iteration), None)
    if entry is None:
        raise UserError("iteration", iteration, f"has no rollouts in {run.name}; it has come to {run.iteration}")
    scored = [e for e in run.with_role("scorer") if e.iteration == iteration]
    file, name = (scored[-1], "rewards.parquet") if scored else (entry, FILE)
    table = pq.ParquetFile(Artifact(f"{run.url}/{file.key}").part(name))
    total = table.metadata.num_rows
    last = max(1, math.ceil(total / SIZE))
    number = min(max(number, 1), last)
    rows = read_rows(table, range((number - 1) * SIZE, min(number * SIZE, total)))
    return Page(iteration, rows, number, last, _read_pieces(entry.manifest.inputs.get("policy", "")))


@functools.lru_cache(maxsize=8)
def _read_pieces(policy: str) -> dict[int, str]:
    """Read the text of each token id from the policy's tokenizer; empty where that is gone, or not one of a file."""
    try:
        from tokenizers import Tokenizer

        words = Tokenizer.from_file(str(Artifact(policy).part("model/tokenizer.json")))
    except (UserError, ImportError):
        return {}
    return {number: words.decode([number], skip_special_tokens=False) for number in words.get_vocab().values()}


def render_samples(run: Run, page: Page) -> str:
    """Render a page of completions: text escaped, tokens as marks whose shade is their probability."""
    name, number, iteration = html.escape(run.name), page.number, page.iteration
    places = {f"page {n}": f"{iteration}?page={n}" for n in (number - 1, number + 1) if 1 <= n <= page.last}
    places |= {f"iteration {n}": f"{n}" for n in (iteration - 1, iteration + 1) if 1 <= n <= run.iteration}
    links = " · ".join(f'<a href="/runs/{name}/samples/{place}">{words}</a>' for words, place in places.items())
    head = "".join(f"<th>{column}</th>" for column in ("prompt", "completion", "score", "answer"))
    rows = "".join(_render_row(row, page.pieces) for row in page.rows)
    return (
        f'<h1><a href="/runs/{name}">{name}</a>: iteration {iteration}</h1>'
        f"<p>Page {number} of {page.last} · {links}</p>"
        "<p>The darker a token, the less probable the engine found it. Its title has the log-probability, and the "
        f'version that made it.</p><table class="samples"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _render_row(row: Mapping[str, Any], pieces: Mapping[int, str]) -> str:
    tokens = zip(row["completion_ids"], row["logprobs"], row["policy_versions"], row["loss_mask"])
    marks = "".join(_render_token(pieces.get(number, f"⟨{number}⟩"), *about) for number, *about in tokens)
    score = row.get("score")
    told = f"{score:.3g}" if score is not None else str(row.get("outcome") or "not scored yet")
    cells = (html.escape(row["prompt"]), marks, html.escape(told), html.escape(row["answer"]))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _render_token(text: str, logprob: float, version: int, sampled: bool) -> str:
    shade = min(1.0, max(0.0, -logprob / 5)) if sampled else 0.0
    about = f"{logprob:.3f} nats, version {version}" if sampled else "not sampled: from a tool or the environment"
    style = f"background:rgba(214,39,40,{shade:.2f})"
    return f'<span style="{style}" title="{about}">{html.escape(text)}</span>'
