"""The final model behind vLLM's OpenAI API, from the artifact that `export` committed."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, STORE, kubectl
from tests.cluster.making import draw_tiny_model, submit_workflow
from tests.cluster.test_jobset import RUN, SMALL
from tests.cluster.volumes import apply
from tuneloop.argo.template import define_workflow, stage_template
from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.cluster.watch import read_nodes
from tuneloop.kube.connection import Connection
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.export import export

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

OVERLAY = """
kind: Kustomization
components: [COMPONENT]
images: [{name: tuneloop/rollout, newName: NAME, newTag: TAG}]
patches:
  - target: {kind: ConfigMap, name: tuneloop-model}
    patch: |
      - {op: replace, path: /data/MODEL, value: "REFERENCE"}
  - target: {kind: Deployment, name: tuneloop-model}
    patch: |
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --enforce-eager}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --dtype=float32}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --max-model-len=128}
      - op: add
        path: /spec/template/spec/containers/0/env
        value: [{name: VLLM_CPU_KVCACHE_SPACE, value: "1"}]
      - op: replace
        path: /spec/template/spec/containers/0/resources
        value: {requests: {cpu: 200m, memory: 4Gi}, limits: {memory: 4Gi}}
"""
ASK = """
import json, urllib.request
body = {"model": "tuneloop", "prompt": "12", "max_tokens": 4, "temperature": 0, "logprobs": 1}
request = urllib.request.Request("http://tuneloop-model:8000/v1/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


@pytest.fixture
def served(cluster: Connection, run: str, tmp_path: Path) -> Iterator[str]:
    """The reference of an exported model that a Deployment serves."""
    from hera.workflows import DAG

    with define_workflow("exported") as built:
        prepare = stage_template(data_prep, {"train": 16, "sft": 16, "eval": 4}, cluster=SMALL)
        bring = stage_template(base_model, {"model": "tiny-qwen3"}, cluster=SMALL)
        save = stage_template(export, {}, cluster=SMALL)
        with DAG(name="main"):
            model, _, policy = draw_tiny_model(prepare, bring)
            model >> save(name="export", arguments={"policy": policy, "model": f"{RUN}/export"})
    submit_workflow(cluster, built.to_dict(), run=run, store=STORE)
    assert argo.wait_for_run(cluster, run) == 0
    outputs = {n.display_name: n.outputs for n in read_nodes(run_workflows.find_workflows(cluster, run)[-1]).values()}
    name, _, tag = SMALL.images.format(image="rollout").rpartition(":")
    component = os.path.relpath(ROOT / "manifests" / "components" / "model-server", tmp_path)
    text = OVERLAY.replace("COMPONENT", component).replace("REFERENCE", outputs["export"]["model"])
    (tmp_path / "kustomization.yaml").write_text(text.replace("NAME", name).replace("TAG", tag))
    objects = kubectl("kustomize", str(tmp_path))
    apply(objects)
    try:
        kubectl("-n", cluster.namespace, "rollout", "status", "deployment/tuneloop-model", "--timeout=600s")
        yield outputs["export"]["model"]
    finally:
        apply(objects, "delete")


def test_the_final_model_answers(cluster: Connection, served: str) -> None:
    own = ["-n", cluster.namespace]
    said = json.loads(kubectl(*own, "exec", "deploy/tuneloop-model", "-c", "vllm", "--", "python", "-c", ASK))
    assert said["model"] == "tuneloop"
    assert said["usage"]["completion_tokens"] >= 1
    assert all(logprob <= 0 for logprob in said["choices"][0]["logprobs"]["token_logprobs"])
    fetched = kubectl(*own, "logs", "deploy/tuneloop-model", "-c", "fetch")
    assert f"{served} is at /tmp/model" in fetched
