"""Real vLLM on this machine, in process and as a server: versions changed in place are those of a fresh engine."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.policies import commit_policy, commit_prompts, model
from tests.unit.sharing.test_snapshot import DRIVER, install_stand_in
from tests.waiting import LIMIT_S, until
from tests.warm import forked, python
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import Retryable, UserError
from tuneloop.extensions.fleets.autoscaler import count_requests
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.formats.tokens import load_tokenizer
from tuneloop.inference.engines import Sampling, _readback
from tuneloop.inference.engines._client import Client
from tuneloop.inference.engines.transformers import Transformers
from tuneloop.inference.engines.vllm import Vllm
from tuneloop.inference.fleet import open_fleet
from tuneloop.inference.fleet.refit import make_target, refit_fleet
from tuneloop.inference.multi_turn import EpisodeOptions, play_episodes
from tuneloop.inference.proof import StaleWeights, prove_weights
from tuneloop.stages.rollout import rollout

pytestmark = [pytest.mark.local, pytest.mark.slow]

# In float32 every x86 packs weights; in bfloat16 only one with AVX512_BF16 or AMX does.
ARGS = {
    "max_model_len": 512,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 1 << 28,
    "dtype": "float32",
}
ALIVE: list[
    Vllm
] = []  # what ends one engine, its destructor too, ends what vLLM keeps once a process
LONG = [
    [3 + (i * 7 + j) % 250 for j in range(300)] for i in range(4)
]  # more than two blocks of the prefix cache
SHORT = [[3 + (i * 5 + j) % 250 for j in range(9)] for i in range(4)]
REQUESTS = [Request(f"r{i}", prompt, [10 * i, 10 * i + 1]) for i, prompt in enumerate(LONG + SHORT)]
GREEDY, SAMPLED = Sampling(0.0, 12, ()), Sampling(0.8, 12, ())


def quiet(done: int) -> None:
    """Nobody watches."""


def tokens(groups: list[list[Completion]]) -> list[list[tuple[list[int], list[float]]]]:
    """What was said, whichever version said it."""
    return [[(c.ids, c.logprobs) for c in group] for group in groups]


def begin(policy: Artifact) -> Vllm:
    """An engine in this process, on a version."""
    ALIVE.append(Vllm(ARGS))
    ALIVE[-1].load(policy)
    return ALIVE[-1]


@pytest.fixture(scope="module", params=["tied", "untied"])
def versions(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Artifact]:
    """Three policies whose head is their embedding, or not: which decides what vLLM's reload forgets."""
    root = tmp_path_factory.mktemp("policies")
    return [
        commit_policy(root / f"v{k}", version=k, tied=request.param == "tied") for k in range(3)
    ]


once = pytest.mark.parametrize("versions", ["tied"], indirect=True)
"""Of a test of what has nothing to do with the head."""


@pytest.fixture(scope="module")
def fresh(versions: list[Artifact]) -> list[Any]:
    """What an engine that was started on each version says."""
    said = []
    for policy in versions:
        engine = begin(policy)
        said.append([tokens(engine.generate(REQUESTS, how, quiet)) for how in (GREEDY, SAMPLED)])
    return said


@pytest.fixture(scope="module")
def engine(versions: list[Artifact]) -> Vllm:
    return begin(versions[0])


def test_a_version_changed_in_place_is_that_of_a_fresh_engine(
    engine: Vllm, versions: list[Artifact], fresh: list[Any]
) -> None:
    assert fresh[0] != fresh[1] != fresh[2]
    for k in (0, 1, 2, 0):
        engine.load(versions[k])
        assert (engine.version, engine.digest) == (k, versions[k].manifest.digest)
        assert [
            tokens(engine.generate(REQUESTS, how, quiet)) for how in (GREEDY, SAMPLED)
        ] == fresh[k]
        assert prove_weights(engine, versions[k]).mean < 0.02


def test_agrees_with_the_other_engine(engine: Vllm, versions: list[Artifact]) -> None:
    """Greedy tokens, and log-probabilities at a temperature."""
    engine.load(versions[1])
    other = Transformers()
    other.load(versions[1])
    ours, theirs = (e.generate(REQUESTS, GREEDY, quiet) for e in (engine, other))
    assert [c.ids for group in ours for c in group] == [c.ids for group in theirs for c in group]
    for request, group in zip(REQUESTS, engine.generate(REQUESTS, Sampling(1.0, 12, ()), quiet)):
        for said in group:
            scored = other.score(request.prompt_ids + said.ids)[len(request.prompt_ids) - 1 :]
            assert said.logprobs == pytest.approx(scored, abs=2e-3)


