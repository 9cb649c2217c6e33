"""``tuneloop sweep``: a pipeline run with several settings, and the runs ranked."""

import sys
from collections.abc import Sequence
from subprocess import DEVNULL, Popen
from typing import TYPE_CHECKING, Annotated

import typer

from tuneloop.cli.arguments import CONFIG, CONTEXT, PIPELINE, PRIORITY, SETS, STORE
from tuneloop.cli.cluster import submit_run
from tuneloop.cli.execute import prepare_run, stop_run
from tuneloop.cli.tables import print_table
from tuneloop.core.errors import UserError
from tuneloop.kube.connection import connect_to_cluster

if TYPE_CHECKING:
    from tuneloop.runs.run_record import Run


def run_sweep(
    pipeline: PIPELINE,
    name: Annotated[str, typer.Option("--name", help="Of the sweep; its runs are NAME-1, NAME-2, …")],
    over: Annotated[
        list[str],
        typer.Option(metavar="KEY=V1,V2", help="Values of a key, YAML without commas. Repeatable: all combinations."),
    ],
    store: STORE = "runs",
    config: CONFIG = None,
    sets: SETS = None,
    count: Annotated[int | None, typer.Option("--runs", min=1, help="So many of the combinations, at random.")] = None,
    seed: Annotated[int, typer.Option(help="Of --runs.")] = 0,
    start: Annotated[
        int | None,
        typer.Option("--stop-below-median", min=1, metavar="ITERATION", help="From it on, stop runs that do badly."),
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Runs at once on this machine.")] = 1,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Submit all to this one, at once.")] = None,
    context: CONTEXT = None,
    priority: PRIORITY = None,
) -> int:
    """Run a pipeline with all combinations of settings, each as a run, follow them, and rank them by reward.

    The same again goes on: a run that failed or was interrupted is resumed; one that succeeded or was stopped stays as
    it is. A run does badly if its best reward of a batch is below the median of the average rewards of the others that
    got as far, three at least. Ctrl-C stops runs on this machine; on a cluster they go on. Exit code 1: not all have
    succeeded or were stopped.
    """
    from tuneloop.cli.checks import daemon_ports
    from tuneloop.cluster import run_workflows, submit
    from tuneloop.cluster.sweep import STOPPED, follow_runs, list_points
    from tuneloop.config.loading import find_pipeline
    from tuneloop.runs.run_record import Run

    found, points = find_pipeline(pipeline), list_points(name, over, count, seed)
    given = {run: [*(sets or ()), *(f"{key}={text}" for key, text in each.items())] for run, each in points.items()}
    settings = {run: found.configure(config, each) for run, each in given.items()}
    built = {run: found.build(each) for run, each in settings.items()}
    if start and not getattr(found.module.build_argo, "loop", None):
        raise UserError("--stop-below-median", start, f"{found.name} has no loop; leave it out")
    if cluster := connect_to_cluster(namespace, context) if namespace else None:
        for run, workflow in built.items():
            if earlier := run_workflows.list_workflows(cluster, run):
                submit.check_resumable(run_workflows.prepare_workflow(workflow, run=run, store=store), earlier, run)
        runs, parallel = [Run(run, store) for run in points], len(points)
    else:
        if parallel > 1 and any(port for each in built.values() for port in daemon_ports(each)):
            raise UserError("--parallel", parallel, "each run has a server at the same port; leave it out")
        runs = [prepare_run(found, each.model_dump(mode="json"), run, store, True) for run, each in settings.items()]

    def begin(run: str) -> "Popen[bytes] | None":
        if namespace:
            submit_run(pipeline, run, store, config, given[run], priority, namespace=namespace, context=context)
            return None
        return Popen([sys.executable, "-m", "tuneloop.cli", "resume", run, "--store", store], stdout=DEVNULL)

    def stop(run: str) -> None:
        submit.stop_run(cluster, run) if cluster else stop_run(run, store)

    states = follow_runs(runs, begin, stop, cluster, parallel, start)
    _print_ranking(runs, points, states)
    return int(not {*states.values()} <= {"succeeded", STOPPED})


def _print_ranking(runs: Sequence["Run"], points: dict[str, dict[str, str]], states: dict[str, str]) -> None:
    """Print the runs, the best first, by held-out reward where there is one, and why runs were stopped."""
    from tuneloop.cluster.sweep import STOPPED, read_reason

    rows, looped = [], any(run.iteration for run in runs)
    for run in runs:  # what was evaluated before a loop says nothing of its settings
        judged = [(score.value, run.policy_of(score.entry)) for score in run.evaluations()]
        held = [value for value, made in judged if not looped or (made and made.iteration)]
        rewards = held[-1:], [score.value for score in run.training_rewards()][-1:]
        shown = (str(run.iteration or ""), *(f"{each[0]:.3f}" if each else "" for each in rewards))
        state, why = states[run.name], read_reason(run) if states[run.name] == STOPPED else ""
        rows.append((rewards, (run.name, *points[run.name].values(), state, *shown, why)))
    columns = ("run", *points[runs[0].name], "state", "iterations", "held out", "training", "why stopped")
    print_table(columns, [row for _, row in sorted(rows, reverse=True)], right=columns[-4:-1], cut=columns[-1])
