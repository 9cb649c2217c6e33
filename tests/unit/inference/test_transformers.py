"""The in-process engine against transformers' own generate and a plain forward pass."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    Qwen3Config,
)

from tests.models import write_model
from tests.policies import commit_policy, model
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import UserError
from tuneloop.formats.rollouts import Request
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines.transformers import Transformers, open_engine

PROMPTS = [[7, 8, 9], [11] * 9, [20, 21, 22, 23, 24], [30]]
REQUESTS = [
    Request(f"r{i}", prompt, [100 * i + s for s in range(3)]) for i, prompt in enumerate(PROMPTS)
]


def quiet(done: int) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Transformers:
    made = Transformers(max_model_len=64)
    made.load(commit_policy(tmp_path_factory.mktemp("policy") / "c", version=3))
    return made


def dense(policy: Any, prompt: list[int], completion: list[int], temperature: float) -> list[float]:
    tokens = torch.tensor([prompt + completion])
    with torch.no_grad():
        logprobs = (policy(tokens).logits[0].float() / temperature).log_softmax(-1)
    return [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(completion)]


def test_greedy_is_what_generate_does(engine: Transformers) -> None:
    made = engine.generate(REQUESTS, Sampling(0.0, 16, ()), quiet)
    for request, completions in zip(REQUESTS, made):
        ids = torch.tensor([request.prompt_ids])
        want = engine.model.generate(
            ids, do_sample=False, max_new_tokens=16, eos_token_id=-1, pad_token_id=0
        )
        assert [c.ids for c in completions] == [want[0, ids.shape[1] :].tolist()] * 3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_of_the_sampled_distribution(engine: Transformers, temperature: float) -> None:
    for request, completions in zip(
        REQUESTS, engine.generate(REQUESTS, Sampling(temperature, 12, ()), quiet)
    ):
        for said in completions:
            want = dense(engine.model, request.prompt_ids, said.ids, temperature)
            assert said.logprobs == pytest.approx(want, abs=1e-4)
            assert (said.start_version, said.end_version, said.finish_reason) == (3, 3, "length")


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64),
        Qwen3Config(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, vocab_size=64, use_sliding_window=True, sliding_window=4, max_window_layers=1,
        ),
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=64),
        BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=64),
    ],
    ids=lambda c: c.model_type,
)  # fmt: skip
def test_any_decoder(config: Any, tmp_path: Path) -> None:
    """Rotary, windowed, learned and alibi positions, in one padded batch."""
    torch.manual_seed(0)
    draft = Draft(str(tmp_path / "c"))
    policy = AutoModelForCausalLM.from_config(config).eval()
    policy.save_pretrained(draft.path / "model")
    draft.commit(stage="base_model", facts={"version": 0})
    engine = Transformers()
    engine.load(Artifact(str(tmp_path / "c")))
    for request, completions in zip(
        REQUESTS, engine.generate(REQUESTS, Sampling(1.0, 8, ()), quiet)
    ):
        for said in completions:
            assert said.logprobs == pytest.approx(
                dense(policy, request.prompt_ids, said.ids, 1.0), abs=1e-4
            )


@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_5", "lfm2", "gemma3", "deepseek_v3", "gpt_oss"]
)
def test_rows_end_apart_with_every_kind_of_cache(name: str, tmp_path: Path) -> None:
    """Recurrent states, convolutions, windows, latent keys: rows leave the batch, and the others go on as before."""
    source = write_model(name, tmp_path / "model")
    policy = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    engine = Transformers()
    engine.serve(policy, 0, "digest")
    stops = tuple(range(0, policy.config.vocab_size, 4))
    groups = engine.generate(REQUESTS, Sampling(1.0, 12, stops), quiet)
    lengths = {len(completion.ids) for group in groups for completion in group}
    assert len(lengths) > 2
    for request, completions in zip(REQUESTS, groups):
        for completion in completions:
            expected = dense(policy, request.prompt_ids, completion.ids, 1.0)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_an_attention_that_the_class_does_not_have(tmp_path: Path) -> None:
    draft = Draft(str(tmp_path / "c"))
    write_model("gpt_oss", draft.path / "model")
    draft.commit(stage="base_model", facts={"version": 0})
    with pytest.raises(UserError, match="attn_implementation: 'sdpa': transformers' class"):
        Transformers(attn_implementation="sdpa").load(Artifact(str(tmp_path / "c")))


def test_a_model_without_a_cache_of_keys_and_values(tmp_path: Path) -> None:
    config = MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64)
    with pytest.raises(UserError, match=r"cannot sample from MambaForCausalLM.*take vllm"):
        Transformers().serve(AutoModelForCausalLM.from_config(config), 0, "digest")


def test_same_batch_same_bits(engine: Transformers) -> None:
    sampling = Sampling(1.0, 12, (5, 6))
    assert engine.generate(REQUESTS, sampling, quiet) == engine.generate(REQUESTS, sampling, quiet)


def test_company_does_not_matter(engine: Transformers) -> None:
    """Alone, in another order, in smaller batches: the same tokens."""
    sampling = Sampling(1.0, 12, ())
    together = engine.generate(REQUESTS, sampling, quiet)
    alone = [engine.generate([request], sampling, quiet)[0] for request in REQUESTS]
    backwards = engine.generate(REQUESTS[::-1], sampling, quiet)[::-1]
    engine.max_num_seqs = 4
    try:
        split = engine.generate(REQUESTS, sampling, quiet)
    finally:
        engine.max_num_seqs = 256
    for other in (alone, backwards, split):
        assert [[c.ids for c in group] for group in other] == [
            [c.ids for c in group] for group in together
        ]


def test_a_seed_is_a_stream(engine: Transformers) -> None:
    same, other = engine.generate(
        [Request("a", [7, 8], [1, 1]), Request("b", [7, 8], [2, 3])], Sampling(1.0, 12, ()), quiet
    )
    assert same[0].ids == same[1].ids
    assert len({tuple(c.ids) for c in (same[0], *other)}) == 3


def test_tokens_come_as_often_as_the_model_says(engine: Transformers) -> None:
    seeds = 4000
    (made,) = engine.generate(
        [Request("a", [7, 8, 9], list(range(seeds)))], Sampling(1.0, 1, ()), quiet
    )
    seen = Counter(c.ids[0] for c in made)
    with torch.no_grad():
        probabilities = engine.model(torch.tensor([[7, 8, 9]])).logits[0, -1].softmax(-1)
    for token in probabilities.topk(5).indices.tolist():
        p = float(probabilities[token])
        assert abs(seen[token] / seeds - p) < 5 * math.sqrt(p * (1 - p) / seeds)


def test_stops_at_the_first_stop_token(engine: Transformers) -> None:
    (free,) = engine.generate([Request("a", [7, 8, 9], [0, 1])], Sampling(1.0, 12, ()), quiet)
    stop = free[0].ids[4]
    (cut,) = engine.generate([Request("a", [7, 8, 9], [0, 1])], Sampling(1.0, 12, (stop,)), quiet)
    end = free[0].ids.index(stop) + 1
    assert (cut[0].ids, cut[0].finish_reason) == (free[0].ids[:end], "stop")
    assert cut[0].logprobs == pytest.approx(free[0].logprobs[:end], abs=1e-5)
    assert stop in cut[1].ids or cut[1].ids == free[1].ids


def test_score(engine: Transformers) -> None:
    ids = [7, 8, 9, 10, 11]
    assert engine.score(ids) == pytest.approx(dense(engine.model, ids[:1], ids[1:], 1.0), abs=1e-5)


def test_load_changes_weights_and_says_so(tmp_path: Path) -> None:
    engine = Transformers()
    first, second = (
        commit_policy(tmp_path / "a", version=1),
        commit_policy(tmp_path / "b", version=2),
    )
    engine.load(first)
    before = engine.score([7, 8, 9])
    engine.load(second)
    assert (engine.version, engine.digest) == (2, second.manifest.digest)
    assert engine.score([7, 8, 9]) != before
    want = dense(model(2).float(), [7], [8, 9], 1.0)
    assert engine.score([7, 8, 9]) == pytest.approx(want, abs=1e-4)


def test_who_watches_can_stop_it(engine: Transformers) -> None:
    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(REQUESTS, Sampling(1.0, 12, ()), stop)


@pytest.mark.parametrize(
    ("endpoint", "args"), [("http://localhost:1", {}), (None, {"gpu_memory_utilization": 0.5})]
)
def test_refuses_what_it_does_not_know(endpoint: str | None, args: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        open_engine(endpoint, args, 1.0)