@once
def test_same_batch_same_bits(engine: Vllm) -> None:
    first, again = (tokens(engine.generate(REQUESTS, SAMPLED, quiet)) for _ in range(2))
    assert first == again


@once
def test_prompts_of_more_tokens_than_a_step_takes(engine: Vllm) -> None:
    """vLLM would cut one of them into chunks, which it cannot do on a CPU with a seed for each completion."""
    budget = engine.engine.vllm_config.scheduler_config.max_num_batched_tokens
    many = [
        Request(f"r{i}", [3 + (i * 7 + j) % 250 for j in range(480)], [i])
        for i in range(budget // 480 + 2)
    ]
    assert all(
        len(group[0].ids) == 2 for group in engine.generate(many, Sampling(1.0, 2, ()), quiet)
    )


@once
def test_stops_at_a_stop_token(engine: Vllm) -> None:
    ((free,),) = engine.generate([Request("a", SHORT[0], [1])], SAMPLED, quiet)
    stop = free.ids[3]
    ((cut,),) = engine.generate([Request("a", SHORT[0], [1])], Sampling(0.8, 12, (stop,)), quiet)
    assert cut.ids == free.ids[: free.ids.index(stop) + 1] and (
        free.finish_reason,
        cut.finish_reason,
    ) == (
        "length",
        "stop",
    )


@once
def test_refuses_another_shape(engine: Vllm, tmp_path: Path) -> None:
    before = engine.version
    with pytest.raises(UserError, match="another shape"):
        engine.load(commit_policy(tmp_path / "c", context=2048))
    assert engine.version == before


def test_without_the_repack_a_tied_head_is_caught(
    versions: list[Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that vLLM has and we mend: where it bites, the canary says so; where it does not, nothing is lost."""
    monkeypatch.setattr(_readback, "_repack_head", lambda worker: None)
    engine = begin(versions[0])
    engine.load(versions[1])
    if json.loads((versions[1].path / "model" / "config.json").read_text())["tie_word_embeddings"]:
        with pytest.raises(StaleWeights, match="stale or wrong"):
            prove_weights(engine, versions[1], 0.05)
    else:
        prove_weights(engine, versions[1], 0.05)


@once
@pytest.mark.parametrize(
    "args", [{"max_model_length": 5}, {"max_model_len": -5}, {"dtype": "float7"}]
)
def test_arguments_that_vllm_refuses(versions: list[Artifact], args: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"--engine-args.*vLLM refuses"):
        Vllm(args).load(versions[0])


@dataclass
class Running:
    """A server in a process of its own."""

    url: str
    process: "subprocess.Popen[str]"

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=LIMIT_S)
        connection.request(method, path, None if body is None else json.dumps(body))
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())

    def answers(self) -> bool:
        try:
            return self.ask("GET", "/health") == (200, {"status": "ok"})
        except ConnectionRefusedError:
            return False

    def cpu_seconds(self) -> float:
        fields = (
            Path(f"/proc/{forked(self.process.pid)}/stat").read_text().rpartition(")")[2].split()
        )
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rests(self) -> bool:
        """Whether it hardly computed for two seconds."""
        before = self.cpu_seconds()
        time.sleep(2)
        return self.cpu_seconds() - before < 0.1


def launch(*options: str, program: str = "") -> Running:
    """A server of the policy or weights that `options` name, once it answers; the last option of a kind counts.

    `program` is run in place of the server's module.
    """
    server = (
        [sys.executable, "-c", program]
        if program
        else [python(), "-m", "tuneloop.inference.server"]
    )
    line = [*server, "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(
        [*line, "--engine-args", json.dumps(ARGS), *options], stderr=subprocess.PIPE, text=True
    )
    said = []
    for text in process.stderr or ():
        said.append(text)
        if found := re.search(r"serve: version \d+ at (http://\S+)", text):
            threading.Thread(target=(process.stderr or sys.stdin).read, daemon=True).start()
            running = Running(found[1], process)
            until(running.answers, child=process)
            return running
    raise AssertionError("".join(said))


def start(policy: Artifact) -> Running:
    return launch("--policy", policy.ref)


@pytest.fixture(scope="module")
def server(versions: list[Artifact]) -> Iterator[Running]:
    running = start(versions[0])
    yield running
    running.process.kill()
    running.process.wait()


def test_server_says_what_a_fresh_engine_says(
    server: Running, versions: list[Artifact], fresh: list[Any]
) -> None:
    client = Client(server.url, LIMIT_S)
    for k in (0, 1, 2):
        client.load(versions[k])
        status, answer = server.ask("GET", "/version")
        assert status == 200
        proof = answer.pop("tensors")
        assert proof["different"] == 0 and proof["identical"] + proof["unread"] == proof["tensors"]
        digest = versions[k].manifest.digest
        assert answer == {"version": k, "digest": digest, "engine": "vllm", "context": 512}
        said = client.generate(REQUESTS, GREEDY, quiet)
        assert tokens(said) == fresh[k][0]
        assert {(c.start_version, c.end_version) for group in said for c in group} == {(k, k)}
        prove_weights(client, versions[k], 0.05)


def server_command(policy: Artifact, port: str) -> list[str]:
    """The command line of a server of `policy`, but for its engine's options."""
    address = ["--host", "127.0.0.1", "--port", port]
    return [python(), "-m", "tuneloop.inference.server", "--policy", policy.ref, *address]


@once
def test_a_device_that_can_not_be_had_by_turns(server: Running, versions: list[Artifact]) -> None:
    """A CPU's memory is not given back: the server says so, and an engine asked for it does not start."""
    client = Client(server.url, LIMIT_S, sleeps=True)
    with pytest.raises(
        UserError, match="answers 400: wake_up: 'cpu': this device has no sleep mode"
    ):
        client.load(versions[0])
    with pytest.raises(
        UserError, match="answers 400: sleep: 'cpu': vLLM's sleep mode gives back memory of CUDA"
    ):
        client.close()
    line = server_command(versions[0], "0")
    asked = [*line, "--engine-args", json.dumps({**ARGS, "enable_sleep_mode": True})]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and "Sleep mode" in done.stderr.splitlines()[-1], done.stderr[
        -2000:
    ]


SUSPENDS = """
import os
from pathlib import Path
from tuneloop.inference import server
from tuneloop.sharing import snapshot
snapshot.VERSION = Path("{0}/version")
Path("{0}", str(os.getpid())).write_text("running")
os._exit(server.main())
"""
"""A server that the stand-in for cuda-checkpoint takes for a process with CUDA."""


@once
def test_a_suspended_server_goes_on_with_what_it_had(
    versions: list[Artifact],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its weights are not loaded again, unless they are others. One that the driver does not resume ends."""
    install_stand_in(tmp_path, monkeypatch)
    (tmp_path / "version").write_text(DRIVER.format("570.86.10"))
    asked = ["--policy", versions[0].ref, "--engine-args", json.dumps({**ARGS, "snapshot": True})]
    running = launch(*asked, program=SUSPENDS.format(tmp_path))
    client, state = (
        Client(running.url, LIMIT_S, sleeps=True, patience_s=0),
        tmp_path / str(running.process.pid),
    )
    try:
        client.load(versions[0])
        said = tokens(client.generate(REQUESTS, GREEDY, quiet))
        client.close()
        assert state.read_text() == "checkpointed"
        assert running.ask("GET", "/version")[1]["digest"] == versions[0].manifest.digest, (
            "which nobody loads again"
        )
        assert running.ask("POST", "/load", {"ref": versions[1].ref})[0] == 503, (
            "a call of CUDA would wait for ever"
        )
        client.load(versions[0])
        assert (
            state.read_text() == "running"
            and tokens(client.generate(REQUESTS, GREEDY, quiet)) == said
        )
        client.close()
        client.load(versions[1])
        prove_weights(client, versions[1], 0.05)
        client.close()
        (tmp_path / "restore-fails").write_text("out of memory")
        with pytest.raises(Retryable, match="it has been away"):
            client.load(versions[1])
        assert (
            f'Could not restore on process ID {state.name}: "out of memory"'
            in capsys.readouterr().err
        )
        assert running.process.wait(LIMIT_S) == 75
    finally:
        running.process.kill()
        running.process.wait()


SLEEPS = """
import os
from tuneloop.inference import server
from tuneloop.inference.engines.vllm import Vllm
Vllm.sleep = lambda self, level: self.poison() if level > 1 else None
Vllm.wake_up = lambda self: None
os._exit(server.main())
"""
"""A server on a device that can sleep: what vLLM does there with its memory is left out."""


@once
def test_requests_wait_while_the_engine_sleeps(versions: list[Artifact]) -> None:
    """Also while it is awake and has no weights yet; then they are answered by the version that they name."""
    running = launch("--policy", versions[0].ref, program=SLEEPS)
    body = {
        "requests": [{"id": "a", "prompt_ids": SHORT[0], "seeds": [0]}],
        "sampling": {"max_tokens": 2},
    }

    def asleep(future: "Future[tuple[int, Any]]") -> bool:
        time.sleep(0.5)
        return running.ask("GET", "/health")[0] == 503 and not future.done()

    try:
        with ThreadPoolExecutor(2) as pool:
            assert running.ask("POST", "/sleep", {"level": 2}) == (200, {"status": "asleep"})
            named = pool.submit(running.ask, "POST", "/generate", {**body, "version": 1})
            scored = pool.submit(
                running.ask, "POST", "/generate", {**body, "prompt_logprobs": True}
            )
            assert asleep(named) and running.ask("POST", "/wake_up")[0] == 200 and asleep(scored)
            Client(running.url, LIMIT_S).load(versions[1])
            assert named.result(LIMIT_S)[1]["completions"][0]["start_version"] == 1
            assert scored.result(LIMIT_S)[1]["completions"][0]["start_version"] == 1
            assert running.ask("POST", "/sleep", {"level": 1})[0] == 200
            again = pool.submit(running.ask, "POST", "/generate", body)
            assert asleep(again) and running.ask("POST", "/wake_up")[0] == 200
            assert again.result(LIMIT_S)[1]["completions"][0]["start_version"] == 1, (
                "its weights were kept"
            )
    finally:
        running.process.kill()
        running.process.wait()


@once
def test_requests_at_the_same_time(server: Running, versions: list[Artifact]) -> None:
    """Each caller gets its own answers, a load in the middle waits for those before it and holds those after."""
    Client(server.url, LIMIT_S).load(versions[0])

    def ask(i: int) -> tuple[list[Completion], int]:
        client = Client(server.url, LIMIT_S)
        client.version = None  # type: ignore[assignment] # any version will do
        (group,) = client.generate([REQUESTS[i]], Sampling(0.0, 100, ()), quiet)
        return group, i

    with ThreadPoolExecutor(9) as pool:
        early = [pool.submit(ask, i) for i in range(4)]
        time.sleep(0.1)
        loading = pool.submit(server.ask, "POST", "/load", {"ref": versions[1].ref})
        late = [pool.submit(ask, i) for i in range(4, 8)]
        assert loading.result()[1]["version"] == 1
        for future in early + late:
            group, i = future.result()
            assert {c.start_version for c in group} == {c.end_version for c in group} <= {0, 1}
            client = Client(server.url, LIMIT_S)
            client.load(versions[group[0].start_version])
            (alone,) = client.generate([REQUESTS[i]], Sampling(0.0, 2, ()), quiet)
            assert len(group[0].ids) == 100 and group[0].ids[:2] == alone[0].ids


@once
def test_a_version_that_is_not_there(server: Running, versions: list[Artifact]) -> None:
    Client(server.url, LIMIT_S).load(versions[1])
    body = {
        "requests": [{"id": "a", "prompt_ids": [5, 6], "seeds": [0]}],
        "sampling": {"max_tokens": 2},
    }
    status, said = server.ask("POST", "/generate", {**body, "version": 2})
    assert (status, said["error"]) == (
        409,
        "serves version 1, version 2 was asked for; load it first",
    )
    assert server.ask("POST", "/generate", {**body, "min_version": 2})[0] == 409
    assert (
        server.ask("POST", "/generate", {**body, "min_version": 1, "version": 1})[1]["index"] == 0
    )
    waiting = Client(server.url, LIMIT_S)
    waiting.version = 2
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(waiting.generate, REQUESTS[:1], GREEDY, quiet)
        time.sleep(0.5)
        Client(server.url, LIMIT_S).load(versions[2])
        assert asked.result()[0][0].start_version == 2


@once
@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "/generate",
            {"requests": [{"id": "a", "prompt_ids": [5, 999_999], "seeds": [0]}]},
            "from 0 to",
        ),
        ("/generate", {"requests": [{"id": "a", "prompt_ids": [5] * 600, "seeds": [0]}]}, "512"),
        ("/generate", {"requests": []}, "requests"),
        ("/load", {"ref": "/nowhere"}, "has no manifest.json"),
        ("/load", {}, "ref: None: is required"),
    ],
)
def test_bad_requests(server: Running, path: str, body: Any, said: str) -> None:
    status, answer = server.ask("POST", path, body)
    assert status == 400 and said in answer["error"]
    assert server.ask("GET", "/health")[0] == 200


@once
def test_who_hangs_up_is_dropped(server: Running, versions: list[Artifact]) -> None:
    """What a caller left behind does not run on: the server is idle soon after, and counts nothing as waiting."""
    client = Client(server.url, LIMIT_S)
    client.load(versions[0])

    def hang_up(done: int) -> None:
        until(lambda: count_requests(server.url) > 0)
        raise KeyboardInterrupt

    many = [Request(f"r{i}", SHORT[0], list(range(64))) for i in range(64)]
    with pytest.raises(KeyboardInterrupt):
        client.generate(many, Sampling(1.0, 400, ()), hang_up)
    before = server.cpu_seconds()
    until(lambda: count_requests(server.url) == 0)
    until(server.rests)  # as it may seem to on a busy machine while it still computes
    assert server.cpu_seconds() - before < 10, "4096 times 400 tokens take minutes"
    assert count_requests(server.url) == 0


@once
def test_idle_costs_nothing(server: Running, versions: list[Artifact]) -> None:
    client = Client(server.url, LIMIT_S)
    client.load(versions[0])
    client.generate(REQUESTS, GREEDY, quiet)
    until(server.rests)


def broken(policy: Artifact, url: Path) -> Artifact:
    """Commit a checkpoint one of whose tensors has a shape that vLLM refuses."""
    draft = Draft(str(url))
    for name in policy.manifest.files:
        (draft.path / name).parent.mkdir(parents=True, exist_ok=True)
        (draft.path / name).write_bytes((policy.path / name).read_bytes())
    weights = draft.path / "model" / "model.safetensors"
    tensors = load_file(weights)
    # The last one: those before it are in the engine when this one is refused.
    name = list(tensors)[-1]
    tensors[name] = torch.zeros(3, dtype=tensors[name].dtype)
    save_file(tensors, weights, metadata={"format": "pt"})
    draft.commit(stage="sft", facts={"version": 9})
    return Artifact(str(url))


def test_a_failed_load_poisons_until_one_succeeds(
    server: Running, versions: list[Artifact], fresh: list[Any], tmp_path: Path
) -> None:
    status, said = server.ask(
        "POST", "/load", {"ref": broken(versions[0], tmp_path / "broken").url}
    )
    assert status == 503 and "failed" in said["error"]
    assert server.ask("GET", "/health")[0] == 503
    body = {"requests": [{"id": "a", "prompt_ids": [5, 6], "seeds": [0]}]}
    assert server.ask("POST", "/generate", body)[0] == 503
    # At once: a client asks again after a refusal, and would hide one.
    assert server.ask("POST", "/load", {"ref": versions[1].ref})[0] == 200
    client = Client(server.url, LIMIT_S)
    client.load(versions[1])
    assert server.ask("GET", "/health")[0] == 200
    assert tokens(client.generate(REQUESTS, GREEDY, quiet)) == fresh[1][0]


@once
def test_an_unreadable_file_changes_nothing(
    server: Running, versions: list[Artifact], fresh: list[Any], tmp_path: Path
) -> None:
    """The file is read before the engine pauses, so the version that was served stays."""
    client = Client(server.url, LIMIT_S)
    client.load(versions[1])
    draft = Draft(str(tmp_path / "unreadable"))
    shutil.copytree(versions[0].path / "model", draft.path / "model")
    (draft.path / "model" / "model.safetensors").write_bytes(b"\x00" * 64)
    draft.commit(stage="sft", facts={"version": 9})
    status, answer = server.ask("POST", "/load", {"ref": str(tmp_path / "unreadable")})
    assert status == 400 and "is not a safetensors file" in answer["error"]
    assert server.ask("GET", "/health")[0] == 200
    assert tokens(client.generate(REQUESTS, GREEDY, quiet)) == fresh[1][0]


@once
def test_rollout_through_the_server(
    server: Running, versions: list[Artifact], tmp_path: Path
) -> None:
    """The stage loads its policy into the server, and gets what an engine in its own process gives."""
    prompts = commit_prompts(tmp_path / "p", [f"reverse {i} =" for i in range(10, 20)])
    asked = {
        "policy": versions[2].ref,
        "prompts": prompts.ref,
        "prompts_per_iteration": 4,
        "n": 4,
        "max_tokens": 8,
    }
    rollout(out=str(tmp_path / "r"), **asked, endpoint=server.url)
    rollout(out=str(tmp_path / "s"), **asked, engine_args=ARGS)
    served, own = (
        pq.read_table(Artifact(str(tmp_path / n)).path / "rollouts.parquet").to_pylist()
        for n in "rs"
    )
    assert served == own
    assert {v for row in served for v in row["policy_versions"]} == {2}


@once
def test_a_worker_of_a_fleet_is_refitted(
    server: Running, versions: list[Artifact], fresh: list[Any], tmp_path: Path
) -> None:
    """The stage brings the fleet to its policy; who asks while a worker is paused is answered by the new weights; a
    worker whose update failed is resumed, serves nothing, and is mended by the next refit."""
    prompts, fleet = (
        commit_prompts(tmp_path / "p", [f"reverse {i} =" for i in range(10, 20)]),
        open_fleet(server.url),
    )
    for version, done in ((1, False), (2, False), (2, True)):
        asked = {
            "policy": versions[version].ref,
            "prompts": prompts.ref,
            "prompts_per_iteration": 2,
            "n": 2,
        }
        made = rollout(
            out=f"{tmp_path}/{version}{done}",
            **asked,
            engine="endpoint",
            engine_args={"fleet": server.url},
        )
        assert made.facts["version"] == version
        assert (made.notes["refitted"]["workers"][server.url] == 0) is done
        assert (server.url in made.notes["refitted"]["updates"]) is not done

    assert server.ask("POST", "/engine/pause_generation", {"mode": "keep"})[1] == {"status": "ok"}
    with ThreadPoolExecutor(1) as pool:
        body = {
            "requests": [{"id": "a", "prompt_ids": SHORT[0], "seeds": [0]}],
            "sampling": {"max_tokens": 2},
        }
        waiting = pool.submit(server.ask, "POST", "/generate", body)
        time.sleep(0.5)
        assert not waiting.done()
        refit_fleet(fleet, make_target(versions[1]))
        assert waiting.result(LIMIT_S)[1]["completions"][0]["start_version"] == 1

    with pytest.raises(Retryable, match=r"update_weights_from_disk: answers 503: .*failed"):
        refit_fleet(fleet, make_target(broken(versions[0], tmp_path / "broken")))
    assert (
        server.ask("GET", "/health")[0] == 503 and server.ask("POST", "/generate", body)[0] == 503
    )
    refit_fleet(fleet, make_target(versions[0]))
    client = Client(server.url, LIMIT_S)
    client.load(versions[0])
    assert tokens(client.generate(REQUESTS, GREEDY, quiet)) == fresh[0][0]


@once
def test_a_deterministic_server_says_what_a_fresh_engine_says(versions: list[Artifact]) -> None:
    """Whatever it was asked before, and is asked meanwhile; also by who has hung up. Of these prompts an engine that is
    not gives other bits when it is asked again (with two threads, here): most of their blocks are cached by then."""
    args = {**ARGS, "deterministic": True}
    long = [[3 + (i * 7 + j) % 250 for j in range(200 + 18 * i)] for i in range(16)]
    many, sampled = (
        [Request(f"r{i}", prompt, [10 * i, 10 * i + 1]) for i, prompt in enumerate(long)],
        Sampling(1.0, 24, ()),
    )
    ALIVE.append(fresh := Vllm(args))
    fresh.load(versions[0])
    want = tokens(fresh.generate(many, sampled, quiet))
    running = launch("--policy", versions[0].ref, "--engine-args", json.dumps(args))

    def ask(requests: list[Request]) -> list[Any]:
        client = Client(running.url, LIMIT_S, deterministic=True)
        client.load(versions[0])
        return tokens(client.generate(requests, sampled, quiet))

    def hang_up(done: int) -> None:
        until(lambda: count_requests(running.url) > 0)
        raise KeyboardInterrupt

    try:
        assert [ask(many), ask(many[2:9]) and ask(many)] == [want, want]
        with ThreadPoolExecutor(8) as pool:
            others = [pool.submit(ask, many[3 * i : 3 * i + 5]) for i in range(4)]
            asked = [pool.submit(ask, many) for _ in range(3)]
            assert [each.result(LIMIT_S) for each in asked] == [want] * 3
            assert all(each.result(LIMIT_S) for each in others)
        left = Client(running.url, LIMIT_S, deterministic=True)
        left.load(versions[0])
        minutes = [
            Request(f"a{i}", LONG[0], [*range(64)]) for i in range(64)
        ]  # of work, however late it is looked at
        with pytest.raises(KeyboardInterrupt):
            left.generate(minutes, Sampling(1.0, 200, ()), hang_up)
        assert ask(many) == want
        told = running.ask("GET", "/version")[1]["determinism"]
        assert (told["batch_invariant"], told["threads"]) == (False, fresh.determinism["threads"])
    finally:
        running.process.kill()
        running.process.wait()


@once
def test_the_port_is_taken(server: Running, versions: list[Artifact]) -> None:
    port = server.url.rpartition(":")[2]
    line = server_command(versions[0], port)
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr.strip()) == (
        2, f"error: --port: {port}: is taken; stop what listens there, or choose another"
    )  # fmt: skip


@once
def test_killed_in_the_middle(versions: list[Artifact]) -> None:
    """Nobody starts it anew: the caller says so in one line. SIGTERM ends a server quickly and cleanly."""
    for number, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 0)):
        running = start(versions[0])
        client = Client(running.url, LIMIT_S, patience_s=0.1)
        client.load(versions[0])
        begun = running.cpu_seconds()
        many = [Request(f"r{i}", SHORT[0], list(range(64))) for i in range(64)]  # minutes of work
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.generate, many, Sampling(1.0, 480, ()), quiet)
            until(lambda: running.cpu_seconds() > begun + 0.5)  # noqa: B023
            running.process.send_signal(number)
            assert running.process.wait(LIMIT_S) == code
            with pytest.raises(Retryable, match=running.url):
                asked.result(timeout=LIMIT_S)


def test_stale_server_weights_are_caught(
    server: Running, versions: list[Artifact], tmp_path: Path
) -> None:
    """A checkpoint whose weights are not those that its trainer scored."""
    tied = json.loads((versions[0].path / "model" / "config.json").read_text())[
        "tie_word_embeddings"
    ]
    wrong = commit_policy(tmp_path / "c", version=5, tied=tied, canary_of=model(6, tied=tied))
    client = Client(server.url, LIMIT_S)
    client.load(wrong)
    with pytest.raises(StaleWeights, match="stale or wrong"):
        prove_weights(client, wrong, 0.05)


@once
def test_episodes_of_several_turns(server: Running, versions: list[Artifact]) -> None:
    """What vLLM says of each turn's tokens is what one pass over the whole episode gives."""
    client, reference = Client(server.url, LIMIT_S), Transformers()
    for engine in (client, reference):
        engine.load(versions[0])
    rows = [{"id": str(i), "answer": "", "metadata": "{}", "chat": True} for i in range(len(SHORT))]
    requests = [Request(f"i0-p{i}", prompt, [2 * i, 2 * i + 1]) for i, prompt in enumerate(SHORT)]
    how = EpisodeOptions(
        environment="tests.unit.inference.test_episodes:echo",
        environment_args={"replies": 2},
        max_turns=3,
    )
    words = load_tokenizer(versions[0].path / "model")
    sampling = Sampling(1.0, 24, (words.eos_token_id, *range(100)))
    played = play_episodes(
        how, client, rows, requests, sampling, words, lambda name, turn: turn, quiet
    )
    assert max(episode.facts["turns"] for group in played for episode in group) == 3
    for request, group in zip(requests, played, strict=True):
        for episode in group:
            scored = reference.score(request.prompt_ids + episode.ids)[
                len(request.prompt_ids) - 1 :
            ]
            ours, theirs = (
                [p for p, m in zip(given, episode.mask) if m]
                for given in (episode.logprobs, scored)
            )
            assert ours == pytest.approx(theirs, abs=1e-3)
