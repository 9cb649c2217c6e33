"""Imports of tuneloop inside functions are only for what must not be needed where the importing module is read."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import tuneloop

ROOT = Path(tuneloop.__file__).parent
HEAVY = {
    *("torch", "vllm", "transformers", "datasets", "peft", "safetensors", "tokenizers", "ray"),
    *(
        "kubernetes",
        "hera",
        "kfp",
        "httpx2",
        "fastapi",
        "starlette",
        "uvicorn",
        "math_verify",
        "reasoning_gym",
    ),
    *("mlflow", "tensorboard", "trackio", "wandb", "gguf"),
}
"""Libraries that are slow to import, or that come with an extra."""


def list_modules() -> dict[str, Path]:
    """Return module → file, of the whole package."""
    modules = {}
    for path in ROOT.rglob("*.py"):
        parts = ("tuneloop", *path.relative_to(ROOT).with_suffix("").parts)
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


MODULES = list_modules()
COMMAND = re.compile(r"\.extensions\.\w+\.(\w+_)?commands?$")
"""Commands import what they need when they run, as those of `tuneloop.cli` do."""


def find_imports(module: str) -> Iterator[tuple[str, int, bool]]:
    """Yield each module that `module` imports, the line, and whether that is inside a function."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                names = [f"{child.module}.{alias.name}" for alias in child.names]
                yield from (
                    (name if name in MODULES else child.module or "", child.lineno, inside)
                    for name in names
                )
            else:
                yield from walk(
                    child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                )

    return walk(ast.parse(MODULES[module].read_text()), False)


@functools.cache
def find_heavy_libraries(module: str) -> frozenset[str]:
    """Return the heavy libraries that importing `module` imports, by modules of ours in between as well."""
    seen, left, found = set[str](), [module], set[str]()
    while left:
        name = left.pop()
        if name.partition(".")[0] != "tuneloop":
            found |= {name.partition(".")[0]} & HEAVY
        elif name not in seen:
            seen.add(name)
            left += [name.rpartition(".")[0]] if "." in name else []
            left += (
                [target for target, _, inside in find_imports(name) if not inside]
                if name in MODULES
                else []
            )
    return frozenset(found)


def test_imports_inside_functions_spare_a_heavy_library() -> None:
    places = [
        f"{path.relative_to(ROOT.parent)}:{line} imports {target}"
        for module, path in MODULES.items()
        if not module.startswith("tuneloop.cli") and not COMMAND.search(module)
        for target, line, inside in find_imports(module)
        if inside and target.startswith("tuneloop.")
        if find_heavy_libraries(target) <= find_heavy_libraries(module)
    ]
    assert not places, "move these to the top of their modules"
