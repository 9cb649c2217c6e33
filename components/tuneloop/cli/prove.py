"""Commands that verify a run (its digests, its stages' results, its first difference from another run), explain what
made a version, judge it by another reward, and find out what a policy could gain from a reward."""

import heapq
import json
import sys
import time
from math import nan
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from tuneloop.cli.arguments import JSON, RUN, STORE
from tuneloop.cli.inspect import open_run, print_json
from tuneloop.cli.tables import print_table
from tuneloop.core.errors import UserError
from tuneloop.core.store import Store


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
    """Verify all that a run has committed by SHA-256, and print its root. Exit code 2 if something does not fit."""
    from tuneloop.runs import audit
    from tuneloop.runs.summary import format_facts

    run, proofs = open_run(name, store), []
    for proof in audit.audit_run(run):
        proofs.append(proof)
        for problem in proof.problems:
            typer.echo(f"error: {proof.key}: {problem}", err=True)
    if not (own := [proof for proof in proofs if proof.files is not None]):
        raise UserError(
            "run", name, "has committed nothing that could be verified; see `tuneloop status`"
        )
    facts = {
        "artifacts": f"{sum(not proof.problems for proof in own)} of {len(own)} as committed",
        "files": f"{sum(proof.files or 0 for proof in own)} as committed, by SHA-256",
    }
    if deleted := sum(proof.deleted for proof in own):
        facts["pruned"] = (
            f"by retention the files of {deleted} old checkpoints; their manifests are as committed"
        )
    if outside := len(proofs) - len(own):
        facts["from outside"] = f"{outside} inputs: their manifests were read, their files were not"
    typer.echo(format_facts({**facts, "root": (found := audit.compute_root(run))}))
    if root not in (None, found):
        raise UserError(
            "--root", root, f"the run's root is {found}: it is another run, or was changed since"
        )
    return 2 if any(proof.problems for proof in proofs) else 0


def replay_run(
    name: RUN,
    iteration: Annotated[int, typer.Argument(min=0, help="0: the stages outside the loop.")],
    stage: Annotated[
        str | None, typer.Option(help="One stage of it, as in policy-update; default: all.")
    ] = None,
    store: STORE = "runs",
) -> int:
    """Compute an iteration again on this machine, and compare. Names the first difference; then exits with 2."""
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
    """Find where two runs diverge. The first artifact, by iteration, that differs, and its first difference."""
    from tuneloop.runs.replay import find_departure

    found = find_departure(open_run(name, store), open_run(against, store))
    typer.echo(found or "equal in all artifacts that both have")
    return 2 if found else 0


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
    """Try attacks on rewards and environments. Prints what a policy could gain; exit code 1 if it gains."""
    from tuneloop.local.probe import ENDINGS, count_endings, try_attacks

    _find_modules_here()
    trials = try_attacks(rewards or (), environments or (), data, timeout_s)
    print_table(*count_endings(trials))
    typer.echo(
        "A number without a letter: "
        + "; ".join(": ".join(filter(None, one)) for one in ENDINGS.items())
    )
    paid = sorted(
        (t for t in trials if t.ending in ("n", "g")), key=lambda t: t.outcome.score or 0.0
    )
    for t in {(t.target, t.category): t for t in paid}.values():
        score = "no score" if t.outcome.score is None else f"{t.outcome.score:.3g}"
        about = f"{score}, a wrong answer has {t.wrong:.3g}; {t.outcome.breakdown}"
        typer.echo(f"{t.target}: {t.category}: {t.name}: {about}: {t.text[:200]!r}")
    return 1 if paid else 0


def explain_version(
    name: RUN,
    which: Annotated[
        str, typer.Argument(metavar="ITERATION|VERSION", help="3: an iteration; v4: version 4.")
    ],
    store: STORE = "runs",
) -> None:
    """Explain what made a version. Prompts, rollouts, rewards, seeds, code, image and server, as recorded."""
    from tuneloop.runs import questions, summary

    run = open_run(name, store)
    for ref, told in questions.explain_artifact(run, questions.find_artifact(run, which)):
        typer.echo(f"{ref}\n{summary.format_facts(told)}")


def promote_version(
    name: RUN,
    version: Annotated[str, typer.Argument(help="Version of the weights, as 4 or v4.")],
    promoted: Annotated[
        str, typer.Argument(metavar="NAME", help="The name to give it, as production.")
    ],
    least: Annotated[
        list[str],
        typer.Option("--min", metavar="METRIC=VALUE", help="What its evaluation must reach."),
    ],
    store: STORE = "runs",
) -> None:
    """Name a version that passes the audit and reaches --min. Retention keeps it; the name has a history."""
    from tuneloop.runs import promotion

    try:
        wanted = {
            metric: float(value) for metric, _, value in (each.partition("=") for each in least)
        }
    except ValueError:
        raise UserError(
            "--min", ", ".join(least), "write METRIC=VALUE, as in mean_reward=0.9"
        ) from None
    if not (number := version.removeprefix("v")).isdecimal():
        raise UserError("VERSION", version, "write its number, as in 4 or v4")
    told = promotion.promote_version(open_run(name, store), int(number), promoted, wanted)
    typer.echo(f"{promoted}: version {int(number)} of {name}, {told['ref']}")


