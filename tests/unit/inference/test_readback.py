"""A server compares the tensors of its engine with the files that it loads, and says what it found.

The engine is a plain module in place of vLLM's worker: it loads the files as vLLM does, by name.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from safetensors.torch import load_file, save_file

from tests.policies import commit_policy
from tests.unit.inference.rollout_server import Digits
from tuneloop.core.artifacts import Artifact
from tuneloop.inference.engine_loop import EngineLoop
from tuneloop.inference.engines import vllm
from tuneloop.inference.engines._tensors import compare_state
from tuneloop.inference.engines.vllm import Vllm
from tuneloop.inference.http_api import HttpApi
from tuneloop.inference.proof import digest_policy


class Worker(torch.nn.Module):
    """Holds the tensors of a model under their names, in float32."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        for name, value in load_file(model / "model.safetensors").items():
            owner: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, torch.nn.Parameter(value.float(), requires_grad=False))

    def load(self, model: Path) -> None:
        state = {
            name: value.float() for name, value in load_file(model / "model.safetensors").items()
        }
        self.load_state_dict(state)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    root = tmp_path_factory.mktemp("policies")
    return [commit_policy(root / f"v{version}", version) for version in range(2)]


@pytest.fixture
def worker(versions: list[Artifact]) -> Worker:
    return Worker(versions[0].part("model"))


@pytest.fixture
def engine(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Vllm:
    def rpc(work: Any, args: tuple[Any, ...]) -> list[Any]:
        return [work(SimpleNamespace(get_model=lambda: worker), *args)]

    def start(model: Path, *_: Any) -> Any:
        worker.load(model)
        config = SimpleNamespace(dtype=torch.float32, max_model_len=64)
        # Two tokens that are computed at the start would need an engine.
        monkeypatch.setattr(Vllm, "_try_first_step", lambda self, model: None)
        return SimpleNamespace(
            collective_rpc=rpc,
            model_config=config,
            output_processor=SimpleNamespace(request_states={}),
        )

    monkeypatch.setattr(vllm, "start_engine", start)
    monkeypatch.setattr(vllm, "reload_weights", lambda engine, model: worker.load(model))
    return Vllm({})


@pytest.fixture
def http(engine: Vllm) -> Iterator[TestClient]:
    loop = EngineLoop(engine)
    loop.start()
    with TestClient(HttpApi(loop).app()) as client:
        yield client
    loop.stop()


def load(http: TestClient, policy: Artifact) -> Any:
    body = {"ref": policy.ref, "version": policy.manifest.facts["version"], "force": True}
    return http.post("/load", json=body)


def test_a_server_that_loads_says_that_its_tensors_are_those_of_the_files(
    http: TestClient, versions: list[Artifact]
) -> None:
    count = len(load_file(versions[0].part("model") / "model.safetensors"))
    for policy in (*versions, versions[0]):
        answer = load(http, policy).json()
        assert answer["digest"] == policy.manifest.digest
        assert answer["tensors"] == {
            "digest": digest_policy(policy),
            "dtype": "float32",
            "tensors": count,
            "identical": count,
            "unread": 0,
            "different": 0,
            "example": "",
        }
    assert digest_policy(versions[0]) != digest_policy(versions[1])


def test_a_change_that_the_engine_ignores_poisons_the_server(
    http: TestClient, versions: list[Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(http, versions[0]).status_code == 200
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "reload_weights", lambda engine, model: None)
        answer = load(http, versions[1])
    assert answer.status_code == 503
    assert "tensors of the engine differ from the files" in answer.json()["error"]
    served = http.get("/version").json()
    assert (served["version"], served["digest"], "tensors" in served) == (-1, "", False)
    assert load(http, versions[1]).status_code == 200


def test_verify_names_what_differs(
    http: TestClient, versions: list[Artifact], worker: Worker
) -> None:
    assert http.post("/verify").status_code == 503
    load(http, versions[1])
    name = "model.layers.1.mlp.up_proj.weight"
    assert http.post("/verify").json()["different"] == []
    with torch.no_grad():
        worker.get_parameter(name)[-1, -1] += 1
    assert http.post("/verify").json()["different"] == [name]


def test_a_form_that_vllm_chose_at_its_start_is_unread(
    engine: Vllm, versions: list[Artifact], worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GPT-2's matrices, which vLLM transposes: nothing can be said of them, then or later."""
    name = "model.layers.0.self_attn.o_proj.weight"
    load_plain = worker.load

    def load_transposed(model: Path) -> None:
        load_plain(model)
        with torch.no_grad():
            matrix = worker.get_parameter(name)
            matrix.view(-1).copy_(matrix.flip(0).reshape(-1))

    monkeypatch.setattr(worker, "load", load_transposed)
    for policy in versions:
        engine.load(policy)
        proof = engine.read_back(policy)
        assert (proof.different, proof.unread, proof.is_whole) == (0, 1, False)
    with torch.no_grad():
        worker.get_parameter("model.norm.weight")[0] += 1
    assert engine.read_back(versions[1]).example == "model.norm.weight"


def test_files_that_are_gone_are_the_users_line(http: TestClient, tmp_path: Path) -> None:
    policy = commit_policy(tmp_path / "c", version=1)
    assert load(http, policy).status_code == 200
    for path in policy.part("model").glob("*.safetensors"):
        path.unlink()
    answer = http.post("/verify")
    assert answer.status_code == 400 and "load it again" in answer.json()["error"]


def test_an_engine_that_was_replaced_by_a_stand_in_states_nothing() -> None:
    """A server of another make has no tensors to report, and its client asks for none."""
    assert "tensors" not in HttpApi(EngineLoop(Digits({}))).served()


def test_names_and_shapes_that_a_state_lacks_are_unread(tmp_path: Path) -> None:
    state = {"a": torch.randn(3, 2), "b": torch.randn(4), "c": torch.zeros(()), "d": torch.ones(2)}
    files = {name: value.bfloat16() for name, value in state.items()}
    save_file(files, tmp_path / "model.safetensors")
    exact = {name: value.float() for name, value in files.items()}
    assert compare_state(exact, tmp_path).identical == 4
    exact["a"][2, 1] += 1
    exact["d"] = torch.ones(3)
    found = compare_state({name: exact[name] for name in "acd"}, tmp_path)
    assert (found.different, found.unread, found.identical) == (["a"], ["b", "d"], 1)
