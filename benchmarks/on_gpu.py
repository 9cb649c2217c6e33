"""What a CPU cannot show, on one NVIDIA GPU: whole loops, a server that gives the GPU back, and a trainer that does.

    python benchmarks/on_gpu.py [loop bits colocate suspend trainer server ...] [--layers 28] [--hidden 1024]

`loop`: the pipeline sft_then_grpo with real vLLM, both on the GPU.
`bits`: two deterministic runs of it, one of them killed in its second iteration and resumed; the digests of all that
    they committed are compared.
`colocate`, `suspend`: a run whose server sleeps, or is suspended by NVIDIA's cuda-checkpoint, between rollouts.
`trainer`: SFT steps of a Qwen3 of `--layers` and `--hidden` in bfloat16: tokens a second, the share of the device's
    peak, a sleep in host memory and the way back, and whether the next step is the one of a trainer that never slept.
`server`: vLLM with such a model: what sleep mode, a suspension and both leave on the GPU, their seconds, and whether
    it says the same afterwards; a version changed in place.

Every check is a process of its own; the rest goes on where one fails. Memory is that of the whole GPU (nvidia-smi).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHORT = {"max_model_len": 256, "enforce_eager": True, "gpu_memory_utilization": 0.15}
QUICK = {"loop.target_reward": 2, "loop.iterations": 3}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}; default: all")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.here:
        with tempfile.TemporaryDirectory() as work:
            CHECKS[flags.here](Path(work), flags)
        return 0
    failed = []
    for name in flags.checks or CHECKS:
        began = time.perf_counter()
        same = [f"--{each}={getattr(flags, each)}" for each in ("layers", "hidden", "steps")]
        code = subprocess.run([sys.executable, __file__, "--here", name, *same]).returncode
        failed += [name] if code else []
        print(f"{name}: {'FAILED' if code else 'done'}, {time.perf_counter() - began:.0f} s\n", flush=True)
    return 1 if failed else 0


def read_memory() -> float:
    """GiB in use on the GPU, by all processes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]) / 1024


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_run(store: Path, run: str, **settings: Any) -> subprocess.Popen[str]:
    args = {**SHORT, **settings.pop("args", {})}
    given = {**settings, "engine.args": json.dumps(args), "engine.port": find_port()}
    line = [sys.executable, "-m", "tuneloop.cli", "run", "sft_then_grpo", "--run", run, "--store", str(store)]
    line += ["--no-track", *(f"--set={name.replace('__', '.')}={value}" for name, value in given.items())]
    return subprocess.Popen(line, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


def finish(child: subprocess.Popen[str]) -> str:
    said, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"{said[-6000:]}\nexit code {child.returncode}")
    return said


def describe(store: Path, run: str) -> None:
    """Seconds and tokens a second of every iteration's rollout and update."""
    from tuneloop.core.artifacts import Artifact

    for place in sorted((store / run / "iterations").iterdir(), key=lambda p: int(p.name)):
        made, update = (Artifact(str(place / stage)).manifest for stage in ("rollout", "policy-update"))
        sampled, trained = (stage.timings for stage in (made, update))
        print(f"iteration {place.name}, on {update.notes['device']}, {json.dumps(made.notes)}:", end=" ")
        print(f"rollout {sampled['total']:.2f} s, {sampled['generated_tokens_per_s']:,.0f} tokens/s,", end=" ")
        print(f"update {trained['total']:.2f} s, {trained['tokens_per_s']:,.0f} tokens/s")


def digests(store: Path, run: str) -> dict[str, str]:
    from tuneloop.core.artifacts import Artifact

    found = sorted(m for m in (store / run).rglob("manifest.json") if m.parent.name != "state")
    return {str(m.parent.relative_to(store / run)): Artifact(str(m.parent)).manifest.digest for m in found}


def check_loop(work: Path, flags: argparse.Namespace) -> None:
    began = time.perf_counter()
    said = finish(start_run(work, "loop", **{"loop.iterations": 40}))
    print(said[-2500:])
    print(f"the whole pipeline: {time.perf_counter() - began:.1f} s")
    describe(work, "loop")


