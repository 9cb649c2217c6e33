"""What a pipeline says of the cluster it is rendered for."""

from typing import Any

import pytest

from tuneloop.workflow.settings import QUEUE_LABEL, ROLES, Cluster

ONE = dict.fromkeys(("trainer", "sampler", "scorer"), "q")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"trainer": "tuneloop", "sampler": "tuneloop-samplers", "scorer": "tuneloop"}),
        ({"queue": "q"}, ONE),
        ({"queue": ""}, {}),
        ({"queue": "q", "sampler": {"queue": "s"}}, {**ONE, "sampler": "s"}),
        (
            {"sampler": {"gpus": 2}},
            {"trainer": "tuneloop", "sampler": "tuneloop-samplers", "scorer": "tuneloop"},
        ),
        ({"sampler": {"queue": "tuneloop"}}, dict.fromkeys(ONE, "tuneloop")),
        ({"sampler": {"queue": ""}}, {"trainer": "tuneloop", "scorer": "tuneloop"}),
    ],
)
def test_servers_have_a_queue_of_their_own_unless_another_is_set(
    settings: dict[str, Any], expected: dict[str, str]
) -> None:
    found = {role: Cluster(**settings).build_queue_labels(role).get(QUEUE_LABEL) for role in ROLES}
    assert {role: queue for role, queue in found.items() if queue} == expected
