"""SFT tokens a second: ours beside TRL's SFTTrainer, in one process, one step of each in turn.

    python benchmarks/sft_tokens.py [--steps 12] [--dtype float32|bfloat16] [--hidden 128] [--layers 4] [--batch 22]
    python benchmarks/sft_tokens.py --device cuda --dtype bfloat16 --hidden 1024 --layers 28 --batch 256
    python benchmarks/sft_tokens.py --scaling    ours alone, by one process and by two, of one thread each
    python benchmarks/sft_tokens.py --corpus 200000    what it takes to have the documents of so many rows, and batches

Both train the same Qwen3 from the same weights on the same documents, as many a step, with the same AdamW, loss on the
completion only, no gradient checkpointing. Lengths are lognormal (mean about 94, 16 to 512). TRL runs in both of its
layouts, packed rows holding about as many tokens a step, and ours runs beside each. Tokens are real ones: padding earns
nothing. Rates are those of the median step, the first two left out; a ratio is the median over steps of ours to TRL's
next to it, and the smaller of the two is the one to quote.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LONGEST, VOCABULARY = 512, 512


def documents(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Random ids, and how many of them are the prompt."""
    rng = random.Random(seed)
    lengths = [min(LONGEST, max(16, round(rng.lognormvariate(4.3, 0.7)))) for _ in range(count)]
    return [([rng.randrange(3, VOCABULARY) for _ in range(n)], n // 3) for n in lengths]


def make_model(directory: Path, hidden: int, layers: int) -> Path:
    """A Qwen3 (four layers of width 128: 0.85 million parameters) and the tokenizer that TRL wants."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t2"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="t0", eos_token="t1", unk_token="t2"
    )
    tokenizer.save_pretrained(directory)
    return directory


def ours(
    model: Path, data: list[tuple[list[int], int]], options: argparse.Namespace
) -> Callable[[int], int]:
    """One step on batch `k`, through the code of the stage; returns its tokens."""
    from tuneloop.core.component import Stage
    from tuneloop.formats.token_files import Document
    from tuneloop.stages.sft import train_step
    from tuneloop.training.epochs import prepare_step
    from tuneloop.training.fsdp.ranks import Ranks
    from tuneloop.training.fsdp.trainer import Trainer
    from tuneloop.training.options import Optimization

    adam = Optimization(1e-3, "constant", 0, 0, 0.0, 0.9, 0.95, 1.0)
    trainer = Trainer(model, Ranks(options.device), adam, dtype=options.dtype, max_length=LONGEST)
    stage = Stage("sft", SimpleNamespace(seed=0), Path(os.devnull), "", "")
    ready = [Document(ids, [t >= prompt for t in range(len(ids))]) for ids, prompt in data]

    def step(k: int) -> int:
        chosen = range(k * options.batch, (k + 1) * options.batch)
        prepared = prepare_step(trainer, lambda i: [ready[i]], chosen, options.batch)
        train_step(stage, trainer, prepared)
        return prepared.tokens

    return step


def beside_trl(
    model: Path,
    data: list[tuple[list[int], int]],
    packing: bool,
    work: Path,
    options: argparse.Namespace,
    step: Callable[[int], int],
) -> list[tuple[float, float]]:
    """Tokens a second of ours and of TRL's, for each step of SFTTrainer with one of ours after each."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rates: list[tuple[float, float]] = []
    seen: list[int] = []

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            theirs = seen[-1] / (time.perf_counter() - self.begin)
            begin = time.perf_counter()
            tokens = step(len(rates))
            rates.append((tokens / (time.perf_counter() - begin), theirs))

    class Counting(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            mask = inputs.get("attention_mask")
            seen.append(int(mask.sum()) if mask is not None else inputs["input_ids"].numel())
            return super().training_step(model, inputs, *rest, **named)

    rows = [
        {"input_ids": ids, "completion_mask": [int(t >= p) for t in range(len(ids))]}
        for ids, p in data
    ]
    trainer = Counting(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=SFTConfig(
            output_dir=str(work),
            use_cpu=options.device == "cpu",
            bf16=options.dtype == "bfloat16",
            gradient_checkpointing=False,
            per_device_train_batch_size=max(1, options.batch * 94 // LONGEST)
            if packing
            else options.batch,
            max_steps=options.steps + 2,
            max_length=LONGEST,
            packing=packing,
            completion_only_loss=True,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Turns()],
    )
    trainer.train()
    return rates[2:]


def alone(model: Path, data: list[tuple[list[int], int]], options: argparse.Namespace) -> None:
    """Print the tokens a second of ours, over the ranks that torchrun started."""
    step = ours(model, data, options)
    rates = []
    for k in range(options.steps + 2):
        begin = time.perf_counter()
        tokens = step(k)
        rates.append(tokens / (time.perf_counter() - begin))
    if os.environ["RANK"] == "0":
        print(json.dumps(statistics.median(rates[2:])))


def scaling(model: Path, options: argparse.Namespace) -> None:
    """A table of one process and two, the same batches."""
    print(
        f"SFT, Qwen3 of width {options.hidden}, {options.dtype}, 1 thread a process, real tokens/s"
    )
    rates = []
    for count in (1, 2):
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={count}",
            __file__,
        ]
        same = [
            "--steps",
            str(options.steps),
            "--dtype",
            options.dtype,
            "--hidden",
            str(options.hidden),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*launch, *same, "--rank", str(model)],
            env=env,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        rates.append(float(done.stdout.splitlines()[-1]))
        print(f"{count} processes {rates[-1]:>9,.0f} {rates[-1] / rates[0]:>6.2f}", flush=True)


def corpus(rows: int, work: Path) -> None:
    """A table of the seconds until the documents of `rows` demonstrations can be trained on, and for a step's."""
    from tuneloop.core.artifacts import Artifact
    from tuneloop.core.component import Stage
    from tuneloop.core.seeds import draw_indices
    from tuneloop.stages.base_model import base_model
    from tuneloop.stages.data_prep import data_prep
    from tuneloop.stages.tokenize_data import tokenize_data
    from tuneloop.training.batching import collate_documents
    from tuneloop.training.corpora import read_corpus

    rng = random.Random(0)
    with (work / "rows.jsonl").open("w") as file:
        for i in range(rows + 1):
            words = [
                f"{rng.randrange(1 << 20):x}"
                for _ in range(max(4, round(rng.lognormvariate(2.9, 0.7))))
            ]
            file.write(
                json.dumps({"prompt": f"{i} {' '.join(words[::2])}", "said": " ".join(words)})
                + "\n"
            )
    about: dict[str, Any] = {
        "source": str(work / "rows.jsonl"),
        "source_args": {"shuffle": False},
        "columns": {"prompt": "prompt", "completion": "said"},
        "sft_eval": 0,
    }
    data_prep(out=f"{work}/data", train=1, eval=0, sft=rows, **about)
    data_prep(
        out=f"{work}/few", train=1, eval=0, sft=2000, **about
    )  # a tokenizer is trained on all it is given
    base_model(out=f"{work}/base", model="tiny-qwen3", prompts=f"{work}/few")

    def measure(what: str, work: Callable[[], Any]) -> Any:
        begin, spent = time.perf_counter(), time.process_time()
        found = work()
        print(
            f"{what:<32} {time.perf_counter() - begin:>9.3f} s {time.process_time() - spent:>9.3f} s of CPU",
            flush=True,
        )
        return found

    def open_data(name: str) -> Any:
        return read_corpus(Artifact(f"{work}/{name}"), Artifact(f"{work}/base"), "sft")

    print(f"{rows:,} rows, {os.cpu_count()} cores")
    measure("tokenized by sft at each start", lambda: open_data("data"))
    out, policy, prompts = (f"{work}/{name}" for name in ("tokens", "base", "data"))
    measure("tokenize_data, once", lambda: tokenize_data(out=out, policy=policy, prompts=prompts))
    found = measure("mapped by sft at each start", lambda: open_data("tokens"))
    import torch

    stage = Stage("sft", SimpleNamespace(seed=0), Path(os.devnull), "", "")
    for size in (32, 512):
        order = partial(draw_indices, len(found), 0, size, partial(stage.seed, "order"))
        chosen = measure(f"indices of {size}", order)
        picked = measure("their documents", lambda chosen=chosen: [found[i] for i in chosen])  # type: ignore[misc]
        measure("collated", lambda picked=picked: collate_documents(picked, torch.device("cpu")))  # type: ignore[misc]
    print(f"{found.tokens:,} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=22, help="documents a step")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--corpus", type=int, metavar="ROWS")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    data = documents(options.batch * (options.steps + 2) * 2, 0)
    if options.rank:
        alone(options.rank, data, options)
        return
    with tempfile.TemporaryDirectory() as work:
        if options.corpus:
            corpus(options.corpus, Path(work))
            return
        model = make_model(Path(work) / "model", options.hidden, options.layers)
        if options.scaling:
            scaling(model, options)
            return
        step = ours(model, data, options)
        found = {
            packing: beside_trl(model, data, packing, Path(work), options, step)
            for packing in (False, True)
        }
    import torch

    where = (
        torch.cuda.get_device_name()
        if options.device == "cuda"
        else f"{torch.get_num_threads()} threads"
    )
    print(
        f"SFT, Qwen3 of {options.layers} x {options.hidden}, {options.dtype}, {where}, real tokens/s"
    )
    print(f"{'':<20} {'TRL':>9} {'tuneloop':>9} {'ratio':>6}   lowest and highest ratio of a step")
    for packing, rates in found.items():
        mine, theirs = (statistics.median(rate[i] for rate in rates) for i in (0, 1))
        ratios = sorted(a / b for a, b in rates)
        spread = f"{ratios[0]:.2f} {ratios[-1]:.2f}"
        print(
            f"TRL packing={packing!s:<8} {theirs:>9,.0f} {mine:>9,.0f} {statistics.median(ratios):>6.2f}   {spread}"
        )


if __name__ == "__main__":
    main()
