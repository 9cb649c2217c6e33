"""Real vLLM servers that follow published weights: what they hold, and what they do when something goes wrong."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

from tests.local.loops import command
from tests.local.test_vllm import ARGS, GREEDY, REQUESTS, SHORT, Running, begin, launch, quiet
from tests.policies import commit_policy
from tests.waiting import LIMIT_S, free_port, until
from tests.warm import python
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.extensions.fleets.conformance import Probe, run_checks
from tuneloop.formats.canary import write_canary
from tuneloop.formats.rollouts import Request
from tuneloop.inference.engine_loop import EngineLoop
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines._client import Client
from tuneloop.inference.engines.endpoint import open_engine
from tuneloop.inference.proof import prove_weights
from tuneloop.runs.delivery import list_deliveries
from tuneloop.runs.run_record import Run
from tuneloop.weights.inspect import list_versions
from tuneloop.weights.publish import Published, publish_version

pytestmark = [pytest.mark.local, pytest.mark.slow]


def follow(root: Path | str, *options: str) -> Running:
    """A server that follows `root`, once it serves."""
    return launch("--weights", str(root), "--poll-interval", "0.1", *options)


def served(running: Running, version: int, digest: str = "") -> dict[str, Any]:
    """What ``/version`` says, once it says that the last pull brought `version` (of `digest`), and all is well.

    It is put together while the follower goes on: one of its fields may be older than the next.
    """

    def now() -> dict[str, Any] | None:
        said: dict[str, Any] = running.ask("GET", "/version")[1]
        there = said["version"] == said["pulled"].get("version") == version and said[
            "digest"
        ].startswith(digest)
        return said if there and not said["trouble"] else None

    return until(now) or {}


def step(before: Artifact, url: Path, version: int) -> Artifact:
    """A checkpoint that follows `before` as an optimizer step would: a few per cent of the elements change."""
    from transformers import AutoModelForCausalLM

    draft = Draft(str(url))
    shutil.copytree(before.path / "model", draft.path / "model")
    path = draft.path / "model" / "model.safetensors"
    generator = torch.Generator().manual_seed(version)
    tensors = load_file(path)
    for tensor in tensors.values():
        chosen = torch.rand(tensor.shape, generator=generator) < 0.03
        tensor[chosen] += 0.1 * tensor[chosen].sign() + 0.01
    save_file(tensors, path, metadata={"format": "pt"})
    write_canary(
        AutoModelForCausalLM.from_pretrained(draft.path / "model"), draft.path / "canary.json"
    )
    draft.commit(stage="policy_update", facts={"version": version})
    return Artifact(str(url))


def publish(root: Path | str, policy: Artifact) -> Published:
    return publish_version(
        str(root),
        policy.manifest.facts["version"],
        policy.path / "model",
        source=policy.manifest.digest,
    )


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    """Eleven checkpoints, each a small step from the one before. The head is tied, which vLLM's reload forgets."""
    root = tmp_path_factory.mktemp("policies")
    made = [commit_policy(root / "v0")]
    for version in range(1, 11):
        made.append(step(made[-1], root / f"v{version}", version))
    return made


@pytest.fixture(scope="module")
def follower(
    chain: list[Artifact], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Path]]:
    root = tmp_path_factory.mktemp("weights")
    publish(root, chain[0])
    running = follow(root)
    yield running, root
    running.process.kill()
    running.process.wait()


def test_ten_updates_byte_for_byte(follower: tuple[Running, Path], chain: list[Artifact]) -> None:
    """After each: all tensors that vLLM holds are those of the export, read back; and it computes with them."""
    running, root = follower
    client = Client(running.url, LIMIT_S)
    for policy in chain:
        version = policy.manifest.facts["version"]
        published = publish(root, policy)
        assert version == 0 or published.encoding == "gap8-xor"
        now = served(running, version, policy.manifest.digest)
        status, held = running.ask("POST", "/verify")
        count = len(load_file(policy.path / "model" / "model.safetensors"))
        assert (status, held) == (
            200, {"version": version, "tensors": count, "identical": count, "different": [], "unread": []}
        )  # fmt: skip
        assert now["pulled"]["identical"] == count and now["pulled"]["deltas"] == (
            [version] if version else []
        )
        client.load(policy)
        prove_weights(client, policy, 0.05)
    assert {
        c.start_version for group in client.generate(REQUESTS, GREEDY, quiet) for c in group
    } == {10}


