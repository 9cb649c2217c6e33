"""SFT steps in the shape of Qwen3-0.6B with random weights: tokens a second and peak memory."""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu_steps.records import (
    Step,
    find_device,
    measure_peak_bytes,
    measure_seconds,
    release_memory,
)

Documents = list[tuple[list[int], int]]
LONGEST = 1024
LAYOUTS: dict[str, dict[str, Any]] = {
    "varlen": {"attn_implementation": "varlen", "packing": "packed"},
    "padded": {"attn_implementation": "sdpa", "packing": "padded"},
    "dense": {"attn_implementation": "sdpa", "packing": "packed"},
    "compiled": {"attn_implementation": "varlen", "packing": "packed", "torch_compile": True},
}


def choose_shape(small: bool) -> dict[str, Any]:
    """The shape of Qwen3-0.6B, or a small one."""
    shape = {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    if small:
        shape |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192}
        shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        shape |= {"head_dim": 16}
    return shape


def write_model(directory: Path, small: bool) -> Path:
    """Write the model in bfloat16, with a tokenizer that TRL accepts."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**choose_shape(small), dtype="bfloat16")
    with torch.device(find_device()):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(500)}, unk_token="t2"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="t0", eos_token="t1", unk_token="t2"
    )
    tokenizer.save_pretrained(directory)
    return directory


def make_documents(count: int, vocabulary: int) -> Documents:
    """Make documents of random ids, of lognormal length (mean about 290), with prompts."""
    rng = random.Random(0)
    lengths = [min(LONGEST, max(32, round(rng.lognormvariate(5.5, 0.6)))) for _ in range(count)]
    return [([rng.randrange(3, vocabulary) for _ in range(n)], n // 3) for n in lengths]


def make_trainer(model: Path, **options: Any) -> Any:
    from tuneloop.training.fsdp.ranks import Ranks
    from tuneloop.training.fsdp.trainer import Trainer
    from tuneloop.training.options import Optimization

    optimization = Optimization(1e-5, "constant", 0, 0, 0.0, 0.9, 0.95, 1.0)
    ranks = Ranks(find_device())  # type: ignore[arg-type]
    return Trainer(model, ranks, optimization, dtype="bfloat16", max_length=4096, **options)


def train_ours(
    step: Step, model: Path, data: Documents, name: str, steps: int, batch: int, micro: int
) -> None:
    """Record our steps in one layout, on the same batches, laid out before the clock starts."""
    from tuneloop.core.component import Stage
    from tuneloop.formats.token_files import Document
    from tuneloop.stages.sft import train_step
    from tuneloop.training.epochs import prepare_step

    release_memory()
    trainer = make_trainer(model, **LAYOUTS[name])
    stage = Stage("sft", SimpleNamespace(seed=0), Path(os.devnull), "", "")
    documents = [Document(ids, [t >= prompt for t in range(len(ids))]) for ids, prompt in data]
    batches = len(documents) // batch
    timings = []
    for number in range(steps):
        first = number % batches * batch
        prepared = prepare_step(
            trainer, lambda i: [documents[i]], range(first, first + batch), micro
        )
        take = functools.partial(train_step, stage, trainer, prepared)
        seconds, measures = measure_seconds(take)
        timings.append((prepared.tokens / seconds, seconds, measures["loss"]))
    rate = statistics.median(tokens for tokens, _, _ in timings[2:])
    step.record(
        trainer="tuneloop",
        layout=name,
        documents=batch,
        micro_batch=micro,
        tokens=prepared.tokens,
        tokens_per_s=rate,
        first_s=timings[0][1],
        losses=[loss for _, _, loss in timings],
        **trainer.efficiency(rate),
        parameters=trainer.count(),
    )


def train_trl(step: Step, model: Path, data: Documents, steps: int, batch: int) -> None:
    """Record TRL's SFTTrainer on the same documents: padded, with sdpa, in bfloat16 by autocast."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    release_memory()
    # Our trainer asks for deterministic kernels in the whole process; TRL does not.
    torch.use_deterministic_algorithms(False)
    tokens: list[int] = []
    rates: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            tokens.clear()
            measure_seconds(lambda: None)
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            measure_seconds(lambda: None)
            rates.append(sum(tokens) / (time.perf_counter() - self.start))

    class Counting(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            tokens.append(int(inputs["attention_mask"].sum()))
            return super().training_step(model, inputs, *rest, **named)

    rows = [
        {"input_ids": ids, "completion_mask": [int(t >= prompt) for t in range(len(ids))]}
        for ids, prompt in data
    ]
    config = SFTConfig(
        output_dir=str(step.work / "trl"),
        use_cpu=find_device() == "cpu",
        bf16=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=min(16, batch),
        gradient_accumulation_steps=max(1, batch // 16),
        max_steps=steps,
        max_length=LONGEST,
        packing=False,
        completion_only_loss=True,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    trainer = Counting(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Clock()],
    )
    trainer.train()
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    rate = statistics.median(rates[2:])
    step.record(
        trainer="TRL SFTTrainer, padded, sdpa, bf16, 16 documents a forward pass",
        tokens_per_s=rate,
        flops_per_s=6 * parameters * rate,
        peak_memory_bytes=measure_peak_bytes(),
    )


def predict_memory(step: Step, model: Path, data: Documents, batch: int, micro: int) -> None:
    """Record what `plan` computes for the largest micro-batch of packed rows."""
    from tuneloop.config.model_facts import Model, count_activation_bytes, shape_of
    from tuneloop.training.batching import plan_micro_batches
    from tuneloop.training.options import GPU_LOGITS

    config = json.loads((model / "config.json").read_text())
    shape = shape_of("random", config, model)
    assert isinstance(shape, Model)
    largest = 0
    for first in range(0, len(data), batch):
        lengths = [len(ids) for ids, _ in data[first : first + batch]]
        for indices in plan_micro_batches(lengths, micro, 1, packed=True)[0]:
            largest = max(largest, sum(lengths[i] for i in indices))
    state = shape.parameters * 16
    activations = largest * count_activation_bytes(shape, False, "bfloat16")
    logits = min(largest * shape.vocab, GPU_LOGITS) * 8
    step.record(
        tokens=largest,
        predicted_bytes={"state": state, "activations": activations, "logits": logits},
        predicted_total=state + activations + logits,
    )


def profile_step(step: Step, model: Path, data: Documents, batch: int, micro: int) -> None:
    """Record which kernels take the time of one of our steps over packed rows."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from tuneloop.core.component import Stage
    from tuneloop.formats.token_files import Document
    from tuneloop.stages.sft import train_step
    from tuneloop.training.epochs import prepare_step

    release_memory()
    trainer = make_trainer(model, **LAYOUTS["varlen"])
    stage = Stage("sft", SimpleNamespace(seed=0), Path(os.devnull), "", "")
    documents = [Document(ids, [t >= prompt for t in range(len(ids))]) for ids, prompt in data]
    prepared = prepare_step(trainer, lambda i: [documents[i]], range(batch), micro)
    for _ in range(2):
        train_step(stage, trainer, prepared)
    kinds = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(ProfilerActivity.CUDA)
    with profile(activities=kinds) as recorded:
        seconds, _ = measure_seconds(lambda: train_step(stage, trainer, prepared))
    averages = recorded.key_averages()
    kernels = [event for event in averages if event.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    step.record(
        profiled_s=seconds,
        kernels_s=sum(event.self_device_time_total for event in kernels) / 1e6,
        launches=sum(event.count for event in kernels),
        milliseconds={
            event.key[:90]: [round(event.self_device_time_total / 1e3, 2), event.count]
            for event in kernels[:25]
        },
    )


def run_layouts(
    step: Step, names: tuple[str, ...], peer: bool = False, traced: bool = False
) -> None:
    micro = 4 if step.small else 32
    batch = 2 * micro
    steps = 4 if step.small else 8
    model = write_model(step.work / "model", step.small)
    data = make_documents(4 * batch, choose_shape(step.small)["vocab_size"])
    if traced:
        profile_step(step, model, data, batch, micro)
    for name in names:
        train_ours(step, model, data, name, steps, batch, micro)
    if peer:
        train_trl(step, model, data, steps, batch)
    predict_memory(step, model, data, batch, micro)


def run(step: Step) -> None:
    run_layouts(step, ("varlen", "padded"), peer=True)


def run_profile(step: Step) -> None:
    run_layouts(step, (), traced=True)


def run_dense(step: Step) -> None:
    run_layouts(step, ("dense",))


def run_compiled(step: Step) -> None:
    run_layouts(step, ("compiled",))


def run_parts(step: Step) -> None:
    """Record steps with fewer and with more logits at once than a GPU's default."""
    from tuneloop.training.fsdp import policy

    model = write_model(step.work / "model", step.small)
    micro = 4 if step.small else 32
    data = make_documents(8 * micro, choose_shape(step.small)["vocab_size"])
    for exponent in (25, 28, 30):
        policy.GPU_LOGITS = 1 << exponent
        step.record(logits_at_once=policy.GPU_LOGITS)
        train_ours(step, model, data, "varlen", 4 if step.small else 8, 2 * micro, micro)
