"""Every architecture through all stages: trained, sampled from, exported, and loaded again by others.

The models are tiny and random, with the kinds of tokenizer that their families have (`tests/models.py`).
"""

import functools
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.making import prompts_artifact
from tests.models import ARCHITECTURES, write_model
from tests.policies import commit_prompts
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.formats.rollouts import Request
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines._vllm_start import quiet_vllm
from tuneloop.inference.engines.transformers import Transformers
from tuneloop.inference.engines.vllm import Vllm
from tuneloop.inference.proof import prove_weights
from tuneloop.stages.base_model import base_model
from tuneloop.stages.export import export
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.reward import reward
from tuneloop.stages.rollout import rollout
from tuneloop.stages.sft import sft

pytestmark = pytest.mark.local
QUICK = ("llama2", "lfm2")
"""Architectures that `make test` has: a tokenizer of sentencepiece's kind, and a cache of two kinds."""
SERVED = [name for name, architecture in ARCHITECTURES.items() if architecture.by_vllm]
QUESTIONS = [f"say {number} =" for number in (7, 12, 305, 41, 88, 2)]
GREEDY = Sampling(0.0, 12, ())
VLLM_ARGS = {
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 26,
    "dtype": "float32",
}
Result = TypeVar("Result")


def score(completion: str, answer: str, metadata: object) -> float:
    """Score a completion by its characters, so that completions of one prompt differ."""
    return sum(map(ord, completion)) % 100 / 100


def run_stages(name: str, work: Path) -> Artifact:
    """Train the architecture `name` by SFT and one update, export it, and return the last checkpoint."""
    write_model(name, work / "source")
    demonstrations = prompts_artifact(work / "demonstrations")
    judge = json.dumps({f"{__name__}:score": 1.0})
    prompts = commit_prompts(work / "prompts", QUESTIONS[:4], reward=judge)
    base_model(out=f"{work}/base", model=f"{work}/source")
    sft(
        out=f"{work}/sft",
        policy=f"{work}/base",
        prompts=demonstrations.ref,
        max_steps=2,
        warmup_steps=0,
        device="cpu",
    )
    rollout(
        out=f"{work}/rollout",
        policy=f"{work}/sft",
        prompts=prompts.ref,
        engine="transformers",
        prompts_per_iteration=4,
        n=4,
        max_tokens=8,
        iteration=1,
    )
    reward(out=f"{work}/reward", rollouts=f"{work}/rollout")
    update = policy_update(
        out=f"{work}/update",
        policy=f"{work}/sft",
        rewards=f"{work}/reward",
        iteration=1,
        warmup_steps=0,
        device="cpu",
    )
    assert update.facts["updates"] == 1 and update.facts["used"] > 0
    export(out=f"{work}/export", policy=f"{work}/update")
    return Artifact(f"{work}/update")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that trains an architecture once, and returns its last checkpoint."""
    return functools.cache(lambda name: run_stages(name, tmp_path_factory.mktemp(name)))


def make_requests(directory: Path) -> list[Request]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [
        Request(f"r{number}", list(tokenizer.encode(question)), [number])
        for number, question in enumerate(QUESTIONS)
    ]


def generate(engine: Any, requests: list[Request]) -> list[list[int]]:
    """Generate the greedy tokens of each request."""
    groups = engine.generate(requests, GREEDY, lambda done: None)
    return [group[0].ids for group in groups]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES],
)
def test_all_stages_and_transformers_loads_the_export(name: str, trained: Any) -> None:
    policy = trained(name)
    engine = Transformers()
    engine.load(policy)
    directory = Artifact(str(policy.path.parents[1] / "export")).path
    model, information = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not information["missing_keys"] and not information["unexpected_keys"]
    requests = make_requests(directory)
    for request, tokens in zip(requests, generate(engine, requests)):
        ids = torch.tensor([request.prompt_ids])
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, eos_token_id=-1
        )
        assert answer[0, ids.shape[1] :].tolist() == tokens


def run_in_fork(function: Callable[..., Result], *arguments: Any) -> Result:
    """Run a function in a fork of this process, since vLLM keeps the groups of its first model as long as it lives.

    vLLM is imported here, once."""
    quiet_vllm()
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(function, *arguments).result()


def answer_by_vllm(url: str, dtype: str) -> list[list[int]]:
    """Serve a policy by vLLM, prove its weights, and generate."""
    policy = Artifact(url)
    engine = Vllm({**VLLM_ARGS, "dtype": dtype})
    engine.load(policy)
    prove_weights(engine, policy)
    return generate(engine, make_requests(policy.part("model")))


def serve_in_turn(directories: list[str]) -> tuple[str, str]:
    """Change an engine of vLLM to each model in turn; return why it did not, and what it serves then."""
    engine = Vllm(VLLM_ARGS)
    try:
        for version, directory in enumerate(directories):
            engine.change(Path(directory), version, f"digest-{version}")
    except UserError as error:
        return str(error), engine.digest
    return "", engine.digest


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_vllm_says_what_transformers_says(name: str, trained: Any) -> None:
    """In float32, on the policy that was trained: proved by its canary, and the same greedy tokens."""
    policy = trained(name)
    other = Transformers()
    other.load(policy)
    expected = generate(other, make_requests(policy.path / "model"))
    assert run_in_fork(answer_by_vllm, policy.url, "float32") == expected


@pytest.mark.slow
def test_vllm_serves_recurrent_layers_on_a_cpu(trained: Any) -> None:
    """Without chunks and without a prefix cache, in bfloat16, which its kernel takes alone."""
    answers = run_in_fork(answer_by_vllm, trained("qwen3_next").url, "bfloat16")
    assert [len(tokens) for tokens in answers] == [12] * len(QUESTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "qwen3_5",
            "needs the package torchvision for Qwen3_5ForCausalLM: pip install torchvision",
        ),
        ("qwen3_next", "cannot serve Qwen3NextForCausalLM here (AssertionError: CPU GDN attention"),
        ("deepseek_v3", "cannot serve DeepseekV3ForCausalLM here (RuntimeError: expect weight"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_at_once(name: str, reason: str, tmp_path: Path) -> None:
    write_model(name, tmp_path / "model")
    error, digest = run_in_fork(serve_in_turn, [str(tmp_path / "model")])
    assert error.startswith(f"engine: 'vllm': {reason}") and not digest


@pytest.mark.slow
def test_experts_that_vllm_cannot_change_are_refused(tmp_path: Path) -> None:
    """Its reload leaves gpt-oss's as they were."""
    directories = [write_model("gpt_oss", tmp_path / str(seed), seed) for seed in (0, 1)]
    error, digest = run_in_fork(serve_in_turn, [str(directory) for directory in directories])
    assert "cannot change the experts of GptOssForCausalLM in place" in error and not digest
