"""Addresses on the Hugging Face hub: ``hf://owner/name@revision``, of a data set also
``hf://datasets/…``.

Nothing is fetched here. Readers of models (`training/pretrained.py`, `config/model_facts.py`) and
of data sets (`data/readers/hub.py`) take such addresses apart by `split_hub_address`, and explain
failures of the hub alike (`explain_failures`). Whether a name can only be a path is asked by
`formats/adapter_files.py: is_path` and `data/readers/opening.py`.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from tuneloop.core.errors import Retryable, UserError, list_chain

# These are names of classes: several clients may be installed, and none is imported here.
AWAY = re.compile("Connect(ion)?Error|Connector(DNS)?Error|Disconnected|NameResolution|gaierror")
"""Matches the class of an error of a client that could not connect."""
TOKEN = "set HF_TOKEN to a token that may read it"
REFUSALS = {
    "GatedRepoError": f"is gated on the hub: ask for access on its page, and {TOKEN}",
    "RepositoryNotFoundError": f"is not on the hub, or private: check the name, or {TOKEN}",
    "DatasetNotFoundError": f"is not on the hub, or private: check the name, or {TOKEN}",
    "RevisionNotFoundError": "has no such revision on the hub: check it",
    "OfflineModeIsEnabled": "is not in the hub's cache here, and HF_HUB_OFFLINE forbids to ask",
}
"""Class of an error of the hub's clients → what it says of a name, and the remedy. Of several in a
chain of errors the one that stands first here is shown, and those of `STATUSES` come last
(`explain_refusal`). Tests: `tests/unit/stages/test_hub_names.py`."""
STATUSES = {401: f"is refused by the hub: {TOKEN}", 403: f"is refused by the hub: {TOKEN}"}
"""The same for statuses of HTTP."""


def split_hub_address(field: str, address: str, revision: str | None) -> tuple[str, str | None]:
    """Split an address on the hub into name and revision.

    Any address without ``hf://`` is returned unchanged, with `revision`. Raises UserError, with the
    name of the setting `field`, if the address has another form or names another revision.
    """
    if not address.startswith("hf://"):
        return address, revision
    path = address.removeprefix("hf://").removeprefix("datasets/")
    name, _, named_revision = path.partition("@")
    if not is_hub_name(name) or address.endswith("@"):
        remedy = "is not an address on the hub; write hf://OWNER/NAME@REVISION"
        raise UserError(field, address, remedy)
    if named_revision and revision not in (None, named_revision):
        raise UserError(field, address, f"names another revision than {revision}; give one")
    return name, named_revision or revision


def explain_refusal(error: BaseException | None) -> str | None:
    """Explain why the hub does not serve what a name says, with the remedy, from an error or its
    causes.

    Returns:
        None where they say nothing of it.
    """
    reasons: list[str] = []
    for link in list_chain(error):
        class_names = [kind.__name__ for kind in type(link).__mro__]
        reasons += [REFUSALS[name] for name in class_names if name in REFUSALS]
        if "gated dataset" in str(link):
            reasons.append(REFUSALS["GatedRepoError"])
        status = getattr(getattr(link, "response", None), "status_code", None)
        if status in STATUSES:
            reasons.append(STATUSES[status])
    # The clients raise an error for what is missing while they handle the one that says why.
    ordered = list(REFUSALS.values()) + list(STATUSES.values())
    return min(reasons, key=ordered.index, default=None)


@contextmanager
def explain_failures(field: str, name: str, advice: str = "") -> Iterator[None]:
    """Turn what libraries raise about a model or a data set into one line with its name.

    Args:
        field: the setting that names it. Its first part begins the line of a Retryable.
        name: the directory, or the name on the hub.
        advice: what a user can do where only the library's reason is known.

    Raises UserError, or Retryable where the hub does not answer."""
    try:
        yield
    except (UserError, Retryable):
        raise
    except Exception as error:
        # Each library has its own errors, and all of them are about what the name means.
        refusal = explain_refusal(error)
        if refusal:
            raise UserError(field, name, refusal) from error
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if is_unreachable(error):
            subject = field.partition(".")[0]
            message = f"{subject}: {name}: the hub does not answer ({reason})"
            raise Retryable(message) from error
        raise UserError(field, name, f"cannot be loaded: {reason}{advice}") from error


def is_hub_name(text: str) -> bool:
    """Return whether a text has the form of a repository's name on the hub.

    It is ``OWNER/NAME``, or ``NAME`` of the few that have no owner.
    """
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text))


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether a failed connection is among an error and its causes."""
    for link in list_chain(error):
        if isinstance(link, ConnectionError | TimeoutError) or AWAY.search(type(link).__name__):
            return True
        if isinstance(link, OSError) and link.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return True
    return False
