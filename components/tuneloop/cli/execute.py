"""Commands that run a pipeline on this machine: `run`, `demo`, `resume`, `fork` and `stop`.

`Executor` has what they share, from the checks of a resumption to the summary at the end. The same
for a cluster is in `cluster.py` and `verdict.py`.
"""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuneloop.cli.arguments import CONFIG, IGNORE_LIMITS, PIPELINE, RUN, SETS, STORE
from tuneloop.cli.inspect import open_run
from tuneloop.core.errors import Retryable, UserError

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


@dataclass(frozen=True)
class Executor:
    """How a run is executed on this machine.

    Attributes:
        parallelism: the stages that run at once; None: what the workflow says, or the cores.
        track: whether the run is mirrored into trackers.
        warm: whether stages are forked from a process that has imported torch.
    """

    parallelism: int | None
    track: bool
    warm: bool

    def check_trackers(self) -> None:
        """Raise UserError for an unknown tracker, before anything is written."""
        from tuneloop.runs.tracking import list_trackers
        from tuneloop.trackers import find_tracker

        if self.track:
            for tracker in list_trackers():
                find_tracker(tracker)

    def resume(self, run: "Run") -> int:
        """Continue a run, and return its exit code; of a finished one, only write the report.

        Raises:
            UserError: the run may not be continued here, or cannot succeed on this machine.
        """
        from tuneloop.cli.checks import check_local_run
        from tuneloop.cli.show import write_report
        from tuneloop.runs.resumption import check_resumable
        from tuneloop.runs.summary import summarize_run

        assert run.record
        check_resumable(run)
        if run.phase == "succeeded":
            # Its executor may have been killed before the report was whole.
            summary = summarize_run(run, report=write_report(run))
            typer.echo(f"{run.name}: finished already\n{summary}")
            return 0
        check_local_run(run.record.config, run.read_workflow(), run.store_url)
        return self.execute(run)

    def execute(self, run: "Run") -> int:
        """Execute the run's own workflow.yaml, show it, and say how it ended; return its exit code."""
        from tuneloop.cli.live import Display
        from tuneloop.cli.show import describe_failure, format_store_option, write_report
        from tuneloop.core.ends import cut_error
        from tuneloop.local.executor import execute_parts
        from tuneloop.runs.cautions import describe_caution
        from tuneloop.runs.summary import summarize_run
        from tuneloop.runs.tracking import mirror_in_background

        workflow = run.read_workflow()
        start = time.monotonic()
        with mirror_in_background(run, enabled=self.track) as mirrors:
            with Display(run, workflow) as display:
                outcome = execute_parts(
                    workflow,
                    workdir=run.directory,
                    arguments={"run": run.name, "store": run.store_url},
                    parallelism=self.parallelism,
                    warm=self.warm,
                    cwd=Path.cwd(),
                    on_node=display.node,
                    on_log=display.log,
                )
            run.refresh()
            # Within the block: the mirrors attach the report as they end.
            report = write_report(run)
        has_succeeded = outcome.phase == "Succeeded"
        reason = cut_error(outcome.message)
        is_interrupted = run.phase == "interrupted"
        phase = run.phase if is_interrupted else outcome.phase.lower()
        ending = phase if has_succeeded else f"{phase}: {reason}"
        summary = summarize_run(run, report=report, mirrors=mirrors)
        seconds = time.monotonic() - start
        typer.echo(f"\n{run.name}: {ending} ({seconds:.1f} s)\n{summary}")
        caution = describe_caution(run)
        if caution:
            typer.echo(f"caution: {caution}")
        if is_interrupted:
            command = f"tuneloop resume {run.name}{format_store_option(run.store_url)}"
            typer.echo(f"interrupted: go on with `{command}`", err=True)
        elif not has_succeeded:
            typer.echo(describe_failure(run, outcome), err=True)
        return outcome.exit_code


