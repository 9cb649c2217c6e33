"""Serve an exported model by a Deployment, if its evaluation passes, and roll back if the model
does not answer.

The Deployment's containers take the model from ``$MODEL`` and serve it under its reference, too
(``manifests/components/model-server``). An annotation, written together with the model, names the
previous model. So after a kill at any point the next attempt knows where to continue.

Its pod has an account of its own, which may change that Deployment (``account`` below).
``manifests/components/model-deployer`` names this account and the Deployment `tuneloop-model`:
where one of them is changed here, it is changed there, too (`tests/unit/test_manifests.py`). Exit
code 3 says that the model did not pass, and what was served before is still served
(`core/errors.py: NotPromoted`).

Tests: `tests/unit/stages/test_deploy_model.py`, and `tests/cluster/test_serving.py` in a cluster.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from pydantic import Field

from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import UNTRACKED, Input, Results, Stage, component
from tuneloop.core.context import Options
from tuneloop.core.errors import NotPromoted, UserError
from tuneloop.core.http import Unanswered, send_request
from tuneloop.core.json_types import JsonObject
from tuneloop.formats.rollouts import SAMPLES_FILE
from tuneloop.kube.connection import NAMESPACE, Connection, connect_to_cluster, ignore_refusals

PROMOTION = "tuneloop.dev/promotion"
"""Annotation of a Deployment, as JSON: its `model`, the model's `mean_reward`, whether the model
was `proved` to answer, and the same fields of the `former` model. A Deployment may have that of an
earlier release, or none: a field that is added may be missing.
"""
MODEL = "MODEL"
"""The variable of the pods' containers with the reference of the model, as
``manifests/components/model-server/server.yaml`` reads it.
"""
PROBE_S = 60.0
"""Seconds within which ready pods must answer: until then, a Service may still route to the
previous pods.
"""
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""The file with the namespace of a pod, if its account's token is mounted."""
Promotion = JsonObject


class DeployOptions(Options):
    """The Deployment that serves an exported model, and the mean reward that the model needs."""

    deployment: str = Field(
        "tuneloop-model", description="Deployment that serves models; its pods read $MODEL"
    )
    namespace: str | None = Field(None, description="namespace of the Deployment; none: this pod's")
    url: str = Field(
        "http://tuneloop-model:8000", description="URL of its Service", json_schema_extra=UNTRACKED
    )
    at_least: float | None = Field(
        None, description="minimum; none: the served one's", json_schema_extra=UNTRACKED
    )
    ready_s: float = Field(
        1200, gt=0, description="seconds until all pods are ready", json_schema_extra=UNTRACKED
    )


@component("promotion", account="tuneloop-deployer")
def deploy_model(stage: Stage, model: Input, metrics: Input, *, options: DeployOptions) -> Results:
    """Make a Deployment serve an exported model, and verify by a request that it does; else restore
    the former model.

    Raises:
        NotPromoted: the model's mean reward is too low; or its pods did not become ready or do not
            answer with it, and the former model is served again; or another run has replaced it
            meanwhile.
        UserError: `metrics` are of another policy; there is no such Deployment, or the account may
            not change it.
    """
    is_same_policy = find_policy_digest(metrics) == find_policy_digest(model)
    if "mean_reward" not in metrics.manifest.scalars or not is_same_policy:
        remedy = f"does not evaluate the policy that {model.url} exports"
        raise UserError("--metrics", metrics.ref, remedy)
    namespace = options.namespace
    if namespace is None:
        namespace = OWN_NAMESPACE.read_text() if OWN_NAMESPACE.is_file() else NAMESPACE
    score: float = metrics.manifest.results["mean_reward"]
    server = Server(connect_to_cluster(namespace), options.deployment)
    prompt = pq.read_table(metrics.part(SAMPLES_FILE))["prompt"][0].as_py()

    # From here on pods are replaced; the annotation says what to go back to.
    server.change(lambda current: begin_promotion(current, model.ref, score, options))
    problem = wait_until_right(stage, server.find_unready, options.ready_s)
    if not problem:
        problem = wait_until_right(
            stage,
            lambda: ask_model(options.url, model.ref, prompt),
            min(PROBE_S, options.ready_s),
        )
    promotion = server.change(
        lambda current: end_promotion(current, model.ref, options.deployment, failed=bool(problem))
    )
    if problem:
        restored = f"{options.deployment} serves {promotion['model'] or 'its own model'} again"
        unready = wait_until_right(stage, server.find_unready, options.ready_s)
        if unready:
            restored += f", but {unready}"
        raise NotPromoted("--model", model.ref, f"{problem}; {restored}")
    stage.facts.update(deployment=options.deployment, mean_reward=score)
    stage.notes["former"] = promotion.get("former", {}).get("model")
    stage.log(f"{options.url} answers as {model.ref}")
    return {}


def find_policy_digest(artifact: Artifact) -> str:
    """Return the digest of the policy that an artifact was made with; empty if it names none."""
    return artifact.manifest.inputs.get("policy", "").rpartition("@")[2]


def begin_promotion(
    current: Promotion, model: str, score: float, options: DeployOptions
) -> Promotion:
    """Return the promotion of `model` in place of the `current` one.

    Raises:
        NotPromoted: its score is below the minimum, or below that of the model that is served.
    """
    if current["model"] == model:
        return current  # an earlier attempt has set it
    # A model that was never proved to answer is not what is gone back to.
    is_proved = current.get("proved", True)
    former = dict(current if is_proved else current["former"])
    former.pop("former", None)
    minimum = options.at_least
    if minimum is None:
        minimum = former.get("mean_reward", score)
    # Written so that a score that is no number does not pass.
    if not score >= minimum:
        served = former["model"] or "its own model"
        remedy = f"is below {minimum:g}: {options.deployment} still serves {served}"
        raise NotPromoted("mean_reward", score, remedy)
    return {"model": model, "mean_reward": score, "proved": False, "former": former}


