"""The collection of attacks on what runs programs, and on what computes what a completion says: nothing gains."""

import pytest

from tests.unit.local.test_probe import find_endings

pytestmark = [pytest.mark.local, pytest.mark.slow]


@pytest.mark.parametrize(
    ("rewards", "environments", "kinds"),
    [(["code"], [], {"", "t", "e"}), (["numeric"], [], {"", "t"}), ([], ["python"], {"", "e"})],
)
def test_no_attack_gains(rewards: list[str], environments: list[str], kinds: set[str]) -> None:
    endings = find_endings(rewards, environments, 20.0 if "e" in kinds else 3.0)
    assert endings.keys() == kinds, [endings.get(letter) for letter in "gn"]
    assert len(endings.get("e", ())) > 60 or "e" not in kinds
