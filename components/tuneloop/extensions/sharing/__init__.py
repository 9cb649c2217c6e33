"""Runs that share accelerators, one after the other: what is set, drawn and checked for them.

The programs of their pods and the state of a group are the core's: `tuneloop.sharing` and
`tuneloop.cluster.reservations`, whose names stand in rendered workflows.
"""

from tuneloop.core.hooks import Extension

EXTENSION = Extension(
    name="sharing",
    commands={"leases": "tuneloop.extensions.sharing.command:show_device_leases"},
    settings={"cluster.share": "tuneloop.extensions.sharing.settings:Share"},
    pod="tuneloop.extensions.sharing.pod:HOOK",
)
