"""What a manifest says of the place where its artifact was made."""

import pytest

from tuneloop.core.provenance import collect_provenance


def test_a_tag_that_nobody_has_filled_is_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that Argo has not started has the variables of Argo's pods as they are written."""
    monkeypatch.setenv("TUNELOOP_NODE_WORKFLOW", "demo-2")
    monkeypatch.setenv("TUNELOOP_NODE_NAME", "{{node.name}}")
    assert collect_provenance(0.0, 1)["workflow"] == {"node_workflow": "demo-2"}
