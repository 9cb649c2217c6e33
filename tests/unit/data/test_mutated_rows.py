"""Damaged rows of every layout: each is used as it is, or left out by its name and with a reason.

A row of five is changed in one place: a value, a key, the text of its line. Of what is then read it
is demanded that

- nothing raises but a `UserError`;
- the other rows are read as they were;
- the changed row is either left out by name, or all that a split keeps of it is text that its line
  has: no Python or JSON word that it has not, and a marker that was put into a field that is used
  arrives whole.
"""

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.test_layouts import SAMPLES
from tuneloop.core.errors import UserError
from tuneloop.data import Example
from tuneloop.data.budgets import Budget
from tuneloop.data.sizes import Size, Split
from tuneloop.data.sources import load_source
from tuneloop.data.splitting import Form, Router
from tuneloop.data.tables import RowBuilder

MARKER = "Zq7 ü✓ {{x}} <|im_end|> \u2028 Zq7"
WORDS = re.compile(r"\b(None|nan|NaN|inf|Infinity|True|False|null)\b|\[\{'|\{'|\\ud")
"""What Python or JSON writes for values that are no text."""
SIZES: dict[Split, Size] = {
    "eval": Size(0),
    "sft_eval": Size(0),
    "sft": Size(None),
    "preference_eval": Size(0),
    "preference": Size(None),
    "train": Size(None),
}
VALUES: dict[str, Any] = {
    "null": None,
    "empty": "",
    "blank": " \n",
    "whole float": 18.0,
    "number": 7,
    "true": True,
    "empty list": [],
    "empty object": {},
    "marker": MARKER,
    "control": "a\x00\x1b[0mb",
    "long": "word " * 4000,
    "list of numbers": [1, 2, 3],
    "object": {"a": {"b": None}},
    "parts": [{"type": "text", "text": MARKER}],
    "image": [{"type": "image_url", "image_url": {"url": "x"}}],
    "text that is JSON": '{"a": 1}',
    "text that is a list": "[1, 2]",
    "role": "narrator",
}
RAW = {
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "too large": "1e999",
    "digits": "1" * 5000,
    "deep": "[" * 3000 + "]" * 3000,
    "half a pair": '"a\\ud83d"',
}
"""Values that a line of text can have, and `json.dumps` does not write."""


@dataclass
class Outcome:
    """What became of the rows of a file: texts that the splits keep, and reasons, by row; and how
    many were counted as equal to another, or of no use."""

    kept: dict[str, list[dict[str, Any]]]
    left_out: dict[str, str]
    counted: int


def read_file(file: Path) -> Outcome:
    """Read a file as `data_prep` does, up to the rows that are written."""
    bad = Budget("data.bad_rows", "cannot be used", "rows", "drop", 1.0)
    splits = load_source("files", {"path": str(file), "shuffle": False}, 0, 0)
    builder = RowBuilder({"exact": 1.0}, {})
    kept: dict[str, list[dict[str, Any]]] = {}
    router = Router(splits, SIZES, Form(), bad)
    for routed in router.route():
        row = builder.build(routed)
        kept.setdefault(row["row"], []).append(row)
    left_out = dict(text.split(": ", 1) for text in bad.examples)
    counts = router.counts
    counted = counts.unused + counts.repeated + counts.conflicting + counts.held_back
    return Outcome(kept, left_out, counted)


