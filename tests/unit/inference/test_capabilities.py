"""What engines state of themselves, and what is assumed of an engine that is not here."""

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from tuneloop.config.engines import (
    EndpointEngine,
    Engine,
    ServingEngine,
    TransformersEngine,
    VllmEngine,
)
from tuneloop.config.loading import find_pipeline
from tuneloop.core import plugins
from tuneloop.inference.capabilities import Capabilities, find_capabilities
from tuneloop.inference.engines import check_args


@pytest.mark.parametrize("kind", plugins.list_shipped_variants("engines"))
def test_every_engine_that_ships_states_its_capabilities(kind: str) -> None:
    assert isinstance(find_capabilities(kind), Capabilities)


@pytest.mark.parametrize("section", [VllmEngine, TransformersEngine, EndpointEngine])
def test_an_engine_that_serves_is_one_whose_settings_have_a_server(section: type[Engine]) -> None:
    kind = section.model_fields["kind"].default
    assert find_capabilities(kind).serves == issubclass(section, ServingEngine)


def test_an_engine_that_is_not_installed_counts_as_one_in_the_process_of_its_stage() -> None:
    assert find_capabilities("absent.package:open_engine") == Capabilities()


def test_a_module_of_a_third_party_may_have_open_engine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def open_engine(endpoint, args, timeout_s): ...\n"
    (tmp_path / "bare_engine.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint(name="bare", value="bare_engine", group="tuneloop.engines")
    monkeypatch.setattr(plugins, "_registered", lambda: EntryPoints([entry]))
    assert find_capabilities("bare") == Capabilities()
    check_args("bare", {"depth": 3}, "engine.args.")
    pipeline = find_pipeline("grpo")
    assert pipeline.build(pipeline.configure(None, ["engine=bare", "engine.args={depth: 3}"]))
