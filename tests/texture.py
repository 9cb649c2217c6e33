"""Figures of how much is packed into a line of code, and whether names are nouns and verbs of the field.

    python -m tests.texture             the figures of each package, beside the aims
    python -m tests.texture --files 20  the twenty files that are farthest from the aims

The aims are those of CONTRIBUTING.md. `tests/unit/test_texture.py` holds each package to its
figures in `tests/unit/texture.json`, which may only get better.
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert, ast.match_case)
LINE_LENGTH = 100

# Participles and pronouns tell nothing about what a variable holds.
NO_NAMES = frozenset(
    {
        "about",
        "asked",
        "begun",
        "each",
        "found",
        "given",
        "held",
        "here",
        "kept",
        "known",
        "least",
        "left",
        "made",
        "many",
        "more",
        "most",
        "now",
        "one",
        "others",
        "own",
        "place",
        "passed",
        "rest",
        "said",
        "seen",
        "shown",
        "standing",
        "stands",
        "taken",
        "then",
        "there",
        "told",
        "wanted",
        "what",
        "where",
        "whole",
        "why",
        "how",
    }
)


@dataclass(frozen=True)
class Aim:
    """The limit of a figure, and whether it is a minimum."""

    limit: float
    is_minimum: bool = False

    def is_met(self, figure: float) -> bool:
        return figure >= self.limit if self.is_minimum else figure <= self.limit

    def is_worse(self, figure: float, recorded: float) -> bool:
        """Tell whether a figure misses the aim by more than the recorded one, beyond rounding."""
        worse = figure < recorded - 0.05 if self.is_minimum else figure > recorded + 0.05
        return worse and not self.is_met(figure)


AIMS = {
    "nodes_per_line": Aim(8.5),
    "unpackings": Aim(2.0),
    "walruses": Aim(2.0),
    "splats": Aim(6.0),
    "long_lines": Aim(10.0),
    "no_names": Aim(0.3),
    "docstrings": Aim(18.0, is_minimum=True),
    "comments": Aim(4.0, is_minimum=True),
    "longest_function": Aim(80),
    "complexity": Aim(20),
}
"""Figure → its aim: nodes of the syntax tree a code line; `a, b = x, y`, walruses, splats in
literals and lines of over 100 characters per 1,000 code lines; names that are no nouns in percent
of all bound names; lines of docstrings and of comments in percent of code lines; lines of the
longest function, and the highest cyclomatic complexity (McCabe 1976)."""


@dataclass
class Counts:
    """What was counted in files."""

    nodes: int = 0
    code: int = 0
    documentation: int = 0
    comments: int = 0
    long_lines: int = 0
    unpackings: int = 0
    walruses: int = 0
    splats: int = 0
    bindings: int = 0
    no_names: int = 0
    longest_function: int = 0
    complexity: int = 0

    def add(self, other: "Counts") -> None:
        """Add the counts of another file; of functions the largest counts."""
        for field in fields(self):
            ours: int = getattr(self, field.name)
            theirs: int = getattr(other, field.name)
            is_maximum = field.name in ("longest_function", "complexity")
            setattr(self, field.name, max(ours, theirs) if is_maximum else ours + theirs)

    def figures(self) -> dict[str, float]:
        """Compute the figures that `AIMS` names."""
        lines = max(1, self.code)
        return {
            "nodes_per_line": self.nodes / lines,
            "unpackings": 1000 * self.unpackings / lines,
            "walruses": 1000 * self.walruses / lines,
            "splats": 1000 * self.splats / lines,
            "long_lines": 1000 * self.long_lines / lines,
            "no_names": 100 * self.no_names / max(1, self.bindings),
            "docstrings": 100 * self.documentation / lines,
            "comments": 100 * self.comments / lines,
            "longest_function": self.longest_function,
            "complexity": self.complexity,
        }


def count_file(path: Path) -> Counts:
    """Count one file."""
    source = path.read_text()
    tree = ast.parse(source)
    counts = Counts()
    _count_lines(source, tree, counts)
    for node in ast.walk(tree):
        counts.nodes += 1
        _count_node(node, counts)
    return counts


def _count_lines(source: str, tree: ast.AST, counts: Counts) -> None:
    documentation: set[int] = set()
    for node in ast.walk(tree):
        is_expression = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_expression and isinstance(node.value.value, str):
            documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    counts.code = len(code - documentation)
    counts.documentation = len(documentation)
    counts.comments = len(comments)
    counts.long_lines = sum(len(line) > LINE_LENGTH for line in source.splitlines())


def _count_node(node: ast.AST, counts: Counts) -> None:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        counts.unpackings += sum(isinstance(target, ast.Tuple) for target in node.targets)
    elif isinstance(node, ast.NamedExpr):
        counts.walruses += 1
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        # `*rest` on the left of an assignment is no literal.
        is_literal = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if is_literal:
            counts.splats += sum(isinstance(element, ast.Starred) for element in node.elts)
    elif isinstance(node, ast.Dict):
        counts.splats += sum(key is None for key in node.keys)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        counts.longest_function = max(counts.longest_function, length)
        counts.complexity = max(counts.complexity, compute_complexity(node))
    name = _bound_name(node)
    if name:
        counts.bindings += 1
        counts.no_names += name.strip("_") in NO_NAMES


def _bound_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return None


def compute_complexity(function: ast.AST) -> int:
    """Compute McCabe's number of a function, without those that are defined in it."""
    total = 1
    remaining = list(ast.iter_child_nodes(function))
    while remaining:
        node = remaining.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, BRANCHES):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
        remaining.extend(ast.iter_child_nodes(node))
    return total


