"""The engine that needs only torch and transformers: in process, deterministic, for any decoder of transformers.

Each step is one forward over all live rows. A prompt is prefilled once, however many completions it
gets; rows leave the batch as they finish. Every completion draws its noise from a generator of its
own, so the rest of the batch changes it by float rounding only, and the same batch gives the same
bits. Both libraries are imported late: options are checked without them.

The cache grows by concatenation, which was measured faster than transformers' static one. Rows are
selected by its `reorder_cache`, which beam search needs of every kind of layer. `batch_select_indices`
is missing from layers with a recurrent state (linear attention, convolutions).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tuneloop.core import plugins
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.processor import check_processor
from tuneloop.formats.architectures import find_model_class, supports_attention
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.inference.capabilities import Capabilities
from tuneloop.inference.engines import Done, Engine, Sampling, TensorProof
from tuneloop.inference.engines._tensors import compare_state, digest_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache

CAPABILITIES = Capabilities(deterministic=True)


def open_engine(endpoint: str | None, args: JsonMapping, timeout_s: float) -> Engine:
    """Open the engine; `args` are those of `Transformers`. Raises UserError: another argument, or an endpoint."""
    if endpoint:
        raise UserError(
            "--endpoint",
            endpoint,
            "the transformers engine runs in process; leave the endpoint out",
        )
    check_engine_args(args)
    return Transformers(**args)


def check_engine_args(args: JsonMapping, prefix: str = "--engine-args ") -> None:
    """Refuse what `open_engine` does not know. Raises UserError: with `prefix` and the argument's name as the field."""
    plugins.check_variant_args("engine transformers", Transformers, args, first=0, prefix=prefix)


