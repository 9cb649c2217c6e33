"""What `tuneloop submit` sends to a cluster: a run's workflow, and the servers of Dynamo's operator (a
DynamoGraphDeployment, here graph) that it uses.

`tuneloop submit` (`cli/cluster.py: submit_run`) and sweeps use it. ``submit --server`` takes only
the plan, and neither `check` nor `create` (`cluster/argo_server.py`). What `plan` adds to the
workflow is added by `cluster/drift.py` and `cli/cluster.py: diff_pipeline`, too, or `tuneloop diff`
finds it in every run; what `create` creates besides is released by `cluster/submit.py: stop_run`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from tuneloop.cluster.capacity import find_capacity_warnings
from tuneloop.cluster.graph_end import add_graph_end
from tuneloop.cluster.preflight import check_cluster, find_store_notes
from tuneloop.cluster.queue_problems import find_queue_warnings
from tuneloop.cluster.run_workflows import list_workflows, prepare_workflow
from tuneloop.cluster.submit import create_workflow, prepare_resumption
from tuneloop.config.loading import Pipeline, read_yaml_documents
from tuneloop.config.pipeline import check_store
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.inference.fleet.graph import bring_up, find_api_version, render_graph
from tuneloop.kube.connection import Connection
from tuneloop.planning.limits import Limit, find_limits, read_pods
from tuneloop.planning.pod_paths import list_mounted_paths
from tuneloop.runs.forking import begin_workflow, record_fork
from tuneloop.runs.run_record import Run
from tuneloop.workflow.settings import RUN_LABEL


def read_graph(manifest: Path, run: str, namespace: str) -> JsonObject:
    """Read the Dynamo graph of ``--fleet``, as it is created for a run.

    Raises:
        UserError: the manifest is wrong.
    """
    return render_graph(
        read_yaml_documents("manifest", manifest),
        namespace=namespace,
        labels={RUN_LABEL: run},
    )


def list_fleet_settings(graph: JsonObject) -> list[str]:
    """List the assignments by which a run has the servers of its graph make the rollouts."""
    address = "dynamo://{name}.{namespace}".format(**graph["metadata"])
    return [
        "engine.kind=endpoint",
        "engine.weights.kind=refit",
        f"engine.weights.fleet={address}",
    ]


@dataclass
class Submission:
    """A run that is ready to be submitted.

    Attributes:
        run: its name.
        settings: the configuration of its pipeline.
        workflow: as `prepare_workflow` makes it.
        graph: the Dynamo graph whose servers make its rollouts, if one is created for this run.
        origin: the run from which it starts, if it is a fork.
        limits: of the model, the data and the memory, that it would exceed (`find_limits`).
    """

    run: str
    settings: BaseModel
    workflow: JsonObject
    graph: JsonObject | None
    origin: Run | None
    limits: list[Limit]

    @classmethod
    def plan(
        cls,
        pipeline: Pipeline,
        run: str,
        store: str,
        *,
        config: Sequence[Path] | None,
        sets: Sequence[str],
        priority: str | None,
        namespace: str,
        fleet: Path | None,
        origin: Run | None,
        iteration: int,
    ) -> "Submission":
        """Plan the submission of a run; the cluster is not asked.

        Args:
            pipeline: of the run.
            run: the name.
            store: where its pods commit artifacts.
            config: the files with its settings.
            sets: assignments of settings.
            priority: the priority class of its queued stages.
            namespace: where the workflow will be created.
            fleet: the manifest of a Dynamo graph, which is to make the rollouts.
            origin: the run from which it starts.
            iteration: the one of `origin` at whose end it starts.

        Raises:
            UserError: a setting or the manifest is wrong, or the origin lacks the iteration.
        """
        graph: JsonObject | None = None
        fleet_sets: list[str] = []
        if fleet:
            graph = read_graph(fleet, run, namespace)
            fleet_sets = list_fleet_settings(graph)
        # The user's assignments come last, so that they win.
        settings = pipeline.configure(config, fleet_sets + list(sets), store)
        check_store(settings, store)
        workflow = (
            begin_workflow(pipeline, settings, origin, iteration)
            if origin
            else pipeline.build(settings)
        )
        if graph:
            add_graph_end(workflow, settings.cluster)  # type: ignore[attr-defined]
        mounts = list_mounted_paths(workflow)
        limits = find_limits(settings, workflow, read_pods(settings), mounts=mounts)
        prepared = prepare_workflow(
            workflow, run=run, store=store, namespace=namespace, priority=priority
        )
        return cls(run, settings, prepared, graph, origin, limits)

    def list_manifests(self) -> list[JsonObject]:
        """List the objects in the order in which they are created."""
        return [self.graph, self.workflow] if self.graph else [self.workflow]

    def check(self, cluster: Connection) -> list[UserError]:
        """Check that a cluster has all that the run needs, and return warnings of possible waits,
        and of what could not be checked from here.

        Raises:
            UserError: it lacks something; the notes of the error are what else it lacks.
            Retryable: the API server is in trouble.
        """
        if self.graph:
            find_api_version(cluster)
        check_cluster(cluster, self.workflow)
        warnings: list[UserError] = list(find_queue_warnings(cluster, self.workflow))
        warnings += find_capacity_warnings(cluster, self.workflow)
        warnings += find_store_notes(self.workflow)
        return warnings

    def check_name(self, cluster: Connection) -> None:
        """Raise UserError if the run's name stands for another run on the cluster."""
        prepare_resumption(self.workflow, list_workflows(cluster, self.run), self.run)

    def record_origin(self) -> None:
        """Write into the store of a fork from which run it starts; do nothing for other runs."""
        if self.origin:
            record_fork(self.run, self.workflow, self.origin, self.settings)

    def create(self, cluster: Connection, tell: Callable[[str], object]) -> str:
        """Create the workflow, after its graph is ready, and return its name.

        Args:
            cluster: as `check` has checked it.
            tell: prints the progress of the graph.

        Raises:
            UserError: the run is active, or its name stands for other settings.
            Retryable: the graph did not become ready, or the API server is in trouble.
        """
        self.record_origin()

        def create() -> str:
            return create_workflow(cluster, self.workflow, self.run)

        if self.graph is None:
            return create()
        name = bring_up(cluster, self.graph, create, tell=tell)
        assert name
        return name
