"""Rollout servers that outlive a run: their state, their number, and the protocol's tests."""

from tuneloop.core.hooks import Extension

EXTENSION = Extension(
    name="fleets",
    command_groups={
        "endpoint": "tuneloop.extensions.fleets.endpoint_commands:app",
        "fleet": "tuneloop.extensions.fleets.fleet_commands:app",
    },
)
