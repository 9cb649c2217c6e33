"""The client against servers that misbehave, or die; the real one is in tests/local."""

import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.policies import commit_policy, commit_prompts
from tests.waiting import LIMIT_S, free_port, until
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Interrupted, Retryable, UserError
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.formats.tokens import load_tokenizer
from tuneloop.inference.engines import Remote, Sampling
from tuneloop.inference.engines import _client as module
from tuneloop.inference.engines._client import LOSSES, Client
from tuneloop.inference.engines._connection import Lost
from tuneloop.inference.http_api import BATCH_BYTES, ORDER_BYTES
from tuneloop.inference.multi_turn import EpisodeOptions, play_episodes
from tuneloop.stages.rollout import rollout

REQUESTS = [Request("a", [1, 2], [0]), Request("b", [3], [1])]
SAID = {
    "ids": [5],
    "logprobs": [-0.5],
    "finish_reason": "stop",
    "start_version": 4,
    "end_version": 4,
}


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler, int], None]) -> Iterator[str]:
    """A server that answers each request by `answer(handler, number of the request)`."""
    count = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            nonlocal count
            self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            count += 1
            answer(self, count)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def reply(handler: BaseHTTPRequestHandler, status: int, *lines: object) -> None:
    handler.send_response(status)
    handler.end_headers()
    handler.wfile.write(
        b"".join(b"\n" if line is None else json.dumps(line).encode() + b"\n" for line in lines)
    )


def ask(endpoint: str, timeout_s: float = 60.0, seen: list[int] | None = None) -> list[list[int]]:
    made = Client(endpoint, timeout_s, patience_s=0.1).generate(
        REQUESTS, Sampling(1.0, 4, ()), (seen or []).append
    )
    return [c.ids for group in made for c in group]  # type: ignore[misc]


def line(index: int, token: int) -> dict[str, object]:
    return {"index": index, "completions": [{**SAID, "ids": [token]}]}


def test_answers_come_back_in_the_order_of_the_requests() -> None:
    with serving(lambda h, _: reply(h, 200, None, line(1, 7), None, line(0, 6))) as endpoint:
        assert ask(endpoint) == [[6], [7]]