def check_bits(work: Path, flags: argparse.Namespace) -> None:
    settings = {**QUICK, "engine.deterministic": True, "loop.iterations_per_pod": 0}
    calm, killed = start_run(work, "calm", **settings), start_run(work, "killed", **settings)
    first = work / "killed" / "iterations" / "1" / "policy-update" / "manifest.json"
    while not first.exists():
        assert killed.poll() is None, killed.communicate()[0][-3000:]
        time.sleep(0.05)
    time.sleep(0.7)  # somewhere in the second iteration
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    again = [sys.executable, "-m", "tuneloop.cli", "resume", "killed", "--store", str(work), "--no-track"]
    print(finish(subprocess.Popen(again, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))[-600:])
    finish(calm)
    describe(work, "calm")
    one, two = digests(work, "calm"), digests(work, "killed")
    different = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    print(f"killed and resumed: {len(one)} artifacts, {len(different)} of them different: {different}")
    if different:
        raise SystemExit(1)


def watch_run(work: Path, run: str, settings: dict[str, Any]) -> None:
    """Run to the end, and print the GPU's memory in use, once a stage."""
    child = start_run(work, run, **QUICK, **{"loop.iterations_per_pod": 0}, **settings)
    seen: list[float] = []
    while child.poll() is None:
        seen.append(read_memory())
        time.sleep(0.1)
    said = finish(child)
    print(said[-1200:])
    print("GiB in use, ten times a second:", " ".join(f"{each:.1f}" for each in seen[::5]))
    describe(work, run)


def check_colocate(work: Path, flags: argparse.Namespace) -> None:
    watch_run(work, "colocate", {"engine.colocate": True})


def check_suspend(work: Path, flags: argparse.Namespace) -> None:
    watch_run(work, "suspend", {"engine.snapshot": True, "args": {"kv_cache_memory_bytes": 4 << 30}})


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


