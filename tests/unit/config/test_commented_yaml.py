"""The settings as `tuneloop schema` prints them: a file that people save, edit and run with."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tuneloop.config.commented_yaml import FIRST, FIRST_COUNT, format_settings
from tuneloop.config.foreign_names import FOREIGN
from tuneloop.config.listing import Section, Setting, describe_settings
from tuneloop.config.loading import Pipeline, find_pipeline
from tuneloop.core.json_types import JsonObject

PIPELINES = ("sft", "dpo", "grpo", "sft_then_grpo")
SETTING = re.compile(r"^ *#(\w+):(?: (.*))?$")


@pytest.fixture(params=PIPELINES)
def pipeline(request: pytest.FixtureRequest) -> Pipeline:
    return find_pipeline(request.param)


def format_pipeline(pipeline: Pipeline, key: str = "") -> str:
    text = format_settings(pipeline.name, describe_settings(pipeline.Config), key)
    assert text is not None
    return text


def test_a_saved_file_changes_nothing(pipeline: Pipeline, tmp_path: Path, smollm2: Path) -> None:
    """Neither for the demo nor for a pretrained model, whose defaults go on to follow it."""
    file = tmp_path / "settings.yaml"
    file.write_text(format_pipeline(pipeline))
    for sets in ([], [f"base_model={smollm2}"]):
        assert pipeline.configure_for(None, file, sets) == pipeline.configure_for(None, None, sets)


def test_each_line_may_be_set_by_deleting_its_mark(pipeline: Pipeline, tmp_path: Path) -> None:
    """A shared, a colocated or an optional part needs other settings, too; all others are the
    demo's own values."""
    lines = format_pipeline(pipeline).splitlines()
    expected = pipeline.configure()
    file = tmp_path / "settings.yaml"
    count = 0
    for number, line in enumerate(lines):
        # Sections that are left out by default are commented out as a whole.
        is_required = line.endswith(":")
        if not SETTING.match(line) or is_required or is_in_optional_section(lines, number):
            continue
        values = yaml.safe_load("\n".join([*lines[:number], line.replace("#", "", 1)]))
        file.write_text(yaml.safe_dump(values))
        if is_of_another_kind(values):
            continue
        assert pipeline.configure(file) == expected, line
        count += 1
    assert count > 80


def is_in_optional_section(lines: list[str], number: int) -> bool:
    """Return whether a heading above line `number`, less indented, is commented out."""
    depth = len(lines[number]) - len(lines[number].lstrip())
    for line in reversed(lines[:number]):
        indentation = len(line) - len(line.lstrip())
        is_heading = line.endswith(":") and "# " not in line
        if is_heading and indentation < depth:
            depth = indentation
            if line.lstrip().startswith("#"):
                return True
    return False


def is_of_another_kind(values: JsonObject) -> bool:
    """Return whether a setting is one that the default kind of its section does not have."""
    engine = values.get("engine") or {}
    weights = engine.get("weights") or {}
    foreign = {"url", "encoding", "fleet_has_base", "fleet"} & weights.keys()
    options: set[str] = set()
    for stage in ("update", "preference"):
        section = values.get(stage) or {}
        options |= (section.get("algorithm") or {}).keys()
    others = {"max_completion_len", "soft_punish_cache", "baseline", "normalize_advantages"}
    others |= {"desirable_weight", "undesirable_weight"}
    return bool(foreign or "rollout_endpoint_url" in engine or others & options)


def test_each_setting_has_one_line_of_text(pipeline: Pipeline) -> None:
    lines = format_pipeline(pipeline).splitlines()
    for above, line in pairwise(lines):
        if SETTING.match(line):
            assert re.match(r"^ *# \S", above), line
            assert not re.search(r"(: |# )(;|$)", above), above


@pytest.mark.parametrize(
    ("name", "limit"), [("sft", 130), ("dpo", 137), ("grpo", 167), ("sft_then_grpo", 179)]
)
def test_a_person_can_read_the_settings(name: str, limit: int) -> None:
    """At most 130 were asked for; the loops are above that, and may not grow. The headings of
    `cluster.pod`, of roles' pods and of `cluster.credentials` came later, as platform teams asked
    for them."""
    lines = format_pipeline(find_pipeline(name)).splitlines()
    assert len(list(filter(SETTING.match, lines))) <= limit