# Called by position, too: by `run_demo` with all arguments but the last, and by
# `extensions/sweep/command.py` with the first five. So new ones come last.
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

    A run that ended before its loop made a version may be given other settings; what it has
    committed must fit them.

    Exit code 0: it has succeeded; 1: a stage has failed; 2: a mistake in the settings or the data;
    3: a gate has refused the model; 75: trying again may help; 130: it was interrupted.
    """
    from tuneloop.cli.checks import check_limits, check_local_run, print_followed
    from tuneloop.config.extended import dump_settings
    from tuneloop.config.followed import keep_followed
    from tuneloop.config.loading import dump_workflow, find_pipeline
    from tuneloop.config.machine import read_machine
    from tuneloop.core.store import normalize_url
    from tuneloop.planning.disk import check_store
    from tuneloop.planning.limits import find_limits
    from tuneloop.runs import records, run_record
    from tuneloop.runs.resumption import find_changed_settings

    definition = find_pipeline(pipeline)
    machine = read_machine()
    configured = definition.configure_for(machine, config, sets or (), store)
    resolved = dump_settings(configured.settings)
    if name is None:
        name = f"{definition.name.replace('_', '-')[:24]}-{time.strftime('%Y%m%d-%H%M%S')}"
    executor = Executor(parallelism, track, warm)
    store_url = normalize_url(store)
    record = records.read_record(name, store)
    if record is not None:
        run = run_record.Run(name, store, record)
        # Settings that follow the machine do not make another run of it: it may have started on
        # another machine.
        comparable = keep_followed(resolved, configured.followed, record.config)
        changed = find_changed_settings(run, definition.name, comparable, store_url)
        if not changed:
            return executor.resume(run)
        typer.echo(
            f"{name}: ended before its loop made a version; begins again with another"
            f" {', '.join(changed[:5])}"
        )
    settings = definition.validate(resolved)
    workflow = definition.build(settings)
    limits = find_limits(settings, workflow, machine)
    # A run that begins again has its room already.
    if record is None:
        limits += check_store(workflow, store)
    check_limits(limits, ignore_limits)
    check_local_run(resolved, workflow, store)
    print_followed(configured)
    # The last check: after it the record of the run is written.
    executor.check_trackers()
    fresh = records.Record(
        run=name,
        pipeline=definition.name,
        path=str(definition.path),
        config=resolved,
        store=store_url,
    )
    run = run_record.Run.create(fresh, dump_workflow(workflow), replaced=record)
    return executor.execute(run)


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
    """Run the demo: SFT, then GRPO, of a small model made here. With vLLM where it is installed.

    It needs no network and no GPU. The exit codes are those of `tuneloop run`.
    """
    from tuneloop.cli.checks import choose_demo_engine

    settings = sets or []
    if not any(item.startswith(("engine=", "engine.kind=")) for item in settings):
        engine, reason = choose_demo_engine()
        typer.echo(f"{name}: engine {engine}, {reason}")
        settings = [f"engine={engine}", *settings]
    if not any(item.startswith("loop") for item in settings):
        # A pod by `auto` has eight, and the starts of the pods after the first take 3 s.
        settings = ["loop.iterations_per_pod=20", *settings]
    # The model is too small to share between threads: on two cores with work beside it, a step of
    # SFT takes 60 ms with one thread and 120 to 550 with two.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run_pipeline("sft_then_grpo", name, store, None, settings, parallelism, track, warm)


def resume_run(
    name: RUN,
    store: STORE = "runs",
    parallelism: PARALLELISM = None,
    track: TRACK = True,
    warm: WARM = True,
) -> int:
    """Go on with a run that ended early. The first stage without a commit runs next.

    It has the settings and the workflow with which it was started. The exit codes are those of
    `tuneloop run`.
    """
    run = open_run(name, store)
    if run.record is None:
        raise UserError(
            "run", name, f"was not started here: no record in {run.directory}; use `tuneloop run`"
        )
    return Executor(parallelism, track, warm).resume(run)


def fork_run(
    name: RUN,
    iteration: Annotated[int, typer.Argument(min=0, help="Begin at its end; 0: before the first.")],
    sets: SETS = None,
    fork_name: Annotated[
        str | None, typer.Option("--name", help="Of the fork; default: RUN-at-ITERATION.")
    ] = None,
    store: STORE = "runs",
    track: TRACK = True,
    warm: WARM = True,
    ignore_limits: IGNORE_LIMITS = False,
) -> int:
    """Begin a run where another stood, with other settings. It begins after an iteration of the
    other run. Nothing is copied; both go on apart.

    The exit codes are those of `tuneloop run`.
    """
    from tuneloop.cli.checks import check_limits, check_local_run
    from tuneloop.config.extended import dump_settings
    from tuneloop.config.loading import dump_workflow, find_pipeline
    from tuneloop.config.machine import read_machine
    from tuneloop.planning.disk import check_store
    from tuneloop.planning.limits import find_limits
    from tuneloop.runs import forking, records, run_record

    origin = open_run(name, store)
    fork_name = fork_name or f"{name}-at-{iteration}"
    if origin.record is None:
        raise UserError(
            "RUN",
            name,
            f"was not started here; on a cluster: `tuneloop submit --fork {name} {iteration}`",
        )
    records.check_name(fork_name, "--name")
    if records.read_record(fork_name, store):
        raise UserError(
            "--name",
            fork_name,
            f"is the name of a run; `tuneloop resume {fork_name}` continues it; or choose another",
        )
    definition = find_pipeline(origin.record.path)
    # All settings of the origin, also those that followed the model when it started.
    settings = definition.configure(origin.directory / "config.yaml", sets or ())
    workflow = forking.begin_workflow(definition, settings, origin, iteration)
    limits = find_limits(settings, workflow, read_machine())
    limits += check_store(workflow, origin.store_url)
    check_limits(limits, ignore_limits)
    resolved = dump_settings(settings)
    check_local_run(resolved, workflow, origin.store_url)
    executor = Executor(None, track, warm)
    executor.check_trackers()
    forking.record_fork(fork_name, workflow, origin, settings)
    record = records.Record(
        run=fork_name,
        pipeline=definition.name,
        path=str(definition.path),
        config=resolved,
        store=origin.store_url,
    )
    return executor.execute(run_record.Run.create(record, dump_workflow(workflow)))


def stop_run(
    name: RUN,
    store: STORE = "runs",
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the stages to end.")
    ] = 90.0,
) -> int:
    """Stop a run. Its stages commit what a resume needs and end; of one that was killed, its leases
    are released.

    Exit code 75: its stages have not ended in time, and go on ending.
    """
    from tuneloop.cli.show import format_store_option
    from tuneloop.sharing.lease_storage import STORED_LEASES, release_stored_leases

    run = open_run(name, store)
    state = run.state
    if run.phase != "running" or state is None:
        if state is not None:
            # It ran here, and no process of it is left that could still hold a lease.
            release_stored_leases(f"{run.store_url}/{STORED_LEASES}", name)
        typer.echo(f"{name}: is not running ({run.phase})")
        return 0
    process = state.workflow.pid
    # As a shutdown does: the executor ends its stages, which commit their resume points. It may
    # have ended by itself just now.
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGTERM)
    start = time.monotonic()
    while run.phase == "running":
        if time.monotonic() - start > timeout:
            raise Retryable(f"{name}: still running after {timeout:g} s (process {process})")
        time.sleep(0.05)
    if run.phase == "succeeded":
        typer.echo(f"{name}: has succeeded meanwhile")
        return 0
    seconds = time.monotonic() - start
    command = f"tuneloop resume {name}{format_store_option(store)}"
    typer.echo(f"{name}: stopped in {seconds:.1f} s; go on with `{command}`")
    return 0
