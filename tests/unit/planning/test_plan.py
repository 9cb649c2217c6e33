import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.planned import carrying, planned
from tuneloop.argo import memory_estimate
from tuneloop.config.loading import find_pipeline
from tuneloop.config.model_facts import Model, shape_of
from tuneloop.planning import plan as planning
from tuneloop.planning.checkpoint_size import describe_checkpoint
from tuneloop.planning.cost import estimate_cost
from tuneloop.planning.counts import count_pods, count_runs
from tuneloop.stages.sft import sft
from tuneloop.workflow.plan import read_plan

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
    assert (model.parameters, model.derivation) == (
        22,
        "counted in the headers of its safetensors files",
    )


def test_what_the_formula_does_not_cover_is_not_guessed(tmp_path: Path) -> None:
    experts = {**PUBLISHED["Llama-3.2-1B"][1], "num_local_experts": 8}
    assert "not estimated" in str(shape_of("m", experts, None))
    assert "no 'hidden_size'" in str(shape_of("m", {"num_attention_heads": 2}, None))


LOOP = {
    "name": "loop",
    "dag": {
        "tasks": [
            {"name": "rollout", "template": "rollout"},
            {"name": "check", "template": "sft", "when": "x == y"},
            {"name": "next", "template": "loop", "when": "a < b"},
        ]
    },
}
MAIN = {
    "name": "main",
    "steps": [
        [{"name": "base", "template": "base-model"}, {"name": "sft", "template": "sft"}],
        [{"name": "loop", "template": "loop"}],
    ],
}


def looped(**sampling: int) -> dict[str, Any]:
    """A workflow whose loop samples with these parameters, and trains where a condition holds."""
    stages = [
        planned("base_model", model="tiny-qwen3", vocab_size=300),
        planned("sft", max_steps=30, accelerators=2),
        planned("rollout", prompts_per_iteration=4, n=8, max_tokens=16, **sampling),
    ]
    return carrying(stages, [LOOP, MAIN], iterations="10")


WORKFLOW = looped()


def work(workflow: dict[str, Any]) -> dict[str, str]:
    """Stage → what it does at most."""
    plan = read_plan(workflow)
    times = count_runs(workflow, plan).stages
    return dict(planning.estimate_work(plan.stages.values(), times))


def test_pods_are_counted_through_loops() -> None:
    assert count_pods(WORKFLOW) == {"base-model": 1, "sft": 1 + 10, "rollout": 10}


def test_the_templates_of_an_exit_handler_are_drawn() -> None:
    """As of two extensions: a graph of both, at the end of each workflow."""
    workflow = copy.deepcopy(WORKFLOW)
    spec = workflow["spec"]
    requests = {"requests": {"memory": "64Mi"}}
    for name in ("give", "tell"):
        container = {"image": "ends", "command": ["true"], "resources": requests}
        spec["templates"].append({"name": name, "container": container})
    tasks = [{"name": name, "template": name} for name in ("give", "tell")]
    spec["templates"].append({"name": "at-the-end", "dag": {"tasks": tasks}})
    spec["onExit"] = "at-the-end"
    assert count_pods(workflow) == count_pods(WORKFLOW) + Counter(give=1, tell=1)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(planning.render_plan("toy", workflow))
    rows = [line.split() for line in console.export_text().splitlines() if "ends" in line]
    assert [row[:4] for row in rows] == [["give", "ends", "cpu", "1"], ["tell", "ends", "cpu", "1"]]


def test_numbers_are_those_of_a_plan() -> None:
    stage = planned("sft", learning_rate=1e-3, gradient_checkpointing=True, device="cpu")
    assert stage.role == "trainer" and stage.component is sft
    assert stage.number("learning_rate") == 1e-3
    assert stage.number("gradient_checkpointing") is None
    assert stage.number("device") is stage.number("max_steps") is None


def test_another_backend_starts_its_ranks_itself() -> None:
    assert planned("sft", processes=4).ranks == 4
    assert planned("sft", processes=4, backend="native").ranks == 4
    assert planned("sft", backend="trl", expected_world_size=4).ranks == 4


def test_the_plan_shows_graph_work_and_arithmetic() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(planning.render_plan("toy", WORKFLOW))
    text = console.export_text()
    assert "toy: at most 22 pods" in text
    assert "↺ loop again, at most 10 times in all" in text
    assert "check (while its condition holds)" in text
    factors = "10 iterations × 4 prompts × 8 completions of each"
    assert f"rollout: {factors} = 320 completions, at most 5,120 tokens" in text
    oversampled = work(looped(oversampled_prompts=6))
    assert oversampled["rollout"] == (
        "10 iterations × 6 prompts × 8 completions of each = 480 completions, at most 7,680 tokens"
    )
    carried = work(looped(oversampled_prompts=6, carry_after=8))
    assert "10 iterations × 4 prompts" in carried["rollout"]
    # 300 × 128 embeddings + 4 × (2·128·4·32 + 2·128·2·32 + 3·128·384 + 2·128 + 2·32) + 128
    assert "tiny-qwen3 of 826,240 parameters" in text
    assert "13.2 MB weights, gradients and optimizer (826,240 parameters × 16 bytes)" in text
    assert (
        "sft: 13.2 MB = model 3.3 MB (826,240 parameters × 4 bytes) + trainer's state 9.91 MB "
        "(826,240 parameters × 12 bytes)" in text
    )