def test_many_requests_are_several_posts_and_come_back_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server takes no more than 65,536 prompts, and 4 MiB."""
    posts: list[list[list[int]]] = []

    def answer(handler: Any, _: int) -> None:
        posts.append([each["prompt_ids"] for each in json.loads(handler.body)["requests"]])
        reply(handler, 200, *(line(i, ids[0]) for i, ids in reversed([*enumerate(posts[-1])])))

    def sizes(endpoint: str, length: int) -> list[int]:
        posts.clear()
        requests, seen = [Request(str(i), [i] * length, [0]) for i in range(10)], list[int]()
        made = Client(endpoint, 60.0).generate(requests, Sampling(1.0, 4, ()), seen.append)
        assert [group[0].ids for group in made] == [[i] for i in range(10)] and seen == [
            *range(1, 11)
        ]
        return [len(post) for post in posts]

    with serving(answer) as endpoint:
        assert sizes(endpoint, 3) == [10]
        monkeypatch.setattr(module, "PROMPTS", 4)
        assert sizes(endpoint, 3) == [4, 4, 2]
        monkeypatch.setattr(module, "TOKENS", 3 * (3 + 3 + 32))
        assert sizes(endpoint, 3) == [3, 3, 3, 1]
        assert sizes(endpoint, 200) == [1] * 10, "one is never too long"


@pytest.mark.parametrize(("length", "seeds"), [(1000, 1), (1, 640)])
def test_a_post_is_no_longer_than_a_server_takes(length: int, seeds: int) -> None:
    sizes: list[int] = []

    def answer(handler: Any, _: int) -> None:
        sizes.append(len(handler.body))
        reply(handler, 200, *(line(i, 1) for i in range(len(json.loads(handler.body)["requests"]))))

    asked = [Request(f"eval-{i:06}", [1234567] * length, [2**63 - 1] * seeds) for i in range(1200)]
    with serving(answer) as endpoint:
        Client(endpoint, 60.0).generate(asked, Sampling(1.0, 4, tuple(range(4096))), lambda _: None)
    assert sum(sizes) > BATCH_BYTES and max(sizes) <= BATCH_BYTES + ORDER_BYTES


def test_waits_while_the_version_is_loading() -> None:
    def answer(handler: BaseHTTPRequestHandler, number: int) -> None:
        if number < 3:
            reply(handler, 409, {"error": "serves version 3"})
        else:
            reply(handler, 200, line(0, 6), line(1, 7))

    with serving(answer) as endpoint:
        assert ask(endpoint) == [[6], [7]]


def test_what_is_finished_is_not_asked_for_again() -> None:
    with serving(lambda h, number: reply(h, 200, line(0, 5 + number))) as endpoint:
        assert ask(endpoint) == [[6], [8]], (
            "the second request is the third answer: the server was looked at between"
        )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda h, _: reply(h, 200, None), "broke off after 0 of 2"),
        (lambda h, _: reply(h, 200, {"error": "the engine failed"}), "the engine failed"),
        (lambda h, _: h.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n{not json"), "JSONDecodeError"),
        (lambda h, _: reply(h, 200, 5), "answers 5, which is no JSON object"),
        (lambda h, _: reply(h, 200, ["error"]), r"answers \['error'\], which is no JSON object"),
        (lambda h, _: reply(h, 500), "answers 500"),
    ],
    ids=["breaks off", "engine fails", "garbage", "number", "list", "bug"],
)
def test_who_loses_all_attempts_names_the_cause(answer: Callable[..., None], said: str) -> None:
    """The server is there all the time, so that nobody waits for it: it just never finishes a request."""

    def or_version(handler: BaseHTTPRequestHandler, number: int) -> None:
        reply(handler, 200, {}) if handler.path == "/version" else answer(handler, number)

    with serving(or_version) as endpoint:
        with pytest.raises(
            Retryable, match=f"{said}.*; lost {LOSSES} times in a row without a request finished"
        ):
            ask(endpoint)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            lambda h, _: reply(h, 503, {"error": "no version is loaded whole"}),
            "no version is loaded whole",
        ),
        (lambda h, _: None, "is `python -m tuneloop.inference.server` running there?"),
    ],
    ids=["poisoned", "hangs up"],
)
def test_who_does_not_come_back_is_given_up(answer: Callable[..., None], said: str) -> None:
    with serving(answer) as endpoint, pytest.raises(Lost, match=f"{said}.*; it has been away for"):
        ask(endpoint)


def test_a_silent_server_is_given_up() -> None:
    release = threading.Event()
    silent = pytest.raises(Retryable, match=r"ReadTimeout: not a byte in 0\.3 s")
    with serving(lambda h, _: release.wait(60) and None) as endpoint, silent:
        try:
            ask(endpoint, timeout_s=0.3)
        finally:
            release.set()


def test_409_is_given_up_in_time() -> None:
    with serving(lambda h, _: reply(h, 409, {"error": "serves version 3"})) as endpoint:
        with pytest.raises(Retryable, match="serves version 3"):
            ask(
                endpoint, timeout_s=2.0
            )  # in which the first answer is there, on a busy machine, too


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(Retryable, match=r"http://127\.0\.0\.1:9: ConnectionRefusedError"):
        Client("http://127.0.0.1:9", 1.0).load(commit_policy(tmp_path / "c"))


def test_a_refusal_is_the_users_mistake() -> None:
    with serving(lambda h, _: reply(h, 400, {"error": "request 0: too long"})) as endpoint:
        with pytest.raises(UserError, match="request 0: too long"):
            ask(endpoint)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"index": 0, "completions": [{**SAID, "mood": "good"}]}, "mood: 'good': Unexpected"),
        ({"index": 0, "completions": [{"ids": [5]}]}, "logprobs: "),
        ({"index": 0, "completions": [5]}, "completions.0: 5"),
        ({"index": 0}, "completions: "),
        ({"completions": [SAID]}, "index: "),
    ],
    ids=["newer", "older", "no completion", "no completions", "no index"],
)
def test_an_answer_of_another_form_is_refused_in_a_line(
    message: dict[str, object], problem: str
) -> None:
    refused = pytest.raises(UserError, match=f"another form .{problem}.*the same release")
    with serving(lambda h, _: reply(h, 200, message)) as endpoint, refused:
        ask(endpoint)


def test_a_completion_that_was_aborted_is_asked_for_again() -> None:
    aborted = {"index": 1, "completions": [{**SAID, "ids": [], "finish_reason": "abort"}]}
    asked: list[list[str]] = []

    def answer(handler: Any, _: int) -> None:
        if handler.path == "/version":
            reply(handler, 200, {})
            return
        asked.append([request["id"] for request in json.loads(handler.body)["requests"]])
        reply(handler, 200, *((line(0, 6), aborted) if len(asked) == 1 else (line(0, 7),)))

    with serving(answer) as endpoint:
        assert ask(endpoint) == [[6], [7]]
    assert asked == [["a", "b"], ["b"]]


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_refusal_that_may_pass_is_a_loss(status: int) -> None:
    with serving(lambda h, _: reply(h, status, {"error": "not now"})) as endpoint:
        with pytest.raises(Lost, match=f"answers {status}: not now"):
            ask(endpoint)


def test_a_device_that_is_had_by_turns(tmp_path: Path) -> None:
    policy, asked = commit_policy(tmp_path / "c"), list[str]()
    served = {"version": 0, "digest": policy.manifest.digest, "context": 64}

    def answer(handler: BaseHTTPRequestHandler, _: int) -> None:
        asked.append(handler.path)
        reply(handler, 200, served)

    with serving(answer) as endpoint:
        for sleeps in (False, True):
            client = Client(endpoint, 60.0, sleeps=sleeps)
            client.load(policy, force=True)
            client.close()
    assert asked == ["/version", "/load", "/wake_up", "/version", "/load", "/sleep"]


@pytest.mark.parametrize("endpoint", ["localhost:8000", "ftp://x", "http://", ""])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(UserError, match="absolute URL"):
        Client(endpoint, 1.0)


# A server that dies, and is started anew at the same address


@dataclass
class Mortal:
    """What happens to a server, life by life; each boots with `boots`, and knows no other version until it is loaded.

    Attributes:
        lives: of each life, after how many finished requests it dies in mid-stream; the last lives on with None.
        asked: of each life, the ids of the requests that it was asked for.
        calls: of each life, the paths that were asked for, with the version for ``/generate``.
    """

    boots: Mapping[str, Any]
    lives: Sequence[int | None]
    asked: list[list[str]] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    dead: threading.Event = field(default_factory=threading.Event)
    held: threading.Event = field(default_factory=threading.Event)
    """While it is not set, the next life does not begin."""

    def __post_init__(self) -> None:
        self.held.set()


@contextmanager
def mortal(about: Mortal) -> Iterator[str]:
    """The address at which it lives, one life after the other."""
    port = free_port()  # which nobody is dealt out between two lives
    over, first = threading.Event(), threading.Event()
    served: dict[int, dict[str, Any]] = {}

    def live() -> None:
        for life, fate in enumerate(about.lives):
            about.held.wait()
            about.asked.append([])
            about.calls.append([])
            about.dead.clear()
            with HTTPServer(("127.0.0.1", port), functools.partial(Handler, life, fate)) as server:
                first.set()
                server.timeout = 0.01
                while not (about.dead.is_set() or over.is_set()):
                    server.handle_request()
            if over.is_set():
                return

    class Handler(BaseHTTPRequestHandler):
        def __init__(self, life: int, fate: int | None, *rest: Any) -> None:
            self.life, self.fate, self.served = life, fate, served.get(life, about.boots)
            super().__init__(*rest)

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            about.calls[self.life].append("scores" if "prompt_logprobs" in body else self.path)
            if self.path == "/load":
                served[self.life] = {
                    **about.boots,
                    "version": body["version"],
                    "digest": body["ref"].split("@")[1],
                }
                reply(self, 200, served[self.life])
            elif self.path == "/version":
                reply(self, 200, self.served)
            elif body["version"] != self.served["version"]:
                reply(self, 409, {"error": f"serves version {self.served['version']}"})
            elif "prompt_logprobs" in body:
                scores = about.boots.get("scores") or [0.0] * (
                    len(body["requests"][0]["prompt_ids"]) - 1
                )
                reply(self, 200, {"index": 0, "completions": [{**SAID, "prompt_logprobs": scores}]})
            else:
                self.generate(body)

        def generate(self, body: Any) -> None:
            about.asked[self.life] += [r["id"] for r in body["requests"]]
            self.send_response(200)
            self.end_headers()
            order = list(enumerate(body["requests"]))[::-1]
            for finished, (index, request) in enumerate(order):
                if finished == self.fate:
                    self.wfile.write(b'{"index": 0, "comple')
                    about.dead.set()
                    return
                said = {**SAID, "start_version": body["version"], "end_version": body["version"]}
                made = [
                    {**said, "ids": [sum(request["prompt_ids"]) % 50 + seed % 7]}
                    for seed in request["seeds"]
                ]
                self.wfile.write(json.dumps({"index": index, "completions": made}).encode() + b"\n")

        def log_message(self, *_: object) -> None: ...

    thread = threading.Thread(target=live)
    thread.start()
    first.wait()
    yield f"http://127.0.0.1:{port}"
    over.set()
    about.held.set()
    thread.join()


BATCH = [Request(f"r{i}", [i, i + 1], [2 * i, 2 * i + 1]) for i in range(5)]
BOOT = {"version": -1, "digest": "", "context": 64}


def ids(made: list[list[Completion]]) -> list[list[list[int]]]:
    return [[c.ids for c in group] for group in made]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return commit_policy(tmp_path_factory.mktemp("policy") / "c", version=4)


def test_a_batch_goes_on_where_the_server_died(
    policy: Artifact, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is finished is kept, in its order; the new process is told the version, proved, and asked for the rest."""
    with mortal(Mortal(BOOT, [None])) as endpoint:
        calm = Client(endpoint, 60.0, patience_s=LIMIT_S)
        calm.load(policy)
        undisturbed = ids(calm.generate(BATCH, Sampling(1.0, 4, ()), lambda _: None))
    about, proofs, seen = Mortal(BOOT, [2, 2, None]), list[int](), list[int]()
    with mortal(about) as endpoint:
        client = Client(endpoint, 60.0, patience_s=LIMIT_S)
        assert isinstance(client, Remote)
        client.load(policy)
        client.prove = lambda one: proofs.append(len(one.score([1, 2, 3])))
        made = client.generate(BATCH, Sampling(1.0, 4, ()), seen.append)
    assert ids(made) == undisturbed
    assert about.asked == [["r0", "r1", "r2", "r3", "r4"], ["r0", "r1", "r2"], ["r0"]]
    assert {c.start_version for group in made for c in group} == {4}
    assert proofs == [2, 2]
    assert [calls[:4] for calls in about.calls[1:]] == [
        ["/version", "/version", "/load", "scores"]
    ] * 2
    assert seen == sorted(seen) and seen[-1] == 5
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 4, "one line when it is lost, and one when it is back"
    assert "2 of 5 requests are finished, and kept; waits for it" in told[0]
    assert "asks it for the 1 requests that are left" in told[3]


