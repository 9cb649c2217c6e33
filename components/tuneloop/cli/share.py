"""`tuneloop plan --share`: how long recorded runs would take if they shared their devices."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from tuneloop.argo.colocation import format_gib
from tuneloop.argo.memory_estimate import estimate_memory_parts, model_of
from tuneloop.cli.tables import print_table
from tuneloop.config.model_facts import Model
from tuneloop.core.errors import UserError
from tuneloop.planning.phases import find_device, read_recorded_tasks
from tuneloop.runs.records import read_records
from tuneloop.runs.run_record import Run
from tuneloop.sharing import plans
from tuneloop.sharing.simulate import Rules, Task
from tuneloop.sharing.turns import compute_poll_interval
from tuneloop.workflow.rendered_stages import read_stage
from tuneloop.workflow.settings import Share

LINK, FIXED_S = 16e9, 4.0
"""Published for 8B: bytes a second of a GPU's link to its host, and seconds of a snapshot and back without weights."""
TOTALS = ("total s", "steps/h/accelerator", "against alone")
ASSUMED = """\
simulated: stages take the recorded seconds, one after another by the rules of device leases; contention of concurrent
stages (cores, memory, network) is not included. asynchronous: rollouts are one version old."""


def plan_shared(
    name: str,
    config: Any,
    workflow: Mapping[str, Any],
    *,
    measured: Sequence[str],
    store: str,
    swap: float,
    asked: str | None,
) -> None:
    """Print the result of each plan, and the recommended one. Raises UserError if the plan `asked` loses time, or the
    runs cannot be used for planning.

    Args:
        name: of the pipeline.
        config, workflow: its configuration, and what was rendered from it.
        measured: recorded runs; none: the newest of the pipeline.
        store: the store of these runs.
        swap: seconds that a device loses when its lease goes to another run.
        asked: a plan that must not lose time; default: that of the configuration.
    """
    given = getattr(getattr(config, "cluster", None), "share", None)
    share = given or Share(group="planned")
    asked = asked or (f"shared-{given.policy}" if given else None)
    if asked and asked not in plans.PLANS:
        raise UserError("--plan", asked, f"use one of {', '.join(plans.PLANS)}")
    measured = (
        measured or [record.run for record in read_records(store) if record.pipeline == name][-1:]
    )
    if not measured:
        raise UserError(
            "--measured", None, f"no run of {name} is recorded below {store}: name one, or run it"
        )
    places = (
        each.rstrip("/").rpartition("/") for each in measured
    )  # names, or URLs that end in one
    runs = [Run.open(run, above or store) for above, _, run in places]
    if given and len(runs) > share.runs_per_claim:
        raise UserError(
            "--measured", len(runs), f"runs: cluster.share.runs_per_claim is {share.runs_per_claim}"
        )
    together = share.roles == "together"
    # Each claim has a lease; without claims there is one for the group.
    turns = plans.GROUP if together or not share.device_class else plans.APART
    rules = Rules(turns, swap=swap, handover=compute_poll_interval(share.patience) / 2)
    workloads, accelerators = (
        build_workloads(runs, share.runs_per_claim),
        count_accelerators(workflow, share),
    )
    compared = plans.compare_plans(workloads, accelerators, together, rules)
    columns = (
        "plan",
        "runs",
        "accelerators",
        "s/step",
        "p95",
        *(f"{each} idle" for each in plans.ROLES),
        *TOTALS,
    )
    print_table(columns, list_plan_rows(compared), right=columns[1:])
    shared = min((compared[each] for each in plans.SHARED), key=lambda plan: plan.total)
    gain = compared[plans.SERIAL].total / shared.total - 1
    word = f"{gain:.0%} more in the same time" if gain >= 0 else f"{-gain:.0%} less: it loses time"
    advice = f"recommended: {plans.recommend_plan(compared)}, for most steps an hour and accelerator; by turns "
    advice += f"{shared.runs} runs do {word}"
    swap_lines = describe_swap(workflow, runs, shared.runs)
    typer.echo("\n".join((*map(_source, runs), _turns(rules, share), *swap_lines, ASSUMED, advice)))
    if asked:
        plans.check_plan(compared, asked, rules)


