"""``tuneloop weights``: the checkpoints of a run, and the weight versions that were published for others to pull.

Where a command takes a run's name, it also takes the URL or path of a weights root, which has a ``/`` in it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuneloop.cli.arguments import DELETE, STORE
from tuneloop.cli.inspect import open_run
from tuneloop.cli.tables import print_table
from tuneloop.core.errors import UserError

if TYPE_CHECKING:
    from tuneloop.runs.run_record import Run
    from tuneloop.weights.inspect import Listed

app = typer.Typer(
    no_args_is_help=True, help="The checkpoints of a run, and published weight versions."
)
NAME = Annotated[
    str,
    typer.Argument(
        metavar="RUN|URL", help="A run's name, or the URL of a weights root (with a /)."
    ),
]
BASE = Annotated[
    Path | None, typer.Option(help="The model that the chain starts on, if it stores none.")
]
VERSION = Annotated[int | None, typer.Argument(min=0, help="One version; default: the latest.")]


@app.command("ls")
def show_versions(name: NAME, store: STORE = "runs") -> None:
    """List the policy versions of a run, or the published versions below a URL."""
    from tuneloop.cli.show import show_weights

    if "/" in name:
        return _show_published(name)
    run = open_run(name, store)
    show_weights(run)
    if root := published_root(run):
        _show_published(root)


@app.command("verify")
def verify_weights(
    name: NAME,
    version: Annotated[int | None, typer.Argument(min=0, help="One version; default: all.")] = None,
    base: BASE = None,
    store: STORE = "runs",
) -> int:
    """Hash every file of a run's checkpoints, and assemble its published versions. Exit code 2 if one differs."""
    if "/" in name:
        return _verify_published(name, version, base)
    run = open_run(name, store)
    bad = _verify_checkpoints(run, version)
    root = published_root(run)
    return max(bad, _verify_published(root, version, base)) if root else bad


@app.command("materialize")
def materialize_weights(
    name: NAME,
    directory: Annotated[Path, typer.Argument(help="Empty, absent, or made by an earlier call.")],
    version: VERSION = None,
    base: BASE = None,
    store: STORE = "runs",
) -> None:
    """Make a local model directory hold a published version, byte for byte. Only what it lacks is fetched."""
    from tuneloop.weights.materialize import materialize_version

    done = materialize_version(_root(name, store), version, directory, base=base)
    how = f"full version {done.full}" if done.full is not None else f"from version {done.previous}"
    deltas = f" and {len(done.deltas)} deltas" if done.deltas else ""
    took = sum(done.timings.values())
    typer.echo(
        f"{directory}: version {done.version}, {how}{deltas}, {done.read_bytes / 1e6:.2f} MB in {took:.2f} s"
    )


@app.command("diff")
def diff_weights(
    name: NAME,
    first: Annotated[int, typer.Argument(min=0, help="A version.")],
    second: Annotated[int, typer.Argument(min=0, help="Another one.")],
    role: Annotated[
        str, typer.Option(help="Only tensors of this role, as expert; no others are read.")
    ] = "",
    base: BASE = None,
    store: STORE = "runs",
) -> None:
    """Say which tensors differ between two published versions, and in how many of their elements."""
    from tuneloop.weights.inspect import diff_versions

    found = diff_versions(_root(name, store), first, second, role=role, base=base)
    told = [(tensor, label) for label in ("removed", "added") for tensor in getattr(found, label)]
    told += [
        (name, f"{density:.2%}")
        for name, density in sorted(found.changed.items(), key=lambda item: -item[1])
    ]
    rows = [(tensor, found.roles.get(tensor, ""), text) for tensor, text in told]
    print_table(("tensor", "role", "elements changed"), rows, right=("elements changed",))
    typer.echo(f"{found.same} tensors are the same")


