"""The workers of a DynamoGraphDeployment: ``dynamo://name.namespace``.

The URL has a ``:port`` where the frontend's is not 8000. The operator gives the graph's frontend a
Service ``<name>-frontend``, which resolves inside the cluster. With ``DYN_ENABLE_RL=true`` and
``DYN_RL_PORT=8001`` the frontend lists its workers there (``GET /v1/rl/workers``, protocol version
1), each with the URL and the routes of its administration.
"""

import json
import os

from tuneloop.core.errors import Retryable, UserError, shorten_text
from tuneloop.core.http import Unanswered, is_transient, send_request
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.inference.fleet import ROUTES, Fleet, Worker, parse_service_url

FRONTEND_PORT = 8000
"""The port of the frontend's Service, where the URL has none; `inference/fleet/graph.py` and
`extensions/fleets/fleet_commands.py` probe it.
"""
RL_PORT = 8001
"""The port of the list of workers, which the graph's manifest sets as ``DYN_RL_PORT``."""
NEEDED = {name for name in ROUTES if name != "flush_cache"}
"""Routes that a worker must have; one without ``flush_cache`` drops its cache as it pauses."""


class Dynamo:
    """A fleet whose frontend lists its workers.

    Attributes:
        name: of the graph.
        namespace: of the graph.
        port: of the frontend.
    """

    def __init__(self, name: str, namespace: str, port: int | None) -> None:
        self.name = name
        self.namespace = namespace
        self.port = port or FRONTEND_PORT

    @property
    def host(self) -> str:
        """The host name of the frontend. Raises UserError outside a cluster."""
        if "KUBERNETES_SERVICE_HOST" not in os.environ:
            remedy = (
                "only pods can find a graph by its name; "
                "set rollout_endpoint_url, and name the fleet by its workers' URLs (http://…,…)"
            )
            raise UserError("fleet", f"dynamo://{self.name}.{self.namespace}", remedy)
        return f"{self.name}-frontend.{self.namespace}"

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def discover(self) -> list[Worker]:
        url = f"http://{self.host}:{RL_PORT}/v1/rl/workers"
        try:
            status, content = send_request("GET", url, timeout_s=30)
            answer = parse_answer(status, content)
        except (Unanswered, ValueError) as error:
            remedy = "does its frontend run with DYN_ENABLE_RL=true and DYN_RL_PORT=8001?"
            raise Retryable(f"{url}: {error}; {remedy}") from error
        return read_workers(answer)


def parse_answer(status: int, content: bytes) -> JsonObject:
    """Parse an answer of ``/v1/rl/workers``. Raises ValueError: it is not the frontend's."""
    answer = json.loads(content)
    # The frontend's has a protocol version, whatever its status. A proxy may answer for it.
    is_object = isinstance(answer, dict)
    if not is_object or (is_transient(status) and "protocol_version" not in answer):
        raise ValueError(f"answers {status}: {shorten_text(repr(answer))}")
    return answer


def read_workers(answer: JsonMapping) -> list[Worker]:
    """Read the workers of an answer of ``/v1/rl/workers``, each instance once.

    Raises:
        UserError: another protocol, or a worker that cannot be brought to a version.
        Retryable: the frontend could not ask one of them.
    """
    if answer.get("protocol_version") != 1:
        remedy = "of /v1/rl/workers is not 1; this tuneloop knows no other"
        raise UserError("protocol_version", answer.get("protocol_version"), remedy)
    workers: dict[str, Worker] = {}
    for instance in answer.get("workers", ()):
        name = f"{instance.get('component')}/{instance['instance_id']}"
        if instance.get("error"):
            raise Retryable(f"worker {name}: {instance['error']}")
        routes = tuple(instance.get("routes") or ())
        # Without --enable-rl an instance lacks routes, without DYN_SYSTEM_PORT the URL.
        missing = sorted(NEEDED - set(routes))
        if not instance.get("system_url"):
            missing.append("system_url")
        if missing:
            remedy = f"lacks {', '.join(missing)}; start it with --enable-rl and DYN_SYSTEM_PORT"
            raise UserError("worker", name, remedy)
        workers[name] = Worker(name, instance["system_url"].rstrip("/"), routes)
    return list(workers.values())


def open_fleet(url: str) -> Fleet:
    return Dynamo(*parse_service_url(url))
