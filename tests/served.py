"""The engine with servers that docs/extending.md shows, installed as a package of a third party."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
SETTING = "engine=simple"


def read_program() -> str:
    """Return the page's `my_served.py`."""
    match = re.search(r"^```python\n# my_served\.py\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    assert match
    return match[1]


def install_engine(folder: Path, program: str = "", name: str = "my_served") -> None:
    """Write an engine's module to `folder`, and beside it what pip writes for its entry point.

    Args:
        folder: on the path of the processes that are to find the engine.
        program: text of the module; empty: the page's.
        name: of the module.
    """
    (folder / f"{name}.py").write_text(program or read_program())
    entry = re.search(r'^simple = "(\w+)"$', PAGE.read_text(), re.M)
    assert entry and entry[1] == "my_served"
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[tuneloop.engines]\nsimple = {name}\n")
