"""From a step of the trainer to an engine that serves it, in the shape of Qwen3-0.6B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu_steps.records import Step, find_device, measure_seconds
from benchmarks.gpu_steps.training import make_trainer, write_model
from tuneloop.formats.canary import canary_logprobs, derive_ids


def publish(step: Step, trainer: Any, model: Path, turn: int) -> None:
    """Record the seconds of one version: export, canary, load by the engine, and its answer."""
    import torch
    from transformers import AutoModelForCausalLM

    target = step.work / f"version-{turn}"
    ids = derive_ids(trainer.vocab_size)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-4)

    def load() -> Any:
        served = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
        return served.to(find_device()).eval()

    export_s, written = measure_seconds(lambda: trainer.export(model, target, "bfloat16"))
    canary_s, expected = measure_seconds(lambda: canary_logprobs(written, ids))
    load_s, served = measure_seconds(load)
    answer_s, answers = measure_seconds(lambda: canary_logprobs(served, ids))
    differences = [abs(one - other) for one, other in zip(answers, expected, strict=True)]
    step.record(
        turn=turn,
        bytes=sum(path.stat().st_size for path in target.glob("*.safetensors")),
        export_s=export_s,
        canary_on_the_cpu_s=canary_s,
        load_s=load_s,
        answer_s=answer_s,
        mean_difference=sum(differences) / len(differences),
        max_difference=max(differences),
    )


def run(step: Step) -> None:
    model = write_model(step.work / "model", step.small)
    trainer = make_trainer(model)
    for turn in range(3):
        publish(step, trainer, model, turn)
