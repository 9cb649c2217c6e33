"""``tuneloop sweep``: a run for each combination of settings, and the runs ranked."""

import math
import time
from functools import partial
from typing import Annotated

import typer

from tuneloop.cli.arguments import CONFIG, CONTEXT, PIPELINE, SETS, STORE
from tuneloop.cli.cluster import submit_run
from tuneloop.cli.execute import run_pipeline
from tuneloop.cli.tables import print_table
from tuneloop.core.errors import UserError
from tuneloop.kube.connection import connect_to_cluster


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
    start: Annotated[
        int | None,
        typer.Option(
            "--stop-below-median", min=1, help="From this iteration on, stop runs below the others."
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Submit the runs to a cluster.")
    ] = None,
    context: CONTEXT = None,
) -> int:
    """Run a pipeline with each combination of settings, and rank the runs by their reward.

    Runs on this machine follow one another; a cluster gets all at once, and goes on with them after Ctrl-C. The same
    command again resumes what failed or was interrupted. Exit code 0: all have succeeded or were stopped early.
    """
    from tuneloop.cluster import run_workflows, submit, sweep
    from tuneloop.config.loading import find_pipeline
    from tuneloop.runs.run_record import Run

    found, combinations = find_pipeline(pipeline), sweep.list_combinations(name, over)
    if start and not getattr(found.module.build_argo, "loop", None):
        raise UserError("--stop-below-median", start, f"{found.name} has no loop; leave it out")
    given = {
        run: [*(sets or ()), *(f"{k}={text}" for k, text in each.items())]
        for run, each in combinations.items()
    }
    settings = {run: found.configure(config, each) for run, each in given.items()}
    built = {run: found.build(each) for run, each in settings.items()}
    given_to = {
        run: each["spec"]["arguments"]["parameters"] for run, each in built.items() if start
    }
    most = {
        run: int(p["value"])
        for run, each in given_to.items()
        for p in each
        if p["name"] == "iterations"
    }
    judged = {run: range(start or 0, most.get(run, 0)) for run in given}
    runs = [Run(run, store) for run in given]
    if cluster := connect_to_cluster(namespace, context) if namespace else None:
        for run in runs:
            made = run_workflows.prepare_workflow(built[run.name], run=run.name, store=store)
            submit.check_resumable(made, run_workflows.list_workflows(cluster, run.name), run.name)
    for run in runs:
        state, own = sweep.find_state(run, cluster), given[run.name]
        if cluster and not state.startswith(("running", *sweep.ENDED)):
            submit_run(
                pipeline, run.name, store, config, own, namespace=cluster.namespace, context=context
            )
        elif not cluster and not state.startswith(sweep.STOPPED):
            execute = partial(run_pipeline, pipeline, run.name, store, config, own)
            sweep.execute_run(run, runs, execute, judged[run.name])
    running = runs if cluster else []
    while running := [
        run for run in running if sweep.look_at_run(run, runs, judged[run.name], cluster)
    ]:
        time.sleep(2.0)
    rows = []
    for run in runs:
        state, latest = sweep.find_state(run, cluster), run.latest_reward()
        value, told = (
            (latest.value, f"{latest.value:.3f} ({latest.method})") if latest else (-math.inf, "")
        )
        rows.append(
            (
                (state == "succeeded", value),
                (run.name, *combinations[run.name].values(), told, state),
            )
        )
    columns = ("run", *next(iter(combinations.values())), "reward", "state")
    print_table(
        columns,
        [row for _, row in sorted(rows, key=lambda each: each[0], reverse=True)],
        cut="state",
    )
    return int(not all(row[-1].startswith(sweep.ENDED) for _, row in rows))
