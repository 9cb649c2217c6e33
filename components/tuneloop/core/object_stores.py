"""What object stores take from the environment, and what they answer.

`core/store.py` has the requests, and here are the words of services and of obstore.
`cluster/preflight.py` reads the first variable out of `KEYS`, and `cli/checks.py` and
`config/stored_facts.py` look for ``NoSuchBucket`` in messages.
"""

import io
import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tuneloop.core.errors import UserError

if TYPE_CHECKING:
    from obstore.store import RetryConfig

REFUSALS = (
    "AccessDenied",
    "InvalidAccessKey",
    "InvalidBucketName",
    "NoSuchBucket",
    "SignatureDoesNotMatch",
)
"""S3's errors that a retry does not change: the user's mistake, exit code 2. obstore does not
recognize them when it lists keys. `core/store_credentials.py: TEMPORARY` is asked before. An error
that is in neither is unavailable, and retried for hours."""
KEYS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, for an S3 of your own AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
}
"""Scheme → where its keys come from, for messages; each of `core/store.py: BUCKET_SCHEMES` has an
entry.
"""
METADATA = ("169.254.169.254", "metadata.google.internal")
"""The metadata service of a cloud's machine: it is asked for credentials when no others are set. An
error that names it says that there are none (`core/errors.py: NoKeys`)."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""obstore's variables for the URL of an S3, which are read here only to allow HTTP. A pod of Argo
has all keys of the ConfigMap `tuneloop-store`, a task of Kubeflow Pipelines only those of
`argo/pod_fields.py: PLAIN` and `SECRET`, and of `kfp/task_pod.py: OTHER_KEYS`."""
ENDPOINT = re.compile(
    r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]+))?(/[A-Za-z0-9._~/-]*)?"
)
MAX_PORT = 0xFFFF
IMAGE = "TUNELOOP_IMAGE"
"""Variable of every pod, and of no process on this machine: its image. `argo/pod_fields.py`,
`kfp/task_pod.py` and the gateway set it, `local/pod.py` leaves it out; the manifest records it
(`core/provenance.py`)."""
PATIENCE = timedelta(seconds=60)
"""How long a pod asks a store again that does not answer, or fails. obstore itself asks ten times, which
is over in one to six seconds where connections are refused, and the next attempt of a stage costs
twenty to thirty seconds of imports. No signal is handled meanwhile, so it is not longer.
"""


def is_plain_http() -> bool:
    """Return whether the environment names an S3 without TLS.

    Raises UserError if what it names is no URL: obstore would panic.
    """
    is_plain = False
    for variable in ENDPOINTS:
        url = os.environ.get(variable)
        if not url:
            continue
        match = ENDPOINT.fullmatch(url)
        if not match or int(match["port"] or 0) > MAX_PORT:
            remedy = "is not the URL of an S3; write http://HOST:PORT or https://HOST"
            raise UserError(variable, url, remedy)
        is_plain |= url.startswith("http://")
    return is_plain


def build_retries() -> "RetryConfig | None":
    """Build how often a request to a store is repeated; None: as obstore does by itself.

    People at a terminal are told at once that an address is wrong.
    """
    if IMAGE not in os.environ:
        return None
    return {
        # Time ends it, not their number.
        "max_retries": 1000,
        "retry_timeout": PATIENCE,
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    }


def shorten_error(error: BaseException) -> str:
    """Shorten a service's error message.

    Of XML only the error code is kept, which the service's manual explains.
    """
    text = str(error)
    code = re.search(r"<Code>([^<]+)</Code>", text)
    if code:
        return code[1]
    # obstore appends the whole response as Rust prints it.
    return " ".join(text.partition("Debug source:")[0].split())[:300]


class ObjectFile(io.RawIOBase):
    """An object as a file, read range by range."""

    def __init__(self, size: int, read_range: Callable[[int, int], memoryview]) -> None:
        """Open an object of `size` bytes; `read_range` gets the offset and the length in bytes."""
        self.size = size
        self.read_range = read_range
        self.offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self.offset, os.SEEK_END: self.size}
        self.offset = offset + origins[whence]
        return self.offset

    # The base class's WriteableBuffer is a name that only type checkers know.
    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self.size - self.offset))
        if length:
            buffer[:length] = self.read_range(self.offset, length)
            self.offset += length
        return length
