"""What may import what, and what must not be imported where it costs."""

import subprocess
import sys

HEAVY = (
    "torch",
    "vllm",
    "transformers",
    "datasets",
    "kfp",
    "hera",
    "mlflow",
    "tensorboard",
    "trackio",
    "gguf",
    "wandb",
    "kubernetes",
    "pandas",
    "httpx2",
)
STAGES = (
    "data_prep",
    "base_model",
    "sft",
    "rollout",
    "reward",
    "policy_update",
    "evaluate",
    "export",
)


def test_what_is_loaded_by_what() -> None:
    """Step by step in one process: light modules, the stages, a pipeline configured; rendered, it needs hera."""
    light = [
        "cli",
        "core.component",
        "config.loading",
        "runs.run_record",
        "local.executor",
        "local.journal",
    ]
    light += ["weights.pointer", *(f"stages.{name}" for name in STAGES), "inference.server"]
    steps = [
        *(f"import tuneloop.{module}" for module in light),
        "from tuneloop.config.loading import find_pipeline",
        "pipeline = find_pipeline('sft_then_grpo'); pipeline.configure()",
        "pipeline.build(pipeline.configure())",
    ]
    script = f"""
import sys
for step in {steps}:
    exec(step)
    print(step, *(m for m in {HEAVY} if m in sys.modules), sep=" | ")
"""
    told = subprocess.check_output([sys.executable, "-c", script], text=True).splitlines()
    assert told[:-1] == steps[:-1] and told[-1] in (steps[-1], f"{steps[-1]} | hera")
