"""Commands that run a pipeline on this machine."""

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuneloop.cli.arguments import CONFIG, IGNORE_LIMITS, PIPELINE, RUN, SETS, STORE
from tuneloop.cli.inspect import open_run
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.store import local_path

if TYPE_CHECKING:
    from tuneloop.runs.run_record import Run

TRACK = Annotated[
    bool,
    typer.Option(
        "--track/--no-track",
        help="Mirror it as it goes, to where TUNELOOP_TRACKERS says; default: MLflow.",
    ),
]
PARALLELISM = Annotated[
    int | None, typer.Option(min=1, help="Stages at once; default: the workflow's, or the cores.")
]
WARM = Annotated[
    bool,
    typer.Option(
        "--warm/--no-warm",
        help="Fork stages from a process that has imported torch: quicker starts.",
    ),
]


def run_pipeline(
    pipeline: PIPELINE,
    name: Annotated[
        str | None, typer.Option("--run", help="Name of the run; default: pipeline and time.")
    ] = None,
    store: STORE = "runs",
    config: CONFIG = None,
    sets: SETS = None,
    parallelism: PARALLELISM = None,
    track: TRACK = True,
    warm: WARM = True,
    ignore_limits: IGNORE_LIMITS = False,
) -> int:
    """Run a pipeline on this machine. The same run again resumes it: committed stages end at once.

    A run that ended before its loop made a version may be given other settings; what it has committed must fit them.
    """
    from tuneloop.cli.checks import check_limits, check_local_run, print_followed
    from tuneloop.config.followed import keep_followed
    from tuneloop.config.loading import dump_workflow, find_pipeline
    from tuneloop.config.machine import read_machine
    from tuneloop.core.store import normalize_url
    from tuneloop.planning.disk import check_store
    from tuneloop.planning.limits import find_limits
    from tuneloop.runs import records, run_record

    found = find_pipeline(pipeline)
    machine = read_machine()
    configured = found.configure_for(machine, config, sets or ())
    resolved = configured.settings.model_dump(mode="json")
    if name is None:
        name = f"{found.name.replace('_', '-')[:24]}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (record := records.read_record(name, store)) is not None:
        standing = run_record.Run(name, store, record)
        kept = keep_followed(resolved, configured.followed, record.config)
        if _same(standing, found.name, kept, normalize_url(store)):
            return _continue(standing, parallelism, track, warm)
    settings = found.validate(resolved)
    workflow = found.build(settings)
    limits = find_limits(settings, workflow, machine)
    if record is None:
        limits += check_store(workflow, store)
    check_limits(limits, ignore_limits)
    check_local_run(resolved, workflow, store)
    print_followed(configured)
    _check_trackers(track)
    at = normalize_url(store)
    fresh = records.Record(
        run=name, pipeline=found.name, path=str(found.path), config=resolved, store=at
    )
    return _carry_out(
        run_record.Run.create(fresh, dump_workflow(workflow), replaced=record),
        parallelism,
        track,
        warm,
    )


def run_demo(
    name: Annotated[
        str, typer.Option("--run", help="Name of the run; the same again resumes it.")
    ] = "demo",
    store: STORE = "runs",
    sets: SETS = None,
    parallelism: PARALLELISM = None,
    track: TRACK = True,
    warm: WARM = True,
) -> int:
    """Run the demo: SFT, then a GRPO loop, of a small model made here. With vLLM where it is installed."""
    from tuneloop.cli.checks import demo_engine

    settings = sets or []
    if not any(each.startswith(("engine=", "engine.kind=")) for each in settings):
        engine, why = demo_engine()
        typer.echo(f"{name}: engine {engine}, {why}")
        settings = [f"engine={engine}", *settings]
    if not any(each.startswith("loop") for each in settings):
        settings = [
            "loop.iterations_per_pod=20",
            *settings,
        ]  # a pod by `auto` has eight, which takes 3 s longer
    # The model is too small to share between threads: on two cores with work beside it, a step of SFT takes 60 ms with
    # one thread and 120 to 550 with two.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run_pipeline("sft_then_grpo", name, store, None, settings, parallelism, track, warm)


def resume_run(
    name: RUN,
    store: STORE = "runs",
    parallelism: PARALLELISM = None,
    track: TRACK = True,
    warm: WARM = True,
) -> int:
    """Go on with a run that ended early. The first stage without a commit runs next."""
    found = open_run(name, store)
    if found.record is None:
        raise UserError(
            "run", name, f"was not started here: no record in {found.directory}; use `tuneloop run`"
        )
    return _continue(found, parallelism, track, warm)


def fork_run(
    name: RUN,
    iteration: Annotated[int, typer.Argument(min=0, help="Begin at its end; 0: before the first.")],
    sets: SETS = None,
    new: Annotated[
        str | None, typer.Option("--name", help="Of the fork; default: RUN-at-ITERATION.")
    ] = None,
    store: STORE = "runs",
    track: TRACK = True,
    warm: WARM = True,
) -> int:
    """Begin a run where another stood after an iteration, with other settings. Nothing is copied; both go on apart."""
    from tuneloop.cli.checks import check_local_run
    from tuneloop.config.loading import dump_workflow, find_pipeline
    from tuneloop.runs import forking, records, run_record

    run, new = open_run(name, store), new or f"{name}-at-{iteration}"
    if run.record is None:
        raise UserError(
            "RUN",
            name,
            f"was not started here; on a cluster: `tuneloop submit --fork {name} {iteration}`",
        )
    records.check_name(new, "--name")
    if records.read_record(new, store):
        raise UserError(
            "--name",
            new,
            f"is the name of a run; `tuneloop resume {new}` continues it; or choose another",
        )
    found = find_pipeline(run.record.path)
    settings = found.configure(run.directory / "config.yaml", sets or ())
    workflow = forking.begin_workflow(found, settings, run, iteration)
    check_local_run(config := settings.model_dump(mode="json"), workflow, run.store_url)
    _check_trackers(track)
    forking.record_fork(new, workflow, run, settings)
    fresh = records.Record(
        run=new, pipeline=found.name, path=str(found.path), config=config, store=run.store_url
    )
    return _carry_out(run_record.Run.create(fresh, dump_workflow(workflow)), None, track, warm)


