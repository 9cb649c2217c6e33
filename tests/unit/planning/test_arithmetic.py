"""Hours by a device's data sheet, against figures that were computed by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.planned import carrying, planned
from tests.unit.planning.test_plan import PUBLISHED
from tuneloop.cli import run_cli
from tuneloop.core.errors import UserError
from tuneloop.planning.arithmetic import estimate_seconds
from tuneloop.training.devices import DEVICES, find_device
from tuneloop.workflow.plan import StagePlan

SIZE = "596,049,920"
H100 = 0.4 * 989e12
"""Operations a second that are assumed, and below bytes."""
BYTES = 0.6 * 3.35e12
TRAINED: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_length": 1000,
    "per_device_train_batch_size": 8,
}
ASKED: dict[str, Any] = {"prompts_per_iteration": 100, "n": 4, "max_tokens": 200}


def estimate(
    tmp_path: Path, *stages: StagePlan, device: str = "H100"
) -> tuple[dict[str, float], list[str]]:
    """Estimate stages that follow one another, on Qwen3-0.6B."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-0.6B"][1]))
    return estimate_seconds(carrying([planned("base_model", model=str(tmp_path)), *stages]), device)


@pytest.mark.parametrize(
    ("more", "operations"),
    [
        ({}, 6),
        ({"gradient_checkpointing": True}, 8),
        ({"lora": {"r": 8}}, 4),
        ({"lora": {"r": 8}, "gradient_checkpointing": True}, 6),
    ],
)
def test_training_takes_so_many_operations_a_parameter_and_token(
    tmp_path: Path, more: dict[str, Any], operations: int
) -> None:
    steps = {"max_steps": 100, "gradient_accumulation_steps": 2, **TRAINED, **more}
    seconds, lines = estimate(tmp_path, planned("sft", accelerators=4, **steps))
    # 1,600 sequences of 1,000 tokens, on four devices; 6 operations: 5.722e15 at 1.5824e15 a second
    assert seconds == {"sft": pytest.approx(operations * 596_049_920 * 1.6e6 / (4 * H100))}
    assert operations != 6 or seconds["sft"] == pytest.approx(3.616, abs=1e-3)
    assert lines[0].startswith(f"  sft: {operations} × {SIZE} × 1,600 × 1000 tokens, on 4 = ")
    assert (
        "assumed: 40% of H100's 989 TFLOP/s (dense bfloat16), 60% of its 3.35 TB/s; without starting"
        in lines[-1]
    )


def test_a_pair_is_two_sequences(tmp_path: Path) -> None:
    stage = planned("preference", max_steps=10, accelerators=1, **TRAINED)
    _, (line, _) = estimate(tmp_path, stage)
    assert line.startswith(f"  preference: 6 × {SIZE} × 160 × 1000 tokens")


def test_a_token_takes_a_pass_over_weights_and_cache(tmp_path: Path) -> None:
    engine = {"max_model_len": 1000, "max_num_seqs": 150}
    update = planned("policy_update", updates_per_batch=2, dtype="bfloat16", accelerators=1)
    rollout = planned("rollout", accelerators=1, engine_args=engine, **ASKED)
    seconds, lines = estimate(tmp_path, rollout, update)
    # 400 completions, 150 at once: three rounds of 200 tokens. A step reads 1.192 GB of weights and of 150 sequences
    # 900 tokens, on the mean, of 114,688 bytes each: 15.483 GB, together 16.675 GB. The prompts have 320,000 tokens.
    step, prompts = (1.1921e9 + 15.4829e9) / BYTES, 2 * 596_049_920 * 320_000 / H100
    assert (
        seconds["rollout"]
        == pytest.approx(600 * step + prompts, rel=1e-4)
        == pytest.approx(5.942, abs=1e-3)
    )
    assert "600 steps of 150 at once, each 16.7 GB" in lines[0]
    assert seconds["policy-update"] == pytest.approx(6 * 596_049_920 * 400 * 1000 / H100), (
        "every completion once"
    )


def test_engines_share_the_completions_and_tensor_parallel_ranks_a_step(tmp_path: Path) -> None:
    engine = {"max_model_len": 1000, "tensor_parallel_size": 2}
    rollout = planned("rollout", accelerators=4, engine_args=engine, **ASKED)
    seconds, lines = estimate(tmp_path, rollout)
    step = (2 * 596_049_920 + 200 * 900 * 114_688) / BYTES / 2
    assert seconds["rollout"] == pytest.approx(200 * step + 2 * 596_049_920 * 320_000 / (4 * H100))
    assert "200 steps of 200 at once" in lines[0]


def test_many_short_sequences_are_bound_by_computing(tmp_path: Path) -> None:
    many = {"prompts_per_iteration": 4000, "n": 1, "max_tokens": 2}
    engine = {"max_model_len": 4, "max_num_seqs": 4000}
    seconds, _ = estimate(tmp_path, planned("rollout", accelerators=1, engine_args=engine, **many))
    assert seconds["rollout"] == pytest.approx((2 + 2) * 2 * 596_049_920 * 4000 / H100), (
        "two tokens, and two of a prompt"
    )