def list_packages() -> Iterator[tuple[str, list[Path]]]:
    """Yield each package of tuneloop, each extension, and the pipelines, with their files."""
    package = ROOT / "components" / "tuneloop"
    directories = sorted(path for path in package.iterdir() if path.is_dir())
    extensions = package / "extensions"
    directories.remove(extensions)
    directories += sorted(path for path in extensions.iterdir() if path.is_dir())
    for directory in directories:
        files = sorted(directory.rglob("*.py"))
        if files:
            yield str(directory.relative_to(package)), files
    yield "pipelines", sorted((ROOT / "pipelines").rglob("*.py"))


def count_files(paths: Iterable[Path]) -> Counts:
    """Count several files together."""
    total = Counts()
    for path in paths:
        if path.stat().st_size:
            total.add(count_file(path))
    return total


def compute_figures() -> dict[str, dict[str, float]]:
    """Compute the figures of each package, rounded to a decimal."""
    return {
        name: {key: round(value, 1) for key, value in count_files(paths).figures().items()}
        for name, paths in list_packages()
    }


def measure_distance(figures: dict[str, float]) -> float:
    """Measure how far figures are from the aims, summed over the aims that they miss."""
    distance = 0.0
    for name, aim in AIMS.items():
        if not aim.is_met(figures[name]):
            ratio = figures[name] / aim.limit
            distance += 1 / max(ratio, 0.01) if aim.is_minimum else ratio
    return distance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", type=int, metavar="N", help="the N files farthest from the aims")
    options = parser.parse_args()
    if options.files:
        paths = [path for _, files in list_packages() for path in files if path.stat().st_size]
        rows = {str(path.relative_to(ROOT)): count_file(path).figures() for path in paths}
        ordered = sorted(rows.items(), key=lambda item: -measure_distance(item[1]))
        rows = dict(ordered[: options.files])
    else:
        rows = compute_figures()
    print("".ljust(48), *(name.rjust(17) for name in AIMS))
    for name, figures in rows.items():
        print(name.ljust(48), *(f"{figures[key]:17.1f}" for key in AIMS))
    print("aim".ljust(48), *(f"{aim.limit:17.1f}" for aim in AIMS.values()))


if __name__ == "__main__":
    main()