@app.command("gc")
def delete_unused_weights(
    name: NAME,
    keep: Annotated[int, typer.Option(min=1, help="Number of newest versions to keep.")] = 1,
    pin: Annotated[
        list[int] | None, typer.Option(help="A version to keep, which a replica serves.")
    ] = None,
    delete: DELETE = False,
    store: STORE = "runs",
) -> None:
    """Delete published versions that are not needed: neither kept nor pinned, nor the base of one that is."""
    from tuneloop.weights.inspect import delete_unused_versions

    found = delete_unused_versions(_root(name, store), keep, pin or (), delete=delete)
    numbers = ", ".join(map(str, found)) or "none"
    left = "" if delete else ", and what crashed publications left; --delete does"
    typer.echo(f"{'dropped' if delete else 'to drop'}: {numbers}{left}")


def published_root(run: "Run") -> str | None:
    """Return the URL where a run has published weight versions, if it has."""
    from tuneloop.weights import pointer

    return run.weights_url if pointer.read_pointer(run.weights_url) else None


def _root(name: str, store: str) -> str:
    if "/" in name:
        return name
    if (root := published_root(open_run(name, store))) is None:
        raise UserError(
            "run",
            name,
            "published no versions (engine.weights=pull); give the URL of a weights root",
        )
    return root


def _listed(root: str) -> "list[Listed]":
    from tuneloop.weights.inspect import list_versions

    if found := list_versions(root):
        return found
    raise UserError("weights", root, "has no versions; publish some, or correct the URL")


def _show_published(root: str) -> None:
    """Print the versions below a root: how each is stored, and in how many bytes."""
    from tuneloop.runs.summary import format_size

    columns = ("published", "base", "stored as", "bytes", "of full", "elements changed")
    rows = [
        (
            f"{v.version}{' latest' if v.latest else ''}",
            "" if v.base_version is None else str(v.base_version),
            v.encoding or ("held by readers" if v.held_by_readers else "full"),
            format_size(v.stored_bytes),
            f"{v.stored_bytes / v.full_bytes:.1%}",
            "" if v.density is None else f"{v.density:.2%}",
        )
        for v in _listed(root)
    ]
    print_table(columns, rows, right=(*columns[:2], *columns[3:]))


def _verify_published(root: str, version: int | None, base: Path | None) -> int:
    """Assemble versions and compare every tensor; return 2 where one cannot be assembled, or differs."""
    from tuneloop.weights import versions
    from tuneloop.weights.inspect import verify_version

    first, chain = dict[str, int](), versions.Chain(root)
    for chosen in [v.version for v in _listed(root)] if version is None else [version]:
        try:
            tensors = verify_version(chain, chosen, base=base)
            typer.echo(f"published version {chosen}: {tensors}/{tensors} tensors as published")
        except UserError as error:
            found = first.setdefault(str(error.value), chosen)
            said = error if found == chosen else f"builds on version {found}"
            typer.echo(f"error: published version {chosen}: {said}", err=True)
    return 2 if first else 0


def _verify_checkpoints(run: "Run", version: int | None) -> int:
    from tuneloop.runs.verification import find_state_entry, verify_artifact

    run.refresh(all_iterations=True)
    held = run.checkpoints
    if not (chosen := [e for e in held if version in (None, e.manifest.facts["version"])]):
        versions = ", ".join(str(e.manifest.facts["version"]) for e in held) or "none"
        raise UserError("version", version, f"is not in this run; versions: {versions}")
    bad = 0
    for entry in chosen:
        state = find_state_entry(run, entry)
        checked = [one for each in (entry, state) if each for one in verify_artifact(run, each)]
        wrong = [c for c in checked if not c.is_unchanged]
        bad += len(wrong)
        at = f"version {entry.manifest.facts['version']}  {entry.key}"
        typer.echo(f"{at}: {len(checked) - len(wrong)}/{len(checked)} files as committed")
        for c in wrong:
            what = (
                f"holds SHA-256 {c.actual.sha256}, not {c.expected.sha256}"
                if c.actual
                else "is missing"
            )
            typer.echo(
                f"error: {run.url}/{c.key}: {what}; restore it, or delete {entry.key} and resume",
                err=True,
            )
    return 2 if bad else 0
