"""Make a Workflow a whole run by itself, as `hera generate yaml` prints it for `argo submit`.

`tuneloop submit` names the run, its store and its labels (`cluster/run_workflows.py`). Here the
manifest has to say all of it: a label that `submit` adds to what it sends is missing here until it
is added.

`cli/pipeline_file.py: render_file` calls it at the end of each pipeline's file;
docs/hera-and-argo.md describes it, and `tests/golden/test_golden.py` tests it.
"""

import os
import secrets
from typing import Any

from hera.workflows import Workflow, models

from tuneloop.workflow.settings import RUN_LABEL

RUN = "TUNELOOP_RUN"
"""Variable with the run's name; without it each manifest that is generated is another run."""
STORE = "TUNELOOP_STORE"
"""Variable with the store of the run."""
DEFAULT_STORE = "s3://artifacts/runs"
"""The store of the examples in docs/cluster.md and of ``manifests/overlays/local``."""


def complete_run(workflow: Workflow) -> Workflow:
    """Give a Workflow the name, the store and the labels of a run, and return it.

    Parameters that are set at submission (``argo submit -p run=…``) win: the labels follow them. A
    Workflow without the parameter ``run`` is no run, and stays as it is.
    """
    # Hera takes arguments in many forms; a rendered Workflow has objects with a name.
    arguments: Any = workflow.arguments or ()
    parameters = {argument.name: argument for argument in arguments}
    if "run" not in parameters:
        return workflow
    # Submitted twice, a manifest with one name is a run and its resumption.
    name = os.environ.get(RUN) or f"{parameters['run'].value}-{secrets.token_hex(3)}"
    parameters["run"].value = name
    if "store" in parameters:
        parameters["store"].value = os.environ.get(STORE) or DEFAULT_STORE
    workflow.generate_name = f"{name}-"
    expression = models.LabelValueFrom(expression="workflow.parameters.run")
    workflow.workflow_metadata = models.WorkflowMetadata(labels_from={RUN_LABEL: expression})
    pod_metadata: Any = workflow.pod_metadata
    pod_labels = (pod_metadata and pod_metadata.labels) or {}
    labels = pod_labels | {RUN_LABEL: "{{workflow.parameters.run}}"}
    workflow.pod_metadata = models.Metadata(labels=labels)
    return workflow
