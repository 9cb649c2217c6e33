"""The application behind ``tuneloop ui``: a page whose scripts request the runs' artifacts as JSON.

The page inserts them as text, never as markup, and the browser is told to run no other scripts.

`cli/ui.py` serves it, in a process that only reads. Requests come on several threads: a run is used
by one at a time (`OpenRuns.use`).

A route that the page asks for has to be answered in a report, too, where there is no server:
`report.py: render_page` puts the answers of a run into the file, and `static/frozen.js` finds them
there.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from tuneloop.cluster.run_workflows import list_cluster_runs
from tuneloop.core.errors import Corrupt, Retryable, UserError, name_disk_errors
from tuneloop.core.store import normalize_url
from tuneloop.kube.connection import Connection
from tuneloop.runs.records import list_runs, read_record
from tuneloop.runs.run_record import Run
from tuneloop.ui import describe, samples
from tuneloop.ui.report import STATIC
from tuneloop.workflow.settings import RUN_LABEL

PAGES = ("/", "/compare", "/runs/{rest:path}")
"""The paths of the page. Its scripts read from the address what to show (`static/app.js: open`): a
path that is added needs a page there."""
UNCOMMITTED = f"{RUN_LABEL},workflows.argoproj.io/phase!=Succeeded"
"""Selects the workflows whose runs may have committed nothing: active and failed ones."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Content security policy: only the page's own scripts run, whatever a completion contains.

A report has its own, `report.py: POLICY`.
"""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""Headers of all answers."""
OPEN_RUNS = 50
"""The most runs that are kept open. The page of all runs asks for each that goes on every few
seconds: one that is not open is read anew from its first artifact."""
Describe = Callable[[Run, Request], Any]
"""Computes the answer to a request about a run."""


def build_app(
    store: str,
    cluster: Connection | None = None,
    hosts: Sequence[str] = ("*",),
    ask: describe.Ask | None = None,
) -> Starlette:
    """Build the application for the runs below a store.

    Args:
        store: a path or URL.
        cluster: the cluster that executes runs, if any: it knows their state.
        hosts: the host names for which the application answers. Another site may point its own
            name here (DNS rebinding).
        ask: asks another executor for the state of a run.
    """
    runs = OpenRuns(store, cluster)
    # Only what lies beside this module is ever read, whatever path is asked for.
    files = {f"/static/{path.name}": path.name for path in STATIC.iterdir()}
    files |= dict.fromkeys(PAGES, "index.html")
    routes = [_route_file(path, name) for path, name in files.items()]
    routes += [
        Route("/api/runs", lambda _: _answer(runs.list_names())),
        _route_run(runs, "", lambda run, _: describe.describe_run(run)),
        _route_run(runs, "/now", lambda run, _: describe.describe_state(run, cluster, ask)),
        _route_run(runs, "/weights", lambda run, _: describe.describe_weights(run)),
        _route_run(runs, "/samples/{at:path}", _read_samples),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
            Middleware(GZipMiddleware, compresslevel=1),
        ],
        exception_handlers={
            UserError: _refuse,
            Retryable: _refuse,
            HTTPException: _refuse,
            Exception: _refuse,
        },
    )


class OpenRuns:
    """The runs below a store that were requested last, kept open between requests."""

    def __init__(self, store: str, cluster: Connection | None) -> None:
        self.store = store
        self.cluster = cluster
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._locks: dict[str, threading.Lock] = {}
        # Requests for different runs add and drop at the same time.
        self._keeping = threading.Lock()

    def list_names(self) -> dict[str, Any]:
        """List the runs that have committed something, or that are on the cluster."""
        names = set(list_runs(self.store))
        # While the cluster is unavailable, the store's runs are shown.
        with suppress(UserError, Retryable):
            names |= self._list_submitted(UNCOMMITTED)
        return {"store": self.store, "runs": sorted(names)}

    def _list_submitted(self, selector: str) -> set[str]:
        """List the runs of this store among the cluster's workflows that a label selector
        selects.
        """
        if self.cluster is None:
            return set()
        return list_cluster_runs(self.cluster, normalize_url(self.store), selector)

    def use(self, name: str, describe_it: Callable[[Run], Any], *, all_iterations: bool) -> Any:
        """Read a run's current state, and describe it.

        Args:
            name: the run's.
            describe_it: computes what is returned.
            all_iterations: list all of its iterations in a directory: of 1,000 this takes 60 ms,
                which is much for each key that is typed into a search.

        Raises:
            UserError: there is no such run.
        """
        # One request at a time refreshes a run.
        with self._locks.setdefault(name, threading.Lock()), name_disk_errors():
            run = self._read_on(name, all_iterations=all_iterations)
            self._keep_open(name, run)
            return describe_it(run)

    def _keep_open(self, name: str, run: Run) -> None:
        """Keep a run, which is not among the open ones, and drop those used longest ago."""
        with self._keeping:
            self._runs[name] = run
            while len(self._runs) > OPEN_RUNS:
                self._runs.popitem(last=False)

    def _read_on(self, name: str, *, all_iterations: bool) -> Run:
        """Return a run in its current state: the open one, unless it was deleted or replaced by
        another.
        """
        run = self._runs.pop(name, None)
        if run and run.record == read_record(name, self.store):
            run.refresh(all_iterations=None if all_iterations else False)
            if run.entries:
                return run
        try:
            return Run.open(name, self.store)
        except UserError:
            # It may have been submitted, and have committed nothing yet.
            with suppress(UserError):
                if self._list_submitted(f"{RUN_LABEL}={name}"):
                    return Run(name, self.store)
            raise


def _route_file(path: str, name: str) -> Route:
    """Answer a path with a file of the page."""
    return Route(path, lambda _: FileResponse(STATIC / name, headers=HEADERS))


def _route_run(runs: OpenRuns, path: str, describe_run: Describe) -> Route:
    """Answer a path below a run's with what `describe_run` makes of the run."""

    def answer(request: Request) -> Response:
        value = runs.use(
            request.path_params["name"],
            lambda run: describe_run(run, request),
            # The page asks for the state every few seconds: all else goes by what that has listed.
            all_iterations=path == "/now",
        )
        return _answer(value)

    return Route(f"/api/runs/{{name}}{path}", answer)


def _read_samples(run: Run, request: Request) -> dict[str, Any]:
    """Read the completions that a request asks for."""
    return samples.read_page(run, request.path_params["at"], request.query_params)


def _answer(value: Any, status: int = 200) -> Response:
    """Answer in JSON, with null for a number that is not finite."""
    return Response(to_json(value, inf_nan_mode="null"), status, HEADERS, "application/json")


def _refuse(request: Request, error: Exception) -> Response:
    """Answer with what went wrong, for the page to show."""
    if isinstance(error, HTTPException):
        status = error.status_code
    elif isinstance(error, Corrupt):
        # `static/runs.js` calls such a run damaged, and one of status 404 deleted.
        status = 422
    elif isinstance(error, UserError):
        status = 404
    else:
        status = 503 if isinstance(error, Retryable) else 500
    return _answer({"error": str(error)}, status)
