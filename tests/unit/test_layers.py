"""What may import what, and what must not be imported where it costs."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "transformers", "datasets", "kfp", "hera", "mlflow", "plotly", "kubernetes", "pandas")
STAGES = ("data_prep", "base_model", "sft", "rollout", "reward", "policy_update", "evaluate", "export", "serve")


def loaded_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*(m for m in {HEAVY} if m in sys.modules))"
    return set(subprocess.check_output([sys.executable, "-c", script], text=True).split())


@pytest.mark.parametrize(
    "module", ["cli", "component", "config", "runs", "argo.executor", "argo.state", "weights.pointer"]
)
def test_light_modules(module: str) -> None:
    assert loaded_by(f"import tuneloop.{module}") == set()


def test_stages_are_declared_without_what_they_run_with() -> None:
    assert loaded_by("import " + ", ".join(f"tuneloop.{stage}" for stage in STAGES)) == set()


def test_pipelines_are_configured_without_hera() -> None:
    assert loaded_by("from tuneloop.config import find\nfind('sft_then_grpo').configure()") == set()


def test_rendering_needs_hera_and_nothing_heavier() -> None:
    code = "from tuneloop.config import find\np = find('sft_then_grpo'); p.build(p.configure())"
    assert loaded_by(code) <= {"hera"}
