"""How far a pretrained model's log-probabilities differ by dtype and device, and by a step.

An engine must answer with the canary's numbers within a tolerance. These are the differences that
the tolerance has to bear, and the differences that it should tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_steps.records import Step, find_device
from tuneloop.formats.canary import canary_logprobs, derive_ids, tell_versions_apart

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "training.md"
QUESTIONS = ("What is the capital of France?", "Write a story about a lighthouse.")
STEPS = (1e-6, 1e-5)


def compute_logprobs(model: Any, rows: Sequence[list[int]], together: bool = False) -> Any:
    """Compute the log-probability of every token but the first, row by row or as one batch."""
    import torch

    device = next(model.parameters()).device
    groups = [list(rows)] if together else [[row] for row in rows]
    values = []
    with torch.no_grad():
        for group in groups:
            tokens = torch.tensor(group, device=device)
            logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
            logprobs = torch.log_softmax(logits, dim=-1)
            values.append(logprobs.gather(2, tokens[:, 1:, None])[..., 0].cpu())
    return torch.cat(values)


def compare(one: Any, other: Any) -> dict[str, float]:
    difference = (one - other).abs()
    return {"mean": float(difference.mean()), "max": float(difference.max())}


def make_texts(step: Step, model: Any, tokenizer: Any) -> dict[str, list[list[int]]]:
    """Random ids, natural text, and what the model says itself; rows of equal length."""
    import torch

    length = 24 if step.small else 128
    rows = 2 if step.small else 8
    vocabulary = len(tokenizer)
    drawn = derive_ids(vocabulary, rows * length)
    natural = tokenizer(DOCUMENTATION.read_text())["input_ids"][: rows * length]
    own = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        tokens = torch.tensor([prompt], device=model.device)
        new = length - len(prompt) % length
        said = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
        )
        own.append(said[0, -length:].tolist())

    def cut(ids: list[int]) -> list[list[int]]:
        return [ids[start : start + length] for start in range(0, len(ids), length)]

    return {"random ids": cut(drawn), "natural text": cut(natural), "own greedy text": own}


def open_model(step: Step, dtype: str, device: str, attention: str = "sdpa") -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        step.model, dtype=dtype, attn_implementation=attention
    )
    return model.to(device).eval()


def compare_computations(step: Step, texts: dict[str, list[list[int]]]) -> None:
    """Compare what should be equal: dtypes, devices, kernels, and a batch with its rows alone."""
    device = find_device()
    full = open_model(step, "float32", device)
    low = open_model(step, "bfloat16", device)
    eager = open_model(step, "bfloat16", device, "eager")
    full_host = open_model(step, "float32", "cpu")
    low_host = open_model(step, "bfloat16", "cpu")
    for name, rows in texts.items():
        exact = compute_logprobs(full, rows)
        served = compute_logprobs(low, rows)
        few = rows[:2]
        step.record(
            text=name,
            tokens=exact.numel(),
            mean_logprob=float(exact.mean()),
            bfloat16_beside_float32=compare(served, exact),
            bfloat16_batch_beside_rows=compare(compute_logprobs(low, rows, True), served),
            bfloat16_eager_beside_sdpa=compare(compute_logprobs(eager, rows), served),
            float32_batch_beside_rows=compare(compute_logprobs(full, rows, True), exact),
            float32_beside_cpu=compare(exact[:2], compute_logprobs(full_host, few)),
            bfloat16_beside_cpu=compare(served[:2], compute_logprobs(low_host, few)),
            cpu_bfloat16_beside_float32=compare(
                compute_logprobs(low_host, few), compute_logprobs(full_host, few)
            ),
        )


def compare_steps(step: Step, texts: dict[str, list[list[int]]], vocabulary: int) -> None:
    """Move every weight by ±size, by random signs and by a gradient's, and compare with before."""
    import torch

    device = find_device()
    full = open_model(step, "float32", device)
    low = open_model(step, "bfloat16", device)
    served_before = open_model(step, "bfloat16", device)
    tokens = torch.tensor(texts["natural text"], device=device)
    full(input_ids=tokens, labels=tokens).loss.backward()
    masters = {name: value.detach().clone() for name, value in full.named_parameters()}
    gradients = {name: value.grad.sign() for name, value in full.named_parameters()}
    ids = derive_ids(vocabulary)
    generator = torch.Generator(device).manual_seed(0)
    before = {
        name: (compute_logprobs(full, rows), compute_logprobs(low, rows))
        for name, rows in texts.items()
    }
    for kind in ("random signs", "signs of a gradient"):
        for size in STEPS:
            changed = 0
            with torch.no_grad():
                served = dict(low.named_parameters())
                for name, value in full.named_parameters():
                    sign = gradients[name]
                    if kind == "random signs":
                        coins = torch.rand(value.shape, generator=generator, device=device)
                        sign = (coins < 0.5).to(value.dtype) * 2 - 1
                    value.copy_(masters[name] - size * sign)
                    rounded = value.to(torch.bfloat16)
                    changed += int((rounded != served_before.get_parameter(name)).sum())
                    served[name].copy_(rounded)
            for name, rows in texts.items():
                step.record(
                    moved=kind,
                    size=size,
                    text=name,
                    float32=compare(compute_logprobs(full, rows), before[name][0]),
                    bfloat16=compare(compute_logprobs(low, rows), before[name][1]),
                    bfloat16_weights_changed=changed / sum(map(torch.numel, masters.values())),
                )
            now = canary_logprobs(low.to("cpu"), ids)
            then = canary_logprobs(served_before.to("cpu"), ids)
            answers = canary_logprobs(low.to(device), ids)
            served_before.to(device)
            step.record(
                moved=kind,
                size=size,
                canary="written on the CPU, answered by the GPU, both in bfloat16",
                noise=compare(torch.tensor(answers), torch.tensor(now)),
                signal=compare(torch.tensor(now), torch.tensor(then)),
                **tell_versions_apart(answers, now, then),
            )


def run(step: Step) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(step.model)
    texts = make_texts(step, open_model(step, "float32", find_device()), tokenizer)
    compare_computations(step, texts)
    compare_steps(step, texts, len(tokenizer))
