"""What docstrings and comments name exists: a module, what is in it, a file beside it.

Comments name the other end of a contract, such as who reads a file that is written here. A rename
would leave them behind without anybody noticing.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "components" / "tuneloop"
DOTTED = re.compile(r"`(tuneloop(?:\.\w+)+)")
FILE = re.compile(r"[`\s(]((?:\w+/)+\w+\.py)\b")
GROUPS = ("tuneloop.backends", "tuneloop.fleet")
"""Groups of entry points whose packages have other names."""


def list_texts(source: str) -> Iterator[str]:
    """Yield the docstrings, the strings below assignments, and the comments of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def list_names(source: str) -> set[str]:
    """Return the names that a module binds."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def exists(name: str) -> bool:
    """Return whether a dotted name is a package, a module, or something in one."""
    parts = name.split(".")[1:]
    for count in range(len(parts), 0, -1):
        path = PACKAGE.joinpath(*parts[:count])
        modules = (path.with_suffix(".py"), path / "__init__.py")
        for module in modules:
            if module.is_file():
                return count == len(parts) or parts[count] in list_names(module.read_text())
    return not parts


def list_unknown(source: str, directory: Path) -> list[str]:
    """List what the texts of a file in `directory` name and that does not exist."""
    unknown: list[str] = []
    for text in list_texts(source):
        names = [name for name in DOTTED.findall(text) if name not in GROUPS]
        unknown += [name for name in names if not exists(name)]
        for file in FILE.findall(text):
            places = (PACKAGE / file, directory / file, PACKAGE.parents[1] / file)
            if not any(place.is_file() for place in places):
                unknown.append(file)
    return unknown


def test_all_that_comments_name_exists() -> None:
    unknown: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        missing = list_unknown(path.read_text(), path.parent)
        if missing:
            unknown[str(path.relative_to(PACKAGE))] = missing
    assert unknown == {}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ('"""See `tuneloop.core.ends.strip_exit` and ``core/ends.py``."""', []),
        ('"""See `tuneloop.core.endings`."""', ["tuneloop.core.endings"]),
        ("# `tuneloop.core.ends.strip_end` reads it.", ["tuneloop.core.ends.strip_end"]),
        ("# Read by core/endings.py.", ["core/endings.py"]),
    ],
)
def test_a_name_that_was_left_behind_is_found(text: str, missing: list[str]) -> None:
    assert list_unknown(text + "\n", PACKAGE) == missing
