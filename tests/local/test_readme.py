"""Every command the README shows is run, in its order, where a stranger would run it."""

import os
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.waiting import LIMIT_S
from tuneloop.config.loading import find_pipeline
from tuneloop.workflow.plan import read_plan

pytestmark = pytest.mark.local
ROOT = Path(__file__).parents[2]
ELSEWHERE = {"make demo", "make test", "make smollm2", "make demo-smollm2"}
"""`make test` is what runs this file; what `make demo` runs is the third command, with another seed;
the fixture `smollm2` does what `make smollm2` does; test_smollm2.py has what `make demo-smollm2` runs."""


def commands() -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.S | re.M)
    return [line for block in blocks for line in block.splitlines() if line]


def test_the_readme_starts_with_two_commands() -> None:
    assert commands()[:2] == ["make demo", "make test"]


@pytest.mark.slow
def test_readme_commands(tmp_path: Path, smollm2: Path) -> None:
    assert smollm2 == ROOT / ".venv/models/smollm2"
    for name in ("pipelines", ".venv", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for command in commands():
        if command in ELSEWHERE:
            continue
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            text=True,
            capture_output=True,
            timeout=10 * LIMIT_S,
            env={**os.environ},
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr
    for run in ("mine", "chats"):
        assert (tmp_path / f"runs/{run}/report.html").stat().st_size > 10_000


def test_every_relative_link_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pictures_of_the_pages_are_few_and_small() -> None:
    shown = re.findall(r"!\[.+\]\((\S+)\)", (ROOT / "docs/ui.md").read_text())
    taken = [*ROOT.glob("docs/images/*.png")]
    assert {ROOT / "docs" / name for name in shown} == {*taken} and len(taken) == 6
    assert max(picture.stat().st_size for picture in taken) < 60_000


def test_pictures_are_small_and_fetch_nothing() -> None:
    pictures = re.findall(r"!\[.+\]\((\S+)\)", (ROOT / "README.md").read_text())
    assert len(pictures) == 2
    for name in pictures:
        text = (ROOT / name).read_text()
        ElementTree.fromstring(text)
        assert len(text) < 30_000
        assert not re.search(r"(href|src)=|url\([^#)]|@import", text), (
            "a page shows it without asking anybody"
        )
    shown = (ROOT / "docs/images/loop.svg").read_text()
    pipeline = find_pipeline("sft_then_grpo")
    plan = read_plan(pipeline.build(pipeline.Config()))
    assert [name for name in plan.stages if name.replace("-", "_") not in shown] == []
