"""The HTTP client: what arrives in pieces, in forks, and around proxies."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.waiting import LIMIT_S, free_port
from tuneloop.core.http import Unanswered, open_response, send_request


@contextmanager
def answering(*pieces: bytes) -> Iterator[str]:
    """The URL of a server that sends the pieces one by one to each client, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    client.recv(1 << 16)
                    for piece in (b"HTTP/1.1 200 OK\r\n\r\n", *pieces):
                        client.sendall(piece)

        thread = threading.Thread(target=serve)
        thread.start()
        yield "http://127.0.0.1:%d" % listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_lines_are_whole_however_they_arrive() -> None:
    text = "a\u2028b".encode()
    with answering(b"fir", b"st\n\n" + text[:2], text[2:] + b"\nrest") as url:
        with open_response("GET", url, timeout_s=LIMIT_S) as response:
            assert list(response.lines()) == [b"first", b"", text, b"rest"]


def test_a_forked_process_has_a_client_of_its_own() -> None:
    with answering(b"yes") as url:
        assert send_request("GET", url, timeout_s=LIMIT_S) == (200, b"yes")
        if (child := os.fork()) == 0:
            os._exit(send_request("GET", url, timeout_s=LIMIT_S) != (200, b"yes"))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_no_proxy_stands_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with answering(b"direct") as url:
        assert send_request("GET", url, timeout_s=LIMIT_S) == (200, b"direct")


def test_nobody_answers_at_what_is_no_url() -> None:
    with pytest.raises(Unanswered, match=r"missing an .http"):
        send_request("GET", "nowhere", timeout_s=LIMIT_S)
