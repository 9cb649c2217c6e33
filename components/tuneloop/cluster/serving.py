"""The rollout servers of a rendered workflow as a Deployment and a Service, which outlive runs."""

import json
from typing import Any

from tuneloop.argo.claims import share_of
from tuneloop.argo.pod_fields import TOKENS
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject

FIELDS = (
    "serviceAccountName",
    "automountServiceAccountToken",
    "securityContext",
    "terminationGracePeriodSeconds",
    "nodeSelector",
    "tolerations",
)


def render_servers(workflow: JsonMapping, name: str, config: Any) -> list[JsonObject]:
    """Render the server of a run's template `serve` as a Deployment; each replica is one pod, and requires no token.
    Raises UserError if the workflow starts no server, or one that depends on its run or on a device lease."""
    serve = next((each for each in workflow["spec"]["templates"] if each["name"] == "serve"), None)
    words = serve["container"]["args"] if serve else []
    flags = {
        flag: value for flag, value in zip(words[::2], words[1::2]) if "{{" not in value
    }  # else specific to a run
    if not serve or "--weights" not in flags or share_of(workflow):
        remedy = "need engine=vllm, engine.weights=pull and engine.weights.url=URL, without cluster.share"
        raise UserError("--servers", name, remedy)
    container = {**serve["container"], "name": "serve"}
    own = {"app.kubernetes.io/name": name}
    container["args"] = [word for flag in flags.items() for word in flag]
    container["readinessProbe"] = {
        **container["readinessProbe"],
        "failureThreshold": 3,
    }  # Argo's waits for the start
    lists = {
        "env": container["env"],
        "volumeMounts": container["volumeMounts"],
        "volumes": serve["volumes"],
    }
    kept = {
        k: [each for each in v if "{{" not in str(each) and TOKENS not in str(each)]
        for k, v in lists.items()
    }
    fields = {**workflow["spec"], **serve, **json.loads(serve.get("podSpecPatch", "{}"))}
    pod = {key: fields[key] for key in FIELDS if key in fields} | {"volumes": kept.pop("volumes")}
    pod |= {
        "containers": [container | kept],
        "enableServiceLinks": False,
    }  # a Service called vllm sets VLLM_PORT
    about = {"name": name, "labels": {**own, "app.kubernetes.io/part-of": "tuneloop"}}
    # One is the default of Kubernetes: it is left out, so that applying it keeps an autoscaler's number.
    deployment: JsonObject = (
        {"replicas": config.engine.server.replicas} if config.engine.server.replicas > 1 else {}
    )
    deployment["selector"] = {"matchLabels": own}
    deployment["template"] = {
        "metadata": {"labels": {**serve["metadata"]["labels"], **own}},
        "spec": pod,
    }
    port = container["ports"][0]["containerPort"]
    service = {"selector": own, "ports": [{"name": "http", "port": port, "targetPort": port}]}
    return [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": about, "spec": deployment},
        {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": service},
    ]