def test_a_deterministic_batch_is_made_anew_where_the_server_died(policy: Artifact) -> None:
    """What is left of it would be another batch. A server that promises nothing is refused."""
    about = Mortal({**BOOT, "determinism": {"threads": 2}}, [2, 4, None])
    with mortal(about) as endpoint:
        client = Client(endpoint, 60.0, deterministic=True, patience_s=LIMIT_S)
        client.load(policy)
        assert client.determinism == {"threads": 2}
        made = client.generate(BATCH, Sampling(1.0, 4, ()), lambda _: None)
    assert about.asked == [["r0", "r1", "r2", "r3", "r4"]] * 3
    assert ids(made) == [
        [[(2 * i + 1) % 50 + seed % 7] for seed in (2 * i, 2 * i + 1)] for i in range(5)
    ]
    with mortal(Mortal(BOOT, [None])) as endpoint:
        client = Client(endpoint, 60.0, deterministic=True, patience_s=0.1)
        with pytest.raises(UserError, match="its server is not deterministic"):
            client.load(policy)


def answers(endpoint: str) -> bool:
    """Whether a server is at the address."""
    try:
        return Client(endpoint, 60.0, patience_s=0.0)._json("GET", "/version") is not None
    except Retryable:
        return False


def test_a_server_that_came_back_unseen_is_told_the_version_again(policy: Artifact) -> None:
    """It died between two calls: nobody lost a connection, but it serves what it boots with."""
    about = Mortal(BOOT | {"version": 0, "digest": "d"}, [None, None])
    with mortal(about) as endpoint:
        client = Client(endpoint, 60.0, patience_s=LIMIT_S)
        client.load(policy)
        about.dead.set()
        until(lambda: len(about.calls) == 2 and answers(endpoint))
        about.calls[1].clear()
        assert ids(client.generate(BATCH[:1], Sampling(1.0, 4, ()), lambda _: None)) == [[[1], [2]]]
    assert about.calls[1] == ["/generate", "/version", "/version", "/load", "/generate"]


