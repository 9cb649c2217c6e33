"""What a CPU cannot show, on one NVIDIA GPU: whole loops, a server that gives the GPU back, and a trainer that does.

    python -m benchmarks.on_gpu [loop bits colocate suspend trainer server ...] [--layers 28] [--hidden 1024]

`loop`: the pipeline sft_then_grpo with real vLLM, both on the GPU.
`bits`: two deterministic runs of it, one of them killed in its second iteration and resumed; the digests of all that
    they committed are compared.
`colocate`, `suspend`: a run whose server sleeps, or is suspended by NVIDIA's cuda-checkpoint, between rollouts.
`trainer`: SFT steps of a Qwen3 of `--layers` and `--hidden` in bfloat16: tokens a second, the share of the device's
    peak, a sleep in host memory and the way back, and whether the next step is the one of a trainer that never slept.
`server`: vLLM with such a model: what sleep mode, a suspension and both leave on the GPU, their seconds, and whether
    it says the same afterwards; a version changed in place.

Every check is a process of its own; the rest goes on where one fails, and at SIGTERM its runs end, too. Memory is that
of the whole GPU (nvidia-smi).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.rollout_tokens import server
from tests.local.loops import digests
from tests.waiting import free_port
from tuneloop.core.artifacts import Artifact

SHORT = {"max_model_len": 256, "enforce_eager": True, "gpu_memory_utilization": 0.15}
LONGER = {
    "max_model_len": 1024,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 8 << 30,
}
QUICK = {"loop.target_reward": 2, "loop.iterations": 3, "loop.iterations_per_pod": 0}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}; default: all"
    )
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.here:
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
        )  # so that `finally` is reached
        with tempfile.TemporaryDirectory() as work:
            CHECKS[flags.here](Path(work), flags)
        return 0
    failed = []
    for name in flags.checks or CHECKS:
        began = time.perf_counter()
        same = [f"--{each}={getattr(flags, each)}" for each in ("layers", "hidden", "steps")]
        code = subprocess.run(
            [sys.executable, "-m", "benchmarks.on_gpu", "--here", name, *same]
        ).returncode
        failed += [name] if code else []
        print(
            f"{name}: {'FAILED' if code else 'done'}, {time.perf_counter() - began:.0f} s\n",
            flush=True,
        )
    return 1 if failed else 0


def read_memory() -> float:
    """GiB in use on the GPU, by all processes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return (
        int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0])
        / 1024
    )