def stop_run(
    name: RUN,
    store: STORE = "runs",
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the stages to end.")
    ] = 90.0,
) -> int:
    """Stop a run. Its stages commit what a resume needs and end; of one that was killed, its leases are released."""
    from tuneloop.cli.show import format_store_option
    from tuneloop.sharing.lease_storage import STORED_LEASES, release_stored_leases

    found = open_run(name, store)
    state = found.state
    if found.phase != "running" or state is None:
        if state is not None:  # it ran here: no process of it is left
            release_stored_leases(f"{found.store_url}/{STORED_LEASES}", name)
        typer.echo(f"{name}: is not running ({found.phase})")
        return 0
    os.kill(state.workflow.pid, signal.SIGTERM)
    start = time.monotonic()
    while found.phase == "running":
        if time.monotonic() - start > timeout:
            raise Retryable(
                f"{name}: still running after {timeout:g} s (process {state.workflow.pid})"
            )
        time.sleep(0.05)
    seconds = time.monotonic() - start
    typer.echo(
        f"{name}: stopped in {seconds:.1f} s; go on with `tuneloop resume {name}{format_store_option(store)}`"
    )
    return 0


def _same(standing: "Run", pipeline: str, config: dict[str, Any], store: str) -> bool:
    """Return whether a run was started with these very settings, and refuse a name that stands for another run.

    Before the loop's first version a failed run may be mended: the stages themselves refuse what does not fit their
    committed outputs. After that a change could leave iterations behind that are no longer part of the run.
    """
    from tuneloop.runs.records import find_differences

    record = standing.record
    assert record
    asked = {"pipeline": pipeline, "store": store, **config}
    differing = find_differences(
        asked, {"pipeline": record.pipeline, "store": record.store, **record.config}
    )
    begun = standing.phase in ("running", "succeeded") or any(
        made.iteration for made in standing.checkpoints
    )
    what = ", ".join(differing[:5])
    if differing and (begun or standing.origin or {"pipeline", "store"} & {*differing}):
        remedy = f"exists with another {what}; `tuneloop resume {record.run}` continues it; or choose another name"
        raise UserError("--run", record.run, remedy)
    if differing:
        typer.echo(
            f"{record.run}: ended before its loop made a version; begins again with another {what}"
        )
    return not differing


def _continue(run: "Run", parallelism: int | None, track: bool, warm: bool) -> int:
    from tuneloop.cli.checks import check_local_run
    from tuneloop.cli.show import write_report
    from tuneloop.runs.completeness import describe_missing, list_missing
    from tuneloop.runs.summary import summarize_run

    assert run.record
    if (made := local_path(run.record.store)) and made.resolve() != run.directory.parent.resolve():
        raise UserError(
            "run", run.name, f"was begun in {made}, and goes on there alone: move it back"
        )
    if run.phase == "running":
        raise UserError(
            "run",
            run.name,
            f"is running; see `tuneloop status {run.name}`, or `tuneloop stop` it first",
        )
    if run.phase == "succeeded":  # its executor may have been killed before the report was whole
        missing = list_missing(run)
        if missing:
            remedy = "restore it from a copy, or delete the run and run it again under this name"
            lost = f"has succeeded, but {describe_missing(missing)} in {run.url} is missing"
            raise UserError("run", run.name, f"{lost}; {remedy}")
        typer.echo(f"{run.name}: finished already\n{summarize_run(run, report=write_report(run))}")
        return 0
    check_local_run(run.record.config, run.read_workflow(), run.store_url)
    return _carry_out(run, parallelism, track, warm)


def _check_trackers(track: bool) -> None:
    """Refuse trackers that are unknown before anything is written."""
    from tuneloop.runs.tracking import list_trackers
    from tuneloop.trackers import find_tracker

    for each in list_trackers() if track else ():
        find_tracker(each)


def _carry_out(run: "Run", parallelism: int | None, track: bool, warm: bool) -> int:
    """Execute the run's own workflow.yaml, show it, and say how it ended."""
    from tuneloop.cli.live import Display
    from tuneloop.cli.show import describe_failure, write_report
    from tuneloop.local.executor import execute_parts
    from tuneloop.runs.summary import summarize_run
    from tuneloop.runs.tracking import mirror_in_background

    workflow = run.read_workflow()
    start = time.monotonic()
    with mirror_in_background(run, enabled=track) as mirrors:
        with Display(run, workflow) as display:
            outcome = execute_parts(
                workflow,
                workdir=run.directory,
                arguments={"run": run.name, "store": run.store_url},
                parallelism=parallelism,
                warm=warm,
                cwd=Path.cwd(),
                on_node=display.node,
                on_log=display.log,
            )
        run.refresh()
        report = write_report(run)  # which mirrors attach
    ended = (
        "succeeded"
        if outcome.phase == "Succeeded"
        else f"{outcome.phase.lower()}: {outcome.message}"
    )
    summary = summarize_run(run, report=report, mirrors=mirrors)
    typer.echo(f"\n{run.name}: {ended} ({time.monotonic() - start:.1f} s)\n{summary}")
    if outcome.phase != "Succeeded":
        typer.echo(describe_failure(run, outcome), err=True)
    return outcome.exit_code
