"""What object stores take from the environment, and what they answer."""

import io
import os
import re
from collections.abc import Callable
from typing import Any

from tuneloop.core.errors import UserError

REFUSALS = (
    "AccessDenied",
    "InvalidAccessKey",
    "InvalidBucketName",
    "NoSuchBucket",
    "SignatureDoesNotMatch",
)
"""S3's errors that a retry does not change; obstore does not recognize them when it lists keys."""
KEYS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, for an S3 of your own AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
}
"""Where each scheme's keys come from."""
METADATA = ("169.254.169.254", "metadata.google.internal")
"""The metadata service of a cloud's machine: it is asked for credentials when no others are set."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
ENDPOINT = re.compile(
    r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]+))?(/[A-Za-z0-9._~/-]*)?"
)


def is_plain_http() -> bool:
    """Return whether the environment names an S3 without TLS. Raises UserError if it is no URL: obstore would panic."""
    given = {name: value for name in ENDPOINTS if (value := os.environ.get(name))}
    for name, value in given.items():
        found = ENDPOINT.fullmatch(value)
        if not found or int(found["port"] or 0) >= 1 << 16:
            raise UserError(
                name, value, "is not the URL of an S3; write http://HOST:PORT or https://HOST"
            )
    return any(value.startswith("http://") for value in given.values())


def shorten_error(error: BaseException) -> str:
    """Shorten a service's error message; of XML only the error code is kept, which the service's manual explains."""
    text = str(error)
    if code := re.search(r"<Code>([^<]+)</Code>", text):
        return code[1]
    return " ".join(text.partition("Debug source:")[0].split())[:300]


class ObjectFile(io.RawIOBase):
    """An object as a file, read range by range."""

    def __init__(self, size: int, read_range: Callable[[int, int], memoryview]) -> None:
        self.size = size
        self.read_range = read_range
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        if length := max(0, min(len(buffer), self.size - self.at)):
            buffer[:length] = self.read_range(self.at, length)
            self.at += length
        return length