@contextmanager
def started(
    verb: str, *words: str, store: Path, sets: dict[str, Any]
) -> Iterator[subprocess.Popen[str]]:
    """`tuneloop <verb> …`, which with all its stages and servers has ended afterwards."""
    line = [sys.executable, "-m", "tuneloop.cli", verb, *words, "--store", str(store), "--no-track"]
    line += [f"--set={name}={value}" for name, value in sets.items()]
    child = subprocess.Popen(
        line, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def settings(args: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"engine.args": json.dumps({**SHORT, **args}), "engine.port": free_port(), **more}


def finish(child: subprocess.Popen[str], shown: int = 1200) -> None:
    """Print the end of what a command prints. Raises SystemExit: it fails."""
    said, _ = child.communicate()
    print(said[-6000 if child.returncode else -shown :])
    if child.returncode:
        raise SystemExit(f"exit code {child.returncode}")


def describe(store: Path, run: str) -> None:
    """Print seconds and tokens a second of every iteration's rollout and update."""
    for place in sorted((store / run / "iterations").iterdir(), key=lambda p: int(p.name)):
        made, update = (
            Artifact(str(place / stage)).manifest for stage in ("rollout", "policy-update")
        )
        sampled, trained = (stage.timings for stage in (made, update))
        print(
            f"iteration {place.name}, on {update.notes['device']}, {json.dumps(made.notes)}:",
            end=" ",
        )
        print(
            f"rollout {sampled['total']:.2f} s, {sampled['generated_tokens_per_s']:,.0f} tokens/s,",
            end=" ",
        )
        print(f"update {trained['total']:.2f} s, {trained['tokens_per_s']:,.0f} tokens/s")


def check_loop(work: Path, flags: argparse.Namespace) -> None:
    began, sets = time.perf_counter(), settings({}, **{"loop.iterations": 40})
    with started("run", "sft_then_grpo", "--run", "loop", store=work, sets=sets) as child:
        finish(child, shown=2500)
    print(f"the whole pipeline: {time.perf_counter() - began:.1f} s")
    describe(work, "loop")


def check_bits(work: Path, flags: argparse.Namespace) -> None:
    calm, killed = (settings({}, **QUICK, **{"engine.deterministic": True}) for _ in range(2))
    first = work / "killed" / "iterations" / "1" / "policy-update" / "manifest.json"
    with started("run", "sft_then_grpo", "--run", "calm", store=work, sets=calm) as whole:
        with started("run", "sft_then_grpo", "--run", "killed", store=work, sets=killed) as child:
            while not first.exists():
                assert child.poll() is None, child.communicate()[0][-3000:]
                time.sleep(0.05)
            time.sleep(0.7)  # somewhere in the second iteration
        with started("resume", "killed", store=work, sets={}) as child:
            finish(child)
        finish(whole)
    describe(work, "calm")
    one, two = digests(work, "calm"), digests(work, "killed")
    different = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    print(
        f"killed and resumed: {len(one)} artifacts, {len(different)} of them different: {different}"
    )
    if different:
        raise SystemExit(1)


def watch_run(work: Path, run: str, sets: dict[str, Any]) -> None:
    """Run to the end, and print the GPU's memory in use meanwhile."""
    seen: list[float] = []
    with started("run", "sft_then_grpo", "--run", run, store=work, sets=sets) as child:
        while child.poll() is None:
            seen.append(read_memory())
            time.sleep(0.5)
        finish(child)
    print("GiB in use, twice a second:", " ".join(f"{each:.1f}" for each in seen))
    describe(work, run)


def check_colocate(work: Path, flags: argparse.Namespace) -> None:
    watch_run(work, "colocate", settings({}, **QUICK, **{"engine.colocate": True}))


def check_suspend(work: Path, flags: argparse.Namespace) -> None:
    watch_run(
        work,
        "suspend",
        settings({"kv_cache_memory_bytes": 4 << 30}, **QUICK, **{"engine.snapshot": True}),
    )


def make_model(folder: Path, flags: argparse.Namespace) -> Path:
    """A Qwen3 with random weights; at 28 layers of 1024 it has the shape of Qwen3-0.6B."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=flags.hidden,
        intermediate_size=3 * flags.hidden,
        num_hidden_layers=flags.layers,
        num_attention_heads=flags.hidden // 64,
        num_key_value_heads=max(1, flags.hidden // 128),
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds until the GPU has done `work`, and what it returned."""
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    found = work()
    torch.cuda.synchronize()
    return time.perf_counter() - began, found


def prepare_trainers(
    work: Path, flags: argparse.Namespace
) -> tuple[list[Any], Callable[[Any, int], int]]:
    """Two equal trainers, and what takes the `k`-th step of one and returns its tokens."""
    from tuneloop.core.component import Params, Stage
    from tuneloop.formats.token_files import Document
    from tuneloop.stages.sft import train_step
    from tuneloop.training.epochs import prepare_step
    from tuneloop.training.fsdp.ranks import Ranks
    from tuneloop.training.fsdp.trainer import Trainer
    from tuneloop.training.options import Optimization

    model, batch, rng = make_model(work / "model", flags), 64, random.Random(0)
    stage, ranks = Stage("sft", Params(), Path(os.devnull), "", ""), Ranks("cuda")
    adam = Optimization(1e-5, "constant", 0, 0, 0.0, 0.9, 0.95, 1.0)
    lengths = [min(1024, max(32, round(rng.lognormvariate(5.5, 0.6)))) for _ in range(batch * 4)]
    ids = [[rng.randrange(3, 150000) for _ in range(n)] for n in lengths]
    documents = [Document(each, [t >= len(each) // 3 for t in range(len(each))]) for each in ids]

    def step(trainer: Trainer, k: int) -> int:
        chosen = range(k % 4 * batch, (k % 4 + 1) * batch)
        prepared = prepare_step(trainer, lambda i: [documents[i]], chosen, 32)
        train_step(stage, trainer, prepared)
        return prepared.tokens

    return [Trainer(model, ranks, adam, dtype="bfloat16", max_length=4096) for _ in range(2)], step


def check_trainer(work: Path, flags: argparse.Namespace) -> None:
    import torch

    (slept, other), step = prepare_trainers(work, flags)
    print(slept.chosen(), f"{sum(p.numel() for p in slept.model.parameters()):,} parameters")
    steps = [timed(lambda k=k: step(slept, k)) for k in range(flags.steps)]  # type: ignore[misc]
    rate = statistics.median(tokens / seconds for seconds, tokens in steps[2:])
    print(
        f"{steps[-1][1]:,} tokens a step, {rate:,.0f} tokens/s (median), {json.dumps(slept.efficiency(rate))}"
    )
    for k in range(flags.steps):
        step(other, k)
    equal = [slept.compute_state_digest() == other.compute_state_digest()]
    print(f"two trainers, the same steps, the same bits: {equal[0]}")
    for turn in range(2):
        before = torch.cuda.memory_allocated()
        away, _ = timed(slept.sleep)
        moved = (before - torch.cuda.memory_allocated()) / 1e9
        back, _ = timed(slept.wake)
        print(
            f"sleep {turn}: {moved:.2f} GB left the GPU in {away:.2f} s ({moved / away:.1f} GB/s),",
            end=" ",
        )
        print(f"and came back in {back:.2f} s ({moved / back:.1f} GB/s)")
    for trainer in (slept, other):
        step(trainer, 1)
    equal.append(slept.compute_state_digest() == other.compute_state_digest())
    print(f"the step after it, the same bits: {equal[1]}")
    saved, digested = (
        timed(lambda: slept.save(work / "state"))[0],
        timed(slept.compute_state_digest)[0],
    )
    print(f"saved in {saved:.2f} s; digest of the state in {digested:.2f} s")
    if not all(equal):
        raise SystemExit(1)


def make_policy(work: Path, flags: argparse.Namespace) -> Artifact:
    from tuneloop.stages.base_model import base_model
    from tuneloop.stages.data_prep import data_prep

    source = make_model(work / "model", flags)
    data_prep(out=f"{work}/prompts", train=16, eval=8, sft=64)
    base_model(out=f"{work}/tiny", prompts=f"{work}/prompts")  # for its tokenizer
    for file in Artifact(f"{work}/tiny").part("model").iterdir():
        if not (source / file.name).exists() and file.suffix != ".safetensors":
            (source / file.name).write_bytes(file.read_bytes())
    base_model(out=f"{work}/policy", model=str(source))
    return Artifact(f"{work}/policy")


def check_server(work: Path, flags: argparse.Namespace) -> None:
    policy, failed = make_policy(work, flags), 0
    for way in (
        {"enable_sleep_mode": True},
        {"snapshot": True},
        {"snapshot": True, "enable_sleep_mode": True},
    ):
        empty, began = read_memory(), time.perf_counter()
        try:
            with server(policy.ref, {**LONGER, **way}, stderr=None) as url:
                print(
                    f"{way}: started in {time.perf_counter() - began:.1f} s, {read_memory() - empty:.1f} GiB"
                )
                take_turns(url, policy, empty)
        except Exception as error:
            failed += 1
            print(f"   FAILED: {type(error).__name__}: {error}", flush=True)
    if failed:
        raise SystemExit(1)


def take_turns(url: str, policy: Artifact, empty: float) -> None:
    """Put a server to sleep and wake it, three times; `empty`: GiB in use on the GPU without it."""
    from tuneloop.formats.rollouts import Request
    from tuneloop.inference.engines import Sampling
    from tuneloop.inference.engines._client import Client

    client, rng = Client(url, 120, sleeps=True, patience_s=0), random.Random(1)
    asked = [
        Request(str(i), [rng.randrange(3, 150000) for _ in range(200)], [i]) for i in range(64)
    ]

    def sample() -> list[list[int]]:
        made = client.generate(asked, Sampling(max_tokens=64, temperature=1.0), lambda done: None)
        return [list(group[0].ids) for group in made]

    client.load(policy)
    said = sample()
    for _ in range(3):
        away, _ = timed(client.close)
        left = read_memory() - empty
        back, _ = timed(lambda: client.load(policy))
        seconds, again = timed(sample)
        print(
            f"   away in {away:.2f} s, leaves {left:.2f} GiB; back with its weights in {back:.2f} s,",
            end=" ",
        )
        print(
            f"{read_memory() - empty:.1f} GiB; {sum(map(len, again)) / seconds:,.0f} tokens/s",
            flush=True,
        )
        assert again == said, "it says other tokens than before"
    print(
        f"   all weights changed in place: {timed(lambda: client.load(policy, force=True))[0]:.2f} s",
        flush=True,
    )


CHECKS: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "loop": check_loop,
    "bits": check_bits,
    "colocate": check_colocate,
    "suspend": check_suspend,
    "trainer": check_trainer,
    "server": check_server,
}

if __name__ == "__main__":
    sys.exit(main())