def draw_documents(count: int, seed: int = 0) -> list[Any]:
    from tuneloop.formats.token_files import Document

    rng = random.Random(seed)
    lengths = [min(1024, max(32, round(rng.lognormvariate(5.5, 0.6)))) for _ in range(count)]
    return [Document([rng.randrange(3, 150000) for _ in range(n)], [t >= n // 3 for t in range(n)]) for n in lengths]


def check_trainer(work: Path, flags: argparse.Namespace) -> None:
    import torch

    from tuneloop.core.component import Params, Stage
    from tuneloop.stages.sft import train_step
    from tuneloop.training.epochs import prepare_step
    from tuneloop.training.fsdp.ranks import Ranks
    from tuneloop.training.fsdp.trainer import Trainer
    from tuneloop.training.options import Optimization

    model, batch = make_model(work / "model", flags), 64
    stage, ranks = Stage("sft", Params(), Path(os.devnull), "", ""), Ranks("cuda")
    adam = Optimization(1e-5, "constant", 0, 0, 0.0, 0.9, 0.95, 1.0)
    documents = draw_documents(batch * 4)

    def step(trainer: Trainer, k: int) -> int:
        chosen = range(k % 4 * batch, (k % 4 + 1) * batch)
        prepared = prepare_step(trainer, lambda i: [documents[i]], chosen, 32)
        train_step(stage, trainer, prepared)
        return prepared.tokens

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        torch.cuda.synchronize()
        began = time.perf_counter()
        found = work()
        torch.cuda.synchronize()
        return time.perf_counter() - began, found

    slept, other = (Trainer(model, ranks, adam, dtype="bfloat16", max_length=4096) for _ in range(2))
    print(slept.chosen(), f"{sum(p.numel() for p in slept.model.parameters()):,} parameters")
    rates = []
    for k in range(flags.steps):
        seconds, tokens = timed(lambda k=k: step(slept, k))  # type: ignore[misc]
        rates.append(tokens / seconds)
    rate = sorted(rates[2:])[len(rates[2:]) // 2]
    print(f"{tokens:,} tokens a step, {rate:,.0f} tokens/s (median), {json.dumps(slept.efficiency(rate))}")
    for k in range(flags.steps):
        step(other, k)
    equal = slept.compute_state_digest() == other.compute_state_digest()
    print(f"two trainers, the same steps, the same bits: {equal}")
    state = sum(t.numel() * t.element_size() for t in slept._state().values())
    for turn in range(2):
        before = torch.cuda.memory_allocated()
        away, _ = timed(slept.sleep)
        left = torch.cuda.memory_allocated()
        back, _ = timed(slept.wake)
        moved = (before - left) / 1e9
        print(
            f"sleep {turn}: {moved:.2f} GB (state {state / 1e9:.2f}) left the GPU in {away:.2f} s ({moved / away:.1f} "
            f"GB/s), and came back in {back:.2f} s ({moved / back:.1f} GB/s)"
        )
    for trainer in (slept, other):
        step(trainer, 1)
    print(f"the step after it, the same bits: {slept.compute_state_digest() == other.compute_state_digest()}")
    seconds, _ = timed(lambda: slept.save(work / "state"))
    print(f"saved in {seconds:.2f} s; digest of the state in {timed(slept.compute_state_digest)[0]:.2f} s")


def check_server(work: Path, flags: argparse.Namespace) -> None:
    from tuneloop.core.artifacts import Artifact
    from tuneloop.formats.rollouts import Request
    from tuneloop.inference.engines import Sampling
    from tuneloop.inference.engines._client import Client
    from tuneloop.stages.base_model import base_model
    from tuneloop.stages.data_prep import data_prep

    source = make_model(work / "model", flags)
    data_prep(out=f"{work}/prompts", train=16, eval=8, sft=64)
    base_model(out=f"{work}/tiny", prompts=f"{work}/prompts")  # for its tokenizer
    for file in Artifact(f"{work}/tiny").part("model").iterdir():
        if not (source / file.name).exists() and file.suffix != ".safetensors":
            (source / file.name).write_bytes(file.read_bytes())
    began = time.perf_counter()
    base_model(out=f"{work}/policy", model=str(source))
    policy = Artifact(f"{work}/policy")
    print(f"base_model: {time.perf_counter() - began:.1f} s, {policy.manifest.results}")
    rng = random.Random(1)
    asked = [Request(str(i), [rng.randrange(3, 150000) for _ in range(200)], [i]) for i in range(64)]
    sampling = Sampling(max_tokens=64, temperature=1.0)
    args = {
        "max_model_len": 1024,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 8 << 30,
        "gpu_memory_utilization": 0.5,
    }
    ways = ({"enable_sleep_mode": True}, {"snapshot": True}, {"snapshot": True, "enable_sleep_mode": True})
    for way in ways:
        port, empty, began = find_port(), read_memory(), time.perf_counter()
        line = [sys.executable, "-m", "tuneloop.inference.server", "--policy", policy.ref, "--host", "127.0.0.1"]
        line += ["--port", str(port), "--engine-args", json.dumps({**args, **way})]
        process = subprocess.Popen(line)
        client = Client(f"http://127.0.0.1:{port}", 120, sleeps=True, patience_s=0)
        try:
            wait_for_server(process, port)
            started = time.perf_counter() - began
            client.load(policy)
            print(f"{way}: started in {started:.1f} s, {read_memory() - empty:.1f} GiB")
            said = client.generate(asked, sampling, lambda done: None)
            for _ in range(3):
                began = time.perf_counter()
                client.close()
                away, left = time.perf_counter() - began, read_memory() - empty
                began = time.perf_counter()
                client.load(policy)
                back = time.perf_counter() - began
                began = time.perf_counter()
                again = client.generate(asked, sampling, lambda done: None)
                rate = sum(len(c.ids) for group in again for c in group) / (time.perf_counter() - began)
                same = [group[0].ids for group in again] == [group[0].ids for group in said]
                print(
                    f"   away in {away:.2f} s, leaves {left:.2f} GiB; back with its weights in {back:.2f} s, "
                    f"{read_memory() - empty:.1f} GiB; same tokens: {same}, {rate:,.0f} tokens/s",
                    flush=True,
                )
            began = time.perf_counter()
            client.load(policy, force=True)
            print(f"   all weights changed in place: {time.perf_counter() - began:.2f} s", flush=True)
        except (Exception, SystemExit) as error:
            print(f"   FAILED: {type(error).__name__}: {error}", flush=True)
        finally:
            process.kill()
            process.wait()


def wait_for_server(process: subprocess.Popen[bytes], port: int) -> None:
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}")
        time.sleep(0.1)


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
