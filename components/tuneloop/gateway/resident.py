"""A policy and its optimizer that stay in memory between requests, and a sampler of its snapshots."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, Field

from tuneloop.algorithms._terms import clip_surrogate
from tuneloop.core.artifacts import Artifact, Draft, delete_draft
from tuneloop.core.component import Params
from tuneloop.core.context import Stage
from tuneloop.core.errors import UserError
from tuneloop.core.provenance import collect_provenance
from tuneloop.formats.facts import CheckpointFacts, VersionFacts
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.formats.token_files import Document
from tuneloop.gateway.wire import Datum
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines.transformers import Transformers
from tuneloop.training import checkpoint
from tuneloop.training.lora import Lora
from tuneloop.training.options import Optimization

if TYPE_CHECKING:
    from torch import Tensor

    from tuneloop.training.fsdp.policy import Policy
    from tuneloop.training.fsdp.ranks import Ranks

STAGE = "session"
"""The stage name in the manifests of its checkpoints."""
MICRO_BATCH = 64
"""Sequences in one forward pass."""
INPUTS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo"), ("logprobs", "advantages")),
}
"""Loss → the inputs that it needs for every position, in addition to ``target_tokens``."""
THRESHOLDS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
}
"""Loss → its options with their defaults: bounds of the ratio."""


class AdamParams(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """AdamW's options of one step; names and defaults are Tinker's."""

    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0, description="0: gradients are not clipped")


@dataclass(frozen=True)
class Snapshot:
    """The weights of one version, for sampling: the model's `state` with adapters merged in, or (None) those of the
    checkpoint `base`, whose configuration and tokenizer they go with."""

    base: Artifact
    version: int
    state: "dict[str, Tensor] | None" = None


class Resident:
    """A model in training; with `lora`, only adapters are trained. With `optimizer` it continues with the optimizer's
    state and the adapters of `policy`. `version` is `policy`'s plus the number of steps since; `saved` is the version
    that was last opened or saved. Raises UserError if `policy` is no checkpoint, or lacks that state."""

    def __init__(
        self,
        policy: Artifact,
        ranks: "Ranks",
        lora: Lora | None = None,
        *,
        seed: int = 0,
        optimizer: bool = False,
    ) -> None:
        self.ranks = ranks
        self.seed = seed
        self.gradients = False
        self.spoiled = False
        checkpoint.model_dir(policy)
        self.lora = _adapters(policy) if optimizer else lora
        self._open(policy, optimizer)

    def forward_backward(
        self, data: Sequence[Datum], name: str, config: dict[str, float], forward_only: bool = False
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Add the gradient of a loss to those since the last step; return each datum's log-probabilities of its target
        tokens, float32 ``[positions]``, and ``loss:sum``. Raises UserError, with nothing added, if the data does not
        fit the loss. After any other error part of it may have been added, and the next `optim_step` is refused."""
        import torch

        if not data:
            raise UserError("data", [], "is empty; send at least one datum")
        options = check_options(name, config)
        documents = [_document(datum, INPUTS[name], self.trainer) for datum in data]
        by_datum: dict[int, np.ndarray] = {}
        total = 0.0
        before = self.spoiled
        self.trainer.max_length = max(len(document.ids) for document in documents)
        with self.trainer.frozen() if forward_only else nullcontext():
            for micro in self.trainer.plan([len(d.ids) for d in documents], MICRO_BATCH):
                logprobs, _ = self.trainer.logprobs([documents[i] for i in micro])
                columns = {
                    each: np.concatenate([data[i].inputs[each] for i in micro])
                    for each in INPUTS[name]
                }
                inputs = {
                    k: torch.from_numpy(v.astype("f4")).to(logprobs.device)
                    for k, v in columns.items()
                }
                loss = compute_loss(name, logprobs, inputs, options).sum()
                if not forward_only:
                    self.spoiled = self.gradients = True  # spoiled until the gradient is complete
                    loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
                parts = logprobs.detach().cpu().split([len(data[i].tokens) for i in micro])
                by_datum |= {i: part.numpy() for i, part in zip(micro, parts)}
        self.spoiled = before
        return [by_datum[i] for i in range(len(data))], {"loss:sum": total}

    def optim_step(self, adam: AdamParams) -> dict[str, float]:
        """Take one step with the gradients since the last one. Raises UserError if there are none, or they are not
        finite or incomplete, and drops them. Any other error drops `trainer`, as its weights may be half updated."""
        if not self.gradients:
            raise UserError(
                "optim_step", self.version, "there is no gradient; call forward_backward first"
            )
        trainer = self.trainer
        step = self.trainer.step
        if self.spoiled:
            trainer.optimizer.zero_grad()
            self.spoiled = self.gradients = False
            remedy = "a forward_backward since the last step failed: all gradients are dropped; send them again"
            raise UserError("optim_step", self.version, remedy)
        trainer.optimization = _optimization(adam)
        for group in trainer.optimizer.param_groups:
            group.update(
                betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
            )
        self.gradients = False
        try:
            norm, _ = trainer.update()
        except ArithmeticError as error:
            trainer.step = step
            trainer.optimizer.zero_grad()
            raise UserError("optim_step", self.version, f"no step was taken: {error}") from error
        except BaseException:
            del self.trainer
            raise
        self.version += 1
        return {"grad_norm:mean": norm, "weight_version:max": float(self.version)}

    def snapshot(self) -> Snapshot:
        """Copy the current weights to the host's memory."""
        state = {
            name: value.detach().to("cpu", copy=True)
            for name, value in self.trainer.whole_state().items()
        }
        return Snapshot(self.trainer.base, self.version, state)

    def save(self, url: str, *, with_state: bool = True, **facts: Any) -> Artifact:
        """Commit a checkpoint from which `load` continues bit for bit; without its state, the weights to sample from.
        Raises UserError if no step has used the gradients, which the state does not include, or if `url` is taken."""
        if self.gradients and with_state:
            raise UserError(
                "save_state",
                self.version,
                "has gradients that no step has used; call optim_step first",
            )
        began = time.time()
        clock = time.perf_counter()
        base = self.trainer.base
        draft = Draft(url)
        stage = Stage(STAGE, Params(), draft.path, draft.url, draft.attempt)
        stage.facts.update(facts)
        stage.notes.update(device=self.ranks.device.type)
        try:
            dtype = CheckpointFacts.read(base).save_dtype or "float32"
            checkpoint.write_checkpoint(
                stage, self.trainer, base, dtype, self.version, "files" if with_state else "none"
            )
        except BaseException:
            delete_draft(draft.path)
            raise
        stage.timings["total"] = time.perf_counter() - clock
        provenance = collect_provenance(began, self.ranks.world)
        record = {
            "facts": stage.facts,
            "notes": stage.notes,
            "timings": stage.timings,
            "provenance": provenance,
        }
        manifest = draft.commit(stage=STAGE, inputs={"policy": base.ref}, **record)
        if manifest.root != draft.attempt:
            raise UserError("save_state", url, "is taken; choose another name")
        if with_state:
            self.saved = self.version
        return Artifact(url)

    def load(self, policy: Artifact, optimizer: bool) -> None:
        """Continue from a checkpoint, or only with its weights. Raises UserError, changing nothing, if it is not one,
        lacks optimizer state, or has other adapters. After any other error `trainer` may be lost."""
        checkpoint.model_dir(policy)
        if optimizer and _adapters(policy) != self.lora:
            raise UserError(
                "load_state",
                policy.url,
                "was trained with other adapters; create a model from it instead",
            )
        self._open(policy, optimizer)

    def _open(self, policy: Artifact, optimizer: bool) -> None:
        import torch

        from tuneloop.training.fsdp.trainer import Trainer

        state = checkpoint.trainer_state(policy)
        written = checkpoint.find_state(policy) if optimizer else None
        if optimizer and written is None:
            raise UserError(
                "load_state", policy.url, "has no optimizer state; load its weights alone"
            )
        base = checkpoint.lora_base(policy) if optimizer and self.lora else policy
        directory = checkpoint.model_dir(base)
        saved = written.part("trainer") if written else None
        version = VersionFacts.read(policy).version
        self.__dict__.pop(
            "trainer", None
        )  # two may not fit into memory; the checkpoint was checked before
        torch.manual_seed(self.seed)
        trainer = Trainer(directory, self.ranks, _optimization(AdamParams()), lora=self.lora)
        trainer.base = base
        checkpoint.load_masters(trainer, base)
        if saved and state is not None:
            trainer.load(saved, state.step)
        self.trainer: Trainer = trainer
        self.version = version
        self.saved = version
        self.gradients = False
        self.spoiled = False


