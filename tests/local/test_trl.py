"""TRL's own scripts by the backend `trl`: two processes each, on chats of `data_prep`. SFT is in tests/cluster."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.making import tiny_model
from tests.waiting import LIMIT_S
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.stages.data_prep import data_prep
from tuneloop.training.backends import run_here
from tuneloop.training.backends.trl import Trl
from tuneloop.training.checkpoint import find_state, trainer_state
from tuneloop.training.fetch import fetch_artifact

pytestmark = [pytest.mark.local, pytest.mark.slow]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)
TINY = {
    **{"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1},
    **{
        "use_cpu": True,
        "bf16": False,
        "dtype": "float32",
        "gradient_checkpointing": False,
        "report_to": "none",
    },
    **{"save_strategy": "no", "log_level": "info"},
}
GRPO = {
    "reward_funcs": [
        "tuneloop.training.backends.trl.score",
        "think_format_reward",
        "tests.local.test_trl.digits",
    ],
    **{"num_generations": 4, "max_completion_length": 8},
}


def digits(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """A reward that differs within a group of random completions."""
    return [float(sum(c.isdigit() for c in completion[0]["content"])) for completion in completions]


DROPPING = """
import os, sys
import torch
import torch.distributed as dist

def train(i):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}{i}", rank=int(os.environ["RANK"]), world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1))
    dist.destroy_process_group()

sys.setswitchinterval(1000)  # no thread gets Python's lock unless it is released: as on a very busy machine
for i in range(10):
    train(i)
"""
"""What all of TRL's scripts do in the end. It hangs by ``python -m``."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("trl")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(work / "model", dtype=torch.float32))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(work / "model")
    data_prep(out=str(work / "prompts"), train=16, eval=4, sft=16, preference=16, chat=True)
    return work


@pytest.mark.parametrize(
    ("trainer", "split", "options"),
    [("dpo", "preference", {}), ("kto", "preference", {}), ("grpo", "train", GRPO)],
)
def test_a_script_in_two_processes(
    made: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    trainer: str,
    split: str,
    options: dict[str, Any],
) -> None:
    rows = f"{Artifact(str(made / 'prompts')).ref}#{split}.parquet"
    places = {"model_name_or_path": str(made / "model"), "dataset_name": str(tmp_path / "data")}
    backend = Trl(
        trainer=trainer,
        processes=2,
        args={**places, "output_dir": str(tmp_path / "out"), **TINY, **options},
    )
    fetch_artifact(rows, tmp_path / "data")
    with pytest.raises(
        UserError, match="holds chats as JSON, which TRL reads as plain text; fetch it by"
    ):
        backend.validate()
    fetch_artifact(rows, tmp_path / "data", messages=True)
    assert run_here(backend) == 0
    said = "".join(capfd.readouterr())
    assert (
        "Total train batch size (w. parallel, distributed & accumulation) = 4" in said
    )  # 2 a rank, 2 ranks
    for name in ("score", "think_format_reward", "digits") if trainer == "grpo" else ():
        assert f"'rewards/{name}/mean'" in said
    before, after = (
        AutoModelForCausalLM.from_pretrained(p).state_dict()
        for p in (made / "model", tmp_path / "out")
    )
    assert any(not torch.equal(before[name], value) for name, value in after.items())
    assert all(bool(value.isfinite().all()) for value in after.values())


SMALL = [
    *(
        "data.train=8",
        "data.eval=8",
        "data.sft=16",
        "sft.max_steps=3",
        "sft.warmup_steps=0",
        "evaluate.limit=8",
    ),
    *("trainer.per_device_train_batch_size=16", "trainer.adam_beta2=0.99"),
]
PAIRS = [
    *(
        "data.preference=8",
        "data.preference_eval=4",
        "preference.max_steps=3",
        "preference.warmup_steps=0",
    ),
    "trainer.per_device_train_batch_size=8",
]


TWO = ["processes=2", "trainer.per_device_train_batch_size=8"]


@pytest.mark.parametrize(
    ("pipeline", "stage", "sets", "ranks"),
    [("sft", "sft", SMALL, TWO), ("dpo", "preference", SMALL + PAIRS, [])],
)
def test_a_pipeline_is_switched_by_one_line(
    tmp_path: Path, pipeline: str, stage: str, sets: list[str], ranks: list[str]
) -> None:
    """Each step has all rows, so that either backend takes the same ones: to other weights by rounding alone."""
    for backend, more in (("native", []), ("trl", ranks)):
        given = [
            word
            for item in (*sets, *more, f"{stage}.backend={backend}")
            for word in ("--set", item)
        ]
        assert run_cli(["run", pipeline, "--run", backend, "--store", str(tmp_path), *given]) == 0
    ours, theirs = (Artifact(f"{tmp_path}/{backend}/{stage}") for backend in ("native", "trl"))
    assert ours.manifest.params["backend"] is None and theirs.manifest.params["backend"] == "trl"
    assert theirs.manifest.notes["world_size"] == 1 + len(ranks) / 2
    assert ours.manifest.results == pytest.approx(theirs.manifest.results, rel=1e-3)
    assert (
        Artifact(f"{tmp_path}/trl/export")
        .manifest.inputs["policy"]
        .endswith(theirs.manifest.digest)
    )
    before, *after = (
        AutoModelForCausalLM.from_pretrained(Artifact(artifact).part("model")).state_dict()
        for artifact in (theirs.manifest.inputs["policy"], ours.url, theirs.url)
    )
    moved = max(float((after[0][name] - value).abs().max()) for name, value in before.items())
    apart = max(float((after[0][name] - value).abs().max()) for name, value in after[1].items())
    assert apart < 0.05 * moved
    assert trainer_state(theirs) == trainer_state(ours) and find_state(theirs) is not None


def test_a_rank_ends_whatever_its_threads_still_hold(tmp_path: Path) -> None:
    (tmp_path / "dropping.py").write_text(DROPPING)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words += ["-m", "tuneloop.training.rank", "dropping", str(tmp_path / "store")]
    assert (
        subprocess.run(
            words, env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=10 * LIMIT_S
        ).returncode
        == 0
    )