def test_what_is_mostly_left_out_is_printed_where_it_is_asked_for() -> None:
    grpo = find_pipeline("grpo")
    whole = format_pipeline(grpo)
    assert "`tuneloop schema PIPELINE cluster.share` prints its settings" in whole
    assert "runs_per_claim" not in whole
    assert "    #runs_per_claim: 2\n" in format_pipeline(grpo, "cluster.share")


def test_the_settings_that_people_set_first_are_at_the_top(pipeline: Pipeline) -> None:
    head = format_pipeline(pipeline).partition("\n\n")[0].splitlines()
    keys = [line.split()[1].partition("=")[0] for line in head if line.startswith("#   ")]
    assert len(keys) == FIRST_COUNT and set(keys) <= set(FIRST)
    assert keys[:2] == ["base_model", "data.source"]


def test_a_ranked_setting_is_one_of_some_pipeline() -> None:
    keys: set[str] = set()
    for name in PIPELINES:
        described = describe_settings(find_pipeline(name).Config)
        keys |= {setting.key for setting in described.list_settings()}
    assert set(FIRST) <= keys
    # So is each that a name of another tool stands for.
    targets = {key for equivalents in FOREIGN.values() for key in equivalents}
    assert targets <= keys


def read_comment(text: str, key: str) -> str:
    """Return the comment above the only line that sets `key`."""
    lines = text.splitlines()
    (number,) = [index for index, line in enumerate(lines) if line.lstrip().startswith(f"#{key}:")]
    return lines[number - 1].strip()


def test_a_setting_of_several_kinds_has_the_text_and_the_default_of_each() -> None:
    grpo = find_pipeline("grpo")
    engine = format_pipeline(grpo, "engine")
    assert "vllm: vLLM's own options" in read_comment(engine, "args")
    assert "transformers, endpoint: the engine's own options" in read_comment(engine, "args")
    assert read_comment(engine, "fleet").startswith("# endpoint: refit: the servers: http")
    algorithm = format_pipeline(grpo, "update.algorithm")
    assert "default of gspo: 0.0003" in read_comment(algorithm, "epsilon")
    assert read_comment(algorithm, "soft_punish_cache").startswith("# dapo: tokens before that")
    assert "plugin" not in format_pipeline(grpo)


def test_a_default_that_follows_something_says_what() -> None:
    grpo = format_pipeline(find_pipeline("grpo"))
    assert "default for a pretrained model: TRL's" in read_comment(grpo, "learning_rate")
    assert "  # as in rollout and reward, unless set here: max_tokens, environment, " in grpo
    evaluate = format_pipeline(find_pipeline("grpo"), "evaluate")
    assert read_comment(evaluate, "max_turns") == "# as rollout.max_turns, unless it is set here"
    assert read_comment(format_pipeline(find_pipeline("sft"), "evaluate"), "max_turns") != (
        "# as rollout.max_turns, unless it is set here"
    )


def test_choices_and_limits_are_named() -> None:
    trainer = format_pipeline(find_pipeline("sft"), "trainer")
    assert "one of float32, bfloat16" in read_comment(trainer, "dtype")
    loop = format_pipeline(find_pipeline("grpo"), "loop")
    assert "at least 1; at most 90" in read_comment(loop, "per_workflow")


def test_a_part_has_the_headings_above_it(tmp_path: Path) -> None:
    """So that it is a file for `run -c`, too. Equal sections are written out where asked for."""
    grpo = find_pipeline("grpo")
    text = format_pipeline(grpo, "cluster.sampler")
    assert text.startswith("cluster:\n  # the rollout server")
    (tmp_path / "part.yaml").write_text(text.replace("#gpus: 0", "gpus: 1"))
    assert grpo.configure(tmp_path / "part.yaml") == grpo.configure(
        None, ["cluster.sampler.gpus=1"]
    )
    assert "those of cluster.trainer" in format_pipeline(grpo)
    assert format_settings("grpo", describe_settings(grpo.Config), "cluster.nothing") is None


def test_what_is_listed_is_whole() -> None:
    """Every key of the configuration is there, however deep."""
    described = describe_settings(find_pipeline("sft_then_grpo").Config)
    assert isinstance(described.find("trainer.lora.r"), Setting)
    assert isinstance(described.find("engine.weights"), Section)
    assert described.find("rollout.nothing") is None
