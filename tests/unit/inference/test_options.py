"""What an engine is told, looked at before anything runs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tuneloop.cli import run_cli
from tuneloop.config.loading import find_pipeline
from tuneloop.core import plugins
from tuneloop.core.errors import UserError
from tuneloop.inference.engines import vllm

LIGHT = """
import sys
from tuneloop.core import plugins
from tuneloop.inference.engines import check_args
for name in plugins.list_shipped_variants("engines"):
    check_args(name, {}, "")
sys.exit(str(heavy) if (heavy := {"torch", "transformers", "vllm"} & sys.modules.keys()) else 0)
"""


def test_options_are_looked_at_without_what_the_engines_run_on() -> None:
    assert {"endpoint", "transformers", "vllm"} <= set(plugins.list_shipped_variants("engines"))
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("sets", "field", "says"),
    [
        (
            ("engine.kind=transformers", "engine.args.seed=1"),
            "engine.args.seed",
            "takes dtype, max_model_len",
        ),
        (("engine.args.seed=1",), "engine.args.seed", "is set by tuneloop"),
        (
            (
                "engine.kind=endpoint",
                "engine.rollout_endpoint_url=http://a",
                "engine.weights.kind=pull",
                "engine.args.hok=a:b",
            ),
            "engine.args.hok",
            "unknown key",
        ),
        (
            ("rollout.environment=python", "rollout.environment_args.second=1"),
            "rollout.environment_args.second",
            "takes seconds, memory_mb, output_kb",
        ),
        (("engine.args.deterministic=1",), "engine.args.deterministic", "must be true or false"),
        (
            ("engine.deterministic=true", "engine.kind=transformers"),
            "engine.deterministic",
            "is a setting of kind vllm, not of transformers",
        ),
        (("engine.deterministic=true", "engine.replicas=2"), "engine", "replicas that are up"),
        (("engine.args.deterministic=true", "engine.replicas=2"), "engine", "replicas that are up"),
        (
            ("evaluate.environment_args.seconds=1",),
            "evaluate.environment_args",
            "goes with environment",
        ),
        (
            ("rollout.prompts_per_iteration=8", "rollout.oversampled_prompts=7"),
            "rollout.oversampled_prompts",
            r"7: must be at least prompts_per_iteration \(8\)",
        ),
        (
            ("rollout.n=1", "rollout.oversampled_prompts=32"),
            "rollout.oversampled_prompts",
            "set n to 2 or more",
        ),
        (("rollout.carry_after=2",), "rollout.oversampled_prompts", "goes with carry_after"),
        (
            ("rollout.carry_after=3", "rollout.oversampled_prompts=32"),
            "rollout.carry_after",
            r"max_tokens \(8\)",
        ),
        (
            (
                "rollout.carry_after=2",
                "rollout.oversampled_prompts=32",
                "rollout.environment=calculator",
            ),
            "rollout.carry_after",
            "an environment's state cannot continue",
        ),
        (
            ("rollout.carry_after=2", "rollout.oversampled_prompts=32", "loop.asynchronous=true"),
            "rollout.carry_after",
            "not there yet with loop.asynchronous",
        ),
        (
            ("rollout.prompts_per_iteration=4", "update.updates_per_batch=5"),
            "update.updates_per_batch",
            r"a batch of rollout.prompts_per_iteration \(4\)",
        ),
    ],
)
def test_what_rollouts_can_not_do_is_refused_before_anything_runs(
    sets: tuple[str, ...], field: str, says: str
) -> None:
    with pytest.raises(UserError, match=says) as refused:
        find_pipeline("sft_then_grpo").configure(sets=sets)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("more", "bound"), [((), 3), (("update.max_staleness=5",), 5), (("rollout.n=1",), 3)]
)
def test_the_update_takes_tokens_as_old_as_carrying_makes_them(
    more: tuple[str, ...], bound: int
) -> None:
    """Four rounds, and twice the groups of a batch; a single completion a group is no reason to refuse."""
    pipeline = find_pipeline("sft_then_grpo")
    made = pipeline.build(
        pipeline.configure(sets=["rollout.carry_after=2", "rollout.oversampled_prompts=32", *more])
    )
    assert f'"--max-staleness","{bound}"' in json.dumps(made).replace("\\", "").replace(
        '", "', '","'
    )


@pytest.mark.parametrize("asked", ["7", "0", "many"])
def test_a_number_of_prompts_that_can_not_be_is_one_line_and_no_workflow(
    asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = ["rollout.prompts_per_iteration=8", f"rollout.oversampled_prompts={asked}"]
    assert run_cli(["render", "grpo", *(f"--set={each}" for each in said)]) == 2
    out, err = capsys.readouterr()
    assert (out, [*tmp_path.iterdir()]) == ("", [])
    (line,) = err.splitlines()
    assert line.startswith("error: rollout.oversampled_prompts: ") and asked in line


def test_all_that_sample_and_the_server_are_told_to_be_deterministic() -> None:
    pipeline = find_pipeline("sft_then_grpo")
    made = pipeline.build(
        pipeline.configure(sets=["engine.deterministic=true", "loop.iterations_per_pod=0"])
    )
    told = {}
    for template in made["spec"]["templates"]:
        words = template.get("container", {}).get("args", [])
        if "--engine-args" in words:
            told[template["name"]] = json.loads(words[words.index("--engine-args") + 1])
    short = {"max_model_len": 256, "enforce_eager": True, "deterministic": True}
    assert told == dict.fromkeys(("serve", "rollout", "evaluate"), short)
    asked = {"snapshot": True, "colocate": True}
    suspended = {
        "max_model_len": 256,
        "enforce_eager": True,
        "snapshot": True,
        "enable_sleep_mode": True,
    }
    assert pipeline.Config(engine=asked).engine.options == suspended
    with pytest.raises(UserError, match="deterministic needs a single one"):
        vllm.open_engine("http://a:1,http://b:1", short, 1.0)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_what_the_vllm_of_this_machine_does_not_know() -> None:
    known = {"max_model_len": 256, "enforce_eager": True, "enable_sleep_mode": True}
    vllm.check_here(known | dict.fromkeys(vllm.ADDED_ARGS, True), "engine.args.")
    with pytest.raises(
        UserError, match=r"engine\.args\.max_modell_len: 3: .*did you mean max_model_len"
    ):
        vllm.check_here({"max_modell_len": 3}, "engine.args.")