def test_who_dies_of_every_batch_is_given_up(policy: Artifact) -> None:
    with mortal(Mortal(BOOT, [1, 0, 0, 0, None])) as endpoint:
        client = Client(endpoint, 60.0, patience_s=LIMIT_S)
        client.load(policy)
        with pytest.raises(Retryable, match=f"JSONDecodeError.*; lost {LOSSES} times in a row"):
            client.generate(BATCH, Sampling(1.0, 4, ()), lambda _: None)


def test_the_signal_that_stops_the_stage_ends_the_wait(policy: Artifact) -> None:
    def stop() -> None:
        if about.dead.is_set():
            raise Interrupted("stopped")

    about = Mortal(BOOT, [1, None])
    with mortal(about) as endpoint:
        client = Client(endpoint, 60.0, patience_s=LIMIT_S)
        client.load(policy)
        about.held.clear()
        client.check = stop
        calls: tuple[Callable[[], Any], ...] = (
            lambda: client.generate(BATCH, Sampling(1.0, 4, ()), lambda _: None),
            lambda: client.score([1, 2]),
            lambda: client.load(policy),
        )
        for call in calls:
            with pytest.raises(Interrupted):
                call()


def test_the_signal_is_heard_while_the_server_is_silent() -> None:
    release, stopping = threading.Event(), threading.Event()

    def answer(handler: BaseHTTPRequestHandler, _: int) -> None:
        stopping.set()
        release.wait(60)

    def check() -> None:
        if stopping.is_set():
            raise Interrupted("stopped")

    with serving(answer) as endpoint:
        client = Client(endpoint, 60.0, patience_s=LIMIT_S)
        client.check = check
        with pytest.raises(Interrupted):
            client.score([1, 2])
        release.set()


