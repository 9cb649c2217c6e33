"""Commands that explain what made a version, judge it by another reward, and name, sign and publish versions.

Each command opens a run, calls one function of this package, and prints. A command that is added is
named in `__init__.py`, too, and in docs/commands.md.
"""

import heapq
import json
import time
from math import nan
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from tuneloop.cli.arguments import JSON, RUN, STORE
from tuneloop.cli.inspect import open_run, print_json
from tuneloop.cli.tables import print_table
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.store import Store

if TYPE_CHECKING:
    from tuneloop.runs.run_record import Run
from tuneloop.cli.prove import find_modules_here

NEWEST = Annotated[
    str | None, typer.Argument(help="Of the weights, as 4 or v4; default: the newest.")
]


def explain_version(
    name: RUN,
    which: Annotated[
        str | None,
        typer.Argument(
            metavar="[ITERATION|VERSION]",
            help="3: an iteration; v4: version 4; default: the newest version.",
        ),
    ] = None,
    store: STORE = "runs",
) -> None:
    """Explain what made a version. Prompts, rollouts, rewards, seeds, code, image and server, as
    recorded.

    Each artifact that it was made from is printed with its reference and what its manifest says.
    """
    from tuneloop.extensions.provenance import questions
    from tuneloop.runs import summary
    from tuneloop.runs.stored_checkpoints import find_checkpoint

    run = open_run(name, store)
    if which is None:
        which = f"v{find_checkpoint(run, None).version}"
        typer.echo(f"{which}, the newest: {questions.list_known(run)}\n", err=True)
    artifact = questions.find_artifact(run, which)
    for reference, facts in questions.explain_artifact(run, artifact):
        typer.echo(f"{reference}\n{summary.format_facts(facts)}")


def promote_version(
    name: RUN,
    version: Annotated[str, typer.Argument(help="Version of the weights, as 4 or v4.")],
    promoted: Annotated[
        str, typer.Argument(metavar="NAME", help="The name to give it, as production.")
    ],
    minima: Annotated[
        list[str],
        typer.Option("--min", metavar="METRIC=VALUE", help="What its evaluation must reach."),
    ],
    store: STORE = "runs",
) -> None:
    """Name a version that passes the audit and reaches --min. Retention keeps it; the name has a
    history.

    The newest evaluation of the version that measured all metrics decides. `tuneloop promoted`
    lists the names.
    """
    from tuneloop.extensions.provenance import promotion
    from tuneloop.runs.promotions import parse_minima

    # Tables print v4, and users copy what they read.
    number = version.removeprefix("v")
    if not number.isdecimal():
        raise UserError("VERSION", version, "write its number, as in 4 or v4")
    run = open_run(name, store)
    record = promotion.promote_version(run, int(number), promoted, parse_minima(minima))
    typer.echo(f"{promoted}: version {int(number)} of {name}, {record['ref']}")


def list_promotions(
    promoted: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Default: all names.")
    ] = None,
    store: STORE = "runs",
    as_json: JSON = False,
) -> None:
    """List promoted versions, newest first. With user, time, the figures that decided, and
    references for tools.

    The newest of a name is the one that the name stands for now; the others are its history.
    """
    from tuneloop.formats.promotions import read_history

    # Names are those of a store: runs of one task promote to the same name in turn.
    history, _ = read_history(Store(store))
    promotions = [item for item in reversed(history) if promoted in (None, item["name"])]
    if promoted and not promotions:
        raise UserError(
            "NAME", promoted, f"was not promoted in {store}; `tuneloop promote` does that"
        )
    if as_json:
        print_json({"promotions": promotions})
    elif promotions:
        columns = ("name", "run", "version", "when", "who", "figures", "reference")
        rows = [_format_promotion(promotion) for promotion in promotions]
        print_table(columns, rows, cut="reference")
    else:
        typer.echo(f"nothing was promoted in {store}")


def _format_promotion(promotion: JsonMapping) -> tuple[str, ...]:
    """Return the row of a promotion in the list."""
    results = promotion["figures"]
    # A metric that the evaluation lacks could not have been promoted; a damaged record may say so.
    figures = [
        f"{metric} {results.get(metric, nan):g} (≥ {minimum:g})"
        for metric, minimum in promotion["least"].items()
    ]
    return (
        promotion["name"],
        promotion["run"],
        str(promotion["version"]),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(promotion["time"])),
        promotion["who"],
        ", ".join(figures),
        promotion["ref"],
    )


