"""Public functions are named by a verb and its object; those that are not stand on a list that may only shrink."""

import ast
from collections.abc import Iterator
from pathlib import Path

import tuneloop

LIST = Path(__file__).with_name("one_word_names.txt")


def public_functions() -> Iterator[tuple[str, str]]:
    """Module (below tuneloop) and name of every public function at the head of a module."""
    root = Path(tuneloop.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield module, node.name


def test_one_word_names_only_get_fewer() -> None:
    """A new function needs a better name; one that got a better name leaves the list.

    `main` is what programs have, and `score` what every reward has, a user's too."""
    found = list(public_functions())
    one_word = {
        f"{module}:{name}"
        for module, name in found
        if "_" not in name
        and name != "main"
        and not (name == "score" and module.startswith("rewards."))
    }
    listed = set(LIST.read_text().split())
    assert not one_word - listed, "name these by a verb and its object"
    assert not listed - one_word, f"delete these from {LIST.name}"
    assert len(listed) < 0.15 * len(found)
