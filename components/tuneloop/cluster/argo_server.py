"""Send a workflow to an Argo server, by Hera's ``create``: for those who have its address and no kubeconfig.

`tuneloop submit --server URL` uses it. ``ARGO_TOKEN`` and ``ARGO_INSECURE_SKIP_VERIFY`` are those of the argo command
line."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kube.connection import NAMESPACE
from tuneloop.workflow.settings import RUN_LABEL


class Server:
    """An Argo server. Raises UserError where `url` has no scheme."""

    def __init__(self, url: str, namespace: str = NAMESPACE) -> None:
        from hera.workflows import WorkflowsService

        if not url.startswith(("http://", "https://")):
            raise UserError("server", url, "must be an absolute URL: https://host:port")
        skip = os.environ.get("ARGO_INSECURE_SKIP_VERIFY", "").lower() == "true"
        token = os.environ.get("ARGO_TOKEN") or None
        self.url = url
        self.namespace = namespace
        self._service = WorkflowsService(
            host=url, token=token, verify_ssl=not skip, namespace=namespace
        )

    def submit(self, made: JsonMapping, run: str) -> str:
        """Create a workflow from `prepare_workflow`; see `tuneloop.cluster.submit.create_workflow`. Raises UserError
        where the server cannot be reached or refuses, or the run is under way."""
        from hera.workflows import Workflow

        made, at = argo.prepare_resumption(made, self.workflows(run), run)
        name = f"{run}-{at}" if at > 1 else run
        with self._faults():
            built: Any = Workflow.from_dict(
                {**made, "metadata": {**made["metadata"], "name": name}}
            )
            built.workflows_service = self._service
            built.create()
        return name

    def workflows(self, run: str) -> list[JsonObject]:
        """Return the workflows of a run, oldest first."""
        with self._faults():
            found = self._service.list_workflows(
                self.namespace, label_selector=f"{RUN_LABEL}={run}"
            )
        items = [
            item.model_dump(mode="json", by_alias=True, exclude_none=True)
            for item in found.items or ()
        ]
        return sorted(items, key=lambda item: str(item["metadata"]["creationTimestamp"]))

    def wait(self, run: str) -> int:
        """Wait for the newest workflow of a run to end; see `tuneloop.cluster.submit.wait_for_run`."""
        while (
            run_workflows.get_workflow_phase(newest := self.workflows(run)[-1])
            not in run_workflows.DONE
        ):
            time.sleep(2.0)
        return argo.exit_code(newest)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn the server's errors into one line that says what to do."""
        from hera.exceptions import HeraException, InternalServerError
        from requests import RequestException

        try:
            yield
        except InternalServerError as error:
            raise Retryable(f"server: {self.url}: {' '.join(str(error).split())}") from error
        except HeraException as error:
            raise UserError(
                "server", self.url, f"refused: {' '.join(str(error).split())}"
            ) from error
        except RequestException as error:
            remedy = f"does not answer ({type(error).__name__}); correct the address, or port-forward to it"
            raise UserError("server", self.url, remedy) from error
