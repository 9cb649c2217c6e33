"""Addresses on the Hugging Face hub: ``hf://owner/name@revision``, of a data set also ``hf://datasets/…``."""

import errno
import re

from tuneloop.core.errors import UserError

AWAY = re.compile(
    "Connect(ion)?Error|Connector(DNS)?Error|Disconnected|NameResolution|gaierror"
)  # class names


def split_hub_address(field: str, address: str, revision: str | None) -> tuple[str, str | None]:
    """Split an address on the hub into name and revision; any other address is returned unchanged, with `revision`."""
    if not address.startswith("hf://"):
        return address, revision
    name, _, own = address.removeprefix("hf://").removeprefix("datasets/").partition("@")
    if not is_hub_name(name) or address.endswith("@"):
        raise UserError(
            field, address, "is not an address on the hub; write hf://OWNER/NAME@REVISION"
        )
    if own and revision not in (None, own):
        raise UserError(field, address, f"names another revision than {revision}; give one")
    return name, own or revision


def is_hub_name(text: str) -> bool:
    """Return whether a text has the form of a repository's name on the hub: ``OWNER/NAME``, or ``NAME``
    of the few that have no owner."""
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text))


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether a failed connection is among the causes."""
    while error and not (
        isinstance(error, ConnectionError | TimeoutError) or AWAY.search(type(error).__name__)
    ):
        if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            break
        error = error.__cause__ or error.__context__
    return error is not None
