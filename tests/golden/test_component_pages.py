"""`docs/components/` says what the stages' own docstrings and signatures say; `make golden` writes it."""

from pathlib import Path

import pytest

from tests.component_pages import load_stages, render_stage_page
from tuneloop.core.component import Component

PAGES = Path(__file__).parents[2] / "docs" / "components"
STAGES = list(load_stages())


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_page(stage: Component, request: pytest.FixtureRequest) -> None:
    path = PAGES / f"{stage.name}.md"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(render_stage_page(stage))
    assert path.read_text() == render_stage_page(stage), (
        "the stage has changed; `make golden` if that is wanted"
    )


def test_every_page_has_its_stage() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {stage.name for stage in STAGES}
