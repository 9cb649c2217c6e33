"""The application behind ``tuneloop ui``: a list of runs, a page of each, the completions of each iteration.

Pages are made of what runs have committed when they are asked for, and look again by themselves while a run goes on.
What a policy wrote is text in them: all of it is escaped, and the browser is told to run no script but ours.
"""

import html
import string
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from tuneloop.core.errors import Retryable, UserError
from tuneloop.runs import report
from tuneloop.runs.records import list_runs, read_record
from tuneloop.runs.run_record import Run
from tuneloop.runs.summary import iterations_line, reward_line
from tuneloop.ui import samples

HERE = Path(__file__).parent
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; img-src data:"
"""Content security policy: scripts are ``/ui.js`` alone, whatever stands in a completion."""


class Runs:
    """The runs of a store, each read once and looked at again; `lock` is held while a page is made of them."""

    def __init__(self, store: str) -> None:
        self.store, self.lock, self._known = store, threading.Lock(), dict[str, Run]()

    def open(self, name: str) -> Run:
        """Return a run as it is now.

        Raises:
            UserError: there is none of that name, or it is damaged.
        """
        known = self._known.pop(name, None)
        if known and known.record == read_record(name, self.store):
            known.refresh()
        if not (known and known.entries):
            known = Run.open(name, self.store)
        self._known[name] = known
        return known


def build_app(store: str) -> Starlette:
    """Build the application over the runs below `store`, a path or URL."""
    runs = Runs(store)

    def make_route(path: str, make: Callable[[Request], Response]) -> Route:
        def answer(request: Request) -> Response:
            with runs.lock:
                return make(request)

        return Route(path, answer)

    def show_runs(request: Request) -> Response:
        wanted = request.query_params.get("q", "")
        rows = "".join(_describe(runs, name) for name in list_runs(store) if wanted in name)
        template = string.Template((HERE / "runs.html").read_text("utf-8"))
        return _page("runs", template.substitute(rows=rows, store=html.escape(store), wanted=html.escape(wanted)))

    def show_run(request: Request) -> Response:
        run = runs.open(request.path_params["name"])
        nodes = run.state.nodes.values() if run.state and run.phase == "running" else ()
        running = [node for node in nodes if node.type == "Pod" and node.phase == "Running"]
        now = ", ".join(f"{node.display_name} {node.progress}".strip() for node in running)
        place = f"/runs/{quote(run.name)}/samples/{run.iteration}"
        link = f'<a href="{place}">completions of iteration {run.iteration}</a>' if run.iteration else ""
        told = f"<p>{html.escape(f'Running: {now}') if now else ''} {link}</p>"
        return _page(run.name, f"<main data-run>{told}{report.render_body(run)}</main>")

    def show_samples(request: Request) -> Response:
        run, number = runs.open(request.path_params["name"]), request.path_params["iteration"]
        page = request.query_params.get("page", "1")
        shown = samples.read_page(run, number, int(page) if page.isdecimal() else 1)
        return _page(f"{run.name}, iteration {number}", samples.render_samples(run, shown))

    def tell_mark(request: Request) -> Response:
        run = runs.open(request.path_params["name"])
        running = run.phase not in ("succeeded", "failed")  # also elsewhere, where nobody here knows
        return JSONResponse({"mark": f"{len(run.entries)} {run.phase}", "running": running})

    return Starlette(
        routes=[
            make_route("/", show_runs),
            Route("/ui.js", lambda request: FileResponse(HERE / "ui.js", media_type="text/javascript")),
            make_route("/runs/{name}", show_run),
            make_route("/runs/{name}/mark", tell_mark),
            make_route("/runs/{name}/samples/{iteration:int}", show_samples),
        ],
        exception_handlers={UserError: _refuse, Retryable: _refuse, HTTPException: _refuse},
    )


def _describe(runs: Runs, name: str) -> str:
    """Return a row of the list of runs; one that cannot be read says why."""
    try:
        run = runs.open(name)
        cells = [run.record.pipeline if run.record else "", run.phase, iterations_line(run), reward_line(run)]
    except (UserError, Retryable) as error:
        cells = ["", "damaged", "", str(error)]
    link = f'<a href="/runs/{quote(name)}">{html.escape(name)}</a>'
    return f"<tr><td>{link}</td>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _refuse(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404 if isinstance(error, UserError) else 503
    return _page("not found" if status == 404 else "error", f"<p>{html.escape(str(error))}</p>", status)


def _page(title: str, body: str, status: int = 200) -> Response:
    head = '<script src="/ui.js" defer></script>'
    nav = '<nav><a href="/">runs</a></nav>'
    return HTMLResponse(report.fill_page(title, nav + body, head), status, {"Content-Security-Policy": POLICY})
