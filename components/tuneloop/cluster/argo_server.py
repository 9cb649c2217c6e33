"""Send a workflow to an Argo server, by Hera's ``create``.

It is for those who have the server's address and no kubeconfig. `tuneloop submit --server URL` uses
it. ``ARGO_TOKEN`` and ``ARGO_INSECURE_SKIP_VERIFY`` are those of the argo command line.

It is a second way beside `cluster/submission.py: Submission.create`, with fewer steps: the cluster
is not checked, and the Secret with the token of the rollout servers (`cluster/submit.py:
_create_token`) is not made, so that they ask for no token. A step that is added there is missing
here until `cli/cluster.py: _submit_to_server` or this file has it, too. It is tested on a cluster
alone: `tests/cluster/test_server.py`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tuneloop.cluster import submit as argo
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kube.connection import NAMESPACE, Unreachable
from tuneloop.workflow.settings import RUN_LABEL


class Server:
    """An Argo server."""

    def __init__(self, url: str, namespace: str = NAMESPACE) -> None:
        """Use the server at `url`. Raises UserError if that has no scheme."""
        from hera.workflows import WorkflowsService

        if not url.startswith(("http://", "https://")):
            raise UserError("server", url, "must be an absolute URL: https://host:port")
        skips_verification = os.environ.get("ARGO_INSECURE_SKIP_VERIFY", "").lower() == "true"
        self.url = url
        self.namespace = namespace
        self._service = WorkflowsService(
            host=url,
            # An empty token would be sent, and refused.
            token=os.environ.get("ARGO_TOKEN") or None,
            verify_ssl=not skips_verification,
            namespace=namespace,
        )

    def submit(self, workflow: JsonMapping, run: str) -> str:
        """Create a workflow from `prepare_workflow`; see `tuneloop.cluster.submit.create_workflow`.

        Raises:
            UserError: the server cannot be reached or refuses, or the run is under way.
        """
        from hera.workflows import Workflow

        prepared, number = argo.prepare_resumption(workflow, self.workflows(run), run)
        # The first workflow of a run has its name alone.
        name = f"{run}-{number}" if number > 1 else run
        manifest = dict(prepared)
        manifest["metadata"] = dict(prepared["metadata"])
        manifest["metadata"]["name"] = name
        with self._translate_errors():
            hera_workflow: Any = Workflow.from_dict(manifest)
            hera_workflow.workflows_service = self._service
            hera_workflow.create()
        return name

    def workflows(self, run: str) -> list[JsonObject]:
        """Return the workflows of a run, oldest first."""
        with self._translate_errors():
            answer = self._service.list_workflows(
                self.namespace,
                label_selector=f"{RUN_LABEL}={run}",
            )
        workflows: list[JsonObject] = []
        for item in answer.items or ():
            # The same form as that of the API server.
            workflow = item.model_dump(
                mode="json",
                by_alias=True,
                exclude_none=True,
            )
            workflows.append(workflow)
        return sorted(workflows, key=lambda item: str(item["metadata"]["creationTimestamp"]))

    def wait(self, run: str) -> int:
        """Wait for the newest workflow of a run; see `tuneloop.cluster.submit.wait_for_run`."""
        return argo.wait_for_newest(lambda: self.workflows(run))

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate the server's errors to one line that says what to do."""
        from hera.exceptions import HeraException, InternalServerError
        from requests import RequestException

        try:
            yield
        except InternalServerError as error:
            message = " ".join(str(error).split())
            raise Retryable(f"server: {self.url}: {message}") from error
        except HeraException as error:
            message = " ".join(str(error).split())
            raise UserError("server", self.url, f"refused: {message}") from error
        except RequestException as error:
            raise Unreachable(
                "server",
                self.url,
                f"does not answer ({type(error).__name__}); correct the address, or port-forward"
                " to it",
            ) from error