def test_episodes_go_on_where_the_server_died(policy: Artifact) -> None:
    """It dies in the second turn: the first is not played again, nor are episodes that had their answer."""
    rows = [
        {"id": str(i), "answer": "", "metadata": "{}", "chat": False} for i in range(len(BATCH))
    ]
    how = EpisodeOptions(
        environment="tests.unit.inference.test_episodes:echo",
        environment_args={"replies": 1},
        max_turns=2,
    )
    words = load_tokenizer(policy.path / "model")
    played = []
    for lives in ([None], [7, None]):
        about = Mortal(BOOT | {"context": 4096}, lives)
        with mortal(about) as endpoint:
            client = Client(endpoint, 60.0, patience_s=LIMIT_S)
            client.load(policy)
            sampling = Sampling(1.0, 4, ())
            played.append(
                play_episodes(
                    how, client, rows, BATCH, sampling, words, lambda _, turn: turn, lambda _: None
                )
            )
    assert played[0] == played[1]
    assert [len(each) for each in about.asked] == [5 + 10, 3], (
        "five requests of two episodes, then a request each"
    )


def test_rollouts_of_a_server_that_died_are_those_of_one_that_lived(
    policy: Artifact, tmp_path: Path
) -> None:
    """The stage proves the new process, too: what it commits is the same."""
    scores = json.loads((policy.path / "canary.json").read_text())["logprobs"]
    prompts = commit_prompts(tmp_path / "p", [f"reverse {i} =" for i in range(10, 20)])
    asked = {
        "policy": policy.ref,
        "prompts": prompts.ref,
        "prompts_per_iteration": 4,
        "n": 2,
        "max_tokens": 8,
    }
    made = []
    for name, lives in (("calm", [None]), ("killed", [3, None])):
        about = Mortal(BOOT | {"scores": scores}, lives)
        with mortal(about) as endpoint:
            made.append(rollout(out=str(tmp_path / name), **asked, endpoint=endpoint))
    assert [calls.count("scores") for calls in about.calls] == [1, 1]
    assert made[0].digest == made[1].digest