def test_a_chain_that_starts_on_what_the_replica_has(chain: list[Artifact], tmp_path: Path) -> None:
    """Version 0 is never fetched; a replica that was started with another model says so in one line, and serves not."""
    root, models = tmp_path / "weights", [policy.path / "model" for policy in chain[:2]]
    about = [{"source": policy.manifest.digest} for policy in chain[:2]]
    publish_version(str(root), 0, models[0], held_by_readers=True, **about[0])  # type: ignore[arg-type]
    assert not list(root.rglob("*.safetensors"))
    line = [
        python(),
        "-m",
        "tuneloop.inference.server",
        "--weights",
        str(root),
        "--base",
        str(models[1]),
        "--port",
        "0",
    ]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as other:
        refused = until(
            lambda: next((text for text in other.stderr or () if "--base" in text), None),
            child=other,
        )
        assert (
            "but version 0, which stores no weights, needs" in (refused or "")
            and other.poll() is None
        )
        other.kill()
    running = follow(root, "--base", str(models[0]))
    try:
        served(running, 0, chain[0].manifest.digest)
        publish_version(str(root), 1, models[1], base=models[0], **about[1])  # type: ignore[arg-type]
        assert served(running, 1, chain[1].manifest.digest)["pulled"]["deltas"] == [1]
        held = running.ask("POST", "/verify")[1]
        assert (
            held["identical"] == held["tensors"] == len(load_file(models[1] / "model.safetensors"))
        )
    finally:
        running.process.kill()
        running.process.wait()


