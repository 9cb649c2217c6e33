"""Take a policy out: a plain Hugging Face directory that transformers and vLLM load."""

import shutil
from math import prod
from pathlib import Path

from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.core.errors import UserError
from tuneloop.weights.layout import read_header


@component("model", image="base", results={"parameters": int})
def export(stage: Stage, policy: Input) -> Results:
    """Copy a checkpoint's ``model/`` out: the artifact's files are the model directory, nothing around it.

    Raises:
        UserError: `policy` is not a checkpoint.
    """
    if "model/config.json" not in policy.manifest.files:
        raise UserError("--policy", policy.url, "holds no model/config.json; give it a checkpoint")
    model = policy.part("model")
    shutil.copytree(model, stage.out, dirs_exist_ok=True)
    parameters = sum(count_parameters(path) for path in model.glob("*.safetensors"))
    stage.facts.update(version=policy.manifest.facts.get("version"), digest=policy.manifest.digest)
    return {"parameters": parameters}


def count_parameters(path: Path) -> int:
    """Count the elements in a safetensors file, from its header alone."""
    return sum(prod(tensor.shape) for tensor in read_header(path).tensors.values())


if __name__ == "__main__":
    export.main()
