"""Seconds that the commands take that read a run, for runs of 1,000 and of 4,000 iterations.

A run is written here as the stages leave it: a manifest for each of rollout, reward and policy update, of the size and
with the fields of a real one, its rows of metrics and scores, an empty vocabulary for the rest, and the
journal of the local executor.
Every command runs in a process of its own. The first row of a command reads a run that nobody has read before, the
second one the same run again.

    python benchmarks/run_index.py [--iterations 1000 4000] [--store s3://bucket/prefix] [--work DIRECTORY]
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from tuneloop.core.artifacts import File, Manifest, dump_checked_json
from tuneloop.core.store import Store, local_path
from tuneloop.local.journal import Journal, Node, Workflow
from tuneloop.runs.records import Record

COMMANDS = (("status",), ("report",), ("weights", "ls"))
MODEL = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
OBJECTIVE = {f"option_{i}": 0.25 * i for i in range(18)}
VOCABULARY = b'{"model": {"vocab": {}}, "decoder": null, "added_tokens": []}'
STAGES = {
    "rollout": ("sampler", ("rollouts.parquet",)),
    "reward": ("scorer", ("rewards.parquet",)),
    "policy_update": (
        "trainer",
        (
            *(f"model/{n}" for n in (*MODEL, "model.safetensors")),
            "trainer/rank-00000.safetensors",
            "canary.json",
        ),
    ),
}
BEGUN = 1.7e9


def write_run(url: str, iterations: int) -> None:
    """Write a run of `iterations` below `url`; of files the names, and the bytes of those that readers open."""
    policy = _commit(url, "base-model", "base_model", None, (), {"version": 0}, 0.0)
    policy = _commit(
        url, "sft", "sft", "trainer", STAGES["policy_update"][1], {"version": 1}, 1.0, policy=policy
    )
    _commit(url, "evaluate-before", "evaluate", "evaluator", (), {}, 2.0, policy=policy)
    for i in range(1, iterations + 1):
        at, when = f"iterations/{i}", 10.0 * i
        sampled = {
            "version": i,
            "staleness": {"max": 0, "mean": 0.0},
            "sampling": {"temperature": 1.0},
        }
        made: dict[str, str] = {}
        for offset, (stage, (role, files)) in enumerate(STAGES.items()):
            inputs = {
                "rollout": {"policy": policy},
                "reward": {"rollouts": made.get("rollout", "")},
            }.get(stage, {"policy": policy, "rewards": made.get("reward", "")})
            facts: dict[str, Any] = (
                sampled if stage != "policy_update" else {"version": i + 1, "objective": OBJECTIVE}
            )
            key = f"{at}/{stage.replace('_', '-')}"
            made[stage] = _commit(url, key, stage, role, files, facts, when + 3 * offset, **inputs)
        policy = made["policy_update"]
    _commit(
        url,
        "evaluate-after",
        "evaluate",
        "evaluator",
        (),
        {},
        10.0 * iterations + 20,
        policy=policy,
    )
    _commit(
        url,
        "export",
        "export",
        None,
        ("model.safetensors",),
        {},
        10.0 * iterations + 30,
        policy=policy,
    )


def _commit(
    url: str,
    key: str,
    stage: str,
    role: Any,
    files: tuple[str, ...],
    facts: Any,
    at: float,
    **inputs: str,
) -> str:
    rows = {
        "step": 1,
        "loss": at / 7,
        "kl": 0.01,
        "entropy": 1 / (1 + at),
        "grad_norm": 0.5,
        "tokens": 756,
        "used": 1,
    }
    metrics = json.dumps(rows).encode()
    contents = {name: _make_scores() if name.endswith(".parquet") else VOCABULARY for name in files}
    contents["metrics.jsonl"] = metrics
    listed = {name: _describe(data) for name, data in contents.items()}
    reward = {"mean_reward": 1 - 1 / (1 + at)} if stage in ("reward", "evaluate") else {}
    root = f"data-{xxhash.xxh3_64_hexdigest(key.encode())}"
    manifest = Manifest(
        stage=stage, role=role, root=root, files=listed, inputs=inputs, facts=facts,
        kind="checkpoint" if role == "trainer" else stage,
        params={"temperature": 1.0, **{f"parameter_{i}": i for i in range(15)}},
        results={"loss": 0.5, **reward}, timings={"load": 0.1, "tokens_per_s": 3466.4, "total": 2.5},
        provenance={"started": BEGUN + at, "device": "cpu (x86_64)", "code": "bd9f6b858cf8d516", "python": "3.11.7",
                    "packages": {"torch": "2.13.0", "transformers": "5.19.0", "datasets": "5.2.0"}, "host": "vm"},
    )  # fmt: skip
    manifest = manifest.model_copy(update={"digest": manifest.compute_digest()})
    put = _put_file if (local := local_path(url)) else Store(url).put
    for name, data in contents.items():
        put(f"{local}/{key}/{root}/{name}" if local else f"{key}/{root}/{name}", data)
    told = dump_checked_json(json.loads(manifest.model_dump_json()), "manifest.json")
    put(f"{local}/{key}/manifest.json" if local else f"{key}/manifest.json", told)
    return f"{url}/{key}@{manifest.digest}"


@functools.cache
def _make_scores() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"score": [float(i % 2) for i in range(128)]}), sink)
    return sink.getvalue().to_pybytes()


def _describe(data: bytes) -> File:
    digests = {
        "digest": xxhash.xxh3_128_hexdigest(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    return File(size=len(data), **digests)


def _put_file(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def write_journal(directory: Path, url: str, iterations: int) -> None:
    """Write the record and the journal of such a run: every node with the phases that the executor passes through."""
    store, _, name = url.rpartition("/")
    directory.mkdir(parents=True, exist_ok=True)
    record = Record(run=name, pipeline="grpo", path="grpo.py", config={}, store=store)
    (directory / "run.json").write_bytes(
        dump_checked_json(record.model_dump(mode="json"), f"{record.run}/run.json")
    )
    journal = Journal(directory)
    given = {"run": name, "store": store, "iterations": str(iterations)}
    journal.write(Workflow("grpo", started=BEGUN, parameters=given))
    for node in _nodes(url, iterations):
        for phase in ("Pending", "Running", "Succeeded"):
            node.phase = phase
            journal.write(node)
    journal.write(
        Workflow(
            "grpo", "Succeeded", started=BEGUN, finished=BEGUN + 10.0 * iterations, parameters=given
        )
    )
    journal.close()


def _nodes(url: str, iterations: int) -> Iterator[Node]:
    above = "grpo"
    for i in range(1, iterations + 1):
        loop = f"next-{i}"
        yield Node(loop, f"{above}.next"[:200], "next", "loop", "DAG", parent=above)
        for stage in STAGES:
            name, at = stage.replace("_", "-"), f"{url}/iterations/{i}/{stage.replace('_', '-')}"
            inputs = {
                "policy": f"{url}/iterations/{i - 1}/policy-update@xxh3-128:{i:032x}",
                name: at,
            }
            yield Node(f"{name}-{i}", f"grpo.loop.{name}", name, name, "Retry", parent=loop)
            yield Node(
                f"{name}-0-{i}", f"grpo.loop.{name}(0)", f"{name}(0)", name, "Pod", parent=f"{name}-{i}",
                started=BEGUN, finished=BEGUN + 1, exit_code=0, log=f"logs/{name}-0-{i}.log", inputs=inputs,
                outputs={name: f"{at}@xxh3-128:{i:032x}", "loss": "0.5"},
            )  # fmt: skip
        above = loop


def time_command(*words: str, cwd: str) -> tuple[float, float]:
    """Run a command of tuneloop; return its wall seconds and its CPU seconds, user and system."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "tuneloop.cli", *words],
        check=True,
        cwd=cwd,
        stdout=subprocess.DEVNULL,
    )
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--store", help="default: a temporary directory")
    parser.add_argument("--work", help="keep the runs here, and take those that are here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = given.work or temporary
        print(f"{'command':<12} {'iterations':>10} {'read':>7} {'wall s':>8} {'CPU s':>8}")
        for words in (("--help",), ("plan", "sft_then_grpo")):
            print(
                f"{words[0]:<12} {'':>10} {'':>7} {'{:>8.2f} {:>8.2f}'.format(*time_command(*words, cwd=work))}"
            )
        for count in given.iterations:
            store = given.store or f"{work}/runs"
            url = f"{store if given.store else 'file://' + store}/n{count}"
            if not Path(work, "runs", f"n{count}").exists():
                write_run(url, count)
                write_journal(Path(work, "runs", f"n{count}"), url, count)
            for words in COMMANDS:
                Store(url).delete("index.zst")
                for read in ("first", "again"):
                    took = time_command(*words, f"n{count}", "--store", store, cwd=work)
                    print(
                        f"{' '.join(words):<12} {count:>10,} {read:>7} {took[0]:>8.2f} {took[1]:>8.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