@pytest.mark.parametrize("workers", [1, 2])
def test_experts_and_parts_are_read_back(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense layer and one of experts, whole or split over two workers: each holds its part, and what differs in one
    of them is named."""
    monkeypatch.setenv(
        "VLLM_CPU_OMP_THREADS_BIND", "nobind"
    )  # vLLM would want a NUMA node for each worker
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "mlp_only_layers": [0],
    }
    first = commit_policy(tmp_path / "v0", tied=False, family=partial(Qwen3MoeConfig, **experts))
    root, held = tmp_path / "weights", tmp_path / "held"
    publish(root, first)
    args = json.dumps({**ARGS, "tensor_parallel_size": workers})
    running = follow(root, "--weights-dir", str(held), "--engine-args", args)
    try:
        client = Client(running.url, LIMIT_S)
        for policy in (first, step(first, tmp_path / "v1", 1)):
            version = policy.manifest.facts["version"]
            publish(root, policy)
            served(running, version)
            count = len(load_file(policy.path / "model" / "model.safetensors"))
            assert running.ask("POST", "/verify")[1] == {
                "version": version, "tensors": count, "identical": count, "different": [], "unread": []
            }  # fmt: skip
            client.load(policy)
            prove_weights(client, policy, 0.05)
        layers = (
            "model.layers.0.self_attn.k_proj",
            "model.layers.0.mlp.up_proj",
            "model.layers.1.mlp.experts.3.down_proj",
        )
        tensors = load_file(held / "model.safetensors")
        for layer in layers:
            tensors[f"{layer}.weight"][-1, -1] += 1  # of two workers the other holds it
        save_file(tensors, held / "model.safetensors", metadata={"format": "pt"})
        assert running.ask("POST", "/verify")[1]["different"] == sorted(
            f"{layer}.weight" for layer in layers
        )
    finally:
        running.process.kill()
        running.process.wait()


def test_keeps_to_the_protocol(follower: tuple[Running, Path], chain: list[Artifact]) -> None:
    running, _ = follower
    outcomes = list(run_checks(Probe(running.url, chain[10], 256)))
    assert [o for o in outcomes if o[1] != "ok"] == []


def test_goes_back_to_an_older_version_when_told_to(
    follower: tuple[Running, Path], chain: list[Artifact]
) -> None:
    """The pointer is not moved, so the follower leaves it there; the next one told is served again."""
    running, _ = follower
    client = Client(running.url, LIMIT_S)
    for version in (4, 10):
        client.load(chain[version])
        prove_weights(client, chain[version], 0.05)
        assert running.ask("POST", "/verify")[1]["version"] == version
    status, said = running.ask("POST", "/load", {"ref": chain[10].ref, "version": 11})
    assert status == 409 and "is not published" in said["error"]
    status, said = running.ask("POST", "/load", {"ref": chain[3].ref, "version": 2})
    assert status == 400 and "was published from" in said["error"]


def test_sleep_needs_a_device_that_can(follower: tuple[Running, Path]) -> None:
    running, _ = follower
    for path in ("/sleep", "/wake_up"):
        status, said = running.ask("POST", path)
        assert status == 400 and "cpu" in said["error"]
    assert running.ask("GET", "/health")[0] == 200


def test_a_step_that_changes_nothing_is_a_version(
    follower: tuple[Running, Path], chain: list[Artifact]
) -> None:
    running, root = follower
    published = publish_version(
        str(root), 11, chain[10].path / "model", source=chain[10].manifest.digest
    )
    assert (published.sent_bytes, published.density) == (0, 0)
    served(running, 11, chain[10].manifest.digest)


def test_damaged_versions_are_not_served(
    follower: tuple[Running, Path], chain: list[Artifact], tmp_path: Path
) -> None:
    """The old version stays served, whoever wants the new one is told why; once mended, it is served."""
    running, root = follower
    policy = step(chain[10], tmp_path / "v12", 12)
    spare = Path(shutil.copytree(root, tmp_path / "spare"))
    publish(spare, policy)
    (delta,) = (spare / "weight_v000012").glob("*.safetensors")
    whole = delta.read_bytes()
    delta.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    shutil.copytree(spare / "weight_v000012", root / "weight_v000012")
    (root / "latest").write_bytes((spare / "latest").read_bytes())
    until(lambda: running.ask("GET", "/version")[1]["trouble"])
    assert (running.ask("GET", "/version")[1]["version"], running.ask("GET", "/health")[0]) == (
        11,
        200,
    )
    body = {"requests": [{"id": "a", "prompt_ids": [5, 6], "seeds": [0]}], "min_version": 12}
    status, said = running.ask("POST", "/generate", body)
    assert status == 409 and "it cannot be pulled" in said["error"]
    (root / "weight_v000012" / delta.name).write_bytes(whole)
    served(running, 12)
    held = running.ask("POST", "/verify")[1]
    assert held["identical"] == held["tensors"]


def test_requests_go_on_with_new_weights(chain: list[Artifact], tmp_path: Path) -> None:
    """`keep`: weights change under running requests; each token says its version and has its log-probability."""
    engine = begin(chain[0])
    loop = EngineLoop(engine)
    loop.start()
    said: list[Any] = []  # of both completions token by token, then whole
    request, sampling = Request("r", SHORT[0], [1, 2]), Sampling(1.0, 300, ())

    def hear(_: int, part: Any) -> None:
        said.append(part)
        if len(said) in (
            40,
            80,
        ):  # asked for here, so before the next step: 600 are said in a second or two
            version = len(said) // 40
            loop.call(
                loop.change,
                chain[version].path / "model",
                version,
                chain[version].manifest.digest,
                "keep",
            )

    loop.call(loop.generate, [request], sampling, 0, None, hear, stream=True).result()
    (whole,) = until(lambda: [part for part in said if isinstance(part, list)])
    loop.stop()
    loop.join()
    for made in whole:
        assert (
            set(made.versions) == {0, 1, 2}
            and made.versions == sorted(made.versions)
            and len(made.ids) == 300
        )
        for version in (0, 1, 2):
            engine.load(chain[version])
            scored = engine.score(SHORT[0] + made.ids)[len(SHORT[0]) - 1 :]
            mine = [i for i, v in enumerate(made.versions) if v == version]
            assert [made.logprobs[i] for i in mine] == pytest.approx(
                [scored[i] for i in mine], abs=2e-3
            )


@contextmanager
def gateway(backends: list[str]) -> Iterator[str]:
    """What somebody else puts before a fleet: each request goes to the next replica that takes it."""
    turn = count()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for _ in range(len(backends)):
                url = backends[next(turn) % len(backends)]
                connection = http.client.HTTPConnection(
                    url.removeprefix("http://"), timeout=LIMIT_S
                )
                try:
                    connection.request("POST", self.path, body)
                    reply = connection.getresponse()
                except OSError:
                    continue  # that one is dead
                self.send_response(reply.status)
                self.end_headers()
                with suppress(
                    OSError, http.client.HTTPException
                ):  # it died in the middle, or the caller went
                    while data := reply.read1(65536):
                        self.wfile.write(data)
                connection.close()
                return
            self.send_error(503)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_fleet_loses_one_and_gets_another(
    follower: tuple[Running, Path], chain: list[Artifact], tmp_path: Path
) -> None:
    """A replica that joins late replays the chain; one that is killed loses no request."""
    running, root = follower
    latest = list_versions(str(root))[-1].version
    policy = step(chain[10], tmp_path / "next", latest + 1)
    late = follow(root)
    assert (
        running.ask("POST", "/verify")[1]["identical"]
        == late.ask("POST", "/verify")[1]["identical"]
    )
    with gateway([late.url, running.url]) as url:
        engine = open_engine(url, {"retry_sleep": 0.1, "partial_rollout": True}, LIMIT_S)
        engine.load(policy)
        publish(root, policy)
        prove_weights(engine, policy, 0.05)
        for replica in (late, running):
            until(lambda: replica.ask("GET", "/version")[1]["version"] == latest + 1)  # noqa: B023
        many = [Request(f"r{i}", SHORT[i % 4], [i, i + 100]) for i in range(24)]
        killed: list[int] = []

        def kill(done: int) -> None:
            if done >= 2 and not killed:
                late.process.kill()
                killed.append(done)

        made = engine.generate(many, Sampling(1.0, 100, ()), kill)
    late.process.wait()
    assert killed and 0 < killed[0] < 24
    assert {c.end_version for group in made for c in group} == {latest + 1}
    assert all(len(c.ids) == 100 for group in made for c in group)


def replica(root: Path, port: int) -> subprocess.Popen[bytes]:
    line = [
        python(),
        "-m",
        "tuneloop.inference.server",
        "--weights",
        str(root),
        "--host",
        "127.0.0.1",
    ]
    line += ["--port", str(port), "--engine-args", json.dumps(ARGS)]
    return subprocess.Popen(line, stderr=subprocess.DEVNULL)


def test_loop_over_a_fleet_that_pulls(tmp_path: Path) -> None:
    """Somebody else's processes serve: the loop publishes and asks, and knows of them only their URLs. The first is
    killed during the second iteration; the other joins then, replays the chain, and the loop goes on with it."""
    ports = free_port(), free_port()
    root, iterations = tmp_path / "o" / "weights", tmp_path / "o" / "iterations"
    serving: list[subprocess.Popen[bytes]] = [replica(root, ports[0])]
    try:
        urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        settings = {
            "engine.kind": "endpoint",
            "engine.rollout_endpoint_url": urls,
            "engine.weights.kind": "pull",
            "loop.iterations": 3,
            "engine.args": '{"max_retries": 300, "partial_rollout": true}',
        }
        loop = subprocess.Popen(
            command("run", "sft_then_grpo", "--run", "o", store=tmp_path, **settings)
        )
        serving.append(loop)
        until((iterations / "1" / "rollout" / "manifest.json").is_file, 3 * LIMIT_S, loop)
        serving[0].kill()
        serving.append(replica(root, ports[1]))
        assert loop.wait(3 * LIMIT_S) == 0
    finally:
        for process in serving:
            process.kill()
            process.wait()
    for iteration in (1, 2, 3):
        facts = Artifact(str(iterations / str(iteration) / "rollout")).manifest.facts
        assert (facts["engine"], facts["version"]) == ("endpoint", iteration)
        assert facts["staleness"] == {"max": 0, "mean": 0, "bound": 0}
        assert facts["canary"]["mean_abs_diff"] < facts["canary"]["tolerance"]
    asked = {
        d.version: d for d in list_deliveries(Run.open("o", str(tmp_path))) if d.way == "pulled"
    }
    assert asked.keys() >= {1, 2, 3}
    for delivered in asked.values():  # as replicas recorded it: the loop saw none of it
        assert (
            delivered.replicas
            and delivered.waited_s
            and delivered.behind == 0
            and delivered.encode_s is not None
        )
        assert delivered.publish_s and delivered.materialize_s and delivered.pause_s
