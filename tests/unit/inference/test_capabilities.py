"""What engines state of themselves, and what is assumed of an engine that is not here."""

import pytest

from tuneloop.config.engines import (
    EndpointEngine,
    Engine,
    ServingEngine,
    TransformersEngine,
    VllmEngine,
)
from tuneloop.core import plugins
from tuneloop.inference.capabilities import Capabilities, find_capabilities


@pytest.mark.parametrize("kind", plugins.list_shipped_variants("engines"))
def test_every_engine_that_ships_states_its_capabilities(kind: str) -> None:
    assert isinstance(find_capabilities(kind), Capabilities)


@pytest.mark.parametrize("section", [VllmEngine, TransformersEngine, EndpointEngine])
def test_an_engine_that_serves_is_one_whose_settings_have_a_server(section: type[Engine]) -> None:
    kind = section.model_fields["kind"].default
    assert find_capabilities(kind).serves == issubclass(section, ServingEngine)


def test_an_engine_that_is_not_installed_counts_as_one_in_the_process_of_its_stage() -> None:
    assert find_capabilities("absent.package:open_engine") == Capabilities()
