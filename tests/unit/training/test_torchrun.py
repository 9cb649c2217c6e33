"""What one exit code says of several ranks."""

import signal

import pytest

from tuneloop.training.torchrun import exit_code, main


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


def test_a_node_that_does_not_come_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    nodes = [
        "--nnodes=2",
        "--node-rank=1",
        "--master-addr=127.0.0.1",
        "--master-port=1",
        "--rdzv-conf=timeout=1",
    ]
    assert main([*nodes, "-m", "tuneloop.stages.sft"]) == 75