def list_plan_rows(compared: Mapping[str, plans.Plan]) -> Iterator[tuple[str, ...]]:
    """Yield the row of each plan."""
    alone = next(iter(compared.values())).throughput
    for name, plan in compared.items():
        steps = (
            f"{plan.mean:.2f}",
            f"{plan.p95:.2f}",
            *(f"{plan.idle(each):.0%}" for each in plans.ROLES),
        )
        rate = (f"{plan.throughput * 3600:.1f}", f"{plan.throughput / alone:.2f}")
        yield name, str(plan.runs), str(plan.accelerators), *steps, f"{plan.total:.1f}", *rate


def build_workloads(runs: Sequence[Run], copies: int) -> dict[str, list[Task]]:
    """Build name → tasks of the runs that share devices: several runs, or `copies` of a single one."""
    found = [(run.name, read_recorded_tasks(run)) for run in runs]
    several = found if len(found) > 1 else found * max(2, copies)
    return {f"{name} {number}": tasks for number, (name, tasks) in enumerate(several)}


def count_accelerators(workflow: Mapping[str, Any], share: Share) -> dict[str, int]:
    """Count the accelerators that the stages of each role hold; a role on CPU counts as one."""
    held = dict.fromkeys(plans.ROLES, share.count)
    for template in workflow["spec"]["templates"]:
        stage = read_stage(template)
        if of := "sampler" if stage.serves else find_device(stage.component):
            held[of] = max(held[of], stage.accelerators * stage.nodes)
    return held


def describe_swap(workflow: Mapping[str, Any], runs: Sequence[Run], copies: int) -> Iterator[str]:
    """Yield what it costs that a server gives its devices away: by a snapshot out and in, and by loading weights."""
    stages = [read_stage(template) for template in workflow["spec"]["templates"]]
    server, model = next((stage for stage in stages if stage.serves), None), model_of(stages)
    if server and server.accelerators and isinstance(model, Model):
        parts = (
            []
            if server.engine_args.get("enable_sleep_mode")
            else estimate_memory_parts(server, model, None)
        )
        held, what = sum(count for _, count in parts), " + ".join(text for text, _ in parts) or "0"
        how = f"2 × ({what}) / {LINK / 1e9:g} GB/s + {FIXED_S:g} s = {2 * held / LINK + FIXED_S:.1f} s"
        yield f"engine.snapshot: {how}, by what was published for 8B; host memory {copies} × {format_gib(held)}"
    loads = [
        load
        for run in runs
        for entry in run.with_role("sampler")
        if (load := entry.manifest.timings.get("load"))
    ]
    if server and loads:
        yield f"loading the server's weights, as of each new version: {statistics.median(loads):.2f} s, recorded"


def _source(run: Run) -> str:
    """Describe where the seconds come from."""
    stages = ", ".join(
        f"{stage} {seconds:.2f}" for stage, seconds in run.seconds_an_iteration().items()
    )
    held = (
        "a pod's start to its end"
        if run.state
        else "a stage's start to its commit (its pod took longer)"
    )
    return f"seconds of {run.name}: {run.iteration} iterations, {held} ({stages} worked, median); waits between: median"


def _turns(rules: Rules, share: Share) -> str:
    """Describe the cost of handing over the lease, and where its numbers come from."""
    of = (
        "trainers and samplers each have a turn"
        if len({*rules.turns.values()}) > 1
        else "one turn for all devices"
    )
    return (
        f"{of}; one that goes to another run costs {rules.swap:g} s (--swap), and {rules.handover:g} s until who waited"
        f" sees it: half of {compute_poll_interval(share.patience):g} s, as patience {share.patience:g} s has it"
    )
