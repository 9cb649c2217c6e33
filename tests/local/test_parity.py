"""Losses and gradients beside TRL's own code, on one batch with prompts and completions of all lengths."""

import importlib
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.making import tiny_model
from tuneloop.algorithms._objective import Completions, Tokens
from tuneloop.algorithms._preference import Judged
from tuneloop.algorithms._terms import soft_overlong
from tuneloop.formats.token_files import Document, build_document
from tuneloop.stages.reward_model import bradley_terry
from tuneloop.training.fsdp.policy import Policy
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.pairs import Mismatched, sum_logprobs
from tuneloop.training.scorer import Scorer

pytestmark = [pytest.mark.local, pytest.mark.slow]
COMMON = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "disable_dropout": True,
}


class Case(NamedTuple):
    """A batch of eight completions, and what several models said of their tokens."""

    policy: Policy
    prompts: list[list[int]]
    completions: list[list[int]]
    old: torch.Tensor
    engine: torch.Tensor
    reference: torch.Tensor
    rewards: torch.Tensor
    groups: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        return torch.tensor([len(c) for c in self.completions])

    def logprobs(self) -> torch.Tensor:
        self.policy.model.zero_grad()
        documents = [
            Document(p + c, [False] * len(p) + [True] * len(c))
            for p, c in zip(self.prompts, self.completions)
        ]
        return self.policy.logprobs(documents)[0]

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """By completion, padded on the right."""
        return right(list(values.split(self.lengths.tolist())))


def right(values: list[Any]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(v) for v in values], True)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def case(request, tmp_path_factory) -> Case:
    """Ratios away from 1 so that some are clipped, and an engine that disagrees."""
    model = tiny_model(
        tmp_path_factory.mktemp("model") / request.param, request.param, dtype=torch.float32
    )
    rng = random.Random(0)
    prompts, completions = (
        [[rng.randrange(3, 41) for _ in range(rng.randint(1, most))] for _ in range(8)]
        for most in (9, 7)
    )
    made = Case(Policy(model, Ranks("cpu")), prompts, completions, *[torch.zeros(0)] * 5)
    now, noise = made.logprobs().detach(), torch.Generator().manual_seed(0)
    old, reference = (now + scale * torch.randn(len(now), generator=noise) for scale in (0.3, 0.2))
    engine = old + 0.5 * torch.randn(len(now), generator=noise)
    rewards, groups = torch.tensor([1.0, 0, 0, 0, 0.5, 1, 0, 1]), torch.tensor([0] * 4 + [1] * 4)
    return made._replace(
        old=old, engine=engine, reference=reference, rewards=rewards, groups=groups
    )


@pytest.fixture(scope="module")
def trainers(case, tmp_path_factory) -> dict[str, Any]:
    """TRL's trainers, in evaluation mode: the same gradient, and the normalizer of one whole batch."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    source = case.policy.model.config.name_or_path
    made = {}
    for name, trainer, config in (
        ("grpo", GRPOTrainer, GRPOConfig),
        ("rloo", RLOOTrainer, RLOOConfig),
    ):
        made[name] = trainer(
            model=AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config(
                output_dir=str(tmp_path_factory.mktemp("trl")),
                num_generations=4,
                per_device_train_batch_size=8,
                max_completion_length=12,
                temperature=1.0,
                beta=0.0,
                **COMMON,
            ),
            train_dataset=Dataset.from_list([{"prompt": "say 1 ="}] * 8),
            processing_class=AutoTokenizer.from_pretrained(source),
        )
        made[name].model.eval()
    made["grpo"].current_gradient_accumulation_steps = 1
    return made


def ours(
    case: Case, algorithm: Any, *, engine: bool
) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, advantages of completions, measures; gradients stay on the model."""
    kl = case.old - case.reference if algorithm.beta and algorithm.kl_in == "reward" else None
    valid = torch.ones(8, dtype=torch.bool)
    each = algorithm.advantages(
        Completions(case.rewards, case.groups, valid, case.lengths, case.lengths, kl)
    )
    sequence = torch.arange(8).repeat_interleave(case.lengths)
    tokens = Tokens(
        case.logprobs(),
        case.old,
        each,
        sequence,
        engine=case.engine if engine else None,
        reference=case.reference if algorithm.beta else None,
    )
    output = algorithm.loss(tokens)
    loss = (output.per_token * algorithm.token_weights(case.lengths)[sequence]).sum()
    loss.backward()
    return float(loss.detach()), case.rows(each)[:, 0], output.metrics


def assert_same(case: Case, loss: float, theirs: torch.Tensor, model: torch.nn.Module) -> None:
    model.zero_grad()
    theirs.backward()
    # Terms of size 1 that cancel: what float32 leaves depends on how many threads add them up.
    assert loss == pytest.approx(float(theirs.detach()), rel=2e-5, abs=3e-6)
    found = dict(case.policy.model.named_parameters())
    assert any(parameter.grad.abs().max() > 1e-3 for parameter in found.values())
    for name, parameter in model.named_parameters():
        scale = max(1.0, abs(loss))  # rounding grows with what is summed
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-4, atol=5e-6 * scale)


