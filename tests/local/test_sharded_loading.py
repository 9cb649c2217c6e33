"""Several ranks open one model, each its own rows: bit for bit what each would cut of the whole model, and no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.models import write_model
from tests.waiting import LIMIT_S
from tests.warm import python
from tuneloop.formats.token_files import Document
from tuneloop.training import scorer
from tuneloop.training.fsdp.export import gather_tensor
from tuneloop.training.fsdp.loading import open_model
from tuneloop.training.fsdp.policy import Policy
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.fsdp.trainer import Trainer
from tuneloop.training.lora import Lora
from tuneloop.training.options import Optimization
from tuneloop.training.scorer import Scorer, ScoreTrainer

pytestmark = [pytest.mark.local, pytest.mark.slow]
ADAM = Optimization(1e-2, "constant", 0, 0, 0.01, 0.9, 0.95, 1.0)
DOCUMENTS = [
    Document([5, 6, 7, 8], [False, False, True, True]),
    Document([9, 10, 11], [False, True, True]),
]
FAMILIES = ("llama3", "qwen2", "deepseek_v3")
"""Scaled rotary embeddings; tied weights and biases; experts that are fused from several tensors of the files, and
buffers that the files hold."""
WHOLE = ("qwen3_moe",)
"""Its four experts are too few for three ranks, and every one of these loads the whole model."""
ADAPTERS = Lora(r=2)


class WholeTrainer(Trainer):
    """A trainer whose ranks open the whole model each, before `fully_shard` cuts it."""

    def _open(self, directory: Path) -> Any:
        return self._adapt(open_model(directory, torch.float32, self.layout.attention))


class WholeScoreTrainer(ScoreTrainer):
    """The same with a reward model."""

    def _open(self, directory: Path) -> Any:
        model = self._adapt(scorer._open(directory, torch.float32, self.layout.attention))
        model.score.requires_grad_(True)
        return scorer._Scoring(model.model, model.score, model.config)


def start(processes: int, *arguments: str | Path) -> None:
    words = [
        python(),
        "-m",
        "tuneloop.training.torchrun",
        "--standalone",
        f"--nproc-per-node={processes}",
        "-m",
        __name__,
    ]
    subprocess.run([*words, *map(str, arguments)], check=True, timeout=10 * LIMIT_S)


def test_rows_are_those_of_the_whole_model(tmp_path: Path) -> None:
    for name in FAMILIES:
        write_model(name, tmp_path / name, max_shard_size="100KB")
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 2
    # Its file holds float32 numbers, which no rank has to convert.
    write_model("olmo2", tmp_path / "olmo2")
    start(2, "equal", tmp_path)


def test_rows_that_three_ranks_cannot_share_evenly(tmp_path: Path) -> None:
    for name in ("qwen2", *WHOLE):
        write_model(name, tmp_path / name)
    start(3, "equal", tmp_path)


def test_a_rank_reads_and_holds_its_share_of_a_real_model(smollm2: Path) -> None:
    start(2, "share", smollm2)


def check_equal(directory: Path, ranks: Ranks) -> None:
    """What a rank does: trainers that load their rows, or the whole model, begin and step with the same bits."""
    opened = open_model(directory, torch.float32, "eager", ranks=ranks)
    is_sharded = {isinstance(parameter, DTensor) for parameter in opened.parameters()}
    assert is_sharded == {directory.name not in WHOLE}
    compare(directory, ranks, (Trainer, WholeTrainer))
    compare(directory, ranks, (Trainer, WholeTrainer), lora=ADAPTERS, dtype="bfloat16")
    trainers = (ScoreTrainer, WholeScoreTrainer)
    trained = compare(directory, ranks, trainers)
    # The files of a reward model have a head; a language model gets a new one.
    trained.export(directory, directory / "reward", "bfloat16")
    ranks.barrier()
    compare(directory / "reward", ranks, trainers)


def compare(
    directory: Path, ranks: Ranks, trainers: tuple[type[Trainer], ...], **options: Any
) -> Trainer:
    """Compare what two kinds of trainers make of a model; return the last one."""
    beginnings: list[dict[str, torch.Tensor]] = []
    results: list[tuple[str, float]] = []
    for trainer_class in trainers:
        # Adapters and heads are made of random numbers.
        torch.manual_seed(3)
        trainer = trainer_class(directory, ranks, ADAM, **options)
        next_number = float(torch.rand(1))
        tensors = dict(trainer.model.named_parameters()) | dict(trainer.model.named_buffers())
        beginnings.append(
            {name: gather_tensor(value.detach()).clone() for name, value in tensors.items()}
        )
        if isinstance(trainer, Scorer):
            loss = (trainer.scores(DOCUMENTS) - 1).square().sum()
        else:
            loss = -trainer.logprobs(DOCUMENTS)[0].sum()
        loss.backward()
        trainer.update()
        results.append((trainer.compute_state_digest(), next_number))
    ours, theirs = beginnings
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name
    assert results[0] == results[1]
    return trainer


def check_share(directory: Path, ranks: Ranks) -> None:
    """What a rank does: it reads its half of the file, and holds at most 1.2 of its half in float32, and one layer."""
    # What is imported on the way is no part of the model.
    Policy(directory, ranks)
    Path("/proc/self/clear_refs").write_text("5")
    held = read_figure("status", "VmRSS") * 1024
    read = read_figure("io", "rchar")
    policy = Policy(directory, ranks)
    file_bytes = (directory / "model.safetensors").stat().st_size
    assert read_figure("io", "rchar") - read < 1.05 * file_bytes / ranks.world
    peak = read_figure("status", "VmHWM") * 1024 - held
    parameters = list(policy.model.parameters())
    share = sum(4 * parameter.to_local().numel() for parameter in parameters)
    layer = 4 * sum(each.numel() for each in policy.model.model.layers[0].parameters())
    assert share < 4 * sum(parameter.numel() for parameter in parameters) / 1.9
    assert peak < 1.2 * share + layer, f"{peak} bytes for {share} and a layer of {layer}"
    del policy
    compare(directory, ranks, (Trainer, WholeTrainer), dtype="bfloat16")


def read_figure(file: str, name: str) -> int:
    """Read one number of what Linux says of this process."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with_all = Ranks("cpu")
    work = Path(sys.argv[2])
    if sys.argv[1] == "share":
        check_share(work, with_all)
    else:
        for case in sorted(work.iterdir()):
            check_equal(case, with_all)
