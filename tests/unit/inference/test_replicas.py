"""Several servers as one engine: how prompts are spread over them, and what the loss of one costs."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.policies import commit_policy, commit_prompts
from tests.unit.inference.test_client import BATCH, BOOT, Mortal, ids, mortal
from tests.waiting import LIMIT_S
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Interrupted, Retryable
from tuneloop.formats.rollouts import Request
from tuneloop.inference.engines import Engine, Remote, Sampling
from tuneloop.inference.engines._client import Client
from tuneloop.inference.engines._replicas import Replicas
from tuneloop.inference.engines.vllm import open_engine
from tuneloop.inference.proof import StaleWeights
from tuneloop.stages.rollout import rollout

HOW = Sampling(1.0, 4, ())


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return commit_policy(tmp_path_factory.mktemp("policy") / "c", version=4)


@pytest.fixture(scope="module")
def alone(policy: Artifact) -> list[list[list[int]]]:
    """What one server makes of the batch."""
    with mortal(Mortal(BOOT, [None])) as endpoint:
        client = Client(endpoint, 60.0)
        client.load(policy)
        return ids(client.generate(BATCH, HOW, lambda _: None))


def open_replicas(
    stack: contextlib.ExitStack, servers: Sequence[Mortal], patience_s: float = LIMIT_S
) -> Replicas:
    return Replicas(
        [Client(stack.enter_context(mortal(each)), 60.0, patience_s=patience_s) for each in servers]
    )


def test_a_prompt_stays_with_its_replica(policy: Artifact, alone: list[list[list[int]]]) -> None:
    """So do later turns of its episodes, in whatever batch they are."""
    servers, seen = [Mortal(BOOT, [None]) for _ in range(2)], list[int]()
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(mortal(each)) for each in servers]
        engine = open_engine(", ".join(urls), {}, 60.0)
        assert isinstance(engine, Replicas) and isinstance(engine, Remote)
        engine.load(policy)
        assert (engine.version, engine.digest, engine.context) == (4, policy.manifest.digest, 64)
        assert ids(engine.generate(BATCH, HOW, seen.append)) == alone
        turns = [
            Request("r3-s01", [1], [0]),
            Request("r2-s00", [1], [0]),
            Request("r1-s01", [1], [0]),
        ]
        engine.generate(turns, HOW, lambda _: None)
    first, second = (set(server.asked[0]) for server in servers)
    assert (first, second) == ({"r0", "r2", "r4", "r2-s00"}, {"r1", "r3", "r1-s01", "r3-s01"})
    assert [server.calls[0].count("/load") for server in servers] == [1, 1]
    assert engine.replicas == {urls[0]: {"requests": 4}, urls[1]: {"requests": 4}}
    assert seen == sorted(seen) and seen[-1] == 5


def test_the_others_make_what_one_that_is_lost_had_not_finished(
    policy: Artifact, alone: list[list[list[int]]]
) -> None:
    servers = [Mortal(BOOT, [None]), Mortal(BOOT, [1]), Mortal(BOOT, [None])]
    with contextlib.ExitStack() as stack:
        engine = open_replicas(stack, servers)
        engine.load(policy)
        assert ids(engine.generate(BATCH, HOW, lambda _: None)) == alone
        assert ids(engine.generate(BATCH, HOW, lambda _: None)) == alone, (
            "and all of the next batch"
        )
    assert servers[1].asked == [["r1", "r4"]], "of which it finished the last"
    assert sorted(servers[0].asked[0]) == ["r0", "r0", "r1", "r1", "r3", "r3"]
    assert sorted(servers[2].asked[0]) == ["r2", "r2", "r4"]
    about = list(engine.replicas.values())
    assert [each["requests"] for each in about] == [6, 1, 3]
    assert "JSONDecodeError" in about[1]["lost"] and "lost" not in about[0] | about[2]


def test_a_replica_that_is_away_from_the_start(
    policy: Artifact, alone: list[list[list[int]]]
) -> None:
    with contextlib.ExitStack() as stack:
        gone = Client("http://127.0.0.1:9", 60.0, patience_s=LIMIT_S)
        engine = Replicas([gone, *open_replicas(stack, [Mortal(BOOT, [None])]).clients])
        engine.load(policy)
        assert ids(engine.generate(BATCH, HOW, lambda _: None)) == alone
    assert "ConnectionRefusedError" in engine.replicas[gone.endpoint]["lost"]


def test_the_last_is_waited_for(policy: Artifact, alone: list[list[list[int]]]) -> None:
    """All are lost in one batch; the one that comes back is told the version, proved, and asked for the rest."""
    servers, proofs = [Mortal(BOOT, [1]), Mortal(BOOT, [1, None])], list[str]()

    def prove(one: Engine) -> None:
        assert isinstance(one, Client)
        proofs.append(one.endpoint)

    with contextlib.ExitStack() as stack:
        engine = open_replicas(stack, servers)
        engine.load(policy)
        engine.prove = prove
        servers[1].held.clear()
        assert servers[1].calls, "its first life"
        made = None
        engine.check = lambda: (
            None if engine.live == list(engine.clients) else servers[1].held.set()
        )
        made = engine.generate(BATCH, HOW, lambda _: None)
    assert ids(made) == alone
    assert {*proofs} <= {engine.clients[1].endpoint} and proofs
    assert "/load" in servers[1].calls[1]


def test_where_none_comes_back_the_stage_is_to_be_tried_again(policy: Artifact) -> None:
    with contextlib.ExitStack() as stack:
        engine = open_replicas(stack, [Mortal(BOOT, [1]), Mortal(BOOT, [1])], patience_s=0.1)
        engine.load(policy)
        with pytest.raises(Retryable, match="it has been away for"):
            engine.generate(BATCH, HOW, lambda _: None)


def test_the_signal_that_stops_the_stage_is_heard(policy: Artifact) -> None:
    def stop(_: int) -> None:
        raise Interrupted("stopped")

    with contextlib.ExitStack() as stack:
        engine = open_replicas(stack, [Mortal(BOOT, [None]), Mortal(BOOT, [None])])
        engine.load(policy)
        with pytest.raises(Interrupted):
            engine.generate(BATCH, HOW, stop)


def test_a_stage_proves_each_replica_and_says_who_made_what(
    policy: Artifact, tmp_path: Path
) -> None:
    """Rollouts of two servers, one of which dies, are those of one."""
    scores = json.loads((policy.path / "canary.json").read_text())["logprobs"]
    prompts = commit_prompts(tmp_path / "p", [f"reverse {i} =" for i in range(10, 20)])
    asked = {
        "policy": policy.ref,
        "prompts": prompts.ref,
        "prompts_per_iteration": 4,
        "n": 2,
        "max_tokens": 8,
    }
    digests = set()
    for name, lives in (("one", [[None]]), ("two", [[None], [None]]), ("killed", [[None], [1]])):
        servers = [Mortal(BOOT | {"scores": scores}, each) for each in lives]
        with contextlib.ExitStack() as stack:
            urls = [stack.enter_context(mortal(each)) for each in servers]
            made = rollout(out=str(tmp_path / name), **asked, endpoint=",".join(urls))
        assert [server.calls[0].count("scores") for server in servers] == [1] * len(servers)
        digests.add(made.digest)
        served = made.notes.get("replicas")
        assert served is None if name == "one" else list(served) == urls
        assert name != "killed" or [each["requests"] for each in served.values()] == [3, 1]
    assert len(digests) == 1

    wrong = [
        Mortal(BOOT | {"scores": scores}, [None]),
        Mortal(BOOT | {"scores": [s - 1 for s in scores]}, [None]),
    ]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(mortal(each)) for each in wrong]
        with pytest.raises(StaleWeights, match="stale or wrong"):
            rollout(out=str(tmp_path / "wrong"), **asked, endpoint=",".join(urls))