class Transformers:
    """`Engine` over a `transformers` model. `dtype` of weights and arithmetic: ``auto`` is float32 on a CPU, and the
    saved dtype on a GPU. `max_model_len`: maximum tokens of a sequence; None: the model's own limit."""

    name = "transformers"

    def __init__(
        self,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        attn_implementation: str | None = None,
    ) -> None:
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cpu":
            check_processor()
        self.dtype = "float32" if dtype == "auto" and self.device == "cpu" else dtype
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.attention = attn_implementation
        self.context = 0
        self.version = -1
        self.digest = ""

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        if self.digest == policy.manifest.digest and not force:
            return
        self.version = -1
        self.digest = ""
        disable_progress_bar()
        directory = policy.part("model")
        if self.attention and not supports_attention(find_model_class(directory), self.attention):
            remedy = "transformers' class of this model cannot compute with it; leave it out"
            raise UserError("--engine-args attn_implementation", self.attention, remedy)
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=self.dtype, attn_implementation=self.attention
        )
        self.serve(model, policy.manifest.facts["version"], policy.manifest.digest)

    def serve(self, model: Any, version: int, digest: str) -> None:
        """Serve a model of this process; the engine owns it from then on."""
        self.model = model.to(self.device).eval()
        limit = (
            getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
            or sys.maxsize
        )
        self.context = min(limit, self.max_model_len or limit)
        self.accepts = inspect.signature(self.model.forward).parameters.keys()
        if "past_key_values" not in self.accepts:
            remedy = f"cannot sample from {type(model).__name__}, whose cache is of another kind; take vllm"
            raise UserError("engine", self.name, remedy)
        self.version = version
        self.digest = digest

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, done: Done
    ) -> list[list[Completion]]:
        import torch

        results: dict[int, list[Completion]] = {}
        for batch in self._batches(requests):
            beat = functools.partial(done, len(results))
            with torch.inference_mode():
                completions = iter(self._run([requests[i] for i in batch], sampling, beat))
            results |= {i: [next(completions) for _ in requests[i].seeds] for i in batch}
            done(len(results))
        return [results[i] for i in range(len(requests))]

    def score(self, ids: Sequence[int]) -> list[float]:
        import torch

        tokens = torch.tensor([ids], device=self.device)
        with torch.inference_mode():
            logprobs = (
                self.model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            )
        return logprobs.gather(-1, tokens[0, 1:, None]).squeeze(-1).tolist()  # type: ignore[no-any-return]

    def read_back(self, policy: Artifact) -> TensorProof:
        """Compare the tensors of the model with those of a checkpoint."""
        model = policy.part("model")
        comparison = compare_state(self.model.state_dict(), model)
        return comparison.summarize(
            digest_model(model), str(self.model.dtype).removeprefix("torch.")
        )

    def close(self) -> None:
        self.version = -1
        self.digest = ""
        self.__dict__.pop("model", None)

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Yield indices of requests of similar length (little padding), at most `max_num_seqs` completions together."""
        batch: list[int] = []
        rows = 0
        for i in sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids)):
            if batch and rows + len(requests[i].seeds) > self.max_num_seqs:
                yield batch
                batch = []
                rows = 0
            batch.append(i)
            rows += len(requests[i].seeds)
        if batch:
            yield batch

    def _run(
        self, requests: Sequence[Request], sampling: Sampling, beat: Callable[[], None]
    ) -> list[Completion]:
        """Run one batch to its end; rows are (request, seed) pairs in order."""
        import torch
        from transformers import DynamicCache

        # Uniform in [0, 1), a row for each seed, whatever the other seeds are.
        streams = [torch.Generator().manual_seed(seed) for r in requests for seed in r.seeds]
        rows = [
            torch.rand(sampling.max_tokens, generator=each, dtype=torch.float64) for each in streams
        ]
        noise = torch.stack(rows).to(self.device)
        stops = torch.tensor(sampling.stop_token_ids, device=self.device, dtype=torch.long)
        tokens = torch.zeros(noise.shape, dtype=torch.long, device=self.device)
        logprobs = torch.zeros(noise.shape, device=self.device)
        lengths = torch.full((len(noise),), sampling.max_tokens, device=self.device)
        stopped = torch.zeros(len(noise), dtype=torch.bool, device=self.device)
        live = torch.arange(len(noise), device=self.device)
        cache = DynamicCache(config=self.model.config)
        logits, mask = self._prefill(requests, cache)
        for step in range(sampling.max_tokens):
            beat()
            chosen, logprobs[live, step] = _choose(logits, sampling.temperature, noise[live, step])
            tokens[live, step] = chosen
            ended = torch.isin(chosen, stops)
            if ended.any():
                lengths[live[ended]], stopped[live[ended]] = step + 1, True
                going = (~ended).nonzero().squeeze(-1)
                live = live[going]
                chosen = chosen[going]
                mask = mask[going]
                cache.reorder_cache(going)
            if not len(live) or step + 1 == sampling.max_tokens:
                break
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)
            logits = self._forward(chosen[:, None], mask, cache)
        version = self.version
        return [
            Completion(ids[:n], lps[:n], "stop" if stop else "length", version, version)
            for ids, lps, n, stop in zip(
                tokens.tolist(), logprobs.tolist(), lengths.tolist(), stopped.tolist()
            )
        ]

    def _prefill(self, requests: Sequence[Request], cache: DynamicCache) -> tuple[Tensor, Tensor]:
        """Prefill each prompt once, padded left; then repeat cache, logits and mask for each completion of a prompt."""
        import torch

        width = max(len(r.prompt_ids) for r in requests)
        padded = [[0] * (width - len(r.prompt_ids)) + r.prompt_ids for r in requests]
        kept = [[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in requests]
        mask = torch.tensor(kept, device=self.device)
        logits = self._forward(torch.tensor(padded, device=self.device), mask, cache)
        owner = torch.tensor(
            [i for i, r in enumerate(requests) for _ in r.seeds], device=self.device
        )
        cache.reorder_cache(owner)
        return logits[owner], mask[owner]

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Compute logits after the last of `ids`: float32, rows by vocabulary. `mask` covers the cached tokens too."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        optional = {
            "position_ids": positions,
            "logits_to_keep": 1,
        }  # alibi models take no positions
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **{name: value for name, value in optional.items() if name in self.accepts},
        )
        return out.logits[:, -1].float()


def _choose(logits: Tensor, temperature: float, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Choose a token a row by inversion of the distribution function at `noise`; return it and its log-probability."""
    import torch

    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        chosen = logits.argmax(-1)
    else:
        cumulative = logprobs.double().exp().cumsum(-1)
        points = noise[:, None] * cumulative[:, -1:]  # the sum is 1 but for rounding
        chosen = torch.searchsorted(cumulative, points, right=True).squeeze(-1)
    return chosen, logprobs.gather(-1, chosen[:, None]).squeeze(-1)
