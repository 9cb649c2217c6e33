"""Serve an exported model by a Deployment, if its evaluation passes, and roll back if the model does not answer.

The Deployment's containers take the model from ``$MODEL`` and serve it under its reference, too
(``manifests/components/model-server``). An annotation, written together with the model, names the previous model. So
after a kill at any point the next attempt knows where to continue.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pydantic import Field

from tuneloop.core.component import UNTRACKED, Input, Results, Stage, component
from tuneloop.core.context import Options
from tuneloop.core.errors import NotPromoted, UserError
from tuneloop.core.http import Unanswered, send_request
from tuneloop.kube.connection import NAMESPACE, Connection, connect_to_cluster, ignore_refusals

PROMOTION = "tuneloop.dev/promotion"
"""Annotation of a Deployment, as JSON: its `model`, the model's `mean_reward`, whether the model was `proved` to
answer, and the same fields of the `former` model."""
MODEL = "MODEL"
PROBE_S = 60.0
"""Seconds within which ready pods must answer: until then, a Service may still route to the previous pods."""
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""The file with the namespace of a pod, if its account's token is mounted."""
Promotion = dict[str, Any]


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
    """Make a Deployment serve an exported model, and verify by a request that it does; else restore the former model.

    Raises:
        NotPromoted: the model's mean reward is too low; or its pods did not become ready or do not answer with it, and
            the former model is served again; or another run has replaced it meanwhile.
        UserError: `metrics` are of another policy; there is no such Deployment, or the account may not change it.
    """
    judged, exported = (
        each.manifest.inputs.get("policy", "").rpartition("@")[2] for each in (metrics, model)
    )
    if "mean_reward" not in metrics.manifest.scalars or judged != exported:
        raise UserError(
            "--metrics", metrics.ref, f"does not evaluate the policy that {model.url} exports"
        )
    name, url, least, ready_s = options.deployment, options.url, options.at_least, options.ready_s
    namespace = options.namespace or (
        OWN_NAMESPACE.read_text() if OWN_NAMESPACE.is_file() else NAMESPACE
    )
    score, server = (
        metrics.manifest.results["mean_reward"],
        Server(connect_to_cluster(namespace), name),
    )
    prompt = pq.read_table(metrics.part("samples.parquet"))["prompt"][0].as_py()

    def begin(now: Promotion) -> Promotion:
        if now["model"] == model.ref:  # an earlier attempt set it
            return now
        stands = {**(now if now.get("proved", True) else now["former"])}
        stands.pop("former", None)
        wanted = stands.get("mean_reward", score) if least is None else least
        if not score >= wanted:
            remedy = (
                f"is below {wanted:g}: {name} still serves {stands['model'] or 'its own model'}"
            )
            raise NotPromoted("mean_reward", score, remedy)
        return {"model": model.ref, "mean_reward": score, "proved": False, "former": stands}

    def end(now: Promotion) -> Promotion:
        if now["model"] != model.ref:
            raise NotPromoted(
                "--model", model.ref, f"was replaced at {name} meanwhile by {now['model']}"
            )
        return now.get("former", now) if wrong else {**now, "proved": True}

    server.change(begin)
    wrong = wait_until_right(stage, server.find_unready, ready_s)
    wrong = wrong or wait_until_right(
        stage, lambda: ask_model(url, model.ref, prompt), min(PROBE_S, ready_s)
    )
    now = server.change(end)
    if wrong:
        left = wait_until_right(stage, server.find_unready, ready_s)
        back = f"{name} serves {now['model'] or 'its own model'} again{left and f', but {left}'}"
        raise NotPromoted("--model", model.ref, f"{wrong}; {back}")
    stage.facts.update(deployment=name, mean_reward=score)
    stage.notes["former"] = now.get("former", {}).get("model")
    stage.log(f"{url} answers as {model.ref}")
    return {}


