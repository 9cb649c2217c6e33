"""The proof that an engine serves a checkpoint, before a completion of it counts (docs/weights.md).

1. The engine's own word, its version and digest, has to be the checkpoint's.
2. Our own engines compare their tensors with the checkpoint's files. That tells versions apart at
   any learning rate. An endpoint of another make cannot be asked for this.
3. The log-probabilities of the checkpoint's canary (`tuneloop.formats.canary`) have to be as near
   to the trainer's as right weights are. They show what tensors cannot: another tokenizer, another
   architecture, quantization.

A stage proves before it samples (`inference/generate.py`), and a client again whenever a server was
lost. The gateway proves its sampler by it (`extensions/gateway/sampler.py`), and
`extensions/evaluation/evaluate_lm_eval.py` a server by the canary alone. The results stand in the facts ``canary``
and ``proof`` of rollouts and evaluations. The tests are `tests/unit/training/test_checkpoint.py`
and `tests/local/test_proof.py`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.formats.canary import (
    FILE,
    LENGTH,
    SEPARATED,
    Canary,
    read_canary_file,
    tell_versions_apart,
)
from tuneloop.formats.facts import VersionFacts
from tuneloop.inference.engines import Engine, Readable, TensorProof
from tuneloop.inference.engines._tensors import digest_model

WIDE = 0.25
"""In nats: the tolerance is at least this where all tensors are right and the engine's dtype is
coarser than the checkpoint's (`choose_tolerance`). Another tokenizer or architecture moves the
canary by more, rounding by less.
"""


class StaleWeights(RuntimeError):
    """The engine does not serve the weights that it should, also after loading them once more."""


class WrongWeights(Exception):
    """One attempt to prove the weights failed, for the reason that the text says."""


@dataclass(frozen=True)
class Proof:
    """What was measured of an engine that serves the right weights.

    Attributes:
        distances: ``mean_abs_diff`` and ``max_abs_diff`` between engine and trainer on the canary,
            the `noise` of right weights and the `tolerance`, in nats; and the result of
            `tell_versions_apart` (`formats/canary.py`) where the canary has the log-probabilities
            of the version before. `stages/rollout.py: record_metrics` logs each as a metric of this
            name; the page's names of them are in ``ui/static/dom.js: QUANTITIES``.
        tensors: what reading back said, None of an engine that cannot do it.
    """

    distances: dict[str, float]
    tensors: TensorProof | None = None

    @property
    def is_by_tensors(self) -> bool:
        """Whether all tensors of the engine were found to be the checkpoint's."""
        return self.tensors is not None and self.tensors.is_whole

    @property
    def mean(self) -> float:
        return self.distances["mean_abs_diff"]

    @property
    def tells_versions_apart(self) -> bool:
        """Whether it is shown that the engine does not serve the version before.

        True if there is none, or if both have the same weights.
        """
        separation = self.distances.get("separation", 0.0)
        return self.is_by_tensors or separation == 0 or separation >= SEPARATED

    def describe(self, policy: Artifact) -> JsonObject:
        """Return what a manifest states of the proof that an engine served `policy`.

        `describe_blind_spot` and `stages/rollout.py: warn_of_blind_spot` read its keys.
        """
        statement: JsonObject = {
            "by": "log-probabilities",
            "tells_versions_apart": self.tells_versions_apart,
        }
        if "separation" in self.distances:
            statement["separation"] = self.distances["separation"]
            statement["separation_needed"] = SEPARATED
            statement["learning_rate"] = policy.manifest.params.get("learning_rate")
        if self.tensors is not None:
            statement["by"] = "tensors" if self.is_by_tensors else "tensors, in part"
            statement["digest"] = self.tensors.digest
            statement["dtype"] = self.tensors.dtype
            statement["tensors"] = self.tensors.tensors
            statement["identical"] = self.tensors.identical
        return statement


def prove_weights(engine: Engine, policy: Artifact, tolerance: float | None = None) -> Proof:
    """Prove that `engine` serves `policy`; one reload is tried.

    Args:
        engine: an engine that has loaded the policy.
        policy: a checkpoint.
        tolerance: of the mean difference on the canary, in nats; None: what follows from the noise.

    Raises:
        StaleWeights: the engine serves other weights, also after the reload.
    """
    try:
        return compare_weights(engine, policy, tolerance)
    except WrongWeights:
        # Another client of the server may have changed its weights since they were loaded.
        engine.load(policy, force=True)
    try:
        return compare_weights(engine, policy, tolerance)
    except WrongWeights as error:
        raise StaleWeights(
            f"{error}, also after loading it once more; restart the engine, and if it stays so, "
            "compare its dtype, quantization and tokenizer with the policy's, or raise "
            "canary_tolerance"
        ) from error


def compare_weights(engine: Engine, policy: Artifact, tolerance: float | None = None) -> Proof:
    """Compare what `engine` serves with `policy`, once. Raises WrongWeights where it differs."""
    version = VersionFacts.read(policy).version
    digest = policy.manifest.digest
    if (engine.version, engine.digest) != (version, digest):
        raise WrongWeights(
            f"engine {engine.name} serves version {engine.version} ({engine.digest}) "
            f"instead of {version} ({digest})"
        )
    tensors = compare_tensors(engine, policy)
    # Right tensors are not enough: an engine may tokenize, mask or quantize in another way.
    canary = read_canary(policy)
    # An engine with a short context scores the beginning: later tokens do not change it.
    room = engine.context - 1 if engine.context > 0 else LENGTH
    answers = engine.score(canary.ids[: max(room, 2)])
    if tolerance is None:
        tolerance = choose_tolerance(canary, tensors)
    proof = compare_with_canary(engine.name, version, answers, canary, tolerance)
    if not (tensors and tensors.is_whole):
        check_nearest_version(engine.name, version, proof)
    return replace(proof, tensors=tensors)