class Sampler:
    """Samples from snapshots; one is loaded at a time, and replaced when another is requested."""

    def __init__(self) -> None:
        self.engine = Transformers()
        self._ready: Snapshot | None = None

    def sample(
        self, snapshot: Snapshot, requests: Sequence[Request], sampling: Sampling
    ) -> list[list[Completion]]:
        """Sample each request's completions. Raises UserError if a prompt is empty, too long, or of unknown ids."""
        import torch

        self._change(snapshot)
        deterministic = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(
            False
        )  # a trainer enables them; CUDA has none for sums over the vocabulary
        try:
            return self.engine.generate(requests, sampling, lambda _: None)
        finally:
            torch.use_deterministic_algorithms(deterministic)

    def score(self, snapshot: Snapshot, ids: Sequence[int]) -> list[float]:
        """Compute the log-probability at temperature 1 of each id but the first."""
        self._change(snapshot)
        return self.engine.score(ids)

    def drop(self) -> None:
        """Release the model's memory until the next request."""
        self._ready = None
        self.engine.close()

    def _change(self, snapshot: Snapshot) -> None:
        from tuneloop.training.fsdp.policy import open_model

        if self._ready is snapshot:
            return
        before = self._ready
        self._ready = None
        if snapshot.state is None:
            self.engine.load(snapshot.base)
        else:
            import torch

            model = self.engine.__dict__.get("model")
            if model is None or before is None or before.base.ref != snapshot.base.ref:
                model = open_model(checkpoint.model_dir(snapshot.base), torch.float32, "auto")
            model.load_state_dict(snapshot.state)
            self.engine.serve(model, snapshot.version, "")
        self._ready = snapshot


