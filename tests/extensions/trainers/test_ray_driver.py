"""The program that starts torchrun on the nodes of a Ray cluster."""

import pytest

from tuneloop.core.errors import EXIT_RETRY
from tuneloop.extensions.trainers import ray_driver

pytestmark = [pytest.mark.local, pytest.mark.slow]


def test_nodes_that_do_not_come_are_no_bug(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray_driver, "READY_S", 1.0)
    try:
        assert ray_driver.main(["--nodes", "2", "--", "true"]) == EXIT_RETRY
    finally:
        ray.shutdown()
    assert "the cluster has not had 2 nodes within 1 s" in capfd.readouterr().err
