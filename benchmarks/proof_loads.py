"""Count how often right weights are refused, and how often stale ones pass, on a pretrained model.

Versions differ by one step of 1e-6 on every parameter, rounded to bfloat16. Each load changes the
weights of the engine and proves them, as the stages `rollout` and `evaluate` do. After it the
engine is given the version before under the same label, in the ways in which that may happen:

ignored      a server acknowledges the load, and the engine keeps the tensors that it had
mislabelled  a server loads the files of the version before, and says that it has the new ones
in process   the engine `transformers` holds the version before, and says that it has the new one

Beside it stands what the log-probabilities of the canary alone would have said, as they have to
for an endpoint of another make.

    python benchmarks/proof_loads.py MODEL [--loads 200] [--stale 200] [--engines vllm transformers]
"""

import argparse
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import Retryable
from tuneloop.formats.canary import FILE
from tuneloop.inference.engines import Engine
from tuneloop.inference.engines._client import Client
from tuneloop.inference.proof import (
    Proof,
    StaleWeights,
    WrongWeights,
    check_nearest_version,
    prove_weights,
)

STEP = 1e-6
VERSIONS = 6
LIMIT_S = 300.0
ARGS = {"max_model_len": 256, "dtype": "bfloat16"}
FAULT = "TUNELOOP_PROOF_LOADS_FAULT"
"""Names the file that switches a fault on: it holds ``ignored``, or the reference that is loaded."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a directory of a pretrained model")
    parser.add_argument("--loads", type=int, default=200)
    parser.add_argument("--stale", type=int, default=200, help="how many of them also go stale")
    parser.add_argument("--engines", nargs="+", default=["vllm", "transformers"])
    parser.add_argument("--work", type=Path, help="keep the versions here")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = flags.work or Path(scratch)
        versions = prepare_versions(flags.model, work)
        fault = Path(scratch) / "fault"
        for name in flags.engines:
            with open_subject(name, versions[0], fault) as subject:
                result = measure(name, subject, versions, flags.loads, flags.stale)
            print(json.dumps(result), flush=True)


def prepare_versions(model: Path, work: Path, count: int = VERSIONS) -> list[Artifact]:
    """Commit versions whose float32 parameters differ by `STEP`, saved in bfloat16."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from tuneloop.formats.canary import make_canary
    from tuneloop.inference.proof import read_canary
    from tuneloop.stages.base_model import base_model

    urls = [work / f"v{version}" for version in range(count)]
    if not urls[-1].exists():
        base_model(out=str(urls[0]), model=str(model), save_dtype="bfloat16")
        first = Artifact(str(urls[0]))
        parameters = load_file(first.part("model") / "model.safetensors")
        masters = {name: value.float() for name, value in parameters.items()}
        generator = torch.Generator().manual_seed(0)
        for version, url in enumerate(urls[1:], start=1):
            before = Artifact(str(urls[version - 1]))
            draft = Draft(str(url))
            shutil.copytree(before.part("model"), draft.path / "model")
            for value in masters.values():
                signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8)
                value.add_(signs.float().mul_(2).sub_(1), alpha=STEP)
            saved = {name: value.bfloat16() for name, value in masters.items()}
            path = draft.path / "model" / "model.safetensors"
            path.unlink()
            save_file(saved, path, metadata={"format": "pt"})
            written = AutoModelForCausalLM.from_pretrained(draft.path / "model", dtype="auto")
            previous = read_canary(before)
            canary = make_canary(
                written, previous.ids, previous.text, version=version, previous=previous
            )
            canary.write(draft.path / FILE)
            draft.commit(
                stage="policy_update", params={"learning_rate": STEP}, facts={"version": version}
            )
    return [Artifact(str(url)) for url in urls]


@dataclass
class ServerFaults:
    """Switches the faults of `serve_with_faults`, one after the other."""

    file: Path
    kinds: Iterator[str] = field(
        default_factory=lambda: itertools.cycle(["ignored", "mislabelled"])
    )

    @contextmanager
    def switched_on(self, before: Artifact) -> Iterator[str]:
        kind = next(self.kinds)
        self.file.write_text("ignored" if kind == "ignored" else before.ref)
        try:
            yield kind
        finally:
            self.file.unlink()


@dataclass
class InProcessFault:
    """Makes an engine of this process say that it has a version that it has not."""

    engine: Any

    @contextmanager
    def switched_on(self, before: Artifact) -> Iterator[str]:
        load = self.engine.load

        def mislabel(policy: Artifact, *, force: bool = False) -> None:
            load(before, force=True)
            self.engine.version = policy.manifest.facts["version"]
            self.engine.digest = policy.manifest.digest

        self.engine.load = mislabel
        try:
            yield "in process"
        finally:
            self.engine.load = load


@dataclass
class Subject:
    """An engine, and the way to make it stale."""

    engine: Engine
    fault: ServerFaults | InProcessFault


