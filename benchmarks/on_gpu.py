"""What a CPU cannot show, on one NVIDIA GPU: a list of short steps that goes on where it was cut.

    python -m benchmarks.on_gpu --results FILE --model SMOLLM2 [STEP ...]
    python -m benchmarks.on_gpu --results FILE --model SMOLLM2 --small    a rehearsal, also on a CPU

SMOLLM2 is the directory that `python -m tests.pretrained` writes. Steps come in the order of their
value. Each is a process of its own, which is ended with all it started when its time is over. Figures
are appended to FILE, in JSON Lines, as they are had. A step that FILE says is done is left out, so
that the next lease goes on from the file of the last. `benchmarks/gpu_steps` has the steps.

Steps that need vLLM are left out where it is not installed. A machine without a registry needs the
packages of tuneloop that it lacks, in the steps' PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_steps import records


@dataclass(frozen=True)
class Entry:
    """An entry of the list: what a step runs, how long it may take, and the package it needs."""

    name: str
    function: str
    limit_s: int = 90
    package: str = ""


STEPS = (
    Entry("device", "device:run", 60),
    Entry("varlen", "varlen:run", 60),
    Entry("canary", "canary:run"),
    Entry("training", "training:run"),
    Entry("loop", "loop:run", 240),
    Entry("publish", "publish:run"),
    Entry("bits", "bits:run"),
    Entry("sleep", "sleep:run"),
    Entry("compiled", "training:run_compiled", 180),
    Entry("profile", "training:run_profile", 60),
    Entry("parts", "training:run_parts", 60),
    Entry("dense", "training:run_dense", 60),
    Entry("vllm-loop", "vllm:run_loop", package="vllm"),
    Entry("vllm-bits", "vllm:run_bits", package="vllm"),
    Entry("vllm-colocate", "vllm:run_colocate", package="vllm"),
    Entry("vllm-suspend", "vllm:run_suspend", package="vllm"),
    Entry("vllm-server", "vllm:run_server", package="vllm"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [entry.name for entry in STEPS]
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(names)}")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--until", type=float, default=3600, help="seconds in all")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if unknown := {*flags.steps} - {*names}:
        parser.error(f"no such step: {', '.join(sorted(unknown))}")
    if flags.child:
        return run_child(flags)
    end = time.monotonic() + flags.until
    finished = {record.get("done") for record in records.read_records(flags.results)}
    failures = 0
    for entry in STEPS:
        chosen = not flags.steps or entry.name in flags.steps
        if not chosen or entry.name in finished:
            continue
        if entry.package and importlib.util.find_spec(entry.package) is None:
            continue
        left = end - time.monotonic()
        if left < 20:
            break
        failures += run_entry(entry, flags, min(entry.limit_s, left))
    return 1 if failures else 0


def run_entry(entry: Entry, flags: argparse.Namespace, limit_s: float) -> bool:
    """Run a step in a process of its own, write down how it ended, and return whether it failed."""
    line = [sys.executable, "-m", "benchmarks.on_gpu", "--child", entry.name]
    line += ["--results", str(flags.results), "--model", str(flags.model)]
    if flags.small:
        line.append("--small")
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            line, text=True, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = child.wait(None if flags.small else limit_s)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        log.seek(0)
        output = log.read()
    print(output[-6000:], flush=True)
    outcome = {"step": entry.name, "code": code, "seconds": round(time.monotonic() - start, 1)}
    if code == 0:
        records.append_record(flags.results, {"done": entry.name, **outcome})
    else:
        records.append_record(
            flags.results, {"failed": entry.name, **outcome, "log": output[-3000:]}
        )
    return code != 0


def run_child(flags: argparse.Namespace) -> int:
    (entry,) = (entry for entry in STEPS if entry.name == flags.child)
    module, function = entry.function.split(":")
    call = getattr(importlib.import_module(f"benchmarks.gpu_steps.{module}"), function)
    with tempfile.TemporaryDirectory() as work:
        call(
            records.Step(entry.name, flags.results, Path(work), flags.model.absolute(), flags.small)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
