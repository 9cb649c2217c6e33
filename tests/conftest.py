"""Options and fixtures for all tiers."""

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says what else the machine does.
settings.register_profile("tuneloop", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tuneloop")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/ instead of comparing")
