import pytest

from tuneloop.core import plugins

ATTRIBUTES = {
    "rewards": "score",
    "data": "load_splits",
    "algorithms": "Algorithm",
    "environments": "create_environment",
    "fleet": "open_fleet",
}


@pytest.mark.parametrize("family", ATTRIBUTES)
def test_what_is_listed_as_a_variant_is_one(family: str) -> None:
    for name in plugins.list_shipped_variants(family):
        assert callable(plugins.load_variant(family, name, ATTRIBUTES[family])), name
