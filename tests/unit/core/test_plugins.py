import subprocess
import sys

import pytest

from tuneloop.core import plugins

ATTRIBUTES = {
    "rewards": "score",
    "data": "load_splits",
    "algorithms": "Algorithm",
    "environments": "create_environment",
    "fleet": "open_fleet",
    "trackers": "Tracker",
}


@pytest.mark.parametrize("family", ATTRIBUTES)
def test_what_is_listed_as_a_variant_is_one(family: str) -> None:
    for name in plugins.list_shipped_variants(family):
        assert callable(plugins.load_variant(family, name, ATTRIBUTES[family])), name


def test_what_is_installed_is_looked_through_only_for_a_name_that_does_not_ship() -> None:
    """Reading the metadata of all distributions takes as long as reading a pipeline's configuration."""
    code = """
from tuneloop.config.loading import find_pipeline
from tuneloop.core.plugins import _registered
pipeline = find_pipeline("sft_then_grpo")
pipeline.build(pipeline.configure(sets=["data.rewards={exact: 1.0, format: 0.5}"]))
print(_registered.cache_info().misses)
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "0"
