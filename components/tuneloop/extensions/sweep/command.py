"""``tuneloop sweep``: a run for each combination of settings, and the runs ranked.

The work is in `runs.py`: `Sweep.plan`, `Sweep.run`, `Sweep.ranking`. Runs are started by the
functions of two commands, `cli/execute.py: run_pipeline` and `cli/cluster.py: submit_run`, whose
other options keep their defaults: a sweep has none of `--fork`, `--priority`, `--no-track` and
`--ignore-limits`.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from tuneloop.cli.arguments import CLUSTER_NAMESPACE, CONFIG, CONTEXT, PIPELINE, SETS, STORE
from tuneloop.cli.cluster import submit_run
from tuneloop.cli.execute import run_pipeline
from tuneloop.cli.tables import print_table
from tuneloop.kube.connection import connect_to_cluster

if TYPE_CHECKING:
    from tuneloop.extensions.sweep.runs import Trial


def run_sweep(
    pipeline: PIPELINE,
    name: Annotated[
        str, typer.Option("--name", help="Name of the sweep; the names of its runs begin with it.")
    ],
    over: Annotated[
        list[str], typer.Option(metavar="KEY=V1,V2", help="Values of a key to try. Repeatable.")
    ],
    store: STORE = "runs",
    config: CONFIG = None,
    sets: SETS = None,
    judge_from: Annotated[
        int | None,
        typer.Option(
            "--stop-below-median", min=1, help="From this iteration on, stop runs below the others."
        ),
    ] = None,
    namespace: CLUSTER_NAMESPACE = None,
    context: CONTEXT = None,
) -> int:
    """Run a pipeline with each combination of settings. The runs are ranked by their reward.

    Runs on this machine follow one another. With --namespace the runs are submitted to a cluster,
    which gets all of them at once and continues them after Ctrl-C. The same command again resumes
    what failed or was interrupted.

    Exit code 0: all runs have succeeded or were stopped early; 1: at least one has not.
    """
    from tuneloop.config.loading import find_pipeline
    from tuneloop.extensions.sweep.runs import Sweep

    sweep = Sweep.plan(
        find_pipeline(pipeline),
        name,
        over,
        store=store,
        config=config,
        sets=sets or (),
        judge_from=judge_from,
    )
    cluster = connect_to_cluster(namespace, context) if namespace else None

    def start(trial: "Trial") -> int:
        # What `tuneloop run` and `tuneloop submit` do, their checks and messages included.
        if cluster is None:
            return run_pipeline(pipeline, trial.name, store, config, trial.sets)
        return submit_run(
            pipeline,
            trial.name,
            store,
            config,
            trial.sets,
            namespace=cluster.namespace,
            context=context,
        )

    sweep.run(start, cluster)
    rows = []
    for trial in sweep.ranking():
        reward = f"{trial.reward:.3f} ({trial.method})" if trial.method else ""
        row = [trial.name]
        row += trial.values.values()
        row += [reward, trial.state]
        rows.append(row)
    # All trials have values of the same keys.
    columns = ["run"]
    columns += sweep.trials[0].values
    columns += ["reward", "state"]
    print_table(columns, rows, cut="state")
    return 0 if all(trial.has_ended_well for trial in sweep.trials) else 1
