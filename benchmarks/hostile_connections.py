"""An honest caller of the gateway, or of a rollout server, beside 1,000 hostile connections: how long does it wait?

    python benchmarks/hostile_connections.py [--server gateway|rollout] [--connections 1000] [--seconds 60]

On this machine alone: the server in a process of its own, at 127.0.0.1 and with the 1,024 descriptors that a container
often has; the attackers in another, of less priority (their work is not the server's), from ten addresses below
127.0.0.0/8. Each kind of `KINDS` has an equal share of the connections, and opens another one when its own is closed.
The honest caller asks for two things by turns, over a connection that it keeps and over a new one: on the gateway the
session itself, and a heartbeat that goes through to the session's worker; on a rollout server one completion. It asks
one after the other and pauses 20 ms between. First the server is idle, then attacked. Printed are the times at the 50th
and 99th percentile and the longest, answers other than 200, and the server's memory and descriptors. Where a machine is
busy with other things, much of the time is a wait for a processor: `net` is without what the server's first thread
waited for one meanwhile, and the seconds that it ran, and waited, in all are printed, too. No peer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
DESCRIPTORS = 1024
LIMIT_S = 60.0
"""Seconds after which an honest request counts as not answered."""
HEAD = "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True)
class Target:
    """What is attacked: `path` takes bodies of at most `most` bytes."""

    host: str
    port: int
    token: str
    path: str
    most: int
    pid: int

    def head(self, *, known: bool = False, length: int = 0) -> bytes:
        token = f"Authorization: Bearer {self.token if known else 'tml-' + os.urandom(9).hex()}\r\n"
        return f"{HEAD.format(path=self.path)}{token}Content-Length: {length}\r\n\r\n".encode()


Attack = Callable[[Target, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def say_nothing(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await reader.read()


async def send_headers_slowly(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(HEAD.format(path=target.path).encode() + b"X-Slow: ")
    await drip(reader, writer)


async def send_body_slowly(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Without a token: it is answered at once, and goes on."""
    writer.write(target.head(length=10**9))
    await drip(reader, writer)