def test_what_is_not_known_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm_eval = {"tasks": ["gsm8k"], "limit": 9}
    stages = [
        planned("sft", dtype="float32", accelerators=1),
        planned("rollout", accelerators=1, **ASKED),
        planned("evaluate", limit=9, max_tokens=2),
        planned("evaluate_lm_eval", accelerators=1, **lm_eval),
        planned("preference", max_steps=10, dtype="bfloat16", accelerators=1),
    ]
    said = [
        "sft: {}dtype is float32, and peaks are known of bfloat16",
        "rollout: {}nothing limits its tokens (engine.args.max_model_len)",
        "evaluate: {}it has no accelerator, and no server here has (cluster.sampler.gpus)",
        "evaluate-lm-eval: {}its tasks decide how much it generates",
        "preference: {}nothing limits its tokens (max_length)",
    ]
    with pytest.raises(UserError) as refused:
        estimate(tmp_path, *stages)
    assert refused.value.remedy == "; ".join(each.format("not estimated: ") for each in said)
    known = planned("reward_model", max_steps=10, accelerators=1, **TRAINED)
    seconds, lines = estimate(tmp_path, *stages, known)
    assert [*seconds] == ["reward-model"]
    assert lines[:-2] == [f"  {each.format('not estimated: ')}" for each in said]
    for line, says in (
        (["--device", ""], "--device: '': is not known; known: B200, "),
        (
            ["--device", "H100"],
            "--device: 'H100': evaluate: not estimated: it has no accelerator, and no server here has ",
        ),
        (
            ["--device", "TPU"],
            "--device: 'TPU': is not known; known: B200, H200, H100, H100 PCIe, A100, L40S, L4",
        ),
        (
            ["--device", "H100", "--measured", "r"],
            "--device: 'H100': estimates without a measured run",
        ),
        (
            ["--device", "H100", "--set", "base_model=a/b"],
            "--device: 'H100': needs the shape of the model: a/b: ",
        ),
    ):
        assert run_cli(["plan", "sft", *line]) == 2
        told = capsys.readouterr()
        assert told.err.startswith(f"error: {says}")
        assert not told.out


@pytest.mark.parametrize("most", [1000, 1200])
def test_a_completion_leaves_room_for_its_prompt(tmp_path: Path, most: int) -> None:
    asked = {"prompts_per_iteration": 4, "n": 4, "max_tokens": most}
    engine = {"max_model_len": 1000}
    rollout = planned("rollout", accelerators=1, engine_args=engine, **asked)
    with pytest.raises(
        UserError,
        match=r"rollout: not estimated: max_tokens leaves no room for a prompt in engine\.args",
    ):
        estimate(tmp_path, rollout)


def test_of_groups_that_are_carried_those_of_an_iteration_count(tmp_path: Path) -> None:
    engine = {"max_model_len": 1000, "max_num_seqs": None, "tensor_parallel_size": None}
    asked = {"oversampled_prompts": 150, "engine_args": engine, **ASKED}
    carrying_on = {"carry_after": 64, **asked}
    rollouts = [
        planned("rollout", "whole", accelerators=1, **asked),
        planned("rollout", "carried", accelerators=1, **carrying_on),
    ]
    _, (whole, carried, _) = estimate(tmp_path, *rollouts)
    assert "600 × 800 tokens of prompts" in whole and "400 × 800 tokens of prompts" in carried


def test_an_engine_has_the_devices_of_its_pipeline(tmp_path: Path) -> None:
    engine = {"max_model_len": 1000, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    rollout = planned("rollout", accelerators=8, engine_args=engine, **ASKED)
    seconds, lines = estimate(tmp_path, rollout)
    step = (2 * 596_049_920 + 200 * 900 * 114_688) / BYTES / 2
    assert seconds["rollout"] == pytest.approx(200 * step + 2 * 596_049_920 * 320_000 / (8 * H100))
    assert "200 steps of 200 at once" in lines[0], "two engines of four"


def test_a_model_with_experts_is_not_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": np.zeros((3, 5), np.float16)}, tmp_path / "model.safetensors")
    monkeypatch.setitem(PUBLISHED["Qwen3-0.6B"][1], "num_experts", 8)
    with pytest.raises(UserError, match=r"--device: 'H100': needs a dense model: .* has experts"):
        estimate(tmp_path, planned("sft", max_steps=1, accelerators=1, **TRAINED))


def test_hours_and_cost_of_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    """A server has the accelerator, and the evaluations that ask it are one after another."""
    sets = [
        "engine.kind=vllm",
        "cluster.trainer.gpus=1",
        "cluster.sampler.gpus=1",
        "trainer.dtype=bfloat16",
    ]
    words = [word for each in sets for word in ("--set", each)]
    assert run_cli(["plan", "grpo", *words, "--device", "H100", "--price", "2.5"]) == 0
    text = capsys.readouterr().out
    assert (
        "hours: about 0.183, by arithmetic for H100, not measured, one stage after another: evaluate 2 × "
        in text
    )
    assert "without data-prep, base-model, reward, export, of which it says nothing" in text
    assert "× 2.5 = " in text and "256 × 248 tokens of prompts, on 1 = " in text


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
    ],
)
def test_a_device_is_found_by_whole_words_of_its_name(name: str, known: str) -> None:
    assert find_device(name) == DEVICES[known]


@pytest.mark.parametrize(
    "name", ["GB200", "GH200 480GB", "L40", "H100 NVL", "H100 80GB HBM3 MIG 1g.10gb", "T4"]
)
def test_a_device_of_another_form_is_not_known(name: str) -> None:
    assert find_device(f"NVIDIA {name}") is None
