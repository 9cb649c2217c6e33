"""Commands that check what a run claims: its digests, what its stages compute, where it departs from another."""

from typing import Annotated

import typer

from tuneloop.cli.arguments import RUN, STORE
from tuneloop.cli.inspect import open_run
from tuneloop.core.errors import UserError


def audit_run(
    name: RUN,
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="sha256:…", help="What somebody you trust told you; any other fails."),
    ] = None,
    store: STORE = "runs",
) -> int:
    """Prove by SHA-256 all that a run has committed, and print its root. Exit code 2 where something does not fit."""
    from tuneloop.runs import audit
    from tuneloop.runs.summary import format_facts

    run, proofs = open_run(name, store), []
    for proof in audit.audit_run(run):
        proofs.append(proof)
        for problem in proof.problems:
            typer.echo(f"error: {proof.key}: {problem}", err=True)
    own = [proof for proof in proofs if proof.files is not None]
    facts = {
        "artifacts": f"{sum(not proof.problems for proof in own)} of {len(own)} as committed",
        "files": f"{sum(proof.files or 0 for proof in own)} as committed, by SHA-256",
    }
    if deleted := sum(proof.deleted for proof in own):
        facts["deleted"] = f"the files of {deleted} old checkpoints; their manifests are as committed"
    if outside := len(proofs) - len(own):
        facts["from outside"] = f"{outside} inputs: their manifests were read, their files were not"
    typer.echo(format_facts({**facts, "root": (found := audit.compute_root(run))}))
    if root not in (None, found):
        raise UserError("--root", root, f"the run's root is {found}: it is not, or no longer, what you were told of")
    return 2 if any(proof.problems for proof in proofs) else 0


def replay_run(
    name: RUN,
    iteration: Annotated[int, typer.Argument(min=0, help="0: what is outside the loop.")],
    stage: Annotated[str | None, typer.Option(help="One stage of it, as in policy-update; default: all.")] = None,
    store: STORE = "runs",
) -> int:
    """Compute an iteration once more, here, and compare. Names the first difference; exit code 2 where there is one."""
    from tuneloop.runs.replay import replay_iteration

    differ = 0
    for done in replay_iteration(open_run(name, store), iteration, stage):
        differ += done.difference is not None
        typer.echo(f"{done.entry.key}: " + (done.difference or f"equal, {done.manifest.digest}"))
    return 2 if differ else 0


def bisect_runs(
    name: RUN,
    against: Annotated[str, typer.Option(metavar="RUN", help="The run to compare with.")],
    store: STORE = "runs",
) -> int:
    """Find where two runs depart. The first artifact, by iteration, that differs, and its first difference."""
    from tuneloop.runs.replay import find_departure

    found = find_departure(open_run(name, store), open_run(against, store))
    typer.echo(found or "equal as far as both go")
    return 2 if found else 0
