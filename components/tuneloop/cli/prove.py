"""Commands that verify a run: its digests, its stages' results, its first difference from another run; and find out
what a policy could gain from a reward.

The work is in `runs/audit.py`, `runs/replay.py` and `local/probe.py`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuneloop.cli.arguments import RUN, STORE
from tuneloop.cli.inspect import open_run
from tuneloop.cli.tables import print_table
from tuneloop.core.errors import UserError

if TYPE_CHECKING:
    from tuneloop.runs.audit import Proof


def audit_run(
    name: RUN,
    root: Annotated[
        str | None,
        typer.Option(
            "--root",
            metavar="sha256:…",
            help="The root from a source that you trust; any other fails.",
        ),
    ] = None,
    store: STORE = "runs",
) -> int:
    """Verify all that a run has committed, by SHA-256. The root of the run is printed. Exit code 2
    if something does not fit.

    The root is one digest over all manifests, in the order of the graph: equal roots are equal
    runs. A root that you noted earlier, given by --root, proves that nothing was changed since.
    """
    from tuneloop.runs import audit
    from tuneloop.runs.summary import format_facts

    run = open_run(name, store)
    proofs: list[Proof] = []
    for proof in audit.audit_run(run):
        proofs.append(proof)
        # Said as soon as it is found: to hash a large run takes long.
        for problem in proof.problems:
            typer.echo(f"error: {proof.key}: {problem}", err=True)
    facts = _count_proofs(name, proofs)
    facts["root"] = audit.compute_root(run)
    typer.echo(format_facts(facts))
    if root not in (None, facts["root"]):
        raise UserError(
            "--root",
            root,
            f"the run's root is {facts['root']}: it is another run, or was changed since",
        )
    return 2 if any(proof.problems for proof in proofs) else 0


def _count_proofs(name: str, proofs: "list[Proof]") -> dict[str, str]:
    """Describe how much of a run was verified.

    Raises:
        UserError: the run has committed nothing itself.
    """
    # Inputs from outside of the run have a manifest here, and no files.
    committed = [proof for proof in proofs if proof.files is not None]
    if not committed:
        raise UserError(
            "run", name, "has committed nothing that could be verified; see `tuneloop status`"
        )
    correct = sum(not proof.problems for proof in committed)
    files = sum(proof.files or 0 for proof in committed)
    facts = {
        "artifacts": f"{correct} of {len(committed)} as committed",
        "files": f"{files} as committed, by SHA-256",
    }
    deleted = sum(proof.deleted for proof in committed)
    if deleted:
        facts["pruned"] = (
            f"by retention the files of {deleted} old checkpoints; their manifests are as committed"
        )
    outside = len(proofs) - len(committed)
    if outside:
        facts["from outside"] = f"{outside} inputs: their manifests were read, their files were not"
    return facts


def replay_run(
    name: RUN,
    iteration: Annotated[int, typer.Argument(min=0, help="0: the stages outside the loop.")],
    stage: Annotated[
        str | None, typer.Option(help="One stage of it, as in policy-update; default: all.")
    ] = None,
    store: STORE = "runs",
) -> int:
    """Compute an iteration again on this machine, and compare. Names the first difference; then
    exits with 2.

    The stages get the inputs and seeds that they had. Their outputs go to a temporary folder.
    """
    from tuneloop.runs.replay import replay_iteration

    code = 0
    for replayed in replay_iteration(open_run(name, store), iteration, stage):
        if replayed.difference is not None:
            code = 2
        outcome = replayed.difference or f"equal, {replayed.manifest.digest}"
        typer.echo(f"{replayed.entry.key}: {outcome}")
    return code


def bisect_runs(
    name: RUN,
    against: Annotated[str, typer.Option(metavar="RUN", help="The run to compare with.")],
    store: STORE = "runs",
) -> int:
    """Find where two runs diverge. The first artifact, by iteration, that differs, and its first
    difference.

    Exit code 0: they are equal in all artifacts that both have; 2: they differ.
    """
    from tuneloop.runs.replay import find_departure

    departure = find_departure(open_run(name, store), open_run(against, store))
    typer.echo(departure or "equal in all artifacts that both have")
    return 2 if departure else 0


def probe_rewards(
    rewards: Annotated[
        list[str] | None, typer.Option("--reward", help="By name or pkg.mod:attr. Repeatable.")
    ] = None,
    environments: Annotated[
        list[str] | None, typer.Option("--environment", help="The same. Repeatable.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSON Lines: a row with answer."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds that one call may take.")
    ] = 5.0,
) -> int:
    """Try attacks on rewards and environments. Prints what a policy could gain; exit code 1 if it
    gains.

    By default on those that ship. An attack is a wrong answer that a policy might find: it gains if
    its score is above that of other wrong answers. One of each category is printed with its text.
    """
    from tuneloop.local.probe import ENDINGS, count_endings, try_attacks

    find_modules_here()
    trials = try_attacks(rewards or (), environments or (), data, timeout_s)
    columns, rows = count_endings(trials)
    print_table(columns, rows)
    legend = [": ".join(filter(None, ending)) for ending in ENDINGS.items()]
    typer.echo(f"A number without a letter: {'; '.join(legend)}")
    # n: no score, where there should be one; g: a gain.
    gains = [trial for trial in trials if trial.ending in ("n", "g")]
    gains.sort(key=lambda trial: trial.outcome.score or 0.0)
    # The last of a category stays: the one that gains most.
    largest = {(trial.target, trial.category): trial for trial in gains}
    for trial in largest.values():
        outcome = trial.outcome
        score = "no score" if outcome.score is None else f"{outcome.score:.3g}"
        details = f"{score}, a wrong answer has {trial.wrong:.3g}; {outcome.breakdown}"
        typer.echo(
            f"{trial.target}: {trial.category}: {trial.name}: {details}: {trial.text[:200]!r}"
        )
    return 1 if gains else 0


def find_modules_here() -> None:
    """Find a user's rewards in the working directory, as a stage does, which `python -m` runs.

    Each command that loads rewards or environments calls it: `probe`, and `rescore` of
    `extensions/provenance/commands.py`.
    """
    sys.path.insert(0, str(Path.cwd()))
