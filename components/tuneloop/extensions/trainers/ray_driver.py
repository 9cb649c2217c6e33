"""Run one command on several nodes of a Ray cluster, with torchrun's rendezvous between them.

    python -m tuneloop.extensions.trainers.ray_driver --nodes 2 --processes 4 -- python -m
    tuneloop.training.torchrun -m tuneloop.stages.sft --policy …

It is the entrypoint of a RayJob. Each node runs the command with its own ``PET_*`` variables, and
its output goes to the driver. Ray restarts nothing: stages know how to resume, and a RayJob's
``backoffLimit`` says how often to try.

`extensions/trainers/trainjob.py: as_rayjob` writes its flags. `cluster/launch.py` reads its exit code from the
job's message.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tuneloop.core.errors import EXIT_RETRY
from tuneloop.core.wording import format_count
from tuneloop.training.torchrun import exit_code

PORT = 29500
"""Port of the first node, for the rendezvous. The JobSet's is `argo/jobset.py: PORT`."""
READY_S = 600.0
"""Seconds to wait until the cluster has the nodes."""


def main(argv: Sequence[str]) -> int:
    """Run the command on all nodes, and return the exit code that explains theirs."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    parser = argparse.ArgumentParser(prog="tuneloop.extensions.trainers.ray_driver")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1, help="ranks on each")
    parser.add_argument("--gpus", type=int, default=0, help="of each node")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args(argv)
    # What the nodes print is the log of the job, which is that of this process.
    ray.init(log_to_driver=True)
    bundle = {"CPU": 1.0}
    if arguments.gpus:
        bundle["GPU"] = float(arguments.gpus)
    # Each bundle on a node of its own: a node starts all ranks that it has.
    group = placement_group([bundle] * arguments.nodes, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=READY_S)
    except ray.exceptions.GetTimeoutError:
        nodes = format_count(arguments.nodes, "node")
        print(f"the cluster has not had {nodes} within {READY_S:.0f} s", file=sys.stderr)
        return EXIT_RETRY

    def place_on(node: int, function: Any) -> Any:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        return ray.remote(
            num_cpus=1,
            num_gpus=arguments.gpus,
            max_retries=0,
            scheduling_strategy=strategy,
        )(function)

    # Torch's rendezvous is on the first node, whose address only Ray knows.
    address = ray.get(place_on(0, ray.util.get_node_ip_address).remote())
    rendezvous = {
        "PET_NNODES": str(arguments.nodes),
        "PET_NPROC_PER_NODE": str(arguments.processes),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": str(PORT),
        # A retry must not meet the processes of the attempt before.
        "PET_RDZV_ID": ray.get_runtime_context().get_job_id() + os.urandom(4).hex(),
    }
    tasks = []
    for node in range(arguments.nodes):
        environment = rendezvous | {"PET_NODE_RANK": str(node)}
        tasks.append(place_on(node, _run).remote(arguments.command, environment))
    codes = ray.get(tasks)
    return exit_code(codes) if any(codes) else 0


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run the command on this node with an `environment` beside the node's own, and return its exit
    code.
    """
    # Ray forwards these two streams to the driver.
    process = subprocess.run(
        command,
        env=os.environ | environment,
        stdout=sys.stdout,
        stderr=sys.stderr,
    )
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
