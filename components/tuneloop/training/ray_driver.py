"""Run one command on several nodes of a Ray cluster, with torchrun's rendezvous between them.

    python -m tuneloop.training.ray_driver --nodes 2 --processes 4 -- python -m tuneloop.training.torchrun -m
    tuneloop.stages.sft --policy …

It is the entrypoint of a RayJob. Each node runs the command with its own ``PET_*`` variables, and its output goes to
the driver. Ray restarts nothing: stages know how to resume, and a RayJob's ``backoffLimit`` says how often to try."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tuneloop.training.torchrun import exit_code

PORT = 29500


def main(argv: Sequence[str]) -> int:
    """Run the command on all nodes, and return the exit code that explains the nodes' exit codes."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    parser = argparse.ArgumentParser(prog="tuneloop.training.ray_driver")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1, help="ranks on each")
    parser.add_argument("--gpus", type=int, default=0, help="of each node")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(argv)
    ray.init(log_to_driver=True)
    about = {"CPU": 1.0, **({"GPU": float(given.gpus)} if given.gpus else {})}
    group = placement_group([about] * given.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=600)

    def on(node: int, function: Any) -> Any:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        options = {
            "num_cpus": 1,
            "num_gpus": given.gpus,
            "max_retries": 0,
            "scheduling_strategy": place,
        }
        return ray.remote(**options)(function)

    first = ray.get(on(0, ray.util.get_node_ip_address).remote())
    shared = {
        "PET_NNODES": given.nodes,
        "PET_NPROC_PER_NODE": given.processes,
        "PET_MASTER_ADDR": first,
    }
    shared |= {
        "PET_MASTER_PORT": PORT,
        "PET_RDZV_ID": ray.get_runtime_context().get_job_id() + os.urandom(4).hex(),
    }
    ranks = [{**shared, "PET_NODE_RANK": node} for node in range(given.nodes)]
    codes = ray.get([on(node, _run).remote(given.command, env) for node, env in enumerate(ranks)])
    return exit_code(codes) if any(codes) else 0


def _run(command: Sequence[str], env: dict[str, Any]) -> int:
    own = {name: str(value) for name, value in env.items()}
    return subprocess.run(
        command, env={**os.environ, **own}, stdout=sys.stdout, stderr=sys.stderr
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
