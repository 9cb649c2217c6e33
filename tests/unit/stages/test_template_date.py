"""Chat templates that show today's date: a checkpoint has one day, whenever it is rendered."""

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from tests.models import write_model
from tuneloop.config.loading import find_pipeline
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.formats.template_settings import fix_date, write_date
from tuneloop.formats.tokens import encode_prompt
from tuneloop.stages.base_model import base_model

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
MESSAGES = [{"role": "user", "content": "Hello"}]
DAY = datetime.date(2026, 3, 9)


class Midnight(datetime.datetime):
    """A clock that is a year ahead."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.datetime(2031, 1, 2, tzinfo=tz)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("llama3_2", "Today Date: 09 Mar 2026"), ("gptoss", "Current date: 2026-03-09")],
)
def test_a_template_shows_the_day_that_was_fixed(
    name: str, shown: str, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    original = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert fix_date(tokenizer, DAY)
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert shown in rendered
    monkeypatch.setattr(chat_template_utils, "datetime", Midnight)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == rendered
    # Only the day is another one.
    assert len(rendered) == len(original) and rendered != original


def test_templates_without_a_day_stay(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for name in ("llama3_1", "qwen3", "gemma"):
        template = (TEMPLATES / f"{name}.jinja").read_text()
        tokenizer.chat_template = template
        assert not fix_date(tokenizer, DAY) and tokenizer.chat_template == template
    tokenizer.chat_template = None
    assert not fix_date(tokenizer, DAY)


def test_a_format_that_is_computed_is_left() -> None:
    template = "{% if strftime_now is defined %}{{ strftime_now(form) }}{% endif %}"
    assert write_date(template, DAY) == template


def test_a_checkpoint_renders_alike_on_every_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model("llama3", tmp_path / "model")
    shutil.copy(TEMPLATES / "llama3_2.jinja", model / "chat_template.jinja")
    base_model(out=str(tmp_path / "base"), model=str(model), template_date="2026-03-09")
    policy = Artifact(str(tmp_path / "base"))
    assert policy.manifest.facts["template_date"] == "2026-03-09"

    def encode() -> list[int]:
        tokenizer = AutoTokenizer.from_pretrained(policy.path / "model")
        return list(encode_prompt(tokenizer, json.dumps(MESSAGES), chat=True))

    before = encode()
    monkeypatch.setattr(chat_template_utils, "datetime", Midnight)
    assert encode() == before
    # Without the mend this model's own template has other ids a year later.
    own = AutoTokenizer.from_pretrained(model)
    assert "02 Jan 2031" in own.apply_chat_template(MESSAGES, tokenize=False)


def test_what_is_no_day_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"template_date.*2026-02-30"):
        base_model(out=str(tmp_path / "base"), model="tiny-qwen3", template_date="2026-02-30")


@pytest.mark.parametrize("text", ["2031-01-02", "'2031-01-02'"])
def test_a_day_is_set_as_it_is_written(text: str) -> None:
    """YAML reads a day without quotes as a date."""
    config: Any = find_pipeline("sft").configure(None, [f"model.template_date={text}"])
    assert config.model.template_date == "2031-01-02"


def test_a_day_that_no_calendar_has_is_refused_as_a_setting() -> None:
    with pytest.raises(UserError, match=r"--set: 'model.template_date=2031-02-30'"):
        find_pipeline("sft").configure(None, ["model.template_date=2031-02-30"])


def test_a_test_for_a_missing_clock_never_holds() -> None:
    template = (
        "{% if strftime_now is not defined %}old{% else %}{{ strftime_now('%Y') }}{% endif %}"
    )
    assert write_date(template, DAY) == '{% if false %}old{% else %}{{ "2026" }}{% endif %}'
