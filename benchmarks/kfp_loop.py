"""A long loop on Kubeflow Pipelines: what a run of it compiles to, and how many runs it takes, whatever its length.

The loop is `sft_then_grpo` with a small model and the engine `transformers`. It is run by the rules of KFP 2.17.0's
driver and launcher over KFP's metadata store (tests/kfp_backend.py); the next run is asked for at a stand-in of KFP's
API server (tests/kfp_api.py), and is then run here as that server would. No real KFP is involved.

    python benchmarks/kfp_loop.py [--iterations 1000] [--per-run 60] [--work DIRECTORY]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' backend

from tests.compiling import compiled
from tests.kfp_api import serve_api
from tests.kfp_backend import Backend
from tests.local.loops import SMALL


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument(
        "--per-run", type=int, default=60, help="iterations of a run (loop.per_workflow)"
    )
    parser.add_argument(
        "--work", type=Path, help="directory of the store; by default a temporary one"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run_loop(options.work or Path(temporary), options.iterations, options.per_run)


def run_loop(work: Path, iterations: int, per_run: int) -> None:
    """Run the loop to its end and print a line a run.

    Raises:
        RuntimeError: a task is left running, or the loop is not whole.
    """
    store = work / "store"
    with serve_api() as api:
        settings = {**SMALL, "loop.iterations": iterations, "loop.per_workflow": per_run}
        settings |= {"rollout.n": 2, "kfp.api": api.url}
        package = compiled(
            "sft_then_grpo", [f"{k}={v}" for k, v in settings.items()], work / "loop.yaml"
        )
        spec = next(yaml.safe_load_all(package.read_text()))
        tasks = sum(
            len(each["dag"]["tasks"])
            for each in [spec["root"], *spec["components"].values()]
            if "dag" in each
        )
        print(
            f"compiled: {package.stat().st_size:,} bytes, {tasks} tasks, {iterations:,} iterations, {per_run} a run"
        )
        backend, begun = Backend(work / "root"), time.monotonic()
        api.runs.append(
            {"display_name": "long", "experiment_id": "e1", "run_id": "r1", "created_at": ""}
        )
        for i, asked in enumerate(api.runs, start=1):  # it grows: each run asks for the next
            given = {"store": str(store), "run": "long", "target_reward": 2.0}
            made = backend.run(package, "long", run_id=asked["run_id"], **given)
            states = set(backend.get_states(made).values())
            committed = len(list(store.glob("long/iterations/*/policy-update/manifest.json")))
            counts = f"{len(made.started):2} tasks started, {len(made.skipped):2} from the cache"
            print(
                f"run {i:3}: {counts}, {committed:5,} iterations, {time.monotonic() - begun:6.0f} s",
                flush=True,
            )
            if not states <= {"COMPLETE", "CACHED"}:
                raise RuntimeError(
                    f"run {i}: its tasks are {sorted(states)}, not all COMPLETE or CACHED"
                )
        if committed != iterations or not (store / "long/export/manifest.json").exists():
            raise RuntimeError(
                f"{committed} of {iterations} iterations, export: {(store / 'long/export').exists()}"
            )
        print(
            f"whole: {len(api.runs)} runs, nothing left running, the export is of iteration {iterations:,}"
        )


if __name__ == "__main__":
    main()