def rescore_run(
    name: RUN,
    reward: Annotated[
        str,
        typer.Option(help="Its name, as in exact or my_rewards:score; or JSON, reward → weight."),
    ],
    examples: Annotated[
        int, typer.Option(min=0, help="Completions to show, of those whose score differs most.")
    ] = 5,
    store: STORE = "runs",
) -> None:
    """Judge a run's stored rollouts by another reward. Means, groups whose order changes, and
    changed completions.

    Nothing is sampled and nothing is written. A group whose order changes would have trained the
    policy in another direction.
    """
    from tuneloop.extensions.provenance import questions

    # A reward of the user's own is a module in the directory that the command is run in.
    find_modules_here()
    lines: list[tuple[str, ...]] = []
    largest: list[JsonObject] = []
    # A name alone is the whole score.
    spec = reward if reward.startswith("{") else json.dumps({reward: 1.0})
    for iteration, rows in questions.rescore_run(open_run(name, store), spec):
        changed = [row for row in rows if row["change"]]
        line = (
            str(iteration),
            _format_mean(rows, "score"),
            _format_mean(rows, "rescored"),
            f"{len(changed)} of {len(rows)}",
            questions.count_reordered(rows),
        )
        lines.append(line)
        # A long run has more changed rows than fit into memory: only the largest are kept.
        largest = heapq.nlargest(examples, largest + changed, key=itemgetter("change"))
    columns = ("iteration", "mean", "rescored", "scored otherwise", "groups reordered")
    print_table(columns, lines, right=columns)
    for row in largest:
        texts = "  ".join(f"{key} {row[key]!r:.200}" for key in ("prompt", "completion", "answer"))
        typer.echo(f"{row['request_id']}: {row['score']} → {row['rescored']}  {texts}")


def _format_mean(rows: list[JsonObject], column: str) -> str:
    """Format the mean of a column of scores, without rows that have none."""
    scores = [row[column] for row in rows if row[column] is not None]
    return f"{fmean(scores):.3f}" if scores else "none"


def attest_version(
    name: RUN,
    key: Annotated[Path, typer.Option(help="Private key, PEM.")],
    version: NEWEST = None,
    certificate: Annotated[
        list[Path] | None, typer.Option(help="Certificate chain, leaf first. Repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory; default: RUN-vVERSION.")
    ] = None,
    builder: Annotated[
        str, typer.Option(help="URI that identifies the builder.")
    ] = "https://github.com/tuneloop",
    store: STORE = "runs",
) -> None:
    """Sign a version and what it was made from. Writes its files, a model card, SLSA provenance and
    a signature.

    The version must pass the audit. `tuneloop verify-model` verifies the files, without a store.
    """
    from tuneloop.extensions.provenance import attestation, questions, signatures

    # The key first: it may be wrong, and to read the run takes longer.
    signer = signatures.open_signer(key, certificate or ())
    run = open_run(name, store)
    artifact = questions.find_artifact(run, _name_version(run, version))
    directory = attestation.attest_version(run, artifact, output, signer, builder)
    typer.echo(f"signed: {directory}")


def push_version(
    name: RUN,
    repo: Annotated[
        str, typer.Argument(help="Hugging Face repository, as OWNER/NAME; created if missing.")
    ],
    version: NEWEST = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="If it is new; default: as OWNER.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only its LoRA adapters, in peft's format.")
    ] = False,
    store: STORE = "runs",
) -> None:
    """Upload a version to the Hugging Face hub. It must pass the audit; a model card is made from
    the run.

    The token is the one of `hf auth login`, or HF_TOKEN.
    """
    from tuneloop.extensions.provenance import attestation, questions

    run = open_run(name, store)
    artifact = questions.find_artifact(run, _name_version(run, version))
    url = attestation.push_version(run, artifact, repo, private, adapter)
    typer.echo(f"pushed: {url}")


def _name_version(run: "Run", version: str | None) -> str:
    """Return a version as `find_artifact` takes it, ``v4``: by default the newest of the run."""
    if not version and run.checkpoints:
        version = str(run.checkpoints[-1].version)
    return f"v{(version or '').removeprefix('v')}"


def verify_model(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The model's files, as `attest` writes them.")
    ],
    public_key: Annotated[Path | None, typer.Option(help="The signer's key, PEM.")] = None,
    certificate: Annotated[
        list[Path] | None, typer.Option(help="A trusted authority's. Repeatable.")
    ] = None,
) -> None:
    """Verify a model's files by its signature and provenance. Needs no store; names the first file
    that is wrong.

    Exit code 2: the signature is not by this key or authority, or a file is not as signed.
    """
    from tuneloop.extensions.provenance import signatures
    from tuneloop.runs.summary import format_facts

    verifier = signatures.open_verifier(public_key, certificate or ())
    typer.echo(format_facts(signatures.verify_model(directory, verifier)))
