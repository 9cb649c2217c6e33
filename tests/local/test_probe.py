"""The collection of attacks on what runs programs, and on what computes what a completion says: nothing gains."""

import itertools
import os
import random

import pytest

from tests.unit.local.test_probe import find_endings
from tuneloop.local import probe

pytestmark = [pytest.mark.local, pytest.mark.slow]
SHARES = 3


@pytest.mark.parametrize(
    ("rewards", "environments", "kinds"),
    [(["code"], [], {"", "t", "e"}), (["numeric"], [], {"", "t"}), ([], ["python"], {"", "e"})],
)
def test_no_attack_gains(
    rewards: list[str], environments: list[str], kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the attacks of each class, another one from run to run; all, as `tuneloop probe` tries them, take a
    minute of computing for each of these."""
    share = (
        int(os.environ.get("TUNELOOP_TEST_SEED") or random.SystemRandom().randrange(SHARES))
        % SHARES
    )
    print(f"attacks of TUNELOOP_TEST_SEED={share}")
    load = probe.load_attacks
    monkeypatch.setattr(
        probe, "load_attacks", lambda row: itertools.islice(load(row), share, None, SHARES)
    )
    endings = find_endings(rewards, environments, 20.0 if "e" in kinds else 3.0)
    assert "" in endings and endings.keys() <= kinds, [endings.get(letter) for letter in "gn"]
    assert len(endings.get("e", ())) > 60 // SHARES // 2 or "e" not in kinds
