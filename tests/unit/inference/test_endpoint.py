"""The engine `endpoint` against a peer that keeps to the protocol, loses requests, lags, or does neither."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.policies import commit_policy
from tests.unit.inference.peer import ODD, Peer, serving
from tests.waiting import LIMIT_S, until
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import Retryable, UserError
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines.endpoint import Endpoint, open_engine

SAMPLED = Sampling(1.0, 6, ())
REQUESTS = [Request(f"r{i}", [3 + i, 4, 5], [i, i + 100]) for i in range(5)]
FAST = {"retry_sleep": 0.02}


def quiet(done: int) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return commit_policy(tmp_path_factory.mktemp("policy") / "v3", version=3)


def opened(url: str, policy: Artifact, **args: Any) -> Endpoint:
    engine = open_engine(url, {**FAST, **args}, LIMIT_S)
    engine.load(policy)
    assert isinstance(engine, Endpoint)
    return engine


def alone(peer: Peer, request: Request, limit: int = 6) -> list[list[int]]:
    """What the peer says when it is asked directly."""
    body = {"sampling": {"temperature": 1.0, "max_tokens": limit, "stop_token_ids": []}}
    asked = {"prompt_ids": request.prompt_ids, "seeds": request.seeds}
    return [
        [token for token, _ in peer.complete(asked, j, body)] for j in range(len(request.seeds))
    ]


@pytest.mark.parametrize("partial_rollout", [False, True])
def test_asks_for_one_prompt_at_a_time_and_for_the_version(
    policy: Artifact, partial_rollout: bool
) -> None:
    peer = Peer(3)
    seen: list[int] = []
    with serving(peer) as url:
        engine = opened(f"{url}/", policy, partial_rollout=partial_rollout)
        made = engine.generate(REQUESTS, SAMPLED, seen.append)
    assert [[c.ids for c in group] for group in made] == [alone(peer, r) for r in REQUESTS]
    assert {(c.start_version, c.end_version) for group in made for c in group} == {(3, 3)}
    assert all(body["version"] == 3 for body in peer.asked) and seen[-1] == 5
    if not partial_rollout:
        assert sorted(len(body["requests"]) for body in peer.asked) == [1] * 5
        with serving(peer) as url:
            assert opened(url, policy).score([3, 4, 5]) == peer.scores([3, 4, 5])


def test_waits_until_the_fleet_has_the_version(policy: Artifact) -> None:
    peer = Peer(2)
    with serving(peer) as url:
        engine = opened(url, policy)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(engine.generate, REQUESTS[:1], SAMPLED, quiet)
            until(lambda: len(peer.asked) > 2)
            peer.version = 3
            assert asked.result(LIMIT_S)[0][0].start_version == 3
    assert engine.retries > 1


def test_older_versions_within_the_bound(policy: Artifact) -> None:
    with serving(Peer(2)) as url:
        made = opened(url, policy, max_staleness=1).generate(REQUESTS, SAMPLED, quiet)
        assert {c.start_version for group in made for c in group} == {2}
    with serving(Peer(1)) as url, pytest.raises(Retryable, match=r"409: .*after 2 retries"):
        opened(url, policy, max_staleness=1, max_retries=2).generate(REQUESTS[:1], SAMPLED, quiet)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("another version echoed", "answers with version 4 where 3 was demanded"),
        ("one token too many", "gives 7 ids and 7 log-probabilities of 6"),
        ("loses a log-probability", "above 0 or not finite"),
    ],
)
def test_what_it_answers_is_checked(policy: Artifact, fault: str, said: str) -> None:
    with serving(Peer(3, fault)) as url, pytest.raises(UserError, match=said):
        opened(url, policy).generate(REQUESTS, SAMPLED, quiet)


@pytest.mark.parametrize("fault", ODD)
def test_a_completion_of_another_form_is_refused(policy: Artifact, fault: str) -> None:
    said = "beyond the policy's vocabulary" if "vocabulary" in fault else "answers in another form"
    with serving(Peer(3, fault)) as url, pytest.raises(UserError, match=said):
        opened(url, policy, partial_rollout=False).generate(REQUESTS, SAMPLED, quiet)


def test_lost_requests_are_sent_again(policy: Artifact) -> None:
    peer = Peer(3)
    peer.lost_after = 3
    with serving(peer) as url:
        engine = opened(url, policy)
        made = engine.generate(REQUESTS, SAMPLED, quiet)
    assert [[c.ids for c in group] for group in made] == [
        alone(peer, r) for r in REQUESTS
    ] and engine.retries == 1


def test_several_urls_take_turns(policy: Artifact) -> None:
    """One is dead, one has an older version: each request ends where the version is, after a retry at most for each."""
    older, newer = Peer(2), Peer(3)
    with serving(older) as first, serving(newer) as second:
        engine = opened(f"http://127.0.0.1:9, {first},{second}/", policy)
        made = engine.generate(REQUESTS, SAMPLED, quiet)
    assert [[c.ids for c in group] for group in made] == [alone(newer, r) for r in REQUESTS]
    assert len(newer.asked) == 5 and 5 <= engine.retries <= 10
    with pytest.raises(UserError, match="rollout_endpoint_url: 'there': must be an absolute URL"):
        open_engine("http://here:1,there", {}, 1.0)


def test_partial_rollouts_are_drained_with_their_versions(policy: Artifact) -> None:
    """A replica is lost after three tokens; one with a newer version goes on from them, and every token says which."""
    older, newer = Peer(2), Peer(3)
    older.lost_after = 3
    request = Request("r", [3, 4, 5], [7])
    with serving(older) as first, serving(newer) as second:
        urls = iter([first, second])
        engine = opened(first, policy, partial_rollout=True, max_staleness=1)
        engine._hook = lambda about: {**about, "url": f"{next(urls)}/generate"}
        ((said,),) = engine.generate([request], SAMPLED, quiet)
    assert said.versions == [2, 2, 2, 3, 3, 3] and (said.start_version, said.end_version) == (2, 3)
    assert said.ids[:3] == alone(older, request, 3)[0] and len(said.logprobs) == 6
    assert newer.asked[0]["requests"][0]["prompt_ids"] == [3, 4, 5, *said.ids[:3]]
    assert newer.asked[0]["sampling"]["max_tokens"] == 3
    ids = [3, 4, 5, *said.ids]
    assert said.logprobs[3:] == pytest.approx(newer.scores(ids)[5:]), (
        "scored given the tokens of the older version"
    )


@pytest.mark.parametrize(("arrived", "reason"), [(3, "stop"), (6, "length")])
def test_a_completion_that_was_lost_at_its_end_is_whole(
    policy: Artifact, arrived: int, reason: str
) -> None:
    peer = Peer(3)
    request = Request("r", [3, 4, 5], [7])
    whole = alone(peer, request, arrived)[0]
    sampling = replace(SAMPLED, stop_token_ids=(whole[-1],) if reason == "stop" else ())
    peer.lost_after = arrived
    with serving(peer) as url:
        ((said,),) = opened(url, policy, partial_rollout=True).generate([request], sampling, quiet)
    assert (said.ids, said.finish_reason, said.versions) == (whole, reason, [])


def test_a_stream_that_leaves_tokens_out_is_refused(policy: Artifact) -> None:
    with (
        serving(Peer(3, "streams too little")) as url,
        pytest.raises(UserError, match="streams other tokens"),
    ):
        opened(url, policy, partial_rollout=True).generate(REQUESTS, SAMPLED, quiet)


def test_hanging_up_ends_what_runs(policy: Artifact) -> None:
    hung_up = threading.Event()

    class Flooding(Peer):
        def lines(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
            try:
                yield from super().lines(body)
            except GeneratorExit:
                hung_up.set()
                raise

    peer = Flooding(3)
    long = [Request(f"r{i}", [3, 4], list(range(64))) for i in range(4)]

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with serving(peer) as url:
        with pytest.raises(KeyboardInterrupt):
            opened(url, policy).generate(long, Sampling(1.0, 400, ()), stop)
        until(hung_up.is_set)
        opened(url, policy).generate(REQUESTS[:1], SAMPLED, quiet)


CALLS: list[dict[str, Any]] = []


def hook(about: dict[str, Any]) -> Any:
    """Adds a header, and gives up sooner."""
    CALLS.append(about)
    return {"headers": {**about["headers"], "X-Session": "a"}, "max_retries": 1}


def careless(about: dict[str, Any]) -> Any:
    """Returns nothing."""


def test_the_hook_may_change_a_request(policy: Artifact) -> None:
    with serving(Peer(2)) as url, pytest.raises(Retryable, match="after 1 retries"):
        opened(url, policy, hook=f"{__name__}:hook").generate(REQUESTS[:1], SAMPLED, quiet)
    assert len(CALLS) == 2 and CALLS[0].keys() == {
        "url",
        "payload",
        "headers",
        "max_retries",
        "retry_sleep",
    }
    with (
        serving(Peer(3)) as url,
        pytest.raises(TypeError, match="must return a dict, not NoneType"),
    ):
        opened(url, policy, hook=f"{__name__}:careless").generate(REQUESTS[:1], SAMPLED, quiet)


@pytest.mark.parametrize(
    ("url", "args", "said"),
    [
        (None, {}, "needs the URL"),
        ("localhost:8000", {}, "absolute URL"),
        ("ftp://x/y", {}, "absolute URL"),
        ("http://x?a=b", {}, "absolute URL"),
        ("http://x", {"max_stale": 1}, "engine_args.max_stale: 1: unknown key"),
        ("http://x", {"max_staleness": -1}, "greater than or equal to 0"),
        ("http://x", {"hook": "nowhere:hook"}, "cannot be imported"),
    ],
)
def test_bad_options(url: str | None, args: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_engine(url, args, 1.0)


def test_completions_of_two_versions_say_which_token_is_whose(tmp_path: Path) -> None:
    from tuneloop.formats.rollouts import make_rows

    said = Completion([5, 6], [-0.1, -0.2], "length", 2, 3, versions=[2, 3])
    row = {"id": "p", "prompt": "", "answer": "", "reward": "{}", "metadata": "{}"}
    methods = {
        "decode": lambda self, ids, **_: "",
        "get_added_vocab": lambda self: {},
        "__len__": lambda self: 0,
    }
    tokenizer = type("Words", (), methods)()
    (made,) = make_rows(tokenizer, row, Request("g", [1], [0]), [said])
    assert made["policy_versions"] == [2, 3]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"kind": "endpoint"}, "needs the address of its servers"),
        ({"kind": "endpoint", "weights": {"kind": "refit", "fleet": "x"}}, "'x': must be a URL"),
        (
            {
                "kind": "endpoint",
                "weights": {"kind": "refit", "fleet": "dynamo://a.b"},
                "rollout_endpoint_url": "http://x",
            },
            "name gives its URL",
        ),
        ({"kind": "endpoint", "rollout_endpoint_url": "x:80"}, "absolute URL"),
        ({"colocate": True, "weights": "pull"}, "colocate needs a server that loads checkpoints"),
        ({"snapshot": True, "weights": "pull"}, "snapshot needs a server that loads checkpoints"),
        ({"snapshot": True, "replicas": 2}, "unset snapshot or replicas"),
        ({"snapshot": True}, "set kv_cache_memory_bytes or enable_sleep_mode"),
        (
            {"snapshot": True, "args": {"enable_sleep_mode": False}},
            "set kv_cache_memory_bytes or enable_sleep_mode",
        ),
    ],
)
def test_settings_that_exclude_one_another(engine: dict[str, Any], said: str) -> None:
    from tuneloop.config.loading import load_pipeline

    with pytest.raises(ValueError, match=said):
        load_pipeline("grpo").Config(engine=engine)


def test_the_vocabulary_of_a_multimodal_policy_is_that_of_its_language_model(
    tmp_path: Path,
) -> None:
    draft = Draft(str(tmp_path / "policy"))
    (draft.path / "model").mkdir(parents=True)
    config = {"model_type": "gemma3", "text_config": {"vocab_size": 99}}
    (draft.path / "model" / "config.json").write_text(json.dumps(config))
    draft.commit(stage="sft", facts={"version": 3})
    engine = opened("http://127.0.0.1:9", Artifact(str(tmp_path / "policy")))
    assert engine.vocab_size == 99
