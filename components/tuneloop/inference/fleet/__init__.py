"""Fleets of rollout workers that pull nothing: they are brought to each version from outside.

A backend is a module with ``open_fleet(url) -> Fleet``, found by the URL's scheme; a third party's
is an entry point in the group ``tuneloop.fleet`` under its scheme. It only says which workers there
are now (`Fleet.discover`); `inference/fleet/refit.py: refit_fleet` is the same for all.
``docs/weights.md`` has the schemes, and the routes of a worker. The engine `endpoint` and `tuneloop
fleet` use fleets. The section `engine.weights` opens one only to check its URL
(`config/engine_weights.py`): `open_fleet` must not send a request.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from tuneloop.core import plugins
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.http import Unanswered, send_request
from tuneloop.core.json_types import JsonObject
from tuneloop.core.server_token import build_token_headers

NOT_VARIANTS = ("graph", "refit")
"""Modules of this package that are no backends: any other is a scheme that users may name."""
ROUTES = (
    "get_weight_version",
    "pause_generation",
    "update_weights_from_disk",
    "flush_cache",
    "resume_generation",
)
"""Routes of a worker below ``/engine/``: `inference/fleet/refit.py` calls them, and
`inference/http_api.py` has them. A worker of Dynamo must have them, too
(`inference/fleet/dynamo.py: NEEDED`).
"""
URLS = {"http": "urls", "https": "urls"}
"""Scheme → backend, where the two have different names."""


class Unreachable(Retryable):
    """A worker does not answer: it may be gone, as the next discovery of the fleet will tell."""


@dataclass(frozen=True)
class Worker:
    """One worker.

    Attributes:
        id: names its process; a replacement has another id, if the backend can tell. The note
            ``refitted`` of a stage has it as a key.
        url: of its administration, without ``/engine``.
        routes: that it has.
    """

    id: str
    url: str
    routes: tuple[str, ...] = ROUTES

    def call(self, route: str, timeout_s: float, **body: Any) -> JsonObject:
        """Return the answer of a route.

        Raises:
            Unreachable: there is none.
            Retryable: it is a refusal or failure.
        """
        url = f"{self.url.rstrip('/')}/engine/{route}"
        try:
            status, content = send_request(
                "POST",
                url,
                body=body,
                headers=build_token_headers(),
                timeout_s=timeout_s,
            )
        except Unanswered as error:
            raise Unreachable(f"worker {self}: {route}: {error}") from error
        text = content.decode(errors="replace")
        answer = None
        # Text that is not JSON is a proxy's, and a failure.
        with suppress(ValueError):
            answer = json.loads(text)
        if status != 200 or not isinstance(answer, dict) or answer.get("status") != "ok":
            line = " ".join(text.split())[:300]
            raise Retryable(f"worker {self}: {route}: answers {status}: {line}")
        return answer

    def version(self, timeout_s: float = 10.0) -> str:
        """Return the label of the weights that it serves; raise as `call`."""
        return str(self.call("get_weight_version", timeout_s).get("version", ""))

    def __str__(self) -> str:
        return self.url if self.id == self.url else f"{self.id} at {self.url}"


class Fleet(Protocol):
    """Where workers are."""

    @property
    def endpoint(self) -> str | None:
        """Where the fleet as a whole answers ``/generate``; None: only its workers do."""

    def discover(self) -> Sequence[Worker]:
        """List the current workers, each once.

        Raises:
            UserError: there is no such fleet.
            Retryable: no answer.
        """


def open_fleet(url: str) -> Fleet:
    """Open the fleet at `url`, without a request yet.

    Raises:
        UserError: an unknown scheme, or a malformed URL.
    """
    scheme, address, _ = url.partition("://")
    name = URLS.get(scheme, scheme)
    backends = plugins.list_variants("fleet")
    if not address or name not in backends:
        # People write the schemes of `URLS`, not the backend's name. The examples are in the
        # description of `RefitFleet.fleet` (`config/engine_weights.py`), too.
        schemes = (set(URLS) | set(backends)) - set(URLS.values())
        remedy = (
            "must be a URL: http://host:port,…, dns://name:port, service://name.namespace, "
            f"dynamo://name.namespace; schemes: {', '.join(sorted(schemes))}"
        )
        raise UserError("fleet", url, remedy)
    return plugins.load_variant("fleet", name, "open_fleet")(url)


def port_of(url: str) -> int | None:
    """Return the port in `url`: None where there is none, 0 where it cannot be one."""
    # urlsplit reads the port only when it is asked for, and raises ValueError then.
    try:
        return urlsplit(url).port
    except ValueError:
        return 0


def parse_service_url(url: str) -> tuple[str, str, int | None]:
    """Parse ``scheme://name.namespace:port`` into name, namespace and port.

    Raises:
        UserError: it has another form.
    """
    parts = urlsplit(url)
    name, _, namespace = (parts.hostname or "").partition(".")
    port = port_of(url)
    if not name or port == 0 or not namespace or "." in namespace or parts.path not in ("", "/"):
        remedy = f"must be {parts.scheme}://name.namespace, with :port where it needs one"
        raise UserError("fleet", url, remedy)
    return name, namespace, port
