import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.making import tiny_model
from tuneloop.core.artifacts import hash_files
from tuneloop.core.errors import UserError
from tuneloop.formats.token_files import Document
from tuneloop.training import options
from tuneloop.training.fsdp import policy as policy_module
from tuneloop.training.fsdp.policy import Policy
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.fsdp.trainer import Trainer
from tuneloop.training.options import Optimization

ADAM = Optimization(1e-2, "constant", 0, 0, 0.01, 0.9, 0.95, 1.0)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    rng = random.Random(0)
    lengths = [2, 30, 5, 17, 9, 9, 3]
    return [
        Document(
            [rng.randrange(41) for _ in range(n)],
            [False, *(rng.random() < 0.6 for _ in range(n - 1))],
        )
        for n in lengths
    ]


def dense(
    model: Path, documents: list[Document], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies from all logits, one document at a time."""
    opened = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    values, entropies = [], []
    for d in documents:
        logits = opened(input_ids=torch.tensor([list(d.ids)])).logits[0] / temperature
        for t, wanted in enumerate(d.targets):
            if wanted:
                distribution = torch.distributions.Categorical(logits=logits[t - 1])
                values.append(distribution.log_prob(torch.tensor(d.ids[t])))
                entropies.append(distribution.entropy())
    return torch.stack(values), torch.stack(entropies)


@pytest.mark.parametrize("packing", ["padded", "packed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_those_of_each_document_alone(model, documents, packing, temperature):
    policy = Policy(model, Ranks("cpu"), packing=packing, max_length=40)
    with torch.no_grad():
        values, entropies = policy.logprobs(documents, temperature)
        wanted = dense(model, documents, temperature)
    torch.testing.assert_close((values, entropies), wanted, rtol=1e-4, atol=1e-5)


def test_without_a_gpu_attention_is_sdpa_and_eager_says_the_same(model, documents):
    one, other = (
        Policy(model, Ranks("cpu"), max_length=40, attn_implementation=how)
        for how in ("auto", "eager")
    )
    assert (one.chosen()["attention"], other.chosen()["attention"]) == ("sdpa", "eager")
    with torch.no_grad():
        torch.testing.assert_close(
            one.logprobs(documents), other.logprobs(documents), rtol=1e-4, atol=1e-5
        )


def gradients(
    model: Path, documents: list[Document], packing: str, limit: int
) -> dict[str, torch.Tensor]:
    policy = Policy(model, Ranks("cpu"), packing=packing, max_length=40)
    count = sum(d.target_count for d in documents)
    for micro in policy.plan([len(d.ids) for d in documents], limit):
        values, _ = policy.logprobs([documents[i] for i in micro])
        (-values.sum() / count).backward()
    return {name: p.grad for name, p in policy.model.named_parameters()}


@pytest.mark.parametrize(("packing", "limit"), [("packed", 7), ("padded", 2), ("packed", 3)])
def test_the_gradient_knows_no_layout(model, documents, packing, limit):
    """Packed as padded, micro-batches as the whole batch."""
    wanted = gradients(model, documents, "padded", 7)
    assert any(g.abs().max() > 1e-3 for g in wanted.values())
    torch.testing.assert_close(
        gradients(model, documents, packing, limit), wanted, rtol=1e-4, atol=1e-5
    )


def test_bfloat16_computes_low_and_keeps_float32(model, documents):
    policy = Policy(model, Ranks("cpu"), dtype="bfloat16")
    values, _ = policy.logprobs(documents)
    wanted, _ = dense(model, documents)
    assert values.dtype == torch.float32
    assert not values.equal(wanted)
    torch.testing.assert_close(values, wanted, rtol=0.1, atol=0.1)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}


def train(trainer: Trainer, documents: list[Document], steps: int) -> None:
    for _ in range(steps):
        (-trainer.logprobs(documents)[0].mean()).backward()
        trainer.update()


def test_saving_and_loading_changes_nothing(model, documents, tmp_path):
    one = Trainer(model, Ranks("cpu"), ADAM)
    train(one, documents, 2)
    one.save(tmp_path / "a")
    two = Trainer(model, Ranks("cpu"), ADAM)
    two.load(tmp_path / "a", one.step)
    two.save(tmp_path / "b")
    assert hash_files(tmp_path / "a") == hash_files(tmp_path / "b")  # byte for byte, .metadata too
    for trainer in (one, two):
        train(trainer, documents, 2)
    one.save(tmp_path / "c")
    two.save(tmp_path / "d")
    assert hash_files(tmp_path / "c") == hash_files(tmp_path / "d") != hash_files(tmp_path / "a")


def test_the_step_is_adamw_with_clipping(model, documents):
    trainer = Trainer(model, Ranks("cpu"), replace(ADAM, max_grad_norm=0.1, warmup_steps=2))
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    for step in (1, 2, 3):
        for p, ours in zip(plain.parameters(), trainer.model.parameters()):
            p.data.copy_(ours.detach())
        (-trainer.logprobs(documents)[0].mean()).backward()
        for p, ours in zip(plain.parameters(), trainer.model.parameters()):
            p.grad = ours.grad.clone()
        norm, rate = trainer.update()
        assert rate == pytest.approx(1e-2 * min(1, step / 2))
        optimizer.param_groups[0]["lr"] = rate
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)))
        optimizer.step()
        for p, ours in zip(plain.parameters(), trainer.model.parameters()):
            torch.testing.assert_close(ours, p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_schedules_are_those_of_transformers_after_the_warm_up(kind):
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    name = "constant_with_warmup" if kind == "constant" else kind
    theirs = get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=10)
    ours = replace(ADAM, learning_rate=2.0, lr_scheduler_type=kind, warmup_steps=3, max_steps=10)
    for step in range(1, 11):
        if step > 3:
            assert ours.rate(step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert [ours.rate(step) for step in (1, 2, 3)] == pytest.approx([2 / 3, 4 / 3, 2.0])


def test_divergence_is_not_saved_as_a_policy(model, documents):
    trainer = Trainer(model, Ranks("cpu"), ADAM)
    (trainer.logprobs(documents)[0].mean() * float("nan")).backward()
    with pytest.raises(ArithmeticError, match="norm is nan"):
        trainer.update()


def test_bad_models_and_devices(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="cannot be loaded"):
        Policy(tmp_path, Ranks("cpu"))
    with pytest.raises(UserError, match="1 processes are training"):
        Ranks("cpu", expected=2)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            Ranks("cuda")
    monkeypatch.setenv("CXX", "no-such-compiler")
    for option, why in {
        "cpu_offload": "needs a GPU, and this trains on the CPU",
        "use_liger_kernel": "run on a GPU only",
        "torch_compile": "install no-such-compiler",
    }.items():
        with pytest.raises(UserError, match=f"--{option.replace('_', '-')}.*{why}"):
            Policy(tmp_path, Ranks("cpu"), **{option: True})


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_logits_in_chunks_and_activations_made_again_change_nothing(arch, tmp_path, monkeypatch):
    """Values, entropies and gradients; three tokens' logits at once."""
    model = tiny_model(tmp_path / "model", arch, dtype=torch.float32, tie=arch == "qwen3")
    documents = [
        Document([5, 6, 7, 8], [False, True, True, True]),
        Document([9, 8, 7], [False, False, True]),
    ] * 3
    found = []
    for size, again in ((options.LOGITS, False), (3 * 41, True)):
        monkeypatch.setattr(policy_module, "LOGITS", size)
        policy = Policy(model, Ranks("cpu"), gradient_checkpointing=again)
        values, entropy = policy.logprobs(documents, 0.7)
        (values * torch.arange(12.0)).sum().backward()
        found.append([values.detach(), entropy, *(p.grad for p in policy.model.parameters())])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)
