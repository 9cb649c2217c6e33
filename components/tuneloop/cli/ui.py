"""``tuneloop ui``: a live page over the runs of a store."""

import contextlib
import threading
from typing import Annotated

import typer

from tuneloop.cli.arguments import CLUSTER_NAMESPACE, CONTEXT, KFP, STORE
from tuneloop.cli.kfp import connect_to_executor
from tuneloop.core.errors import UserError
from tuneloop.core.store import local_path

LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")
"""Addresses and host names of this machine. A page that listens on one of them answers for no other
host name; on any other address it answers for all (`ui/app.py: build_app`)."""


def serve_ui(
    store: STORE = "runs",
    host: Annotated[
        str, typer.Option(help="Address to listen on. There is no authentication.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes a free one and says which.")
    ] = 8090,
    namespace: CLUSTER_NAMESPACE = None,
    context: CONTEXT = None,
    kfp: KFP = None,
) -> None:
    """Serve a live page over the runs of a store. Read only: curves, alarms, completions token by
    token, weights.

    With --namespace or --kfp the page also shows the state of runs that are executed there. It is
    served until Ctrl-C or SIGTERM.
    """
    try:
        import pyarrow as pa
        import uvicorn

        from tuneloop.inference.server import bind_address, serve_until_signalled
        from tuneloop.ui.app import build_app
    except ImportError as error:
        raise UserError(
            "ui", error.name, "is not installed: pip install 'tuneloop[gateway]'"
        ) from None
    folder = local_path(store)
    if folder and not folder.is_dir():
        raise UserError(
            "--store", store, "is not a directory; correct it, or start a run there first"
        )
    cluster, ask = connect_to_executor(namespace, context, kfp)
    # A page of another origin may not send requests in the user's name: behind a loopback address
    # only its own names are accepted as the host.
    hosts = [*LOOPBACK, host] if host in LOOPBACK else ["*"]
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind_address(host, port))
        # Before the address is printed: whoever reads it may connect at once.
        listener.listen(128)
        url_host = f"[{host}]" if ":" in host else host
        typer.echo(f"http://{url_host}:{listener.getsockname()[1]}/", err=True)
        config = uvicorn.Config(
            build_app(store, cluster, hosts, ask),
            log_level="warning",
            access_log=False,
            lifespan="off",
        )
        # For its first value pyarrow imports pandas, if installed. That takes a second, so it is
        # done before a request.
        threading.Thread(target=pa.scalar, args=(0,), daemon=True).start()
        serve_until_signalled(uvicorn.Server(config), listener)