async def send_body_slowly_with_token(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(target.head(known=True, length=10**6))
    await drip(reader, writer)


async def send_too_much(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """A body at the limit, from nobody."""
    writer.write(target.head(length=target.most))
    with contextlib.suppress(OSError):
        for _ in range(target.most // 2**16):
            writer.write(b" " * 2**16)
            await writer.drain()
            await asyncio.sleep(0.01)


async def send_broken_json(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """With a token: it is read, and refused."""
    while True:
        await ask(
            reader, writer, target.head(known=True, length=40) + b'{"model_id": [[[[' + b"[" * 23
        )
        await asyncio.sleep(1)


async def ask_without_token(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """As fast as it is refused."""
    while True:
        await ask(reader, writer, target.head())


async def ask_once(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """The same, each over another connection."""
    await ask(reader, writer, target.head())


async def read_nothing(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Ask again and again, and take no answer."""
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    while not writer.is_closing():
        writer.write(target.head() * 50)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(writer.drain(), 5)
        await asyncio.sleep(1)


async def send_no_http(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(os.urandom(4000) + b"\r\n\r\n")
    await reader.read()


KINDS: dict[str, Attack] = {
    "silent": say_nothing,
    "slow headers": send_headers_slowly,
    "slow body": send_body_slowly,
    "slow body, token": send_body_slowly_with_token,
    "body at the limit": send_too_much,
    "broken JSON, token": send_broken_json,
    "401 again": ask_without_token,
    "401, new connection": ask_once,
    "reads no answer": read_nothing,
    "no HTTP": send_no_http,
}


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a byte a second until it is closed."""
    while not writer.is_closing():
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(1)
        if reader.at_eof():
            return


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    await reader.readexactly(int(length[1]) if length else 0)


async def attack(
    target: Target, number: int, kind: Attack, end: float, opened: Counter[str], name: str
) -> None:
    """Hold one hostile connection, at least, until `end`, by the monotonic clock; a new one for each that is closed."""
    first = True
    while first or time.monotonic() < end:
        first, writer = False, None
        try:
            source = (f"127.0.0.{2 + number % 10}", 0)
            reader, writer = await asyncio.open_connection(
                target.host, target.port, local_addr=source, limit=2**14
            )
            opened[name] += 1
            await asyncio.wait_for(kind(target, reader, writer), end - time.monotonic())
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            if writer is not None:
                writer.transport.abort()
        await asyncio.sleep(0.05)


def run_attackers(target: Target, connections: int, seconds: float, kinds: Sequence[str]) -> None:
    """Attack until `seconds` are over, and print how many connections each kind has opened."""
    os.nice(10)
    opened, end = Counter[str](), time.monotonic() + seconds

    async def attack_all() -> None:
        each = [(number, kinds[number % len(kinds)]) for number in range(connections)]
        await asyncio.gather(
            *(attack(target, number, KINDS[name], end, opened, name) for number, name in each)
        )

    asyncio.run(attack_all())
    print(json.dumps(opened))


class Honest:
    """A caller who asks `requests` by turns: (method, path, body). Of each, `times` has the seconds until its answer,
    `waits` those in which the server's first thread had no processor meanwhile."""

    def __init__(self, target: Target, requests: Sequence[tuple[str, str, Any]]) -> None:
        self.target, self.requests = target, requests
        self.kept = http.client.HTTPConnection(target.host, target.port, timeout=LIMIT_S)
        self.times: list[float] = []
        self.waits: list[float] = []
        self.other = Counter[str]()
        self.descriptors = 0

    def ask_for(self, seconds: float) -> None:
        """Ask for so many seconds, and at least for each thing once."""
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end or number < 2 * len(self.requests):
            new = http.client.HTTPConnection(self.target.host, self.target.port, timeout=LIMIT_S)
            self._ask(
                self.kept if number % 2 else new, *self.requests[number // 2 % len(self.requests)]
            )
            new.close()
            number += 1
            self.descriptors = max(self.descriptors, len(os.listdir(f"/proc/{self.target.pid}/fd")))
            time.sleep(0.02)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> None:
        begun, (_, waited_s) = time.perf_counter(), read_schedule(self.target.pid)
        text = None if body is None else json.dumps(body)
        headers = {
            "Authorization": f"Bearer {self.target.token}",
            "Content-Type": "application/json",
        }
        try:
            connection.request(method, path, text, headers)
            answer = connection.getresponse()
            answer.read()
            said = str(answer.status)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            said = type(error).__name__
        self.times.append(time.perf_counter() - begun)
        self.waits.append(read_schedule(self.target.pid)[1] - waited_s)
        if said != "200":
            self.other[said] += 1


@dataclass
class Measure:
    """Times of an honest caller, and what the server had: bytes resident, now and at most, descriptors at most, and
    seconds in which its first thread ran, and was ready to and had no processor (schedstat, see proc(5))."""

    times: list[float]
    waits: list[float]
    other: dict[str, int]
    memory: int
    peak: int
    descriptors: int
    ran_s: float
    waited_s: float

    def row(self, name: str) -> str:
        *_, p99 = statistics.quantiles(self.times, n=100, method="inclusive")
        *_, ran99 = statistics.quantiles(
            map(float.__sub__, self.times, self.waits), n=100, method="inclusive"
        )
        figures = f"{statistics.median(self.times):>8.3f} {p99:>8.3f} {max(self.times):>8.3f} {ran99:>8.3f}"
        figures += f" {len(self.times):>8}"
        sizes = f"{self.memory / 2**20:>8.0f} {self.peak / 2**20:>8.0f} {self.descriptors:>11}"
        sizes += f" {self.ran_s:>7.1f} {self.waited_s:>7.1f}"
        return f"{name:<10} {figures} {sum(self.other.values()):>8} {sizes}  {self.other or ''}"


def measure(honest: Honest, seconds: float) -> Measure:
    honest.times, honest.waits, honest.other, honest.descriptors = [], [], Counter(), 0
    pid = honest.target.pid
    before = read_schedule(pid)
    honest.ask_for(seconds)
    ran_s, waited_s = (now - then for now, then in zip(read_schedule(pid), before))
    told = Path(f"/proc/{pid}/status").read_text()
    kib = {name: int(re.search(rf"{name}:\s+(\d+) kB", told)[1]) for name in ("VmRSS", "VmHWM")}  # type: ignore[index]
    memory = kib["VmRSS"] * 1024, kib["VmHWM"] * 1024
    return Measure(
        honest.times, honest.waits, dict(honest.other), *memory, honest.descriptors, ran_s, waited_s
    )


def read_schedule(pid: int) -> tuple[float, float]:
    """Read the seconds in which a process's first thread ran, and waited for a processor."""
    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


def besiege(
    honest: Honest, connections: int, seconds: float, idle_s: float, kinds: Sequence[str] = ()
) -> tuple[list[Measure], dict[str, int]]:
    """Measure an honest caller beside nobody, beside the attackers, and after them; what these have opened, by kind."""
    target = honest.target
    before = measure(honest, idle_s)
    flags = [json.dumps(vars(target)), str(connections), str(seconds), *(kinds or KINDS)]
    with subprocess.Popen(
        [sys.executable, __file__, "--attack", *flags], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            during = measure(honest, seconds)
            opened = json.loads(child.communicate(timeout=LIMIT_S)[0])
        finally:
            child.kill()
    return [before, during, measure(honest, 1.0)], opened


def limit_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))


def drain(stderr: IO[str]) -> None:
    """Read what a server says: else it would wait for that, once the pipe is full."""
    threading.Thread(target=lambda: [None for _ in stderr], daemon=True).start()


@contextlib.contextmanager
def serve_gateway(home: Path) -> Iterator[Honest]:
    """Yield an honest caller of a gateway of its own, who has a session there."""
    command = [
        sys.executable,
        "-m",
        "tuneloop.cli",
        "gateway",
        "--local",
        "--store",
        str(home / "store"),
    ]
    command += ["--port", "0", "--token-file", str(home / "token")]
    about: Any = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": limit_descriptors}
    with subprocess.Popen(command, **about) as process:
        try:
            assert process.stderr
            found = re.search(r"http://([\d.]+):(\d+)", process.stderr.readline())
            assert found
            drain(process.stderr)
            token = (home / "token").read_text().strip()
            target = Target(
                found[1], int(found[2]), token, "/api/v1/optim_step", 2**25, process.pid
            )
            honest = Honest(target, [])
            id = json.loads(post(target, "/v1/sessions", {}))["id"]
            honest.requests = [("GET", f"/v1/sessions/{id}", None)]
            honest.requests += [("POST", "/api/v1/session_heartbeat", {"session_id": id})]
            post(
                target, "/api/v1/session_heartbeat", {"session_id": id}
            )  # until its worker is there
            yield honest
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


@contextlib.contextmanager
def serve_rollouts(home: Path) -> Iterator[Honest]:
    """Yield an honest caller of a rollout server, which is whole but for its engine."""
    sys.path.insert(0, str(ROOT))
    from tests.unit.inference.rollout_server import BODY, serving
    from tuneloop.core.server_token import VARIABLE, create_token_file

    create_token_file(home / "token")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit_descriptors()
    with serving(**{VARIABLE: str(home / "token")}) as (child, address):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert child.stderr
        drain(child.stderr)
        host, _, port = address.partition(":")
        token = (home / "token").read_text().strip()
        yield Honest(
            Target(host, int(port), token, "/generate", 2**28, child.pid),
            [("POST", "/generate", BODY)],
        )


def post(target: Target, path: str, body: Any) -> bytes:
    """Send a request until it is answered with a success."""
    end = time.monotonic() + LIMIT_S
    while True:
        connection = http.client.HTTPConnection(target.host, target.port, timeout=LIMIT_S)
        connection.request(
            "POST", path, json.dumps(body), {"Authorization": f"Bearer {target.token}"}
        )
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        if answer.status < 300:
            return text
        assert time.monotonic() < end, text
        time.sleep(0.5)


SERVERS = {"gateway": serve_gateway, "rollout": serve_rollouts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", default="gateway", choices=list(SERVERS))
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--idle", type=float, default=20.0, help="seconds of the idle server")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    flags = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as home, SERVERS[flags.server](Path(home)) as honest:
        measures, opened = besiege(
            honest, flags.connections, flags.seconds, flags.idle, flags.kinds
        )
    print(
        f"{flags.server}, {flags.connections} hostile connections for {flags.seconds:g} s;"
        f" load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    heads = "longest  p99 net  answers  not 200  RSS, MiB     peak descriptors  ran, s  waited"
    print(f"             p50, s   p99, s  {heads}")
    for name, each in zip(("idle", "attacked", "after"), measures):
        print(each.row(name))
    print("opened:", ", ".join(f"{count} {name}" for name, count in sorted(opened.items())))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        about, connections_, seconds_, *kinds_ = sys.argv[2:]
        run_attackers(Target(**json.loads(about)), int(connections_), float(seconds_), kinds_)
    else:
        main()