def check_options(name: str, config: Mapping[str, float]) -> dict[str, float]:
    """Check the options of the loss `name`, and return them with defaults. Raises UserError at one that is unknown."""
    if name not in INPUTS:
        raise UserError("loss_fn", name, f"unknown; known: {', '.join(INPUTS)}")
    known = THRESHOLDS.get(name, {})
    for option in config.keys() - known.keys():
        raise UserError(
            f"loss_fn_config.{option}",
            config[option],
            f"{name} has {', '.join(known) or 'no options'}",
        )
    return {**known, **config}


def compute_loss(
    name: str, logprobs: "Tensor", inputs: Mapping[str, "Tensor"], config: Mapping[str, float]
) -> "Tensor":
    """Compute Tinker's loss of each target token (tinker-docs.thinkingmachines.ai/losses) from `logprobs` and `inputs`,
    all float32 ``[targets]``. Given ``r = exp(logprobs - sampled logprobs)`` and A the advantages, it is for
    cross_entropy ``-w logprobs``; importance_sampling ``-r A``; ppo ``-min(r A, clip(r) A)``; cispo ``-clip(r) A
    logprobs``, where no gradient goes through the clipped ratio. `config` is what `check_options` returned."""
    if name == "cross_entropy":
        return -inputs["weights"] * logprobs
    ratio = (logprobs - inputs["logprobs"]).exp()
    advantages = inputs["advantages"]
    if name == "importance_sampling":
        return -ratio * advantages
    low = config["clip_low_threshold"]
    high = config["clip_high_threshold"]
    if name == "ppo":
        return -clip_surrogate(ratio, advantages, 1 - low, high - 1, None)[0]
    return -ratio.detach().clamp(low, high) * advantages * logprobs


def _document(datum: Datum, needed: Sequence[str], policy: "Policy") -> Document:
    """Return `datum` for the trainer: a token without effect is appended, so that each position predicts one."""
    length = len(datum.tokens)
    if not 0 < length <= policy.context:
        raise UserError(
            "model_input", f"{length} tokens", f"must be 1 to {policy.context}, the model's context"
        )
    for name in ("target_tokens", *needed):
        if name not in datum.inputs:
            raise UserError(
                f"loss_fn_inputs.{name}", None, f"is required, one for each of {length} tokens"
            )
    for name, values in datum.inputs.items():
        if name not in ("target_tokens", *needed):
            raise UserError(
                f"loss_fn_inputs.{name}",
                list(values.shape),
                "this loss does not use it; leave it out",
            )
        if values.shape != (length,):
            raise UserError(
                f"loss_fn_inputs.{name}",
                list(values.shape),
                f"must be [{length}], one for each token",
            )
    targets = datum.inputs["target_tokens"].tolist()
    for name, ids in (("model_input", datum.tokens), ("loss_fn_inputs.target_tokens", targets)):
        for token in (min(ids), max(ids)):
            if not 0 <= token < policy.vocab_size:
                raise UserError(
                    name, token, f"is not a token of this model, which has {policy.vocab_size}"
                )
    return Document([*datum.tokens, 0], [False] + [True] * length, [0, *map(int, targets)])


def _adapters(policy: Artifact) -> Lora | None:
    state = checkpoint.trainer_state(policy)
    return Lora.model_validate(state.lora) if state and state.lora else None


def _optimization(adam: AdamParams) -> Optimization:
    about = {"weight_decay": adam.weight_decay, "adam_beta1": adam.beta1, "adam_beta2": adam.beta2}
    return Optimization(
        adam.learning_rate, "constant", 0, 0, max_grad_norm=adam.grad_clip_norm, **about
    )