def end_promotion(current: Promotion, model: str, deployment: str, *, failed: bool) -> Promotion:
    """Return the `current` promotion as proved, or that of the former model, if the model has
    `failed`.

    Raises:
        NotPromoted: another run has replaced the model meanwhile.
    """
    if current["model"] != model:
        remedy = f"was replaced at {deployment} meanwhile by {current['model']}"
        raise NotPromoted("--model", model, remedy)
    if failed:
        former: Promotion = current.get("former", current)
        return former
    return current | {"proved": True}


@dataclass(frozen=True)
class Server:
    """A Deployment."""

    cluster: Connection
    name: str

    def read(self) -> tuple[JsonObject, Promotion]:
        """Read the Deployment, and the promotion of the model that it serves.

        Raises:
            UserError: its pods take the model's name from somewhere else than the template.
        """
        deployment: JsonObject = self.cluster.get("apps", "v1", "deployments", self.name)
        variables = [
            variable
            for container in deployment["spec"]["template"]["spec"]["containers"]
            for variable in container.get("env", ())
            if variable["name"] == MODEL
        ]
        if variables and "valueFrom" in variables[0]:
            remedy = f"takes ${MODEL} from elsewhere (valueFrom); give it a value"
            raise UserError("--deployment", self.name, remedy)
        model = variables[0].get("value") if variables else None
        annotations = deployment["metadata"].get("annotations", {})
        promotion: Promotion = json.loads(annotations.get(PROMOTION, "{}"))
        # If the user has rolled back, the annotation is about the former model.
        for candidate in (promotion, promotion.get("former", {})):
            if candidate.get("model", "") == model:
                return deployment, candidate
        return deployment, {"model": model}

    def change(self, decide: Callable[[Promotion], Promotion]) -> Promotion:
        """Change the promotion to what `decide` returns for it, and return that; retry after a
        concurrent change.
        """
        while True:
            deployment, current = self.read()
            promotion = decide(current)
            if promotion == current:
                return current
            patch = build_patch(deployment, promotion)
            with ignore_refusals(409):
                self.cluster.custom.patch_namespaced_custom_object(
                    "apps", "v1", self.cluster.namespace, "deployments", self.name, patch
                )
                return promotion

    def find_unready(self) -> str:
        """Return what is wrong unless all of its pods have the newest template and are ready; else
        an empty text.
        """
        deployment, _ = self.read()
        status = deployment.get("status", {})
        replicas = deployment["spec"].get("replicas", 1)
        generation = deployment["metadata"]["generation"]
        # Until the controller has seen the new template, its counts are of the former one.
        is_observed = status.get("observedGeneration", 0) >= generation
        names = ("replicas", "updatedReplicas", "availableReplicas")
        if is_observed and all(status.get(name, 0) == replicas for name in names):
            return ""
        return f"the pods of {self.name} are not all ready"


def build_patch(deployment: JsonObject, promotion: Promotion) -> JsonObject:
    """Build the patch that makes a Deployment serve the model of `promotion`.

    It names the version that was read, so that the API refuses it after a concurrent change.
    """
    # Without a model of ours, the pods take the name from their ConfigMap.
    model_variable = []
    if promotion["model"]:
        model_variable.append({"name": MODEL, "value": promotion["model"]})
    template = deployment["spec"]["template"]["spec"]
    pod: JsonObject = {}
    for kind in ("initContainers", "containers"):
        if kind not in template:
            continue
        pod[kind] = []
        for container in template[kind]:
            variables = [
                variable for variable in container.get("env", ()) if variable["name"] != MODEL
            ]
            pod[kind].append(container | {"env": model_variable + variables})
    return {
        "metadata": {
            "annotations": {PROMOTION: json.dumps(promotion)},
            "resourceVersion": deployment["metadata"]["resourceVersion"],
        },
        "spec": {"template": {"spec": pod}},
    }


def wait_until_right(stage: Stage, find_problem: Callable[[], str], seconds: float) -> str:
    """Call `find_problem` every second until nothing is wrong; return what is still wrong after
    `seconds`.
    """
    deadline = time.monotonic() + seconds
    while (problem := find_problem()) and time.monotonic() < deadline:
        stage.check_stop()
        time.sleep(1.0)
    return f"{problem} after {seconds:g} s" if problem else ""


def ask_model(url: str, name: str, prompt: str) -> str:
    """Request a completion by a model from a server of OpenAI's API; return what is wrong with the
    answer.
    """
    try:
        _, listing = send_request("GET", f"{url}/v1/models", timeout_s=PROBE_S)
        names = [model["id"] for model in json.loads(listing)["data"]]
        if name not in names:
            return f"{url} serves {', '.join(names)} instead"
        # A listing does not prove that the weights are loaded.
        body = {"model": name, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        status, answer = send_request("POST", f"{url}/v1/completions", timeout_s=PROBE_S, body=body)
        if status == 200 and json.loads(answer)["usage"]["completion_tokens"]:
            return ""
        return f"{url} answers {status}: {answer[:200].decode(errors='replace')},"
    except (Unanswered, ValueError, KeyError, TypeError) as error:
        return f"{url} does not answer ({type(error).__name__}: {error})"


if __name__ == "__main__":
    deploy_model.main()
