"""Start the next workflow of a long loop, so that a run consists of workflows of bounded size.

    python -m tuneloop.cluster.continue_run --workflow demo --namespace tuneloop \
        --entrypoint continued iteration=51 …

On a cluster this last step of a workflow creates a copy of the workflow with the next number, which
starts at another template with these arguments. As the copy exists before this workflow ends, an
active run never looks finished. A retry finds an existing copy. On one machine it only writes the
template and the arguments that follow into an output parameter (`NEXT`), which `local/executor.py:
execute_parts` reads.

`argo/loop.py: build_continue_template` renders the step, with the flags of `main` and the account
``tuneloop-continue``: each further right that is needed here goes into
``manifests/namespaced/accounts.yaml``. `planning/counts.py` finds the step by this module's name.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.core.errors import report_errors
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import write_outputs
from tuneloop.kube.connection import WORKFLOWS, Connection, connect_to_cluster
from tuneloop.workflow.manifest import begin_at_template
from tuneloop.workflow.settings import LOCAL, NEXT, RUN_LABEL


@report_errors
def main(argv: Sequence[str]) -> int:
    """Start the next workflow, and write what follows as an output parameter."""
    parser = argparse.ArgumentParser(prog="tuneloop.cluster.continue_run")
    for flag in ("--workflow", "--namespace", "--entrypoint"):
        parser.add_argument(flag, required=True)
    parser.add_argument("arguments", nargs="*", metavar="NAME=VALUE")
    options = parser.parse_args(argv)
    arguments = dict(item.split("=", 1) for item in options.arguments)
    # The local executor reads the output, and runs what follows itself.
    if LOCAL not in os.environ:
        cluster = connect_to_cluster(options.namespace)
        name = create_next_workflow(
            cluster,
            options.workflow,
            options.entrypoint,
            arguments,
        )
        print(f"continue: {name} goes on")
    following = {"entrypoint": options.entrypoint, "arguments": arguments}
    write_outputs({NEXT: following})
    return 0


def create_next_workflow(
    cluster: Connection,
    name: str,
    entrypoint: str,
    arguments: Mapping[str, str],
) -> str:
    """Create the workflow after `name`, unless it exists, and return its name.

    Raises:
        UserError: the account has no permission.
        Retryable: the API server fails.
    """
    workflow = cluster.get(*WORKFLOWS, name)
    run = workflow["metadata"]["labels"][RUN_LABEL]
    # The name of a workflow ends with its number.
    number = run_workflows.get_workflow_number(run, name)
    return argo.create_numbered(
        cluster,
        build_next_workflow(workflow, entrypoint, arguments),
        run,
        number + 1,
    )


def build_next_workflow(
    workflow: JsonMapping,
    entrypoint: str,
    arguments: Mapping[str, str],
) -> JsonObject:
    """Build the workflow that continues where `workflow` ends.

    It has another entrypoint and other arguments. All labels and annotations but Argo's own are
    kept, such as those of the run, of its schedule, and the plan (`workflow/plan.py: PLAN`).
    """
    previous = workflow["metadata"]
    metadata: JsonObject = {}
    for kind in ("labels", "annotations"):
        # Entries of Argo describe the workflow that ends: its phase, whether it is completed. The
        # controller writes those of the next one.
        metadata[kind] = {
            key: value
            for key, value in previous.get(kind, {}).items()
            if "workflows.argoproj.io/" not in key
        }
    metadata["annotations"][run_workflows.CONTINUES] = previous["name"]
    following = {
        "apiVersion": workflow["apiVersion"],
        "kind": "Workflow",
        "metadata": metadata,
        "spec": workflow["spec"],
    }
    return begin_at_template(following, entrypoint, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
