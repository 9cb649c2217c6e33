"""The application behind ``tuneloop ui``: a page whose scripts request the runs' artifacts as JSON. The page inserts
them as text, never as markup, and the browser is told to run no other scripts."""

import threading
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
from tuneloop.core.errors import Retryable, UserError, name_disk_errors
from tuneloop.core.store import normalize_url
from tuneloop.kube.connection import Connection
from tuneloop.runs.records import list_runs, read_record
from tuneloop.runs.run_record import Run
from tuneloop.ui import describe, samples
from tuneloop.ui.report import STATIC
from tuneloop.workflow.settings import RUN_LABEL

FILES = [(f"/static/{path.name}", path.name) for path in STATIC.iterdir()]
FILES += [(page, "index.html") for page in ("/", "/compare", "/runs/{rest:path}")]
UNCOMMITTED = f"{RUN_LABEL},workflows.argoproj.io/phase!=Succeeded"
"""Selects the workflows whose runs may have committed nothing: active and failed ones."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Content security policy: only the page's own scripts run, whatever a completion contains."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def build_app(
    store: str,
    cluster: Connection | None = None,
    hosts: Sequence[str] = ("*",),
    ask: describe.Ask | None = None,
) -> Starlette:
    """Build the application for the runs below `store`, a path or URL; `cluster`, or `ask`, knows the state of runs
    there. It answers only for the host names `hosts`, as another site may point its name here (DNS rebinding)."""
    hosted = Middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    locks, known = dict[str, threading.Lock](), dict[str, Run]()

    def list_submitted(selector: str) -> set[str]:
        try:
            return list_cluster_runs(cluster, normalize_url(store), selector) if cluster else set()
        except (UserError, Retryable):  # show the store's runs while the cluster is unavailable
            return set()

    def answer_runs(_: Request) -> Response:
        return _answer(
            {"store": store, "runs": sorted({*list_runs(store), *list_submitted(UNCOMMITTED)})}
        )

    def read_on(run: Run | None, name: str, *, whole: bool) -> Run:
        """Return a run in its current state: the known object, unless the run was deleted or replaced by another."""
        if run and run.record == read_record(name, store):
            # all of 1,000 iterations take 60 ms: much for a key of a search
            run.refresh(whole=None if whole else False)
            if run.entries:
                return run
        try:
            return Run.open(name, store)
        except UserError:
            with suppress(UserError):
                if cluster and list_cluster_runs(
                    cluster, normalize_url(store), f"{RUN_LABEL}={name}"
                ):
                    return Run(name, store)  # submitted, but without a commit
            raise

    def route_run(path: str, tell: Callable[[Run, Request], Any]) -> Route:
        def answer(request: Request) -> Response:
            name = request.path_params["name"]
            with locks.setdefault(name, threading.Lock()), name_disk_errors():
                # One request at a time refreshes a run.
                known[name] = run = read_on(known.pop(name, None), name, whole=path == "/now")
                return _answer(tell(run, request))

        return Route(f"/api/runs/{{name}}{path}", answer)

    return Starlette(
        routes=[
            *(
                Route(path, lambda _, name=name: FileResponse(STATIC / name, headers=HEADERS))
                for path, name in FILES
            ),
            Route("/api/runs", answer_runs),
            route_run("", lambda run, _: describe.describe_run(run)),
            route_run("/now", lambda run, _: describe.describe_state(run, cluster, ask)),
            route_run("/weights", lambda run, _: describe.describe_weights(run)),
            route_run(
                "/samples/{at:path}",
                lambda run, r: samples.read_page(run, r.path_params["at"], r.query_params),
            ),
        ],
        middleware=[hosted, Middleware(GZipMiddleware, compresslevel=1)],
        exception_handlers=dict.fromkeys((UserError, Retryable, HTTPException, Exception), _refuse),
    )


def _answer(value: Any, status: int = 200) -> Response:
    """Answer in JSON, with null for a number that is not finite."""
    return Response(to_json(value, inf_nan_mode="null"), status, HEADERS, "application/json")


def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _answer({"error": str(error)}, error.status_code)
    status = 404 if isinstance(error, UserError) else 503 if isinstance(error, Retryable) else 500
    return _answer({"error": str(error)}, status)
