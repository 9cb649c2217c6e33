"""Which errors say that a server is away, so that a stage waits for it."""

import asyncio
import errno
import os
import socket

import pytest

from tuneloop.core.errors import list_chain
from tuneloop.core.hub import explain_refusal, is_unreachable


@pytest.mark.parametrize(
    "number", [errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT]
)
def test_a_server_that_is_not_there_is_away(number: int) -> None:
    wrapped = RuntimeError("the client's own")
    wrapped.__cause__ = OSError(number, os.strerror(number))
    assert is_unreachable(wrapped)


def test_a_name_that_nobody_knows_yet_is_away() -> None:
    assert is_unreachable(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))


def test_clients_say_it_by_classes_of_their_own() -> None:
    aiohttp = pytest.importorskip("aiohttp")
    requests = pytest.importorskip("requests")

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            await session.get("http://127.0.0.1:1")

    with pytest.raises(aiohttp.ClientConnectorError) as refused:
        asyncio.run(ask())
    assert is_unreachable(refused.value)
    for alone in (requests.ConnectionError(), aiohttp.ServerDisconnectedError()):
        assert is_unreachable(alone), "without a cause"


def test_another_error_is_not() -> None:
    for error in (None, ValueError("x"), OSError(errno.EACCES, "x"), OSError(errno.ENOSPC, "x")):
        assert not is_unreachable(error)


def test_errors_that_refer_to_one_another_in_a_circle_are_read_once() -> None:
    first = ValueError("x")
    second = KeyError("y")
    first.__cause__ = second
    second.__cause__ = first
    assert not is_unreachable(first)
    assert explain_refusal(first) is None
    assert list_chain(first) == [first, second]
    second.__cause__ = ConnectionError("z")
    assert is_unreachable(first)
