import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tuneloop.argo import memory_estimate
from tuneloop.config.loading import find_pipeline
from tuneloop.config.model_facts import Model, shape_of
from tuneloop.planning import plan
from tuneloop.planning.checkpoint_size import describe_checkpoint
from tuneloop.workflow import rendered_stages

# Sizes that the models' publishers state, with the configurations that they publish.
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen3-0.6B": (596_049_920, {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    }),
    "Llama-3.2-1B": (1_235_814_400, {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    }),
    "Qwen2.5-0.5B": (494_032_768, {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }),
    "Llama-2-7b": (6_738_415_616, {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "tie_word_embeddings": False,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_formula_gives_the_published_size(name: str) -> None:
    count, config = PUBLISHED[name]
    model = shape_of(name, config, None)
    assert isinstance(model, Model)
    assert model.parameters == count


def test_stored_weights_are_counted_before_any_formula(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"a": np.zeros((3, 5), np.float16)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.zeros(7, np.float32)}, tmp_path / "model-2.safetensors")
    model = shape_of("m", PUBLISHED["Llama-3.2-1B"][1], tmp_path)
    assert isinstance(model, Model)
    assert (model.parameters, model.how) == (22, "counted in the headers of its safetensors files")


def test_what_the_formula_does_not_cover_is_not_guessed(tmp_path: Path) -> None:
    experts = {**PUBLISHED["Llama-3.2-1B"][1], "num_local_experts": 8}
    assert "not estimated" in str(shape_of("m", experts, None))
    assert "no 'hidden_size'" in str(shape_of("m", {"num_attention_heads": 2}, None))


def leaf(name: str, stage: str, *args: str, **more: Any) -> dict[str, Any]:
    command = ["python", "-m", f"tuneloop.stages.{stage}"]
    return {
        "name": name,
        "container": {"image": "tuneloop/x:1", "command": command, "args": list(args), **more},
    }


WORKFLOW: dict[str, Any] = {
    "spec": {
        "entrypoint": "main",
        "arguments": {"parameters": [{"name": "run"}, {"name": "iterations", "value": "10"}]},
        "templates": [
            leaf("base-model", "base_model", "--model", "tiny-qwen3", "--vocab-size", "300"),
            leaf("sft", "sft", "--max-steps=30", resources={"limits": {"nvidia.com/gpu": 2}}),
            leaf(
                "rollout",
                "rollout",
                "--prompts-per-iteration",
                "4",
                "--n",
                "8",
                "--max-tokens",
                "16",
            ),
            {
                "name": "loop",
                "dag": {
                    "tasks": [
                        {"name": "rollout", "template": "rollout"},
                        {"name": "check", "template": "sft", "when": "x == y"},
                        {"name": "next", "template": "loop", "when": "a < b"},
                    ]
                },
            },
            {
                "name": "main",
                "steps": [
                    [
                        {"name": "base", "template": "base-model"},
                        {"name": "sft", "template": "sft"},
                    ],
                    [{"name": "loop", "template": "loop"}],
                ],
            },
        ],
    }
}


def test_pods_are_counted_through_loops() -> None:
    assert plan.count_pods(WORKFLOW) == {"base-model": 1, "sft": 1 + 10, "rollout": 10}


def test_flags_ranks_and_accelerators_are_those_of_the_container() -> None:
    template = {
        "name": "t",
        "container": {
            "image": "i",
            "command": [
                "python",
                "-m",
                "tuneloop.training.torchrun",
                "--nproc-per-node=4",
                "-m",
                "tuneloop.stages.sft",
            ],
            "args": ["--learning-rate", "1e-3", "--out={{inputs.parameters.out}}"],
            "resources": {"limits": {"cpu": "2", "nvidia.com/gpu": "4"}},
        },
    }
    stage = rendered_stages.read_stage(template)
    assert (stage.role, stage.ranks, stage.accelerators) == ("trainer", 4, 4)
    assert stage.number("learning_rate") == 1e-3
    assert stage.number("out") is None


def test_the_plan_shows_graph_work_and_arithmetic() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(plan.render_plan("toy", WORKFLOW))
    text = console.export_text()
    assert "toy: at most 22 pods" in text
    assert "↺ loop again, at most 10 times in all" in text
    assert "check (while its condition holds)" in text
    assert "rollout: 10 × 4 prompts × 8 = 320 completions, at most 5,120 tokens" in text
    more = json.loads(json.dumps(WORKFLOW).replace('"--n"', '"--oversampled-prompts", "6", "--n"'))
    stages = [
        rendered_stages.read_stage(each)
        for each in more["spec"]["templates"]
        if "container" in each
    ]
    assert (
        "rollout",
        "10 × 6 prompts × 8 = 480 completions, at most 7,680 tokens",
    ) in plan.estimate_work(stages, plan.count_pods(more))
    carried = json.loads(json.dumps(more).replace('"--n"', '"--carry-after", "8", "--n"'))
    stages = [
        rendered_stages.read_stage(each)
        for each in carried["spec"]["templates"]
        if "container" in each
    ]
    assert any(
        "10 × 4 prompts" in text for _, text in plan.estimate_work(stages, plan.count_pods(carried))
    )
    # 300 × 128 embeddings + 4 × (2·128·4·32 + 2·128·2·32 + 3·128·384 + 2·128 + 2·32) + 128
    assert "tiny-qwen3: 826,240 parameters" in text
    assert "826,240 × (4 weights + 4 gradients + 8 Adam) = 13.2 MB" in text
    assert (
        "sft: model/ 826,240 × 4 = 3.3 MB, trainer/ 826,240 × 12 = 9.91 MB, with both 13.2 MB"
        in text
    )


def test_a_model_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-0.6B"][1]))
    model = memory_estimate.model_of(
        [rendered_stages.read_stage(leaf("b", "base_model", "--model", str(tmp_path)))]
    )
    assert isinstance(model, Model)
    assert model.parameters == 596_049_920
    assert model.kv_bytes == 2 * 28 * 8 * 128 * 2
    assert "no directory here" in str(
        memory_estimate.model_of(
            [rendered_stages.read_stage(leaf("b", "base_model", "--model", "a/hub-name"))]
        )
    )


def drawn(*sets: str) -> str:
    """The plan of the pipeline grpo."""
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    found = find_pipeline("grpo")
    console.print(plan.render_plan("grpo", found.build(found.configure(None, sets))))
    return console.export_text()


def test_a_coarse_grain_is_the_same_work_in_fewer_pods() -> None:
    fine = drawn("loop.iterations=40", "loop.iterations_per_pod=0")
    coarse = drawn("loop.iterations=40", "loop.iterations_per_pod=20")
    assert "at most 126 pods" in fine and "at most 8 pods" in coarse and "40 in 2" in coarse
    work = "40 × 16 prompts × 8 = 5,120 completions"
    assert work in fine and work in coarse


def test_state_that_is_written_now_and_then_is_counted_so() -> None:
    model = Model("7B", 7 * 10**9, "", 32, 4096, 32, 128, 32000, {"q_proj": (4096, 4096)})

    def told(*flags: str) -> str:
        return describe_checkpoint(
            rendered_stages.read_stage(leaf("u", "policy_update", *flags)), model, "bfloat16"
        )

    whole = "model/ 7,000,000,000 × 2 = 14 GB, trainer/ 7,000,000,000 × 12 = 84 GB"
    assert told("--save-dtype", "bfloat16") == f"{whole}, with both 98 GB"
    rest = "each 5 iterations: 30.8 GB an iteration; a new process replays at most 4 updates"
    assert told("--dtype", "bfloat16", "--state-every", "5") == f"{whole} {rest}"
    assert "trainer/ 4,194,304 × 12 = 50.3 MB" in told("--lora", '{"r": 16}')
    assert told("--lora", '{"target_modules": "q.*"}').endswith(", trainer/ not estimated")


def test_gradient_checkpointing_is_counted() -> None:
    model = Model("m", 1000, "", layers=10, hidden=8, kv_heads=1, head_dim=8, vocab=16)
    flags = ("--max-length", "32", "--per-device-train-batch-size", "4", "--dtype", "bfloat16")
    # A layer like Llama's: 24 × 8 + 12 × (8 queries + 8 keys) + 8 × 32.
    layer = 640
    for checkpointing, kept in (("false", 10 * layer), ("true", 10 * 4 * 8 + layer)):
        stage = rendered_stages.read_stage(
            leaf("sft", "sft", *flags, "--gradient-checkpointing", checkpointing)
        )
        assert memory_estimate.estimate_memory_parts(stage, model, None)[1][1] == 4 * 32 * kept


def test_the_overlapped_loop_samples_as_many_batches_as_it_trains_on() -> None:
    pipeline = find_pipeline("grpo")
    sets = [
        "loop.asynchronous=true",
        "engine.kind=transformers",
        "loop.iterations=7",
        "loop.per_workflow=3",
    ]
    pods = plan.count_pods(pipeline.build(pipeline.configure(None, sets)))
    assert (pods["rollout"], pods["reward"], pods["policy-update"]) == (7, 7, 7)
