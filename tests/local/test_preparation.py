"""Ray Data on this machine: the rows, and the bytes, that `data_prep` makes without it."""

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Retryable
from tuneloop.stages.data_prep import data_prep

pytestmark = [pytest.mark.local, pytest.mark.slow]


def prepare(out: Path, **params: Any) -> None:
    """As a workflow does, which tries again: on a busy machine Ray gives up on its own processes after 30 s."""
    for _ in range(4):
        with suppress(Retryable):
            data_prep(out=str(out), **params)
            return
    data_prep(out=str(out), **params)


def test_rows_by_ray_are_the_rows_made_here(tmp_path: Path) -> None:
    params = {"source_args": {"digits": 5}, "train": 3000, "eval": 20, "sft": 40, "preference": 30}
    found = {}
    for how in ("here", "ray"):
        prepare(tmp_path / how, preparation=how, **params)
        found[how] = Artifact(str(tmp_path / how)).manifest
    assert found["ray"].digest == found["here"].digest
    assert found["ray"].params == found["here"].params, "how it was made is no part of what it is"
    assert Counter(found["ray"].notes["examined"]).total() == 3090
