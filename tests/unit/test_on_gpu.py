"""The list of steps for a GPU, rehearsed on a CPU: it records figures, and goes on where it was cut."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import on_gpu
from tests.waiting import LIMIT_S


def rehearse(results: Path, *steps: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "benchmarks.on_gpu", "--small", *steps]
    line += ["--results", str(results), "--model", "none"]
    return subprocess.run(line, capture_output=True, text=True, timeout=10 * LIMIT_S)


def test_a_step_that_is_done_is_left_out_and_one_that_failed_is_not(tmp_path):
    results = tmp_path / "results.jsonl"
    first = rehearse(results, "varlen", "canary")
    assert first.returncode == 1, first.stdout  # there is no model for the canary
    records = [json.loads(line) for line in results.read_text().splitlines()]
    errors = [
        max(record["figures"]["relative_error"].values())
        for record in records
        if "relative_error" in record.get("figures", {})
    ]
    assert len(errors) == 4
    assert max(errors) < 0.02
    assert [record["done"] for record in records if "done" in record] == ["varlen"]
    assert [record["failed"] for record in records if "failed" in record] == ["canary"]

    assert rehearse(results, "varlen").returncode == 0
    assert results.read_text().count("\n") == len(records)


def test_every_step_of_the_list_is_a_function():
    for entry in on_gpu.STEPS:
        module, function = entry.function.split(":")
        source = Path(on_gpu.__file__).parent / "gpu_steps" / f"{module}.py"
        assert f"def {function}(step: Step) -> None:" in source.read_text()
