"""Every data layout under every chat template: each combination encodes, or one line says why not.

The rows are the samples of docs/data.md, prepared by `data_prep`; the templates are TRL's. The table
of docs/templates.md is rendered of the result; `make golden` writes it."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.test_layouts import SAMPLES, prepare, read_rows
from tests.unit.formats.test_templates import NAMES, read_source, set_family
from tests.unit.formats.test_templates import words as words
from tuneloop.core.errors import UserError
from tuneloop.formats.rows import name_row
from tuneloop.formats.tokens import encode_prompt_row
from tuneloop.training.corpora import SIDES, RowEncoder

PAGE = Path(__file__).parents[2] / "docs" / "templates.md"
HEADING = "## Data layouts under these templates\n"
PROMPT_SPLITS = ("train",)
INTRODUCTION = """\
The five rows of each layout of [data.md](data.md#layouts), prepared with `data.chat=true` and encoded
under each of the {templates} templates with the tokenizer of SmolLM2: {encoded} of {cells} combinations
encode whole, with one BOS and at least one target in each demonstration and each side of a pair. In the
other {refused} at least one row is refused, by one line that names the row. `text` is plain text, which
no template changes. `tests/golden/test_layouts_and_templates.py` computes this section.
"""

Rows = list[dict[str, Any]]


@dataclass
class Cell:
    """A layout under a template: the number of rows, and reason → names of the rows refused."""

    rows: int = 0
    refused: dict[str, list[str]] = field(default_factory=dict)


Table = dict[tuple[str, str], Cell]
"""(layout, template) → what became of the rows."""


@pytest.fixture(scope="module")
def rows_by_split(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Rows]]:
    """The prepared rows of each layout, by split."""
    prepared: dict[str, dict[str, Rows]] = {}
    for layout, rows in SAMPLES.items():
        # Prompts without answers need a reward that the user chose.
        rewards = {"exact": 1.0} if layout == "prompt-only" else None
        artifact = prepare(tmp_path_factory.mktemp(layout), rows, rewards=rewards, chat=True)
        splits = {split: read_rows(artifact, split) for split in ("train", "sft", "preference")}
        prepared[layout] = {split: rows for split, rows in splits.items() if rows}
    return prepared


@pytest.fixture(scope="module")
def table(words: Any, rows_by_split: dict[str, dict[str, Rows]]) -> Table:
    """All layouts under all templates."""
    cells: Table = {}
    for template in NAMES:
        stops = set_family(words, template)
        encoder = RowEncoder(words, stops, "as-rendered", "keep")
        for layout, splits in rows_by_split.items():
            cell = Cell()
            cells[layout, template] = cell
            for split, rows in splits.items():
                for row in rows:
                    check_row(encoder, template, split, row, cell)
    return cells


def check_row(
    encoder: RowEncoder, template: str, split: str, row: dict[str, Any], cell: Cell
) -> None:
    """Encode a row as its stage does, and add it to its cell. What encodes has one BOS where the
    template has one, and targets where there is something to learn."""
    case = f"{template}: {split}: {row['row']}"
    cell.rows += 1
    try:
        if split in PROMPT_SPLITS:
            documents = [(encode_prompt_row(encoder.tokenizer, row), None)]
        else:
            encoded = encoder.encode_row(row, SIDES[split])
            documents = [(list(document.ids), list(document.targets)) for document in encoded]
    except UserError as error:
        text = str(error)
        assert "\n" not in text and text.startswith(f"{name_row(row)}: "), case
        cell.refused.setdefault(generalise(error.remedy), []).append(row["row"])
        return
    assert documents, case
    has_bos = row["chat"] and "bos_token" in read_source(template)
    for ids, targets in documents:
        assert ids.count(encoder.tokenizer.bos_token_id) == int(has_bos), case
        assert not has_bos or ids[0] == encoder.tokenizer.bos_token_id, case
        assert targets is None or any(targets), case


def generalise(reason: str) -> str:
    """Return a reason without the words of the row that it is about, and without the remedy."""
    cause = reason.partition("; ")[0]
    return re.sub(r" \('[^']*'( is missing)?\)", "", cause)


def render_section(table: Table) -> str:
    """Render the section of the page: layouts down, and of each the templates that refuse rows."""
    reasons = list(dict.fromkeys(reason for cell in table.values() for reason in cell.refused))
    numbers = {reason: number for number, reason in enumerate(reasons, start=1)}
    layouts = list(dict.fromkeys(layout for layout, _ in table))
    refused = sum(bool(cell.refused) for cell in table.values())
    lines = [
        HEADING.rstrip("\n"),
        INTRODUCTION.format(
            templates=len(NAMES), cells=len(table), refused=refused, encoded=len(table) - refused
        ),
        "| layout | templates that encode all rows | templates that refuse rows (why, below) |",
        "|---|---|---|",
    ]
    for layout in layouts:
        encoded = sum(not table[layout, template].refused for template in NAMES)
        refusals = list_refusals(table, layout, numbers)
        lines.append(f"| `{layout}` | {encoded} of {len(NAMES)} | {refusals} |")
    lines.append("")
    lines += [f"{number}. {reason.rstrip('.!')}." for reason, number in numbers.items()]
    return "\n".join(lines) + "\n"


def list_refusals(table: Table, layout: str, numbers: dict[str, int]) -> str:
    """List the templates that refuse rows of a layout, grouped by the numbers of their reasons."""
    templates: dict[tuple[int, ...], list[str]] = {}
    for template in NAMES:
        reasons = table[layout, template].refused
        if reasons:
            key = tuple(sorted(numbers[reason] for reason in reasons))
            templates.setdefault(key, []).append(template)
    groups = [
        f"{', '.join(names)} ({', '.join(map(str, key))})" for key, names in templates.items()
    ]
    return "; ".join(groups)


def test_every_combination_encodes_or_is_refused(table: Table) -> None:
    """The rows themselves are checked where the table is computed."""
    assert len(table) == len(SAMPLES) * len(NAMES) >= 20 * 26
    assert all(cell.rows >= 3 for cell in table.values())
    encoded = [cell for cell in table.values() if not cell.refused]
    assert len(encoded) >= 1283


def test_the_page_has_the_table(table: Table, request: pytest.FixtureRequest) -> None:
    section = render_section(table)
    page = PAGE.read_text()
    before, _, rest = page.partition(HEADING)
    _, next_heading, after = rest.partition("\n## ")
    whole = f"{before}{section}{next_heading}{after}"
    if request.config.getoption("--update-golden"):
        PAGE.write_text(whole)
    assert PAGE.read_text() == whole, "the table has changed; `make golden` if that is wanted"
