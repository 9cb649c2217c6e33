"""Two ranks write one export, each its own rows: byte for byte what one process would have written and published."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from tests.making import tiny_model
from tests.waiting import LIMIT_S
from tests.warm import python
from tuneloop.core.artifacts import hash_files
from tuneloop.formats.token_files import Document
from tuneloop.training.fsdp.loading import open_model
from tuneloop.training.fsdp.policy import fill_rounded
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.fsdp.trainer import Trainer
from tuneloop.training.lora import Lora
from tuneloop.training.options import Optimization
from tuneloop.weights.publish import publish_version

pytestmark = [pytest.mark.local, pytest.mark.slow]
ADAM = Optimization(1e-2, "constant", 0, 0, 0.01, 0.9, 0.95, 1.0)


CASES = {"rows": "qwen3", "files": "llama", "apart": "qwen3", "lora": "llama", "kept": "llama"}
"""`files`: more than one; `apart`: machines without a common directory; `lora`: adapters are merged in; `kept`: a class
that keeps modules in float32."""


def test_the_files_are_those_of_one_process(tmp_path: Path) -> None:
    for how, arch in CASES.items():
        directory = tiny_model(tmp_path / how / "source", arch, tie=how != "files")
        if how == "files":
            cut_into_files(directory)
    words = [
        python(),
        "-m",
        "tuneloop.training.torchrun",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        __name__,
    ]
    subprocess.run([*words, str(tmp_path)], check=True, timeout=10 * LIMIT_S)
    for how in CASES:
        ours, theirs = tmp_path / how / "ours", tmp_path / how / "theirs"
        assert hash_files(ours) == hash_files(theirs) != {}
        assert len(list(ours.glob("*.safetensors"))) == (3 if how == "files" else 1)
        published = []
        for export in (ours, theirs):
            root = str(tmp_path / how / f"weights-{export.name}")
            publish_version(root, 0, tmp_path / how / "source")
            published.append(publish_version(root, 1, export))
        assert published[0].ref == published[1].ref


def cut_into_files(directory: Path) -> None:
    """Write the model's weights again, as several files."""
    whole = open_model(directory, torch.bfloat16, "sdpa")
    (directory / "model.safetensors").unlink()
    whole.save_pretrained(directory, max_shard_size="20KB")


def check_measurements(trainer: Trainer) -> None:
    """A measurement with rounded parameters, in any order, changes nothing of what follows."""
    documents = [Document([5, 6, 7, 8], [0, 0, 1, 1]), Document([9, 10, 11], [0, 1, 1])]

    def measure(dtype: str) -> list[float]:
        with trainer.frozen(), trainer.rounded(dtype):
            return trainer.logprobs(documents)[0].tolist()

    before = measure("float32")
    rounded = measure("bfloat16")
    assert rounded != before
    # The pass that a training step makes, straight after the measurement.
    assert trainer.logprobs(documents)[0].tolist() == before
    assert measure("bfloat16") == rounded
    assert measure("float32") == before


def export(how: str, work: Path, ranks: Ranks) -> None:
    """What a rank does: one export each way."""
    source, target = work / "source", work / "ours"
    trainer = Trainer(source, ranks, ADAM, lora=Lora(r=2) if how == "lora" else None)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.to_local().add_(
                torch.randn(parameter.shape)[_rows(parameter, ranks)], alpha=0.01
            )
    gather = DTensor.full_tensor
    if how != "apart":
        DTensor.full_tensor = None  # type: ignore[method-assign, assignment]
    elif ranks.rank:
        target = work / "elsewhere"
    check_measurements(trainer)
    written = trainer.export(source, target, "bfloat16")
    DTensor.full_tensor = gather  # type: ignore[method-assign]
    whole = trainer.whole_state()
    if ranks.rank == 0:
        one = open_model(source, torch.bfloat16, "sdpa")
        fill_rounded(one, whole)
        limit = "20KB" if how == "files" else "50GB"
        one.save_pretrained(work / "theirs", max_shard_size=limit)
        for name, value in one.state_dict().items():
            assert torch.equal(value, written.state_dict()[name])
    else:
        assert written is None and not (work / "elsewhere").exists()


def _rows(parameter: DTensor, ranks: Ranks) -> slice:
    size = -(-len(parameter) // ranks.world)
    return slice(ranks.rank * size, (ranks.rank + 1) * size)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with_all = Ranks("cpu")
    for case in CASES:
        # As classes such as ERNIE's with experts do, whose files one process writes for other reasons.
        LlamaForCausalLM._keep_in_fp32_modules_strict = ["norm"] if case == "kept" else None
        export(case, Path(sys.argv[1]) / case, with_all)
