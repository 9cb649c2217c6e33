"""What one exit code says of several ranks."""

import signal

import pytest

from tuneloop.torchrun import exit_code


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([2, 2], 2),
        ([2, -signal.SIGTERM], 2),
        ([1, 75, -signal.SIGTERM], 1),  # a bug, and what it did to the others
        ([-signal.SIGKILL, 75], 137),  # out of memory
        ([1, 2], 2),
        ([75, 75], 75),
        ([-signal.SIGTERM], 75),
    ],
)
def test_exit_code(codes: list[int], expected: int) -> None:
    assert exit_code(codes) == expected
