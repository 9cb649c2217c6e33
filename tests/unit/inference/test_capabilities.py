"""What engines state of themselves, and what is assumed of an engine that is not here."""

import pytest

from tuneloop.core import plugins
from tuneloop.inference.capabilities import Capabilities, find_capabilities


@pytest.mark.parametrize("kind", plugins.list_shipped_variants("engines"))
def test_every_engine_that_ships_states_its_capabilities(kind: str) -> None:
    assert isinstance(find_capabilities(kind), Capabilities)


def test_only_engines_with_servers_pull_sleep_or_have_replicas() -> None:
    for kind in plugins.list_shipped_variants("engines"):
        capabilities = find_capabilities(kind)
        has_servers = capabilities.serves or not capabilities.in_process
        assert has_servers or not capabilities.pulls
        assert capabilities.serves or not (capabilities.sleeps or capabilities.replicas)


def test_an_engine_that_is_not_installed_counts_as_one_in_the_process_of_its_stage() -> None:
    assert find_capabilities("absent.package:open_engine") == Capabilities()
