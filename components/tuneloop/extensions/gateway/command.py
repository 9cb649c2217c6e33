"""``tuneloop gateway``: sessions that are driven through Tinker's primitives."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuneloop.cli.arguments import CONTEXT
from tuneloop.core.errors import UserError
from tuneloop.kube.connection import connect_to_cluster

if TYPE_CHECKING:
    from tuneloop.extensions.gateway.app import Gateway

GRACE_S = 60
"""Seconds for running requests after SIGTERM: a request waits for a worker
(`app.py: START_WAIT_S`), and for its answer to a poll (`worker.py: POLL_S`). The grace period of
the gateway's pod is longer by 10 s (`manifests/components/gateway/gateway.yaml`).
"""


def serve_gateway(
    store: Annotated[
        str, typer.Option(metavar="URL", help="Where workers store the artifacts of sessions.")
    ],
    local: Annotated[
        bool, typer.Option("--local", help="Sessions are processes of this machine.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one and says which.")] = 8080,
    config: Annotated[
        Path | None, typer.Option(help="Quotas and the pods of sessions, in YAML.")
    ] = None,
    audience: Annotated[
        str, typer.Option(help="Audience that tokens must have; empty: any.")
    ] = "tuneloop-gateway",
    token_file: Annotated[
        Path, typer.Option(help="With --local: the token that callers send; made if absent.")
    ] = Path("~/.tuneloop/gateway-token"),
    device: Annotated[str, typer.Option(help="With --local: auto, cpu or cuda.")] = "auto",
    context: CONTEXT = None,
) -> None:
    """Serve sessions, each with a policy that stays in memory. Callers drive them by
    forward_backward, optim_step, sample, save and load_state.

    On a cluster callers send a Kubernetes token, and may have sessions where they may create
    workflows. With --local there is one token, in a file that only you can read. docs/sharing.md
    has the API.
    """
    try:
        import uvicorn

        from tuneloop.extensions.gateway.app import build_app
        from tuneloop.inference.server import UVICORN, bind_address, serve_until_signalled
    except ImportError as error:
        raise UserError(
            "gateway", error.name, "is not installed: pip install 'tuneloop[gateway]'"
        ) from None
    token_file = token_file.expanduser().absolute()
    with contextlib.ExitStack() as stack:
        if local:
            gateway = _open_local_gateway(stack, store, config, token_file, device)
        else:
            gateway = _open_cluster_gateway(store, config, audience, context)
        listener = stack.enter_context(bind_address(host, port))
        # Before the address is printed: whoever reads it may connect at once.
        listener.listen(1024)
        url = f"http://{host}:{listener.getsockname()[1]}"
        typer.echo(f"gateway: {url}", err=True)
        if local:
            typer.echo(f"export TINKER_BASE_URL={url} TINKER_API_KEY=$(cat {token_file})", err=True)
        app = build_app(gateway)
        server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=GRACE_S, **UVICORN))
        serve_until_signalled(server, listener, gateway.backend.drain)


def _open_local_gateway(
    stack: contextlib.ExitStack,
    store: str,
    config: Path | None,
    token_file: Path,
    device: str,
) -> "Gateway":
    """Open a gateway whose sessions are processes of this machine; `stack` ends them."""
    from tuneloop.core.store import normalize_url
    from tuneloop.extensions.gateway.access import TokenFile
    from tuneloop.extensions.gateway.app import Gateway
    from tuneloop.extensions.gateway.processes import Processes
    from tuneloop.extensions.gateway.sessions import read_settings

    access = TokenFile(token_file)
    processes = Processes(token_file.parent / "gateway-logs", read_settings(config), device)
    stack.callback(processes.close)
    return Gateway(processes, access, normalize_url(store), config)


def _open_cluster_gateway(
    store: str,
    config: Path | None,
    audience: str,
    context: str | None,
) -> "Gateway":
    """Open a gateway whose sessions are jobs of a cluster."""
    from kubernetes.client import ApiClient

    from tuneloop.extensions.gateway.access import TokenReviews
    from tuneloop.extensions.gateway.app import Gateway
    from tuneloop.extensions.gateway.jobs import Jobs

    # A separate client: a refusal by the API server means something else to a caller than to a
    # command, so it must not be translated as `connect_to_cluster` does.
    api = ApiClient(connect_to_cluster(context=context).core.api_client.configuration)
    return Gateway(Jobs(api, config), TokenReviews(api, audience), store, config)
