"""What `plan` prints, and how the report titles its curves, is in words of the field."""

import json
import re
from pathlib import Path

import pytest

from tuneloop.cli import run_cli
from tuneloop.ui.report import STATIC

JARGON = re.compile(r"canary|TRL's|\d+ in \d+ |\bor more\b|logprob_gap")


@pytest.mark.parametrize("pipeline", ["sft", "grpo", "dpo", "sft_then_grpo"])
def test_a_plan_is_in_plain_words(
    pipeline: str, smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "a", "answer": "b"}))
    sets = [f"base_model={smollm2}", f"data={data}"]
    words = [word for setting in sets for word in ("--set", setting)]
    assert run_cli(["plan", pipeline, *words, "--ignore-limits"]) == 0
    output = capsys.readouterr()
    assert JARGON.search(output.out + output.err) is None


def test_curves_of_the_loop_have_titles() -> None:
    titles = (STATIC / "dom.js").read_text()
    for name in ("logprob_gap", "zero_variance", "clip_fraction", "mean_abs_diff", "tolerance"):
        assert re.search(rf"^  {name}: \"[^\"]+\",$", titles, re.M), name
