"""From a published version to a served one: a real vLLM server that follows the demo's model through AdamW steps.

    python benchmarks/weights_pull.py [--versions 10] [--lr 1e-5] [--poll-interval 0.05]

The demo's tiny-qwen3 in bf16, each version a step of AdamW (0.9/0.95, fresh normal gradients) on float32 masters. Of
each: what publishing took; from there until it is served, and of that what assembling it beside the running engine
took, and the pause with its parts, in which the engine changes in place and is read back. Medians, with the spread; the
first version, which is full, is left out. After the last, everything that the engine holds is compared with the export.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from tuneloop.core.artifacts import Artifact
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.weights.publish import publish_version

ARGS = {
    "max_model_len": 256,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 28,
    "dtype": "bfloat16",
}


class Trained:
    """The model directory, and the step that follows."""

    def __init__(self, model: Path, lr: float) -> None:
        self.model = model
        self.masters = {
            n: torch.nn.Parameter(t.float())
            for n, t in load_file(model / "model.safetensors").items()
        }
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self) -> None:
        for master in self.masters.values():
            master.grad = torch.randn_like(master)
        self.optimizer.step()
        self.save()

    def save(self) -> None:
        tensors = {
            name: master.detach().to(torch.bfloat16) for name, master in self.masters.items()
        }
        save_file(tensors, self.model / "model.safetensors", metadata={"format": "pt"})


def ask(url: str, path: str, **about: Any) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url + path, **about), timeout=60) as reply:
        return json.load(reply)


def serve(root: str, poll_s: float) -> tuple[subprocess.Popen[str], str]:
    line = [
        sys.executable,
        "-m",
        "tuneloop.inference.server",
        "--weights",
        root,
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    line += ["--poll-interval", str(poll_s), "--engine-args", json.dumps(ARGS)]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    for said in process.stderr:
        if "serve: version" in said:
            return process, said.split()[-1]
    raise RuntimeError("the server ended")


def follow(root: str, url: str, trained: Trained, version: int) -> dict[str, float]:
    """Publish the next version and wait until it is served."""
    trained.step()
    clock = time.perf_counter()
    done = publish_version(root, version, trained.model)
    took, published = time.perf_counter() - clock, time.time()
    while ask(url, "/version")["pulled"].get("version") != version:
        time.sleep(0.01)
    pulled = ask(url, "/version")["pulled"]
    return {
        "publish": took,
        "published to served": pulled["served_at"] - published,
        "  fetch": pulled["fetch_s"],
        "  apply + verify": pulled["apply_s"],
        "  drain (what runs finishes)": pulled["drain_s"],
        "  pause": pulled["pause_s"],
        "    change in place, drop the cache": pulled["change_s"],
        "    read back": pulled["check_s"],
        "bytes": (done.delta_bytes or 0) / done.full_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--poll-interval", type=float, default=0.05)
    flags = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as work:
        data_prep(out=f"{work}/prompts", train=64, eval=8, sft=64)
        base_model(out=f"{work}/policy", prompts=f"{work}/prompts")
        model = Path(shutil.copytree(Artifact(f"{work}/policy").path / "model", f"{work}/model"))
        trained, root = Trained(model, flags.lr), f"{work}/weights"
        trained.save()
        publish_version(root, 0, model)
        process, url = serve(root, flags.poll_interval)
        try:
            taken = [
                follow(root, url, trained, version) for version in range(1, flags.versions + 1)
            ]
            held = ask(url, "/verify", method="POST")
        finally:
            process.kill()
            process.wait()
    table = Table(
        "of each version",
        "median",
        "least",
        "most",
        title=f"{flags.versions} versions, {ARGS['dtype']}, CPU",
    )
    for name in taken[0]:
        values = [about[name] for about in taken]
        form = "{:.2%}" if name == "bytes" else "{:.1f} ms"
        scale = 1 if name == "bytes" else 1e3
        table.add_row(
            name, *(form.format(scale * f(values)) for f in (statistics.median, min, max))
        )
    Console(width=120).print(table)
    print(
        f"{held['identical']} of {held['tensors']} tensors identical in the engine after the last"
    )


if __name__ == "__main__":
    main()