def test_a_model_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-0.6B"][1]))
    model = memory_estimate.model_of([planned("base_model", model=str(tmp_path))])
    assert isinstance(model, Model)
    assert model.parameters == 596_049_920
    assert model.kv_bytes == 2 * 28 * 8 * 128 * 2
    elsewhere = memory_estimate.model_of([planned("base_model", model="a/hub-name")])
    assert "no directory here" in str(elsewhere)


def drawn(*sets: str) -> str:
    """The plan of the pipeline grpo."""
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    found = find_pipeline("grpo")
    console.print(planning.render_plan("grpo", found.build(found.configure(None, sets))))
    return console.export_text()


def test_a_coarse_grain_is_the_same_work_in_fewer_pods() -> None:
    fine = drawn("loop.iterations=40", "loop.iterations_per_pod=0")
    coarse = drawn("loop.iterations=40", "loop.iterations_per_pod=20")
    assert (
        "at most 126 pods" in fine and "at most 8 pods" in coarse and "40 times in 2 pods" in coarse
    )
    work = "40 iterations × 16 prompts × 8 completions of each = 5,120 completions"
    assert work in fine and work in coarse


def test_state_that_is_written_now_and_then_is_counted_so() -> None:
    model = Model("7B", 7 * 10**9, "", 32, 4096, 32, 128, 32000, {"q_proj": (4096, 4096)})

    def told(**parameters: Any) -> str:
        return describe_checkpoint(planned("policy_update", **parameters), model, "bfloat16")

    whole = (
        "model 14 GB (7,000,000,000 parameters × 2 bytes) + "
        "trainer's state 84 GB (7,000,000,000 parameters × 12 bytes)"
    )
    assert told(save_dtype="bfloat16") == f"98 GB = {whole}"
    rest = (
        "the state once in 5 iterations: 30.8 GB an iteration in the mean; a resume repeats at most "
        "4 updates"
    )
    assert told(dtype="bfloat16", state_every=5) == f"{whole}, {rest}"
    assert "trainer's state 50.3 MB (4,194,304 parameters × 12 bytes)" in told(lora={"r": 16})
    assert told(lora={"target_modules": "q.*"}).endswith("; trainer's state not estimated")


def test_gradient_checkpointing_is_counted() -> None:
    model = Model("m", 1000, "", layers=10, hidden=8, kv_heads=1, head_dim=8, vocab=16)
    batch = {"max_length": 32, "per_device_train_batch_size": 4, "dtype": "bfloat16"}
    # A layer like Llama's: 24 × 8 + 12 × (8 queries + 8 keys) + 8 × 32.
    layer = 640
    for checkpointing, kept in ((False, 10 * layer), (True, 10 * 4 * 8 + layer)):
        stage = planned("sft", gradient_checkpointing=checkpointing, **batch)
        assert memory_estimate.estimate_memory_parts(stage, model, None)[1].size == 4 * 32 * kept


def test_the_overlapped_loop_samples_as_many_batches_as_it_trains_on() -> None:
    pipeline = find_pipeline("grpo")
    sets = [
        "loop.asynchronous=true",
        "engine.kind=transformers",
        "loop.iterations=7",
        "loop.per_workflow=3",
    ]
    pods = count_pods(pipeline.build(pipeline.configure(None, sets)))
    assert (pods["rollout"], pods["reward"], pods["policy-update"]) == (7, 7, 7)


def test_an_evaluation_within_a_pod_is_counted_as_often_as_it_runs() -> None:
    pipeline = find_pipeline("grpo")
    sets = ["engine=transformers", "loop.iterations=60", "loop.evaluate_every=5"]
    workflow = pipeline.build(pipeline.configure(None, sets))
    counts = count_runs(workflow, read_plan(workflow))
    assert counts.stages["evaluate"] == 2 + 12 and counts.pods["evaluate"] == 2


def test_the_seconds_of_a_job_of_several_pods_are_its_stages() -> None:
    pipeline = find_pipeline("sft")
    workflow = pipeline.build(pipeline.configure(None, ["nodes=2"]))
    hours, *_ = estimate_cost(workflow, {"sft": 3600.0}, "at most", "as r took", None)
    assert "sft-job 1 × 3.6e+03 s" in hours
