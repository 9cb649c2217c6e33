"""``tuneloop weights``: the checkpoints of a run, and the weight versions that were published for
others to pull.

Where a command takes a run's name, it also takes the URL or path of a weights root, which has a
``/`` in it. Checkpoints are read by `runs/stored_checkpoints.py` and `runs/verification.py`,
published versions by `weights/inspect.py` and `weights/materialize.py`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuneloop.cli.arguments import DELETE, STORE
from tuneloop.cli.inspect import open_run
from tuneloop.cli.tables import print_table
from tuneloop.core.errors import UserError
from tuneloop.core.wording import format_count

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
    """List the policy versions of a run, or the published versions below a URL.

    Of a run both are listed: its checkpoints, and the versions that it has published.
    """
    from tuneloop.cli.show import show_weights

    # The name of a run has no slash.
    if "/" in name:
        _show_published(name)
        return
    run = open_run(name, store)
    show_weights(run)
    root = find_published_root(run)
    if root:
        _show_published(root)


@app.command("verify")
def verify_weights(
    name: NAME,
    version: Annotated[int | None, typer.Argument(min=0, help="One version; default: all.")] = None,
    base: BASE = None,
    store: STORE = "runs",
) -> int:
    """Hash every file of a run's checkpoints, and assemble its published versions. Exit code 2 if
    one differs.

    Each file that differs is named, with what to do. Published versions are assembled one at a time
    in a temporary folder, which needs room for one model.
    """
    if "/" in name:
        return _verify_published(name, version, base)
    run = open_run(name, store)
    code = _verify_checkpoints(run, version)
    root = find_published_root(run)
    if root:
        code = max(code, _verify_published(root, version, base))
    return code


@app.command("materialize")
def materialize_weights(
    name: NAME,
    directory: Annotated[Path, typer.Argument(help="Empty, absent, or made by an earlier call.")],
    version: VERSION = None,
    base: BASE = None,
    store: STORE = "runs",
) -> None:
    """Make a local model directory hold a published version, byte for byte. Only what it lacks is
    fetched.

    A directory of an earlier call is brought to the version by deltas where that reads fewer bytes.
    """
    from tuneloop.weights.materialize import materialize_version

    result = materialize_version(_find_root(name, store), version, directory, base=base)
    source = f"from version {result.previous}"
    if result.full is not None:
        source = f"full version {result.full}"
    if result.deltas:
        source += f" and {len(result.deltas)} deltas"
    megabytes = result.read_bytes / 1e6
    seconds = sum(result.timings.values())
    typer.echo(
        f"{directory}: version {result.version}, {source}, {megabytes:.2f} MB in {seconds:.2f} s"
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
    """Say which tensors differ between two published versions, and in how many of their elements.

    Tensors whose checksums are equal are not read. A tensor whose shape or type differs counts as
    changed everywhere.
    """
    from tuneloop.weights.inspect import diff_versions

    difference = diff_versions(_find_root(name, store), first, second, role=role, base=base)
    changes = [(tensor, "removed") for tensor in difference.removed]
    changes += [(tensor, "added") for tensor in difference.added]
    # The tensors that changed most come first.
    by_density = sorted(difference.changed.items(), key=lambda item: -item[1])
    changes += [(tensor, f"{density:.2%}") for tensor, density in by_density]
    rows = [(tensor, difference.roles.get(tensor, ""), change) for tensor, change in changes]
    print_table(("tensor", "role", "elements changed"), rows, right=("elements changed",))
    typer.echo(f"unchanged: {format_count(difference.same, 'tensor')}")


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
    """Delete published versions that are not needed: neither kept nor pinned, nor the base of one
    that is.

    Versions that replicas announce are kept, too. With --delete what crashed publications left is
    deleted as well.
    """
    from tuneloop.weights.inspect import delete_unused_versions

    unused = delete_unused_versions(_find_root(name, store), keep, pin or (), delete=delete)
    numbers = ", ".join(map(str, unused)) or "none"
    # What crashed publications left has no version, so that it is not in the list.
    if delete:
        typer.echo(f"deleted: {numbers}")
    else:
        typer.echo(f"to delete: {numbers}, and what crashed publications left; --delete does")


def find_published_root(run: "Run") -> str | None:
    """Return the URL where a run has published weight versions, if it has."""
    from tuneloop.weights import pointer

    return run.weights_url if pointer.read_pointer(run.weights_url) else None


def _find_root(name: str, store: str) -> str:
    """Return the weights root that a command names, by a run or by its URL.

    Raises:
        UserError: there is no such run, or it has published nothing.
    """
    if "/" in name:
        return name
    root = find_published_root(open_run(name, store))
    if root is None:
        raise UserError(
            "run",
            name,
            "published no versions (engine.weights=pull); give the URL of a weights root",
        )
    return root


def _list_published(root: str) -> "list[Listed]":
    """List the versions below a root. Raises UserError if there are none."""
    from tuneloop.weights.inspect import list_versions

    versions = list_versions(root)
    if not versions:
        raise UserError("weights", root, "has no versions; publish some, or correct the URL")
    return versions


def _show_published(root: str) -> None:
    """Print the versions below a root: how each is stored, and in how many bytes."""
    from tuneloop.runs.summary import format_size

    rows = []
    for listed in _list_published(root):
        mark = " latest" if listed.latest else ""
        # A version whose weights readers hold has no encoding in the store.
        full = "held by readers" if listed.held_by_readers else "full"
        row = (
            f"{listed.version}{mark}",
            "" if listed.base_version is None else str(listed.base_version),
            listed.encoding or full,
            format_size(listed.stored_bytes),
            f"{listed.stored_bytes / listed.full_bytes:.1%}",
            "" if listed.density is None else f"{listed.density:.2%}",
        )
        rows.append(row)
    columns = ("published", "base", "stored as", "bytes", "of full", "elements changed")
    print_table(columns, rows, right=[name for name in columns if name != "stored as"])


def _verify_published(root: str, version: int | None, base: Path | None) -> int:
    """Assemble versions and compare every tensor; return 2 where one cannot be assembled, or
    differs.
    """
    from tuneloop.weights.inspect import verify_version
    from tuneloop.weights.versions import Chain

    chain = Chain(root)
    numbers = [version] if version is not None else [v.version for v in _list_published(root)]
    # A damaged version breaks all that build on it: its error is printed once.
    first_by_file: dict[str, int] = {}
    for number in numbers:
        try:
            tensors = verify_version(chain, number, base=base)
            typer.echo(f"published version {number}: {tensors}/{tensors} tensors as published")
        except UserError as error:
            first = first_by_file.setdefault(str(error.value), number)
            reason = str(error) if first == number else f"builds on version {first}"
            typer.echo(f"error: published version {number}: {reason}", err=True)
    return 2 if first_by_file else 0


def _verify_checkpoints(run: "Run", version: int | None) -> int:
    """Hash the files of a run's checkpoints, or of one; return 2 where one is not as committed.

    Raises:
        UserError: the run has no checkpoint of this version.
    """
    from tuneloop.runs.stored_checkpoints import find_checkpoint
    from tuneloop.runs.verification import find_state_entry, verify_artifact

    # Otherwise the manifests of older iterations would be taken from an index.
    run.refresh(all_iterations=True)
    newest = find_checkpoint(run, version, "version")
    code = 0
    for entry in run.checkpoints if version is None else [newest]:
        checks = list(verify_artifact(run, entry))
        state = find_state_entry(run, entry)
        if state:
            checks += verify_artifact(run, state)
        wrong = [check for check in checks if not check.is_unchanged]
        correct = len(checks) - len(wrong)
        counts = f"{correct}/{len(checks)} files as committed"
        typer.echo(f"version {entry.version}  {entry.key}: {counts}")
        for check in wrong:
            code = 2
            reason = "is missing"
            if check.actual:
                reason = f"holds SHA-256 {check.actual.sha256}, not {check.expected.sha256}"
            typer.echo(
                f"error: {run.url}/{check.key}: {reason};"
                f" restore it, or delete {entry.key} and resume",
                err=True,
            )
    return code
