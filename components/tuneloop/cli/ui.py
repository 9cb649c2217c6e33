"""``tuneloop ui``: a live page over the runs of a store."""

import contextlib
from typing import Annotated

import typer

from tuneloop.cli.arguments import STORE
from tuneloop.core.errors import UserError


def serve_ui(
    store: STORE = "runs",
    host: Annotated[str, typer.Option(help="Address to listen on. It asks nobody who they are.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one and says which.")] = 8090,
) -> None:
    """Serve a live page over the runs of a store. Read only: curves, alarms, completions token by token, weights."""
    try:
        import uvicorn

        from tuneloop.inference.server import bind_address, serve_until_signalled
        from tuneloop.ui.app import build_app
    except ImportError as error:
        raise UserError("ui", error.name, "is not installed: pip install 'tuneloop[gateway]'") from None
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind_address(host, port))
        listener.listen(128)
        typer.echo(f"http://{host}:{listener.getsockname()[1]}/", err=True)
        config = uvicorn.Config(build_app(store), log_level="warning", access_log=False)
        serve_until_signalled(uvicorn.Server(config), listener)
