"""``tuneloop endpoint``: rollout endpoints that tuneloop does not serve itself.

The tests of the protocol are `extensions/fleets/conformance.py: run_checks`; docs/weights.md describes it.
"""

import socket
from typing import Annotated

import typer

from tuneloop.cli.tables import print_table
from tuneloop.core.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Rollout endpoints that you serve yourself.")


@app.callback()
def define_endpoint_group() -> None:
    """Rollout endpoints that you serve yourself."""
    # Without a callback typer would make the only command of a group the group itself.


@app.command("check")
def run_checks(
    url: Annotated[str, typer.Argument(help="The endpoint's URL, without /generate.")],
    policy: Annotated[
        str | None, typer.Option(metavar="REF", help="The checkpoint that it should serve.")
    ] = None,
    vocabulary: Annotated[int, typer.Option(min=16, help="Prompts have ids below this.")] = 256,
    tolerance: Annotated[
        float, typer.Option(help="Mean difference of log-probabilities that counts as equal.")
    ] = 0.05,
    timeout: Annotated[
        float, typer.Option(help="Seconds without a byte after which it fails.")
    ] = 60.0,
) -> int:
    """Run the protocol's tests against an endpoint. Exit code 1 if it fails one.

    The tests send prompts of random token ids below --vocabulary. With --policy the endpoint's
    version and log-probabilities are compared with those that were stored with that checkpoint.
    """
    from urllib.parse import urlsplit

    from tuneloop.core.artifacts import Artifact
    from tuneloop.extensions.fleets.conformance import Probe, run_checks
    from tuneloop.inference.engines.endpoint import check_url

    endpoint_url = check_url(url)
    parts = urlsplit(endpoint_url)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        # One clear line, where otherwise each of the tests would fail for this reason.
        socket.create_connection((parts.hostname, port), timeout).close()
    except OSError as error:
        raise UserError(
            "url", url, f"does not answer ({error}); start it, or correct the address"
        ) from error
    checkpoint = Artifact(policy) if policy else None
    outcomes = list(run_checks(Probe(endpoint_url, checkpoint, vocabulary, tolerance, timeout)))
    print_table(("check", "result", "what, and why"), outcomes)
    failures = sum(result == "failed" for _, result, _ in outcomes)
    typer.echo(f"{len(outcomes) - failures} of {len(outcomes)} checks without a fault")
    return 1 if failures else 0
