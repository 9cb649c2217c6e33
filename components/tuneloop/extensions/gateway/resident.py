"""A policy and its optimizer that stay in memory between requests, and a sampler of snapshots.

`session.py` calls it on the thread that computes, never two methods at once. Checkpoints are those
of stages (`training/checkpoint.py`), so that a run can go on from one.

It builds the trainer of the stages by itself (`Resident._open`, `_read_optimization`), without
their options: a field that is added to `training/options.py: Optimization`, and an argument of
`training/fsdp/policy.py: Policy`, has to be given here, too. Its tests are in
`tests/extensions/gateway/test_session.py`.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import BaseModel, Field

from tuneloop.algorithms._terms import clip_surrogate
from tuneloop.core.artifacts import Artifact, Draft, delete_draft
from tuneloop.core.component import Params
from tuneloop.core.context import Stage
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.provenance import collect_provenance
from tuneloop.core.wording import format_count
from tuneloop.extensions.gateway.wire import Datum
from tuneloop.formats.facts import CheckpointFacts, VersionFacts
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.formats.token_files import Document
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
"""The most sequences in one forward pass (`Trainer.plan`)."""
POLICY_GRADIENT = ("logprobs", "advantages")
"""Inputs of a policy gradient: the sampler's log-probability of each token, and its advantage."""
INPUTS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": POLICY_GRADIENT,
    "ppo": POLICY_GRADIENT,
    "cispo": POLICY_GRADIENT,
}
"""Loss → the inputs that it needs for every position, in addition to ``target_tokens``.

These are the losses that are served. One that is added is computed in `compute_loss`, and has its
options in `THRESHOLDS`. They are Tinker's, and have nothing to do with `algorithms/`.
"""
THRESHOLDS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
}
"""Loss → its options with their defaults: bounds of the ratio. A loss without an entry has none."""


class AdamParams(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """AdamW's options of one step; names and defaults are Tinker's.

    An option that is added has no effect until `_read_optimization` or `Resident.optim_step`
    applies it.
    """

    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0, description="0: gradients are not clipped")


@dataclass(frozen=True)
class Snapshot:
    """The weights of one version, for sampling.

    Attributes:
        base: the checkpoint that has the configuration and the tokenizer.
        state: the model's, with adapters merged in; None: the weights are those of `base`.
    """

    base: Artifact
    version: int
    state: "dict[str, Tensor] | None" = None


