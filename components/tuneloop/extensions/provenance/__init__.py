"""Which weights made which token: what made a version, and versions that are named, signed and
published.

All commands are in `commands.py`. The audit itself (`tuneloop audit`, `replay`, `bisect`) is in
`runs/`, and so are the promotions of schedules (`runs/promotions.py`).
"""

from tuneloop.core.hooks import Extension

COMMANDS = "tuneloop.extensions.provenance.commands"
EXTENSION = Extension(
    name="provenance",
    commands={
        "why": f"{COMMANDS}:explain_version",
        "rescore": f"{COMMANDS}:rescore_run",
        "promote": f"{COMMANDS}:promote_version",
        "promoted": f"{COMMANDS}:list_promotions",
        "attest": f"{COMMANDS}:attest_version",
        "push": f"{COMMANDS}:push_version",
        "verify-model": f"{COMMANDS}:verify_model",
    },
)