def trl_inputs(case: Case, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    width = max(map(len, case.prompts))
    return {
        "prompt_ids": torch.tensor([[0] * (width - len(p)) + p for p in case.prompts]),
        "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in case.prompts]),
        "completion_ids": right(case.completions),
        "completion_mask": right([[1] * len(c) for c in case.completions]),
        "advantages": advantages,
        "num_items_in_batch": case.lengths.sum().float(),
    }


PUBLISHED = {"loss_agg_mode": "seq-mean-token-mean"}
GRPO: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("grpo", {}, {"loss_type": "dapo"}),
    ("grpo", PUBLISHED, {"loss_type": "grpo"}),
    ("grpo", {**PUBLISHED, "beta": 0.2}, {"loss_type": "grpo"}),
    ("grpo", {**PUBLISHED, "delta": 1.5, "epsilon": 0.1}, {"loss_type": "grpo"}),
    ("grpo", {"off_policy_mask_threshold": 0.05}, {"loss_type": "bnpo"}),
    ("dr_grpo", {"max_completion_length": 12}, {"loss_type": "dr_grpo"}),
    ("dapo", {}, {"loss_type": "dapo"}),
    ("dapo", {"beta": 0.2, "use_bias_correction_kl": False}, {"loss_type": "dapo"}),
    ("dapo", {"beta": 0.2}, {"loss_type": "dapo"}),
    ("gspo", {"epsilon": 0.1, "epsilon_high": 0.15}, {"loss_type": "grpo"}),
    ("gspo", {"beta": 0.2}, {"loss_type": "grpo"}),
    ("cispo", {"epsilon_high": 1.2}, {"loss_type": "cispo"}),
]


@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", None]
)
@pytest.mark.parametrize(("name", "options", "theirs"), GRPO, ids=lambda v: str(v))
def test_policy_gradients_equal_trl(case, trainers, name, options, theirs, mode):
    bounds = {"vllm_importance_sampling_clip_min": 0.3, "vllm_importance_sampling_clip_max": 2.0}
    correction = {} if mode is None else {"vllm_importance_sampling_mode": mode, **bounds}
    algorithm = importlib.import_module(f"tuneloop.algorithms.{name}").Algorithm(
        **options, **correction
    )
    loss, advantages, measures = ours(case, algorithm, engine=mode is not None)
    if mode is None:
        assert 0 < float(measures["clip_fraction"].mean()) < 1
    trainer = trainers["grpo"]
    trainer.loss_type, trainer.beta = theirs["loss_type"], algorithm.beta
    trainer.importance_sampling_level = algorithm.importance_sampling_level
    trainer.epsilon_low, trainer.epsilon_high = (
        algorithm.epsilon,
        algorithm.epsilon_high or algorithm.epsilon,
    )
    trainer.args.delta, trainer.args.use_bias_correction_kl = (
        algorithm.delta,
        algorithm.use_bias_correction_kl,
    )
    trainer.off_policy_mask_threshold = algorithm.off_policy_mask_threshold
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = mode is not None
    inputs = trl_inputs(case, advantages) | {
        "old_per_token_logps": case.rows(case.old),
        "ref_per_token_logps": case.rows(case.reference),
    }
    if (
        mode is not None
    ):  # as in GRPOTrainer._generate_and_score_completions, which needs an engine to run
        inputs["sampling_per_token_logps"] = case.rows(case.engine)
        gap = case.rows(case.old - case.engine)
        ratio = (gap.sum(-1, keepdim=True) if mode.startswith("sequence") else gap).exp()
        outside = (ratio < 0.3) | (ratio > 2.0)
        bounded = (
            ratio.clamp(0.3, 2.0) if mode.endswith("truncate") else ratio.masked_fill(outside, 0.0)
        )
        inputs["importance_sampling_ratio"] = bounded
    assert_same(case, loss, trainer._compute_loss(trainer.model, inputs), trainer.model)


@pytest.mark.parametrize(
    "options", [{}, {"beta": 0.05}, {"normalize_advantages": True, "epsilon_high": 0.4}]
)
def test_rloo_equals_trl(case, trainers, options):
    algorithm = importlib.import_module("tuneloop.algorithms.rloo").Algorithm(**options)
    loss, advantages, _ = ours(case, algorithm, engine=False)
    sums = case.rows(case.old - case.reference).sum(-1)
    rewards = (case.rewards - algorithm.beta * sums).view(
        2, 4
    )  # as RLOOTrainer._generate_and_score_completions
    wanted = (rewards - (rewards.sum(1, keepdim=True) - rewards) / 3).flatten()
    if algorithm.normalize_advantages:
        wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-4)
    torch.testing.assert_close(advantages, wanted)
    trainer = trainers["rloo"]
    trainer.epsilon_low, trainer.epsilon_high = (
        algorithm.epsilon,
        algorithm.epsilon_high or algorithm.epsilon,
    )
    inputs = trl_inputs(case, advantages) | {"old_logps": case.rows(case.old).sum(-1)}
    assert_same(case, loss, trainer._compute_loss(trainer.model, inputs), trainer.model)