def list_places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a row."""
    items: Any = []
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, part in items:
        yield (*path, key)
        yield from list_places(part, (*path, key))


def change_value(row: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    """Return a copy of a row where `change` was applied to the container and the key of a place."""
    changed = copy.deepcopy(row)
    container = changed
    for key in path[:-1]:
        container = container[key]
    change(container, path[-1])
    return changed


def mutate(row: dict[str, Any], rng: random.Random) -> tuple[str, bytes, bool]:
    """Change a row in one place; return what was done, its line, and whether it has the marker."""
    path = rng.choice(list(list_places(row)))
    kind = rng.choice(["value", "value", "value", "raw", "delete", "repeat", "rename", "line"])
    if kind == "value":
        name = rng.choice(list(VALUES))

        def assign(container: Any, key: Any) -> None:
            container[key] = VALUES[name]

        line = json.dumps(change_value(row, path, assign), ensure_ascii=rng.random() < 0.5)
        return f"{path} = {name}", line.encode(), name in ("marker", "parts")
    if kind == "raw":
        name = rng.choice(list(RAW))

        def assign_raw(container: Any, key: Any) -> None:
            container[key] = "@RAW@"

        line = json.dumps(change_value(row, path, assign_raw)).replace('"@RAW@"', RAW[name])
        return f"{path} = {name}", line.encode(), False
    if kind == "delete":

        def delete(container: Any, key: Any) -> None:
            del container[key]

        return f"{path} deleted", json.dumps(change_value(row, path, delete)).encode(), False
    text = json.dumps(row)
    key = rng.choice(list(row))
    if kind == "repeat":
        return f"{key} twice", f'{text[:-1]}, "{key}": "other"}}'.encode(), False
    if kind == "rename":
        renamed = {f"{name}_" if name == key else name: value for name, value in row.items()}
        return f"{key} renamed", json.dumps(renamed).encode(), False
    data = text.encode()
    place = rng.randrange(len(data))
    lines = {
        "cut": data[: max(place, 1)],
        "byte": data[:place] + b"\xff" + data[place:],
        "comma": data + b",",
        "two": data + data,
        "list": b"[" + data + b"]",
        "mark": b"\xef\xbb\xbf" + data,
        "null": b"null",
    }
    name = rng.choice(list(lines))
    return f"line: {name}", lines[name], False


def get_texts(rows: list[dict[str, Any]]) -> str:
    """Return the texts that the splits keep of a row, as they were before JSON."""
    texts: list[str] = []
    for row in rows:
        for column in ("prompt", "completion", "answer", "rejected", "conversation"):
            text = row[column] or ""
            if column in ("prompt", "conversation") and text.startswith("[{"):
                texts += list_texts(json.loads(text))
            else:
                texts.append(text)
        # Plain text is one text, of which the first word is the prompt.
        texts.append(row["prompt"] + (row["completion"] or ""))
    return "\n".join(texts)


def list_texts(value: Any) -> list[str]:
    """List all text inside a value."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for part in parts for text in list_texts(part)]


def check_case(folder: Path, layout: str, seed: int) -> str:
    """Check one changed row; return whether it was kept, left out or refused."""
    rng = random.Random(seed)
    rows = SAMPLES[layout]
    number = rng.randrange(len(rows))
    change, line, has_marker = mutate(rows[number], rng)
    file = folder / "rows.jsonl"
    lines = [json.dumps(row).encode() for row in rows]
    file.write_bytes(b"\n".join(lines))
    before = read_file(file)
    lines[number] = line
    file.write_bytes(b"\n".join(lines))
    case = f"{layout}, seed {seed}: row {number + 1}: {change}"
    try:
        after = read_file(file)
    except UserError:
        return "refused"
    except Exception as error:
        pytest.fail(f"{case}: {type(error).__name__}: {error}")
    name = f"{file}:{number + 1}"
    if layout != "unpaired-preference":
        for other in before.kept:
            if other != name:
                assert after.kept.get(other) == before.kept[other], case
    changed = [rows for row, rows in after.kept.items() if name in row.split(" with ")]
    if not changed:
        assert after.left_out.get(name) or after.counted > before.counted, f"{case}: vanished"
        return "left out"
    texts = get_texts([row for rows in changed for row in rows])
    original = line.decode("utf-8", "replace")
    strange = {match.group() for match in WORDS.finditer(texts)}
    assert not {word for word in strange if word not in original}, f"{case}: {strange}"
    unchanged = get_texts(before.kept.get(name, []))
    if has_marker and texts != unchanged and name in before.kept:
        assert MARKER in texts, case
    return "kept"


def check_cases(folder: Path, count: int) -> dict[str, int]:
    """Check so many cases over all layouts; return how many ended how."""
    endings = {"kept": 0, "left out": 0, "refused": 0}
    layouts = sorted(SAMPLES)
    for seed in range(count):
        endings[check_case(folder, layouts[seed % len(layouts)], seed)] += 1
    return endings


def test_changed_rows(tmp_path: Path) -> None:
    endings = check_cases(tmp_path, 330)
    assert endings["kept"] > 50 and endings["left out"] > 50


@pytest.mark.slow
def test_ten_thousand_changed_rows(tmp_path: Path) -> None:
    endings = check_cases(tmp_path, 10_000)
    print(endings)
    assert endings["kept"] > 2000 and endings["left out"] > 2000


def test_an_example_of_somebody_elses_source_is_checked_alike() -> None:
    """A source that is no file may give what no file can have."""
    from tuneloop.data import Splits

    examples = [
        Example("a", "nan"),
        Example(" ", "b"),
        Example("c\ud83d", "b"),
        Example("d", " "),
        Example("e", "b", metadata={"x": float("nan")}),
        Example("f", "b", metadata={"x": {1}}),
    ]
    bad = Budget("data.bad_rows", "cannot be used", "rows", "drop", 1.0)
    routed = list(Router(Splits.of(examples), SIZES, Form(), bad).route())
    assert [row.example.prompt for row in routed] == ["a"]
    assert bad.count == 5