def choose_tolerance(canary: Canary, tensors: TensorProof | None) -> float:
    """Return the tolerance that follows from the noise, in nats.

    Args:
        canary: of the checkpoint.
        tensors: what reading back said, None of an engine that cannot do it.
    """
    if tensors is None or not tensors.is_whole:
        return canary.tolerance
    # The checkpoint states no noise of an engine that was told to serve a float16 model in
    # bfloat16. As its tensors are right, a wide tolerance is enough.
    is_coarser = tensors.dtype == "bfloat16" != canary.noise.dtype
    return max(WIDE, canary.tolerance) if is_coarser else canary.tolerance


def compare_tensors(engine: Engine, policy: Artifact) -> TensorProof | None:
    """Have the engine read back its tensors, if it can. Raises WrongWeights where they differ."""
    proof = engine.read_back(policy) if isinstance(engine, Readable) else None
    if proof is None:
        return None
    version = VersionFacts.read(policy).version
    expected = digest_policy(policy)
    if proof.digest != expected:
        raise WrongWeights(
            f"engine {engine.name} says it serves version {version}, but the weights that it "
            f"loaded have the digest {proof.digest} instead of {expected}: they are stale or wrong"
        )
    if proof.different:
        raise WrongWeights(
            f"engine {engine.name} says it serves version {version}, but {proof.different} of "
            f"{proof.tensors} tensors differ from the checkpoint's, {proof.example} among them: "
            "its weights are stale or wrong"
        )
    return proof


def digest_policy(policy: Artifact) -> str:
    """Return the digest of a checkpoint's tensors; it is computed once in a process."""
    # All replicas are compared with it, and it reads the whole model.
    return _digest_once(policy.manifest.digest, policy.part("model"))


@functools.lru_cache(maxsize=4)
def _digest_once(digest: str, model: Path) -> str:
    return digest_model(model)


def compare_with_canary(
    name: str,
    version: int,
    answers: Sequence[float],
    canary: Canary,
    tolerance: float | None = None,
) -> Proof:
    """Compare the log-probabilities of an engine with those of the trainer.

    Args:
        name: of the engine, for messages.
        version: which the engine says it serves.
        answers: its log-probabilities of the canary's tokens, or of the first ones.
        canary: of the checkpoint.
        tolerance: as of `prove_weights`.

    Raises:
        WrongWeights: they are too far away.
    """
    claim = f"engine {name} says it serves version {version}, but its log-probabilities"
    expected = canary.logprobs[: len(answers)]
    gaps = [abs(ours - theirs) for ours, theirs in zip(answers, expected, strict=True)]
    mean = sum(gaps) / len(gaps)
    limit = canary.tolerance if tolerance is None else tolerance
    noise = canary.noise
    # The negation also refuses NaN.
    if not mean <= limit:
        raise WrongWeights(
            f"{claim} of the checkpoint's test text (its canary) differ from the trainer's by "
            f"{mean:.4f} nats in the mean "
            f"(tolerance {limit:.4f}, noise of right weights in {noise.dtype} {noise.mean:.4f}): "
            "its weights are stale or wrong"
        )
    distances = {
        "mean_abs_diff": mean,
        "max_abs_diff": max(gaps),
        "tolerance": limit,
        "noise": noise.mean,
    }
    if canary.before is None:
        return Proof(distances)
    return Proof(distances | tell_versions_apart(answers, expected, canary.before[: len(answers)]))


def check_nearest_version(name: str, version: int, proof: Proof) -> None:
    """Check that the log-probabilities are nearer to this version's than to the last version's.

    Callers ask only where not all tensors were found equal: rounding is not the Gaussian noise that
    the ratio assumes, and could accuse right weights. Nothing is decided where the noise is too
    large to tell the versions apart.

    Raises:
        WrongWeights: they are nearer to those of the last version.
    """
    ratio = proof.distances.get("log_likelihood_ratio", 0.0)
    if proof.tells_versions_apart and ratio < 0:
        raise WrongWeights(
            f"engine {name} says it serves version {version}, but its log-probabilities of the "
            "checkpoint's test text (its canary) are those of the version before "
            f"(log-likelihood ratio {ratio:.1f})"
        )


def describe_blind_spot(policy: Artifact, statement: JsonMapping, engine: str) -> str:
    """Return a warning that the proof of a foreign endpoint cannot tell two versions apart.

    Args:
        policy: the checkpoint that was to be served.
        statement: that of `Proof.describe`.
        engine: its name.
    """
    version = VersionFacts.read(policy).version
    rate = statement["learning_rate"]
    separation = statement["separation"]
    at_rate = f" at the learning rate {rate:g}" if rate else ""
    # The distance of two versions grows with the learning rate.
    needed = f" (it would take about {rate * SEPARATED / separation:.0e})" if rate else ""
    return (
        f"warning: nothing proves that the engine {engine} serves version {version} and not "
        f"version {version - 1}, except its own word. Their log-probabilities are "
        f"{separation:.2g} standard deviations of its noise apart{at_rate}, {SEPARATED:g} are "
        f"needed{needed}, and its tensors cannot be read back. The engine vllm reads them back"
    )


def read_canary(policy: Artifact) -> Canary:
    """Read the canary of a checkpoint. Raises UserError where it does not have one."""
    remedy = "make it with base_model, sft or policy_update"
    file = policy.part(FILE, "--policy", remedy)
    try:
        return read_canary_file(file)
    except ValueError as error:
        problem = f"has a canary of another form; {remedy}"
        raise UserError("--policy", policy.url, problem) from error
