"""The stages of `sft_then_grpo` with a model of torch, one after another in one process, each as a pod starts it.

As `tests.certify.sequence`, but all of it is the real thing, made small: data, SFT with resume points, evaluations,
rollouts by the deterministic engine, rewards in processes of their own, policy updates with trainer states, and weight
versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tests.certify.sequence import Step
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.evaluate import evaluate
from tuneloop.stages.export import export
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.reward import reward
from tuneloop.stages.rollout import rollout
from tuneloop.stages.sft import sft

SIZES = {"source_args": {"digits": 2}, "train": 16, "eval": 4, "sft": 32}
TRAINING = {
    "max_steps": 6,
    "save_steps": 2,
    "per_device_train_batch_size": 8,
    "max_length": 64,
    "learning_rate": 0.001,
}
SAMPLING = {"engine": "transformers", "max_tokens": 6}


def list_real_steps(url: str, refs: Mapping[str, str]) -> Iterator[Step]:
    """Yield the steps of a run at `url`; each is asked for when `refs` has the references of those before it."""
    weights = f"{url}/weights"
    yield "data-prep", data_prep, SIZES
    prompts = refs["data-prep"]
    yield "base-model", base_model, {"prompts": prompts, "weights": weights}
    yield (
        "sft",
        sft,
        {"policy": refs["base-model"], "prompts": prompts, "weights": weights, **TRAINING},
    )
    policy = reference = refs["sft"]
    yield "evaluate-before", evaluate, {"policy": policy, "prompts": prompts, **SAMPLING}
    for number in (1, 2):
        at = f"iterations/{number}"
        sampled = {"prompts_per_iteration": 4, "n": 4, "iteration": number, **SAMPLING}
        yield f"{at}/rollout", rollout, {"policy": policy, "prompts": prompts, **sampled}
        yield f"{at}/reward", reward, {"rollouts": refs[f"{at}/rollout"]}
        given = {"policy": policy, "rewards": refs[f"{at}/reward"], "reference": reference}
        yield (
            f"{at}/policy-update",
            policy_update,
            {**given, "iteration": number, "weights": weights},
        )
        policy = refs[f"{at}/policy-update"]
    yield (
        "evaluate-after",
        evaluate,
        {"policy": policy, "prompts": prompts, "iteration": 2, **SAMPLING},
    )
    yield "export", export, {"policy": policy}