def test_the_overlong_punishment_equals_trl_at_its_borders():
    from trl.rewards import get_soft_overlong_punishment

    lengths = list(range(14))
    theirs = get_soft_overlong_punishment(max_completion_len=11, soft_punish_cache=4)(
        [[0] * n for n in lengths]
    )
    assert soft_overlong(torch.tensor(lengths), 11, 4).tolist() == pytest.approx(theirs)


@pytest.fixture(scope="module")
def documents(case) -> list[Document]:
    """Four pairs of the case's completions, each the chosen one first."""
    sides = zip(case.prompts, case.completions[0::2], case.completions[1::2])
    return [build_document(prompt, said) for prompt, *both in sides for said in both]


def trl_trainer(kind: str, case: Case, work: Path, **options: Any) -> Any:
    import trl
    from transformers import AutoModelForSequenceClassification

    source = case.policy.model.config.name_or_path
    reward = kind == "Reward"
    model = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    about = {"num_labels": 1} if reward else {}
    shown = [{"prompt": "say 1 =", "chosen": " 1", "rejected": " 2"}] * 2
    if kind == "KTO":
        shown = [
            {"prompt": "say 1 =", "completion": f" {i}", "label": i % 2 == 0} for i in range(4)
        ]
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model.from_pretrained(source, dtype=torch.float32, **about),
        args=getattr(trl, f"{kind}Config")(
            output_dir=str(work), per_device_train_batch_size=2, max_length=32, **COMMON, **options
        ),
        train_dataset=Dataset.from_list(shown),
        processing_class=AutoTokenizer.from_pretrained(source),
    )
    trainer.model.eval()
    return trainer


def by_row(documents: list[Document]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": right([d.ids for d in documents]),
        "attention_mask": right([[1] * len(d.ids) for d in documents]),
        "completion_mask": right([[int(t) for t in d.targets] for d in documents]),
    }


def sides(documents: list[Document]) -> list[Document]:
    """All chosen ones, then all rejected ones: TRL's order."""
    return documents[0::2] + documents[1::2]


@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("dpo", {"beta": 0.3}, "sigmoid"),
        ("ipo", {"beta": 0.1}, "ipo"),
        ("kto", {"undesirable_weight": 0.7}, "kto"),
    ],
)
def test_preferences_equal_trl(case, documents, tmp_path, name, options, theirs):
    algorithm = importlib.import_module(f"tuneloop.algorithms.{name}").Algorithm(**options)
    others = [*Mismatched(documents, 64)]
    lengths = torch.tensor([document.target_count for document in documents])
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        known, known_others = (
            sum_logprobs(case.policy, d) - torch.rand(len(d), generator=noise)
            for d in (documents, others)
        )
        kl = (sum_logprobs(case.policy, others) - known_others).mean().clamp(min=0)
    assert kl > 0.1
    case.policy.model.zero_grad()
    judged = Judged(
        sum_logprobs(case.policy, documents) - known,
        lengths,
        kl if algorithm.needs_kl else torch.tensor(0.0),
    )
    loss = algorithm.loss(judged).mean()
    loss.backward()
    reference = (known[0::2], known[1::2])
    if name == "kto":
        trainer = trl_trainer("KTO", case, tmp_path, beta=algorithm.beta, undesirable_weight=0.7)
        trainer.precompute_ref_logps = True
        inputs = by_row(documents) | {f"KL_{key}": value for key, value in by_row(others).items()}
        inputs |= {
            "label": torch.arange(8) % 2 == 0,
            "ref_logps": known,
            "ref_KL_logps": known_others,
        }
    else:
        trainer = trl_trainer("DPO", case, tmp_path, beta=algorithm.beta, loss_type=[theirs])
        trainer.precompute_ref_logps = True
        inputs = by_row(sides(documents))
        inputs |= {"ref_chosen_logps": reference[0], "ref_rejected_logps": reference[1]}
    assert_same(
        case,
        float(loss.detach()),
        trainer._compute_loss(trainer.model, inputs, False),
        trainer.model,
    )


def test_reward_model_equals_trl(case, documents, tmp_path):
    trainer = trl_trainer("Reward", case, tmp_path, center_rewards_coefficient=0.1)
    scorer = Scorer(
        Path(case.policy.model.config.name_or_path), Ranks("cpu"), packing="packed", max_length=64
    )
    with torch.no_grad():
        scorer.model.score.weight.copy_(trainer.model.score.weight)
    chosen, rejected = scorer.scores(documents).view(-1, 2).unbind(1)
    loss = bradley_terry(chosen, rejected, 0.1).mean()
    loss.backward()
    inputs = by_row(sides(documents))
    del inputs["completion_mask"]
    own = case._replace(policy=scorer)
    assert_same(
        own, float(loss.detach()), trainer.compute_loss(trainer.model, inputs), trainer.model
    )
