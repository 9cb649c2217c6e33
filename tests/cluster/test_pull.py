"""The whole pull path on real S3: versions published there, a vLLM server that follows, and one that comes late."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.test_pull import follow, publish, served, step
from tests.policies import commit_policy
from tuneloop.weights.inspect import delete_unused_versions, list_versions, verify_version
from tuneloop.weights.materialize import materialize_version
from tuneloop.weights.pointer import PointerRewind

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_versions_go_through_s3(root: str, tmp_path: Path) -> None:
    policies = [commit_policy(tmp_path / "v0")]
    assert publish(root, policies[0]).full
    running = follow(root)
    try:
        for version in (1, 2):
            policies.append(step(policies[-1], tmp_path / f"v{version}", version))
            assert publish(root, policies[-1]).encoding == "gap8-xor"
            pulled = served(running, version)["pulled"]
            assert pulled["deltas"] == [version] and pulled["full"] is None
            held = running.ask("POST", "/verify")[1]
            assert (
                held["version"] == version
                and held["identical"] == held["tensors"]
                and not held["unread"]
            )
    finally:
        running.process.kill()
        running.process.wait()
    late = materialize_version(root, None, tmp_path / "late")
    assert (late.full, late.deltas, late.source) == (0, [1, 2], policies[2].manifest.digest)
    with pytest.raises(PointerRewind):
        publish(root, policies[1])
    assert (
        verify_version(root)
        and list_versions(root)[2].latest
        and delete_unused_versions(root) == []
    )
