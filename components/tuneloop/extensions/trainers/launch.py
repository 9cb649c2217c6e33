"""Run a job of the cluster as a task:
``python -m tuneloop.extensions.trainers.launch --namespace … --manifest …``

The manifest holds ``@name@`` where a parameter's value or an input artifact's reference belongs;
``@job_name@`` becomes a name derived from that parameter alone, so that a restarted launcher finds
its job. `tuneloop.cluster.launch` follows the job and prints what it prints, and this program ends
with its exit code.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence

import xxhash

from tuneloop.cluster.launch import main as follow_job
from tuneloop.kfp.io import Task

READABLE = 30
"""The number of characters of the parameter ``job_name`` that are part of the job's name.

The names of the job's pods contain the job's name, and have at most 63 characters.
"""


def main(argv: Sequence[str]) -> int:
    """Launch and follow the job; return its exit code.

    `kfp_step.py: launch_step` writes the flags and declares the parameters.
    """
    parser = argparse.ArgumentParser(
        prog="tuneloop.extensions.trainers.launch", description=__doc__
    )
    parser.add_argument("--executor-input", required=True)
    parser.add_argument("--manifest", required=True, help="JSON with marks")
    parser.add_argument("--namespace", required=True)
    options = parser.parse_args(argv)
    task = Task.read(options.executor_input)
    values = dict(task.parameters)
    for name, handle in task.inputs.items():
        values[name] = handle["ref"]
    values["job_name"] = job_name(task.parameters["job_name"])
    manifest = options.manifest
    for mark, value in values.items():
        # The mark stands inside of a JSON string, whose quotes are there already.
        manifest = manifest.replace(f"@{mark}@", json.dumps(value)[1:-1])
    code = follow_job(["--namespace", options.namespace, "--manifest", manifest])
    if code == 0:
        task.results = {"job": values["job_name"]}
        task.finish()
    return code


def job_name(text: str) -> str:
    """Return a name that Kubernetes accepts, made of the readable part of `text` and a hash of the
    whole.
    """
    readable = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:READABLE].strip("-")
    return f"{readable or 'job'}-{xxhash.xxh3_64_hexdigest(text.encode())[:8]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
