"""Options and fixtures for all tiers."""

import os
import time

import pytest
from hypothesis import HealthCheck, settings

from tests.pretrained import smollm2 as smollm2

# How long an example takes says what else the machine does.
settings.register_profile("tuneloop", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tuneloop")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden/ instead of comparing"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """CI names the time (seconds since the epoch) after which no test begins; a test on its way goes on."""
    if time.time() > float(os.environ.get("SKIP_AFTER", "inf")):
        pytest.skip("not run: the time for these tests is over")
