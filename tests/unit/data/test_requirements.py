"""Pipelines on data that has not what they need: refused by `data_prep`, with what helps."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.test_layouts import SAMPLES
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError
from tuneloop.stages.data_prep import data_prep

COMMANDS = {
    "messages": "its rows are demonstrations to learn from, which are for `tuneloop run sft`",
    "question-answer": "its rows are prompts to sample .*, which are for `tuneloop run grpo`",
    "preference": "its rows are pairs .*, which are for `tuneloop run dpo --set sft=null`",
}
"""Layout → how the refusal says what its rows are for."""
NEEDS = {
    "sft": r"has no demonstrations to learn from \(recognised: .*data.columns.completion",
    "grpo": r"has no prompts to sample completions of \(recognised: .*data.columns.answer",
    "dpo": r"has no pairs of a better and a worse completion \(recognised: .*data.columns.chosen",
    "sft_then_grpo": r"has no (demonstrations|prompts) to",
}
"""Pipeline → how the refusal says what it needs, and which columns would do."""
FITTING = {("sft", "messages"), ("grpo", "question-answer"), ("dpo", "preference")}


def prepare(pipeline: str, file: Path, *sets: str) -> Any:
    """Run the stage `data_prep` as a pipeline does with these settings."""
    found = find_pipeline(pipeline)
    config = found.configure(None, [f"data={file}", *sets])
    (spec,) = [s for s in found.module.stages(config) if s.component is data_prep]
    return data_prep(out=str(file.parent / "out"), **spec.parameters)


@pytest.mark.parametrize("layout", sorted(COMMANDS))
@pytest.mark.parametrize("pipeline", sorted(NEEDS))
def test_a_pipeline_needs_rows_of_its_form(pipeline: str, layout: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in SAMPLES[layout]))
    sets = ["sft=null"] if pipeline == "dpo" else []
    if (pipeline, layout) in FITTING:
        prepare(pipeline, file, *sets)
        return
    with pytest.raises(UserError, match=NEEDS[pipeline]) as caught:
        prepare(pipeline, file, *sets)
    assert str(caught.value).startswith(f"data: '{file}': ")
    assert caught.match(COMMANDS[layout])


def test_pairs_alone_are_not_enough_for_demonstrations_first(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in SAMPLES["preference"]))
    with pytest.raises(UserError, match=r"has no demonstrations .*`tuneloop run dpo"):
        prepare("dpo", file)


def test_rows_that_are_all_held_out_are_no_wrong_form(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in SAMPLES["messages"]))
    with pytest.raises(UserError, match=r"no demonstrations .* are left .*data.sft_eval"):
        prepare("sft", file, "data.sft_eval=5")
