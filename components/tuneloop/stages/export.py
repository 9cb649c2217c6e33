"""Take a policy out: a plain Hugging Face directory that transformers and vLLM load."""

import os
import shutil
import tempfile
from math import prod
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tuneloop.core.artifacts import Artifact, Manifest, hash_files
from tuneloop.core.component import UNTRACKED, Input, Results, Stage, component
from tuneloop.core.errors import UserError
from tuneloop.weights.layout import read_header


def _copy_out(stage: Stage, manifest: Manifest) -> None:
    if (directory := getattr(stage.params, "directory", None)) is not None:
        copy_out(Artifact(stage.out_url).path, Path(directory).expanduser().absolute())
        stage.log(f"copied to {directory}")


@component("model", image="base", results={"parameters": int}, after=_copy_out)
def export(
    stage: Stage,
    policy: Input,
    *,
    directory: Annotated[str | None, Field(description="also write a copy here", json_schema_extra=UNTRACKED)] = None,
) -> Results:
    """Copy a checkpoint's ``model/`` out: the artifact's files are the model directory, nothing around it.

    Raises:
        UserError: `policy` is not a checkpoint; `directory` exists and holds something else.
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


def copy_out(model: Path, target: Path) -> None:
    """Make `target` a copy of the directory `model`: all of it or nothing.

    Where it is one already, nothing happens; an empty directory is replaced.

    Raises:
        UserError: it holds something else, or cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if target.is_dir() and hash_files(target) == hash_files(model):
            return
        raise UserError("export.directory", str(target), "exists and holds something else; choose another")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            shutil.copytree(model, staged, dirs_exist_ok=True)
            staged.chmod(0o755)  # mkdtemp's directories are private
            os.replace(staged, target)  # an empty directory gives way
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    except PermissionError as error:
        raise UserError("export.directory", str(target), f"{error.strerror}; choose a writable place") from error


if __name__ == "__main__":
    export.main()
