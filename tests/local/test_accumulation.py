"""What crosses between two ranks in one optimizer step."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.making import tiny_model
from tests.waiting import LIMIT_S
from tests.warm import python

pytestmark = [pytest.mark.local, pytest.mark.slow]

STEP = """
import collections, json, os, sys
from pathlib import Path
from torch.profiler import ProfilerActivity, profile
from tests.unit.training.test_fsdp import ADAM
from tuneloop.training.batching import Document
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.fsdp.trainer import Trainer

trainer = Trainer(Path(sys.argv[1]), Ranks("cpu", 2), ADAM)
documents = [Document([i + 1, 2, 3, 4], [False, True, True, True]) for i in range(8)]

def step(limit):
    micro = trainer.plan([len(d.ids) for d in documents], limit)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for batch in trainer.accumulate(micro):
            (-trainer.logprobs([documents[i] for i in batch])[0].sum() / 24).backward()
        trainer.update()
    return len(micro), collections.Counter(e.name for e in seen.events() if e.name.startswith("gloo:"))

step(4)
found = [step(limit) for limit in (4, 1)]
if os.environ["RANK"] == "0":
    print("found", json.dumps(found))
"""


def test_gradients_cross_once_a_step_however_many_micro_batches(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "qwen3", dtype=torch.float32)
    (tmp_path / "step.py").write_text(STEP)
    (tmp_path / "tests").symlink_to(Path(__file__).parents[1])
    words = [
        python(),
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "step",
        str(model),
    ]
    done = subprocess.run(words, text=True, capture_output=True, timeout=5 * LIMIT_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("found "))
    (few, once), (many, often) = json.loads(line.removeprefix("found "))
    assert (few, many) == (1, 4)
    assert (
        often["gloo:all_reduce"] == once["gloo:all_reduce"] > 0
    )  # of gradients, and of their norm
    assert (
        often["gloo:all_gather"] == 4 * once["gloo:all_gather"] > 0
    )  # of parameters, which are freed in between