class Resident:
    """A model in training.

    Attributes:
        version: the checkpoint's plus the number of steps since.
        saved: the version that was last opened or saved.
        gradients: whether there are gradients that no step has used.
        spoiled: whether these are incomplete, as the computation of some of them failed.
        lora: if not None, only adapters are trained.
        trainer: has the weights and the optimizer; missing once a change failed half-way.
    """

    def __init__(
        self,
        policy: Artifact,
        ranks: "Ranks",
        lora: Lora | None = None,
        *,
        seed: int = 0,
        optimizer: bool = False,
    ) -> None:
        """Open the checkpoint `policy`.

        Args:
            optimizer: continue with the optimizer's state and the adapters of `policy`, in place of
                new ones.

        Raises UserError if `policy` is no checkpoint, or lacks that state.
        """
        self.ranks = ranks
        self.seed = seed
        self.gradients = False
        self.spoiled = False
        checkpoint.model_dir(policy)
        self.lora = _adapters(policy) if optimizer else lora
        self._open(policy, optimizer)

    def forward_backward(
        self,
        data: Sequence[Datum],
        name: str,
        config: dict[str, float],
        forward_only: bool = False,
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Add the gradient of a loss to those since the last step.

        Args:
            name, config: of the loss (`compute_loss`), and its options.
            forward_only: compute the loss without its gradient.

        Returns:
            Each datum's log-probabilities of its target tokens, float32 ``[positions]``, and
            ``loss:sum``.

        Raises UserError, with nothing added, if the data does not fit the loss. After any other
        error part of it may have been added, and the next `optim_step` is refused: also if the loss
        is not finite, as with weights that a large learning rate made infinite.
        """
        if not data:
            raise UserError("data", [], "is empty; send at least one datum")
        options = check_options(name, config)
        documents = [_document(datum, INPUTS[name], self.trainer) for datum in data]
        logprobs_by_datum: dict[int, np.ndarray] = {}
        total = 0.0
        was_spoiled = self.spoiled
        lengths = [len(document.ids) for document in documents]
        self.trainer.max_length = max(lengths)
        with self.trainer.frozen() if forward_only else nullcontext():
            for indices in self.trainer.plan(lengths, MICRO_BATCH):
                logprobs, _ = self.trainer.logprobs([documents[index] for index in indices])
                batch = [data[index] for index in indices]
                inputs = _concatenate(batch, INPUTS[name], logprobs)
                loss = compute_loss(name, logprobs, inputs, options).sum()
                # JSON has no number for it, and its gradient would only be refused by the next step.
                if not (loss.isfinite() and logprobs.isfinite().all()):
                    problem = (
                        f"the loss or a log-probability of version {self.version} is not finite"
                    )
                    remedy = "check the data's weights, and load weights from before they grew"
                    raise UserError("loss", float(loss.detach()), f"{problem}: {remedy}")
                if not forward_only:
                    # Spoiled until the gradients of all data have been added.
                    self.spoiled = True
                    self.gradients = True
                    loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
                parts = logprobs.detach().cpu().split([len(datum.tokens) for datum in batch])
                for index, part in zip(indices, parts):
                    logprobs_by_datum[index] = part.numpy()
        self.spoiled = was_spoiled
        return [logprobs_by_datum[index] for index in range(len(data))], {"loss:sum": total}

    def optim_step(self, adam: AdamParams) -> dict[str, float]:
        """Take one step with the gradients since the last one.

        Raises UserError if there are none, or they are not finite or incomplete, and drops them.
        Any other error drops `trainer`, as its weights may be half updated.
        """
        if not self.gradients:
            remedy = "there is no gradient; call forward_backward first"
            raise UserError("optim_step", self.version, remedy)
        trainer = self.trainer
        step = trainer.step
        self.gradients = False
        if self.spoiled:
            trainer.optimizer.zero_grad()
            self.spoiled = False
            problem = "a forward_backward since the last step failed"
            remedy = "all gradients are dropped; send them again"
            raise UserError("optim_step", self.version, f"{problem}: {remedy}")
        # Tinker's client sends the options with every step, as it schedules the learning rate.
        trainer.optimization = _read_optimization(adam)
        for group in trainer.optimizer.param_groups:
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay
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
        state: dict[str, Tensor] = {}
        for name, value in self.trainer.whole_state().items():
            # On a CPU it would share the memory that the next step changes.
            state[name] = value.detach().to("cpu", copy=True)
        return Snapshot(self.trainer.base, self.version, state)

    def save(self, url: str, facts: JsonMapping, *, with_state: bool = True) -> Artifact:
        """Commit a checkpoint.

        Args:
            facts: of its manifest, besides those of every checkpoint.
            with_state: with the optimizer's state, from which `load` continues bit for bit; else it
                has only the weights to sample from.

        Raises UserError if no step has used the gradients, which the state does not include, or if
        `url` is taken.
        """
        if self.gradients and with_state:
            remedy = "has gradients that no step has used; call optim_step first"
            raise UserError("save_state", self.version, remedy)
        started = time.time()
        clock = time.perf_counter()
        base = self.trainer.base
        draft = Draft(url)
        stage = Stage(STAGE, Params(), draft.path, draft.url, draft.attempt)
        stage.facts.update(facts)
        stage.notes["device"] = self.ranks.device.type
        dtype = CheckpointFacts.read(base).save_dtype or "float32"
        state: Literal["files", "none"] = "files" if with_state else "none"
        try:
            checkpoint.write_checkpoint(stage, self.trainer, base, dtype, self.version, state)
        except BaseException:
            delete_draft(draft.path)
            raise
        stage.timings["total"] = time.perf_counter() - clock
        manifest = draft.commit(
            stage=STAGE,
            inputs={"policy": base.ref},
            facts=stage.facts,
            notes=stage.notes,
            timings=stage.timings,
            provenance=collect_provenance(started, self.ranks.world),
        )
        # The manifest of another checkpoint was there first.
        if manifest.root != draft.attempt:
            raise UserError("save_state", url, "is taken; choose another name")
        if with_state:
            self.saved = self.version
        return Artifact(url)

    def load(self, policy: Artifact, optimizer: bool) -> None:
        """Continue from a checkpoint, or only with its weights.

        Raises UserError, changing nothing, if it is not one, lacks optimizer state, or has other
        adapters. After any other error `trainer` may be lost.
        """
        checkpoint.model_dir(policy)
        if optimizer and _adapters(policy) != self.lora:
            remedy = "was trained with other adapters; create a model from it instead"
            raise UserError("load_state", policy.url, remedy)
        self._open(policy, optimizer)

    def _open(self, policy: Artifact, optimizer: bool) -> None:
        import torch

        from tuneloop.training.fsdp.trainer import Trainer

        state = checkpoint.trainer_state(policy)
        state_artifact = checkpoint.find_state(policy) if optimizer else None
        if optimizer and state_artifact is None:
            remedy = "has no optimizer state; load its weights alone"
            raise UserError("load_state", policy.url, remedy)
        base = checkpoint.lora_base(policy) if optimizer and self.lora else policy
        directory = checkpoint.model_dir(base)
        state_directory = state_artifact.part("trainer") if state_artifact else None
        version = VersionFacts.read(policy).version
        # Two trainers may not fit into memory. All of the checkpoint was verified before.
        self.__dict__.pop("trainer", None)
        torch.manual_seed(self.seed)
        trainer = Trainer(directory, self.ranks, _read_optimization(AdamParams()), lora=self.lora)
        trainer.base = base
        checkpoint.load_masters(trainer, base)
        if state_directory and state is not None:
            trainer.load(state_directory, state.step)
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
        self,
        snapshot: Snapshot,
        requests: Sequence[Request],
        sampling: Sampling,
    ) -> list[list[Completion]]:
        """Sample each request's completions.

        Raises UserError if a prompt is empty, too long, or of unknown ids.
        """
        import torch

        self._change(snapshot)
        # A trainer enables them, and CUDA has none for sums over the vocabulary.
        deterministic = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
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
        from tuneloop.training.fsdp.loading import open_model

        if self._ready is snapshot:
            return
        previous = self._ready
        self._ready = None
        if snapshot.state is None:
            self.engine.load(snapshot.base)
        else:
            import torch

            model = self.engine.__dict__.get("model")
            # Snapshots of one model differ in their weights alone.
            if model is None or previous is None or previous.base.ref != snapshot.base.ref:
                model = open_model(checkpoint.model_dir(snapshot.base), torch.float32, "auto")
            model.load_state_dict(snapshot.state)
            self.engine.serve(model, snapshot.version, "")
        self._ready = snapshot


def check_options(name: str, config: Mapping[str, float]) -> dict[str, float]:
    """Check the options of the loss `name`, and return them with defaults.

    Raises UserError at one that is unknown.
    """
    if name not in INPUTS:
        raise UserError("loss_fn", name, f"unknown; known: {', '.join(INPUTS)}")
    options = dict(THRESHOLDS.get(name, {}))
    for option, value in config.items():
        if option not in options:
            remedy = f"{name} has {', '.join(options) or 'no options'}"
            raise UserError(f"loss_fn_config.{option}", value, remedy)
    options.update(config)
    return options


def compute_loss(
    name: str,
    logprobs: "Tensor",
    inputs: Mapping[str, "Tensor"],
    config: Mapping[str, float],
) -> "Tensor":
    """Compute Tinker's loss of each target token (tinker-docs.thinkingmachines.ai/losses).

    With ``r = exp(logprobs - sampled logprobs)`` and A the advantages, it is for cross_entropy ``-w
    logprobs``; importance_sampling ``-r A``; ppo ``-min(r A, clip(r) A)``; cispo ``-clip(r) A
    logprobs``, where no gradient goes through the clipped ratio.

    Args:
        logprobs: of the target tokens, float32 ``[targets]``.
        inputs: the loss's `INPUTS`, each float32 ``[targets]``.
        config: what `check_options` returned.
    """
    if name == "cross_entropy":
        return -inputs["weights"] * logprobs
    ratio = (logprobs - inputs["logprobs"]).exp()
    advantages = inputs["advantages"]
    if name == "importance_sampling":
        return -ratio * advantages
    # Tinker's bounds are those of the ratio; the surrogate's are distances from 1.
    low = config["clip_low_threshold"]
    high = config["clip_high_threshold"]
    if name == "ppo":
        return -clip_surrogate(ratio, advantages, 1 - low, high - 1, None)[0]
    return -ratio.detach().clamp(low, high) * advantages * logprobs


def _concatenate(
    batch: Sequence[Datum],
    names: Sequence[str],
    logprobs: "Tensor",
) -> dict[str, "Tensor"]:
    """Join the inputs of several data, each to a float32 tensor on the device of `logprobs`."""
    import torch

    inputs: dict[str, Tensor] = {}
    for name in names:
        values = np.concatenate([datum.inputs[name] for datum in batch])
        inputs[name] = torch.from_numpy(values.astype("f4")).to(logprobs.device)
    return inputs


def _document(datum: Datum, names: Sequence[str], policy: "Policy") -> Document:
    """Return `datum` for the trainer: a token without effect is appended, so that each position
    predicts one.

    Args:
        names: of the inputs that the loss needs besides the targets.

    Raises UserError if the datum does not fit the loss or the model.
    """
    length = len(datum.tokens)
    if not 0 < length <= policy.context:
        remedy = f"must be 1 to {policy.context}, the model's context"
        raise UserError("model_input", format_count(length, "token"), remedy)
    required = ("target_tokens", *names)
    for name in required:
        if name not in datum.inputs:
            remedy = f"is required, one for each of {format_count(length, 'token')}"
            raise UserError(f"loss_fn_inputs.{name}", None, remedy)
    for name, values in datum.inputs.items():
        shape = list(values.shape)
        if name not in required:
            remedy = "this loss does not use it; leave it out"
            raise UserError(f"loss_fn_inputs.{name}", shape, remedy)
        if shape != [length]:
            remedy = f"must be [{length}], one for each token"
            raise UserError(f"loss_fn_inputs.{name}", shape, remedy)
    # A client may send them as float32; what is no number is refused as no token.
    targets = datum.inputs["target_tokens"].tolist()
    _check_tokens("model_input", datum.tokens, policy.vocab_size)
    _check_tokens("loss_fn_inputs.target_tokens", targets, policy.vocab_size)
    # The trainer predicts each token from those before it, and computes no loss of the first.
    labels = [0]
    labels += map(int, targets)
    return Document(datum.tokens + labels[:1], [False] + [True] * length, labels)


def _check_tokens(field: str, ids: Sequence[float], vocabulary: int) -> None:
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocabulary:
            remedy = f"is not a token of this model, which has {vocabulary}"
            raise UserError(field, token, remedy)


def _adapters(policy: Artifact) -> Lora | None:
    state = checkpoint.trainer_state(policy)
    return Lora.model_validate(state.lora) if state and state.lora else None


def _read_optimization(adam: AdamParams) -> Optimization:
    return Optimization(
        adam.learning_rate,
        "constant",
        0,
        0,
        max_grad_norm=adam.grad_clip_norm,
        weight_decay=adam.weight_decay,
        adam_beta1=adam.beta1,
        adam_beta2=adam.beta2,
    )