@contextmanager
def open_subject(name: str, policy: Artifact, fault: Path) -> Iterator[Subject]:
    """Open a server of vLLM, or the engine `transformers` in this process."""
    if name == "vllm":
        with serving(policy, fault) as url:
            yield Subject(Client(url, LIMIT_S, patience_s=0.0), ServerFaults(fault))
        return
    from tuneloop.inference.engines.transformers import Transformers

    engine = Transformers(dtype="bfloat16")
    yield Subject(engine, InProcessFault(engine))


def measure(
    name: str, subject: Subject, versions: list[Artifact], loads: int, stale: int
) -> dict[str, Any]:
    """Load and prove versions in turn; return what was refused, and how long it took."""
    # To and fro, so that neighbours follow each other.
    last = len(versions) - 1
    turn = itertools.cycle([*range(1, last), *range(last, 1, -1)])
    counts: Counter[str] = Counter()
    seconds: dict[str, list[float]] = {"load": [], "proof": []}
    separations: list[float] = []
    ratios: list[float] = []
    for number in range(loads):
        version = next(turn)
        policy = versions[version]
        proof = prove_right(subject.engine, policy, seconds, counts)
        if proof is not None:
            separations.append(proof.distances["separation"])
            ratios.append(proof.distances["mean_abs_diff"] / proof.distances["noise"])
            count_verdict(proof, version, counts)
        if number < stale:
            prove_stale(subject, versions[version - 1], policy, counts)
    return {
        "engine": name,
        "loads": loads,
        "stale": min(loads, stale),
        "counts": dict(sorted(counts.items())),
        "load_s": round(statistics.median(seconds["load"]), 2),
        "proof_s": round(statistics.median(seconds["proof"]), 2),
        "separation": [round(min(separations), 3), round(max(separations), 3)],
        "distance_in_noises": [round(min(ratios), 2), round(max(ratios), 2)],
    }


def prove_right(
    engine: Engine, policy: Artifact, seconds: dict[str, list[float]], counts: Counter[str]
) -> Proof | None:
    begun = time.perf_counter()
    engine.load(policy)
    loaded = time.perf_counter()
    try:
        proof = prove_weights(engine, policy)
    except StaleWeights as error:
        counts["right, refused"] += 1
        print(error, file=sys.stderr, flush=True)
        return None
    seconds["load"].append(loaded - begun)
    seconds["proof"].append(time.perf_counter() - loaded)
    counts["right, accepted by " + ("tensors" if proof.is_by_tensors else "log-probabilities")] += 1
    return proof


def prove_stale(subject: Subject, before: Artifact, policy: Artifact, counts: Counter[str]) -> None:
    """Have the engine serve `before` as `policy`. What follows has to be a refusal."""
    subject.engine.load(before)
    with subject.fault.switched_on(before) as kind:
        try:
            subject.engine.load(policy)
            prove_weights(subject.engine, policy)
        except (StaleWeights, Retryable):
            counts[f"stale ({kind}), refused"] += 1
        else:
            counts[f"stale ({kind}), accepted"] += 1


def count_verdict(proof: Proof, version: int, counts: Counter[str]) -> None:
    """Count what an endpoint of another make would show with these log-probabilities."""
    foreign = replace(proof, tensors=None)
    try:
        check_nearest_version("endpoint", version, foreign)
    except WrongWeights:
        counts["right, but log-probabilities refuse it"] += 1
    if not foreign.tells_versions_apart:
        counts["log-probabilities cannot tell"] += 1


@contextmanager
def serving(policy: Artifact, fault: Path) -> Iterator[str]:
    """Run a server that has the faults, which `fault` switches on; yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, "--serve", "--policy", policy.ref, "--port", port]
    command += ["--engine-args", json.dumps(ARGS)]
    process = subprocess.Popen(command, env={**os.environ, FAULT: str(fault)})
    url = f"http://127.0.0.1:{port}"
    try:
        Client(url, LIMIT_S, patience_s=LIMIT_S).load(policy)
        yield url
    finally:
        process.terminate()
        process.wait()


def serve_with_faults(argv: list[str]) -> int:
    """Run our server, with a change of weights that goes wrong while the file `FAULT` exists."""
    from tuneloop.inference import http_api, server
    from tuneloop.inference.engines import vllm

    file = Path(os.environ[FAULT])
    reload = vllm.reload_weights
    fetch = http_api._fetch

    def reload_unless_ignored(engine: Any, model: Path) -> None:
        if not (file.exists() and file.read_text() == "ignored"):
            reload(engine, model)

    def fetch_mislabelled(ref: str) -> Any:
        policy = fetch(ref)
        fault = file.read_text() if file.exists() else ""
        if fault in ("", "ignored"):
            return policy
        return SimpleNamespace(part=Artifact(fault).part, manifest=policy.manifest)

    vllm.reload_weights = reload_unless_ignored
    http_api._fetch = fetch_mislabelled
    return server.main(argv)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        code = serve_with_faults([word for word in sys.argv[1:] if word != "--serve"])
        sys.stdout.flush()
        os._exit(code)
    main()