@dataclass(frozen=True)
class Server:
    """A Deployment."""

    cluster: Connection
    name: str

    def read(self) -> tuple[dict[str, Any], Promotion]:
        """Read the Deployment, and the promotion in its annotation, if that is about the model that it serves."""
        found = self.cluster.get("apps", "v1", "deployments", self.name)
        variables = (
            each
            for part in found["spec"]["template"]["spec"]["containers"]
            for each in part.get("env", ())
        )
        named: dict[str, Any] = next((each for each in variables if each["name"] == MODEL), {})
        if "valueFrom" in named:
            raise UserError(
                "--deployment",
                self.name,
                f"takes ${MODEL} from elsewhere (valueFrom); give it a value",
            )
        told, model = (
            json.loads(found["metadata"].get("annotations", {}).get(PROMOTION, "{}")),
            named.get("value"),
        )
        known = (each for each in (told, told.get("former", {})) if each.get("model", "") == model)
        return found, next(
            known, {"model": model}
        )  # it may be the former one, if the user has rolled back

    def change(self, decide: Callable[[Promotion], Promotion]) -> Promotion:
        """Change the promotion to what `decide` returns for it, and return that; retry after a concurrent change."""
        while True:
            found, now = self.read()
            if (new := decide(now)) == now:
                return now
            own = (
                [{"name": MODEL, "value": new["model"]}] if new["model"] else []
            )  # without, a ConfigMap names it
            pod = {
                kind: [
                    {**each, "env": own + [e for e in each.get("env", ()) if e["name"] != MODEL]}
                    for each in parts
                ]
                for kind, parts in found["spec"]["template"]["spec"].items()
                if kind in ("initContainers", "containers")
            }
            told, seen = {PROMOTION: json.dumps(new)}, found["metadata"]["resourceVersion"]
            about = {
                "annotations": told,
                "resourceVersion": seen,
            }  # the API refuses it after a concurrent change
            body = {"metadata": about, "spec": {"template": {"spec": pod}}}
            place = ("apps", "v1", self.cluster.namespace, "deployments", self.name)
            with ignore_refusals(409):
                self.cluster.custom.patch_namespaced_custom_object(*place, body)
                return new

    def find_unready(self) -> str:
        """Return what is wrong unless all of its pods have the newest template and are ready; else an empty text."""
        found, _ = self.read()
        status, wanted = found.get("status", {}), found["spec"].get("replicas", 1)
        counts = [
            status.get(which, 0) for which in ("replicas", "updatedReplicas", "availableReplicas")
        ]
        seen = status.get("observedGeneration", 0) >= found["metadata"]["generation"]
        return (
            "" if seen and counts == [wanted] * 3 else f"the pods of {self.name} are not all ready"
        )


def wait_until_right(stage: Stage, look: Callable[[], str], seconds: float) -> str:
    """Call `look` every second until nothing is wrong; return what is still wrong after `seconds`."""
    deadline = time.monotonic() + seconds
    while (wrong := look()) and time.monotonic() < deadline:
        stage.check_stop()
        time.sleep(1.0)
    return wrong and f"{wrong} after {seconds:g} s"


def ask_model(url: str, name: str, prompt: str) -> str:
    """Request a completion by a model from a server of OpenAI's API; return what is wrong with the answer."""
    try:
        told = json.loads(send_request("GET", f"{url}/v1/models", timeout_s=PROBE_S)[1])
        if name not in (names := [each["id"] for each in told["data"]]):
            return f"{url} serves {', '.join(names)} instead"
        body = {"model": name, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        status, answer = send_request("POST", f"{url}/v1/completions", timeout_s=PROBE_S, body=body)
        done = status == 200 and json.loads(answer)["usage"]["completion_tokens"]
        return "" if done else f"{url} answers {status}: {answer[:200].decode(errors='replace')},"
    except (Unanswered, ValueError, KeyError, TypeError) as error:
        return f"{url} does not answer ({type(error).__name__}: {error})"


if __name__ == "__main__":
    deploy_model.main()
