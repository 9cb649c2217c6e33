"""Workflows of a run, in order."""

from types import SimpleNamespace
from typing import Any

from tuneloop.argo.cluster import workflows


def test_workflows_of_one_second_follow_their_numbers() -> None:
    def made(name: str, second: int) -> dict[str, Any]:
        return {"metadata": {"name": name, "creationTimestamp": f"2026-01-01T00:00:{second:02d}Z"}}

    found = [made("demo-10", 5), made("demo-2", 5), made("demo", 1), made("demo-11", 5)]
    cluster: Any = SimpleNamespace(list=lambda *_, **__: found, namespace="n", context="c")
    assert [w["metadata"]["name"] for w in workflows(cluster, "demo")] == ["demo", "demo-2", "demo-10", "demo-11"]
