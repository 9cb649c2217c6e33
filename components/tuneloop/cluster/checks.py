"""The outcome of a check of a cluster."""

from dataclasses import dataclass

OK = "ok"
WARNING = "warning"
REFUSED = "refused"
NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Check:
    """The outcome of a check.

    Attributes:
        subject: what was checked, such as ``store``.
        outcome: `OK`, `WARNING`, `REFUSED` or `NOT_CHECKED`.
        found: what was found, in words.
        remedy: the command that fixes it; empty if nothing has to be fixed.
    """

    subject: str
    outcome: str
    found: str
    remedy: str = ""
