"""What all tests of Kubeflow Pipelines have in common."""

from collections.abc import Iterator

import pytest

from tests.compiling import without_sources


@pytest.fixture(autouse=True)
def compiles_quickly() -> Iterator[None]:
    """Also what a command compiles."""
    with without_sources():
        yield