def list_promotions(
    promoted: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Default: all names.")
    ] = None,
    store: STORE = "runs",
    as_json: JSON = False,
) -> None:
    """List promoted versions, newest first. With user, time, the figures that decided, and references for tools."""
    from tuneloop.runs import promotion

    chosen = [
        told
        for told in reversed(promotion.read_history(Store(store))[0])
        if promoted in (None, told["name"])
    ]
    if promoted and not chosen:
        raise UserError(
            "NAME", promoted, f"was not promoted in {store}; `tuneloop promote` does that"
        )
    if as_json:
        return print_json({"promotions": chosen})
    if not chosen:
        return typer.echo(f"nothing was promoted in {store}")
    rows = []
    for told in chosen:
        had = told["figures"]
        figures = ", ".join(
            f"{name} {had.get(name, nan):g} (≥ {least:g})" for name, least in told["least"].items()
        )
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(told["time"]))
        rows.append(
            (
                told["name"],
                told["run"],
                str(told["version"]),
                when,
                told["who"],
                figures,
                told["ref"],
            )
        )
    print_table(
        ("name", "run", "version", "when", "who", "figures", "reference"), rows, cut="reference"
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
    """Judge a run's stored rollouts by another reward. Means, groups whose order changes, and changed completions."""
    from tuneloop.runs import questions

    _find_modules_here()
    lines, apart = [], list[dict[str, Any]]()
    spec = reward if reward.startswith("{") else json.dumps({reward: 1.0})
    for iteration, rows in questions.rescore_run(open_run(name, store), spec):
        scores = ([row[by] for row in rows if row[by] is not None] for by in ("score", "rescored"))
        means = (f"{fmean(each):.3f}" if each else "none" for each in scores)
        changed = [row for row in rows if row["change"]]
        lines.append(
            (
                str(iteration),
                *means,
                f"{len(changed)} of {len(rows)}",
                questions.count_reordered(rows),
            )
        )
        apart = heapq.nlargest(examples, [*apart, *changed], key=itemgetter("change"))
    columns = ("iteration", "mean", "rescored", "scored otherwise", "groups reordered")
    print_table(columns, lines, right=columns)
    for row in apart:
        texts = "  ".join(f"{key} {row[key]!r:.200}" for key in ("prompt", "completion", "answer"))
        typer.echo(f"{row['request_id']}: {row['score']} → {row['rescored']}  {texts}")


def attest_version(
    name: RUN,
    key: Annotated[Path, typer.Option(help="Private key, PEM.")],
    version: Annotated[
        str | None, typer.Argument(help="Of the weights, as 4 or v4; default: the newest.")
    ] = None,
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
    """Sign a version and what it was made from. Writes its files, a model card, SLSA provenance and a signature."""
    from tuneloop.runs import attestation, questions, signatures

    signer, run = signatures.open_signer(key, certificate or ()), open_run(name, store)
    made = questions.find_artifact(run, _name_version(run, version))
    typer.echo(f"signed: {attestation.attest_version(run, made, output, signer, builder)}")


def push_version(
    name: RUN,
    repo: Annotated[
        str, typer.Argument(help="Hugging Face repository, as OWNER/NAME; created if missing.")
    ],
    version: Annotated[
        str | None, typer.Argument(help="Of the weights, as 4 or v4; default: the newest.")
    ] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="If it is new; default: as OWNER.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only its LoRA adapters, in peft's format.")
    ] = False,
    store: STORE = "runs",
) -> None:
    """Upload a version to the Hugging Face hub. It must pass the audit; a model card is made from the run."""
    from tuneloop.runs import attestation, questions

    run = open_run(name, store)
    made = questions.find_artifact(run, _name_version(run, version))
    typer.echo(f"pushed: {attestation.push_version(run, made, repo, private, adapter)}")


def _name_version(run: Any, version: str | None) -> str:
    newest = "".join(str(each.version) for each in run.checkpoints[-1:])
    return f"v{(version or newest).removeprefix('v')}"


def verify_model(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The model's files, as `attest` writes them.")
    ],
    public_key: Annotated[Path | None, typer.Option(help="The signer's key, PEM.")] = None,
    certificate: Annotated[
        list[Path] | None, typer.Option(help="A trusted authority's. Repeatable.")
    ] = None,
) -> None:
    """Verify a model's files by its signature and provenance. Needs no store; names the first file that is wrong."""
    from tuneloop.runs import signatures
    from tuneloop.runs.summary import format_facts

    verifier = signatures.open_verifier(public_key, certificate or ())
    typer.echo(format_facts(signatures.verify_model(directory, verifier)))


def _find_modules_here() -> None:
    """Find a user's rewards in the working directory, as a stage does, which `python -m` runs."""
    sys.path.insert(0, str(Path.cwd()))
