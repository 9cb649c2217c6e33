"""Python for tests, started as the program of `tests.warm`: ``-m module …`` becomes a fork of the warm process there.

It is run without `site` and knows the standard library only, so that it starts in milliseconds. What it stands for
gets its arguments, environment, directory, output and signals, and it ends as that ends. Killed, it takes that along.
Its own name in ``/proc`` says which process that is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main(words: list[str]) -> None:
    rest = words[words[:1] == ["-u"] :]
    path = os.environ.get("TUNELOOP_WARM")
    if path and rest[:1] == ["-m"]:
        fork(path, [sys.executable, *rest])
    os.execv(sys.executable, [sys.executable, *words])


def fork(path: str, argv: list[str]) -> None:
    """Run `argv` as a fork, and end as it does; returns if a fork would not be the same."""
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(path)
    heard = channel.makefile()
    ready = json.loads(heard.readline())
    names = {*ready["env"], *(name for name in os.environ if name.startswith("PYTHON"))}
    if any(os.environ.get(name) != ready["env"].get(name) for name in names):
        return

    def tell(**message: object) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    sent = set()

    def send(number: int, frame: object) -> None:
        sent.add(number)
        tell(signal=0, number=number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, send)
    output, errors = (f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in (1, 2))
    tell(start=0, argv=argv, env=dict(os.environ), cwd=os.getcwd(), stdout=output, stderr=errors)
    for line in heard:
        message = json.loads(line)
        if "started" in message:
            with open("/proc/self/comm", "w") as name:
                name.write(f"fork-{message['pid']}")
        if "ended" in message:
            if (number := message["code"] - 128) in sent:  # by that signal, and not with 128 more
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            os._exit(message["code"])
    os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
