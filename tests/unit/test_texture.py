"""Packages keep the aims of CONTRIBUTING.md's "Texture", or come nearer to them."""

import ast
import json
from pathlib import Path

import pytest

from tests.texture import AIMS, compute_complexity, compute_figures, count_file

RECORD = Path(__file__).with_name("texture.json")


def test_no_package_gets_farther_from_the_aims(request: pytest.FixtureRequest) -> None:
    """`--update-golden` records figures that got better; worse ones are never recorded."""
    figures = compute_figures()
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    worse = [
        f"{package}: {name} {values[name]} (recorded {recorded[package][name]}, aim {aim.limit})"
        for package, values in figures.items()
        for name, aim in AIMS.items()
        if package in recorded and aim.is_worse(values[name], recorded[package][name])
    ]
    new = [
        f"{package}: {name} {values[name]} (a new package, aim {aim.limit})"
        for package, values in figures.items()
        for name, aim in AIMS.items()
        if package not in recorded and recorded and not aim.is_met(values[name])
    ]
    assert not worse + new, "\n".join(worse + new)
    if request.config.getoption("--update-golden"):
        RECORD.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


def test_a_file_is_counted(tmp_path: Path) -> None:
    """Every figure, on a file whose counts are known."""
    source = '''"""A module.

With three lines."""

# Why.
def find(given, *, limit=1):
    """Find."""
    first, second = given, limit
    if (size := len(given)) and first:
        return [*given, second]
    return {**given, "size": size}
'''
    path = tmp_path / "module.py"
    path.write_text(source)
    counts = count_file(path)
    assert (counts.code, counts.documentation, counts.comments) == (5, 4, 1)
    assert (counts.unpackings, counts.walruses, counts.splats) == (1, 1, 2)
    # given, limit, first, second, size: one of five is no noun.
    assert (counts.bindings, counts.no_names) == (5, 1)
    assert counts.longest_function == 6
    assert counts.complexity == 3


def test_complexity_counts_branches_and_not_inner_functions() -> None:
    source = """
def outer(a, b):
    def inner():
        return 1 if a else 2
    return [x for x in a if x or b]
"""
    function = ast.parse(source).body[0]
    # One, a comprehension with its condition, and `or`.
    assert compute_complexity(function) == 4
