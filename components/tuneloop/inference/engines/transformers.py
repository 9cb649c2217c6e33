"""The engine that needs only torch and transformers, for any decoder of transformers.

It samples in the stage's process and is deterministic. The gateway samples its snapshots by it, too
(`extensions/gateway/resident.py`, by `serve`), and a third party's engine with servers may wrap it
(``docs/extending.md``: `change`, `compare_files` and `summarize` have the parameters of
`ServedEngine`).

Each step is one forward over all live rows. A prompt is prefilled once, however many completions it
gets; rows leave the batch as they finish. Every completion draws its noise from a generator of its
own, so the rest of the batch changes it by float rounding only, and the same batch gives the same
bits. Both libraries are imported late: options are checked without them.

The cache grows by concatenation, which was measured faster than transformers' static one. Rows are
selected by its `reorder_cache`, which beam search needs of every kind of layer. Layers with a
recurrent state (linear attention, convolutions) lack `batch_select_indices`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuneloop.core import plugins
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.processor import check_processor
from tuneloop.formats.architectures import find_model_class, get_context, supports_attention
from tuneloop.formats.facts import VersionFacts
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.inference.capabilities import Capabilities
from tuneloop.inference.engines import Done, Engine, EngineReport, Sampling, TensorProof
from tuneloop.inference.engines._tensors import Readback, compare_state, digest_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache

CAPABILITIES = Capabilities()


def open_engine(endpoint: str | None, args: JsonMapping, timeout_s: float) -> Engine:
    """Open the engine; `args` are those of `Transformers`.

    Raises:
        UserError: it has no such argument, or an endpoint is given.
    """
    if endpoint:
        remedy = "the transformers engine runs in process; leave the endpoint out"
        raise UserError("--endpoint", endpoint, remedy)
    check_engine_args(args)
    return Transformers(**args)


def check_engine_args(args: JsonMapping, prefix: str = "--engine-args ") -> None:
    """Refuse arguments that `Transformers` does not have.

    Raises:
        UserError: there is one; the field is `prefix` and the argument's name.
    """
    plugins.check_variant_args("engine transformers", Transformers, args, first=0, prefix=prefix)


class Transformers:
    """`Engine` over a `transformers` model.

    Its parameters are the ``engine_args`` that users may set: one that is added needs no other
    place.

    Args:
        dtype: of weights and arithmetic; ``auto``: float32 on a CPU, the saved dtype on a GPU, as
            in `inference/chat.py`.
        max_model_len: maximum tokens of a sequence; None: the model's own limit.
        max_num_seqs: maximum completions that are generated together.
        attn_implementation: transformers' name of the attention; None: its default.
    """

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
        if force or self.digest != policy.manifest.digest:
            version = VersionFacts.read(policy).version
            self.change(policy.part("model"), version, policy.manifest.digest)

    def change(self, directory: Path, version: int, digest: str) -> None:
        """Serve the weights in a model directory.

        Raises:
            UserError: transformers cannot sample from the model, or not with these arguments.
        """
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        self.version = -1
        self.digest = ""
        disable_progress_bar()
        if self.attention and not supports_attention(find_model_class(directory), self.attention):
            remedy = "transformers' class of this model cannot compute with it; leave it out"
            raise UserError("--engine-args attn_implementation", self.attention, remedy)
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=self.dtype, attn_implementation=self.attention
        )
        self.serve(model, version, digest)

    def serve(self, model: Any, version: int, digest: str) -> None:
        """Serve a model of this process; the engine owns it from then on."""
        self.model = model.to(self.device).eval()
        limit = get_context(self.model.config)
        self.context = min(limit, self.max_model_len or limit)
        self.accepts = inspect.signature(self.model.forward).parameters.keys()
        if "past_key_values" not in self.accepts:
            problem = f"cannot sample from {type(model).__name__}, whose cache is of another kind"
            raise UserError("engine", self.name, f"{problem}; take vllm")
        self.version = version
        self.digest = digest

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        done: Done,
    ) -> list[list[Completion]]:
        import torch

        results: dict[int, list[Completion]] = {}
        for batch in self._divide(requests):
            report_progress = functools.partial(done, len(results))
            prompts = [requests[index] for index in batch]
            with torch.inference_mode():
                completions = iter(self._generate_batch(prompts, sampling, report_progress))
            for index in batch:
                results[index] = [next(completions) for _ in requests[index].seeds]
            done(len(results))
        return [results[index] for index in range(len(requests))]

    def score(self, ids: Sequence[int]) -> list[float]:
        import torch

        tokens = torch.tensor([ids], device=self.device)
        with torch.inference_mode():
            logits = self.model(input_ids=tokens, use_cache=False).logits[0, :-1]
        logprobs = logits.float().log_softmax(-1).gather(-1, tokens[0, 1:, None])
        scores: list[float] = logprobs.squeeze(-1).tolist()
        return scores

    def report(self) -> EngineReport:
        return EngineReport()

    def read_back(self, policy: Artifact) -> TensorProof:
        """Compare the tensors of the model with those of a checkpoint."""
        model = policy.part("model")
        return self.summarize(self.compare_files(model), digest_model(model))

    def compare_files(self, model: Path, every: int = 1) -> Readback:
        """Compare all tensors with those of a model directory, whatever `every` says."""
        return compare_state(self.model.state_dict(), model)

    def summarize(self, comparison: Readback, digest: str) -> TensorProof:
        """Add the digest of the files that were compared, and the dtype of the model."""
        return comparison.summarize(digest, str(self.model.dtype).removeprefix("torch."))

    def close(self) -> None:
        self.version = -1
        self.digest = ""
        # Nothing else refers to the model, so that its memory is free at once.
        self.__dict__.pop("model", None)

    def _divide(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Yield the indices of requests that are generated together.

        They have similar lengths, which needs little padding, and at most `max_num_seqs`
        completions.
        """
        batch: list[int] = []
        rows = 0
        lengths = [len(request.prompt_ids) for request in requests]
        for index in sorted(range(len(requests)), key=lengths.__getitem__):
            completions = len(requests[index].seeds)
            if batch and rows + completions > self.max_num_seqs:
                yield batch
                batch = []
                rows = 0
            batch.append(index)
            rows += completions
        if batch:
            yield batch

    def _generate_batch(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        report_progress: Callable[[], None],
    ) -> list[Completion]:
        """Generate one batch to its end; rows are (request, seed) pairs in order."""
        import torch
        from transformers import DynamicCache

        noise = _draw_noise(requests, sampling.max_tokens).to(self.device)
        rows = len(noise)
        stop_ids = torch.tensor(sampling.stop_token_ids, device=self.device, dtype=torch.long)
        tokens = torch.zeros(noise.shape, dtype=torch.long, device=self.device)
        logprobs = torch.zeros(noise.shape, device=self.device)
        lengths = torch.full((rows,), sampling.max_tokens, device=self.device)
        is_stopped = torch.zeros(rows, dtype=torch.bool, device=self.device)
        # The rows that have not ended. Cache, logits and mask have these rows only.
        live = torch.arange(rows, device=self.device)
        cache = DynamicCache(config=self.model.config)
        logits, mask = self._prefill(requests, cache)
        for step in range(sampling.max_tokens):
            report_progress()
            chosen, chosen_logprobs = _choose(logits, sampling.temperature, noise[live, step])
            if not chosen_logprobs.isfinite().all():
                remedy = (
                    f"its logits are not finite at temperature {sampling.temperature:g}: sample from "
                    "weights from before they grew, and train with a smaller learning rate"
                )
                raise UserError("policy version", self.version, remedy)
            tokens[live, step] = chosen
            logprobs[live, step] = chosen_logprobs
            is_stop = torch.isin(chosen, stop_ids)
            if is_stop.any():
                ended = live[is_stop]
                lengths[ended] = step + 1
                is_stopped[ended] = True
                going_on = (~is_stop).nonzero().squeeze(-1)
                live = live[going_on]
                chosen = chosen[going_on]
                mask = mask[going_on]
                cache.reorder_cache(going_on)
            if not len(live) or step + 1 == sampling.max_tokens:
                break
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)
            logits = self._forward(chosen[:, None], mask, cache)
        completions: list[Completion] = []
        # Copied to the host at once, as each copy waits for the device.
        columns = zip(tokens.tolist(), logprobs.tolist(), lengths.tolist(), is_stopped.tolist())
        for ids, values, length, has_stop in columns:
            completion = Completion(
                ids=ids[:length],
                logprobs=values[:length],
                finish_reason="stop" if has_stop else "length",
                start_version=self.version,
                end_version=self.version,
            )
            completions.append(completion)
        return completions

    def _prefill(self, requests: Sequence[Request], cache: DynamicCache) -> tuple[Tensor, Tensor]:
        """Prefill each prompt once; then repeat its cache for each of its completions.

        Returns:
            Logits (completions × vocabulary, float32), and the mask (completions × longest prompt)
            of prompts that are padded on the left.
        """
        import torch

        width = max(len(request.prompt_ids) for request in requests)
        padded_ids: list[list[int]] = []
        masks: list[list[int]] = []
        # The number of the prompt of each completion.
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = request.prompt_ids
            padding = [0] * (width - len(ids))
            padded_ids.append(padding + ids)
            masks.append(padding + [1] * len(ids))
            owners += [number] * len(request.seeds)
        mask = torch.tensor(masks, device=self.device)
        logits = self._forward(torch.tensor(padded_ids, device=self.device), mask, cache)
        owner = torch.tensor(owners, device=self.device)
        cache.reorder_cache(owner)
        return logits[owner], mask[owner]

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Compute the logits after the last of `ids` (rows × vocabulary, float32).

        `mask` covers the cached tokens too.
        """
        arguments: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": mask,
            "past_key_values": cache,
            "use_cache": True,
        }
        # A model with ALiBi takes no positions.
        if "position_ids" in self.accepts:
            # Padding is on the left, and the first token of a prompt has the position 0.
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            arguments["position_ids"] = positions[:, -ids.shape[1] :]
        # The logits of all positions of a batch of long prompts would take gigabytes.
        if "logits_to_keep" in self.accepts:
            arguments["logits_to_keep"] = 1
        return self.model(**arguments).logits[:, -1].float()


def _draw_noise(requests: Sequence[Request], max_tokens: int) -> Tensor:
    """Draw uniform numbers in [0, 1), float64, a row for each seed and a column for each token."""
    import torch

    rows: list[Tensor] = []
    for request in requests:
        for seed in request.seeds:
            # A generator of its own: a row does not depend on which other seeds there are.
            generator = torch.Generator().manual_seed(seed)
            rows.append(torch.rand(max_tokens, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def _choose(logits: Tensor, temperature: float, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Choose a token for each row by inversion of the distribution function at `noise`.

    Args:
        logits: rows × vocabulary, float32.
        temperature: 0 chooses the most probable token.
        noise: one number in [0, 1) for each row, float64.

    Returns:
        The tokens, and their log-probabilities at the temperature (at 1 where it is 0): NaN where a
        row has logits that are not finite.
    """
    import torch

    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        chosen = logits.argmax(-1)
    else:
        cumulative = logprobs.double().exp().cumsum(-1)
        # The sum is 1 but for rounding, so the noise is scaled to it.
        points = noise[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, points, right=True).squeeze(-1)
        # Where a logit is not finite, the index is behind the last token; the caller sees it by the NaN.
        chosen = chosen.clamp(max=logits.shape[-1] - 1)
    return chosen, logprobs.gather(-1, chosen[:, None]).squeeze(-1)
