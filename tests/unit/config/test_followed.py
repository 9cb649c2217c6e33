"""Settings that follow the base model and the machine where a configuration leaves them out."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.planning.test_plan import PUBLISHED
from tuneloop.config.followed import PLAIN_SECTIONS, Draft, keep_followed
from tuneloop.config.loading import find_pipeline
from tuneloop.config.machine import Machine
from tuneloop.config.model_facts import Model, find_hub_cache, read_model_facts
from tuneloop.config.rules import RULES, choose_machine
from tuneloop.stages import (
    data_prep,
    evaluate,
    policy_update,
    preference,
    reference_logprobs,
    reward_model,
    rollout,
    sft,
)

GB = 10**9
SECTIONS = {"policy_update": "update", "data_prep": "data"}
"""Stage → its section, where that has another name."""
ONE_GPU = Machine(False, trainer_gpus=1, sampler_gpus=1, gpu_memory=80 * GB, memory=200 * GB)
TWO_GPUS = Machine(False, trainer_gpus=2, sampler_gpus=2, gpu_memory=80 * GB, memory=200 * GB)
CPU = Machine(is_cluster=False, memory=24 * GB)
PODS = Machine(trainer_gpus=8, sampler_gpus=1)
LLAMA_8B = {
    **PUBLISHED["Llama-2-7b"][1],
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    """A directory with the configuration of a Llama of 8 billion parameters, and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def follow(pipeline: str, machine: Machine | None, *sets: str) -> dict[str, Any]:
    configured = find_pipeline(pipeline).configure_for(machine, None, sets)
    return {followed.setting: followed.value for followed in configured.followed}


def test_facts_of_a_pretrained_model(smollm2: Path) -> None:
    facts = read_model_facts(str(smollm2))
    assert isinstance(facts.shape, Model) and facts.shape.parameters == 134_515_008
    assert (facts.context, facts.dtype, facts.has_chat_template) == (8192, "bfloat16", True)
    assert not facts.is_demo


def test_a_hub_name_is_looked_up_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    for commit, context in (("abc", 100), ("def", 200)):
        (cached / "snapshots" / commit).mkdir(parents=True)
        stated = {**LLAMA_8B, "max_position_embeddings": context}
        (cached / "snapshots" / commit / "config.json").write_text(json.dumps(stated))
    assert read_model_facts("some/model").context == 100
    assert read_model_facts("hf://some/model@def").context == 200
    assert read_model_facts("some/model", "def").context == 200
    absent = read_model_facts("some/other")
    assert (absent.directory, absent.context, absent.has_chat_template) == (None, None, None)


@pytest.mark.parametrize("pipeline", ["sft", "grpo", "sft_then_grpo", "dpo"])
@pytest.mark.parametrize("machine", [CPU, ONE_GPU, None])
def test_the_demo_keeps_its_own_values(pipeline: str, machine: Machine | None) -> None:
    assert follow(pipeline, machine) == {}
    assert find_pipeline(pipeline).configure() == find_pipeline(pipeline).Config()


def test_a_pretrained_model_on_a_cpu(smollm2: Path) -> None:
    followed = follow("sft_then_grpo", CPU, f"base_model={smollm2}")
    assert followed == {
        "data.chat": True,
        "rollout.max_tokens": 128,
        "evaluate.max_tokens": 128,
        "rollout.prompts_per_iteration": 8,
        "evaluate.limit": 64,
        "engine.args": {"max_model_len": 1024, "enforce_eager": True},
        "sft.epochs": 3.0,
        "sft.warmup_steps": 5,
        "sft.max_length": 1024,
        "sft.learning_rate": 2e-5,
        "update.learning_rate": 1e-6,
        "trainer.per_device_train_batch_size": 2,
        "sft.gradient_accumulation_steps": 4,
        "loop.target_reward": None,
        "update.save_total_limit": 2,
        "update.keep_every": 10,
    }
    own = follow("grpo", CPU, f"base_model={smollm2}", "update.save_total_limit=5")
    assert "update.keep_every" not in own, "who sets a limit says what stays"


def test_a_large_model_on_accelerators(llama_8b: Path) -> None:
    base = f"base_model={llama_8b}"
    followed = follow("sft_then_grpo", PODS, base, "trainer.lora={r: 16}", "processes=8")
    assert followed["trainer.dtype"] == "bfloat16"
    assert (followed["rollout.max_tokens"], followed["evaluate.max_tokens"]) == (512, 512)
    assert followed["engine.args"] == {"max_model_len": 2048}
    assert followed["trainer.gradient_checkpointing"]
    assert (followed["sft.learning_rate"], followed["update.learning_rate"]) == (2e-4, 1e-5)
    # A sequence of 2048 tokens keeps 2048 × (4 × 32 layers × 4096 + a layer of 274,432) = 1.6 GB. An eighth of the
    # states, 16 GB, leaves 56 GB of a device, half of which are for activations: 16 sequences; alone it has 5 GB.
    loop = follow("grpo", PODS, base, "trainer.lora={r: 16}", "processes=8")
    assert loop["trainer.per_device_train_batch_size"] == 16
    assert followed["trainer.per_device_train_batch_size"] == 8, "eight examples of each process"
    assert "sft.gradient_accumulation_steps" not in followed
    alone = follow("sft_then_grpo", PODS, base)
    assert alone["trainer.per_device_train_batch_size"] == 2
    assert alone["sft.gradient_accumulation_steps"] == 4
    assert "data.chat" not in followed, "there is no tokenizer to read"


def test_what_a_user_sets_stands(smollm2: Path) -> None:
    sets = [
        f"base_model={smollm2}",
        "data.chat=false",
        "update.learning_rate=5e-4",
        "rollout.max_tokens=8",
        "trainer.per_device_train_batch_size=2",
        "sft.max_steps=10",
        "loop.target_reward=0.98",
    ]
    followed = follow("sft_then_grpo", CPU, *sets)
    settings: Any = find_pipeline("sft_then_grpo").configure_for(CPU, None, sets).settings
    assert not followed.keys() & {item.partition("=")[0] for item in sets}
    assert (settings.update.learning_rate, settings.rollout.max_tokens) == (5e-4, 8)
    assert settings.evaluate.max_tokens == 8, "as rollout's"
    assert settings.sft.epochs is None
    assert settings.sft.gradient_accumulation_steps == 1, "the batch is the user's"


def test_the_whole_configuration_follows_nothing_more(smollm2: Path, tmp_path: Path) -> None:
    """As a resume and a fork read it: concrete values, of another machine perhaps."""
    pipeline = find_pipeline("sft_then_grpo")
    first = pipeline.configure_for(CPU, None, [f"base_model={smollm2}"]).settings
    (tmp_path / "config.yaml").write_text(json.dumps(first.model_dump(mode="json")))
    again = pipeline.configure_for(ONE_GPU, tmp_path / "config.yaml")
    assert again.settings == first and again.followed == ()


def test_a_run_keeps_the_settings_that_followed_another_machine(smollm2: Path) -> None:
    pipeline = find_pipeline("grpo")

    def dump(memory: int, *sets: str) -> tuple[dict[str, Any], Any]:
        machine = Machine(is_cluster=False, memory=memory)
        configured = pipeline.configure_for(machine, None, [f"base_model={smollm2}", *sets])
        return configured.settings.model_dump(mode="json"), configured.followed

    recorded, _ = dump(24 * GB)
    config, followed = dump(100 * GB)
    assert config != recorded and keep_followed(config, followed, recorded) == recorded
    other, followed = dump(100 * GB, "update.learning_rate=1e-5")
    assert keep_followed(other, followed, recorded) == other, "the user asks for another run"


@pytest.mark.parametrize(
    ("tokens", "context"), [(8, 256), (128, 256), (300, 600), (512, 1024), (900, 1024)]
)
def test_the_engines_context_follows_long_completions_of_the_demo(
    tokens: int, context: int
) -> None:
    sets = [f"rollout.max_tokens={tokens}", f"evaluate.max_tokens={tokens}"]
    settings: Any = find_pipeline("grpo").configure(None, sets)
    assert settings.engine.options["max_model_len"] == context
    longer: Any = find_pipeline("grpo").configure(
        None, [*sets, "model.max_position_embeddings=4096"]
    )
    assert longer.engine.options["max_model_len"] == max(256, 2 * tokens)


def test_arguments_of_the_engine_keep_a_context_that_fits(smollm2: Path) -> None:
    base = f"base_model={smollm2}"
    share = "engine.args.gpu_memory_utilization=0.5"
    settings: Any = find_pipeline("grpo").configure_for(PODS, None, [base, share]).settings
    assert settings.engine.args == {"gpu_memory_utilization": 0.5, "max_model_len": 2048}
    own = follow("grpo", PODS, base, "engine.args.max_model_len=4096")
    assert not [setting for setting in own if setting.startswith("engine.")]
    assert "engine.args" not in follow("grpo", PODS, base, "engine.kind=transformers")


def test_completions_are_at_most_half_of_a_short_context(llama_8b: Path) -> None:
    stated = {**LLAMA_8B, "max_position_embeddings": 512}
    (llama_8b / "config.json").write_text(json.dumps(stated))
    followed = follow("sft_then_grpo", PODS, f"base_model={llama_8b}")
    assert followed["rollout.max_tokens"] == 256
    assert followed["engine.args"] == {"max_model_len": 512}
    assert followed["sft.max_length"] == 512


def test_one_gpu_is_shared(smollm2: Path) -> None:
    base = f"base_model={smollm2}"
    assert follow("grpo", ONE_GPU, base)["engine.colocate"] is True
    assert "engine.colocate" not in follow("grpo", TWO_GPUS, base)
    assert "engine.colocate" not in follow("grpo", PODS, base)
    for other in ("engine.colocate=false", "loop.asynchronous=true", "loop.iterations_per_pod=2"):
        assert "engine.colocate" not in follow("grpo", ONE_GPU, base, other)


def test_pairs_count_twice_and_adapters_learn_faster(llama_8b: Path) -> None:
    followed = follow("dpo", PODS, f"base_model={llama_8b}", "trainer.lora={r: 8}")
    assert followed["preference.learning_rate"] == 1e-5
    assert followed["trainer.per_device_train_batch_size"] == 4
    full = follow("dpo", PODS, f"base_model={llama_8b}")
    assert full["trainer.per_device_train_batch_size"] == 1
    assert full["preference.gradient_accumulation_steps"] == 8


def test_a_default_of_a_pipelines_author_stands(tmp_path: Path, smollm2: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from tuneloop.cli.pipeline_file import make_builders\n"
        "from tuneloop.config.pipeline import SET_BY_PIPELINE, PipelineConfig\n"
        "from tuneloop.stages.sft import sft\n"
        "Config = PipelineConfig.with_sections(\n"
        "    tuning=sft.settings(without=SET_BY_PIPELINE, learning_rate=3e-5),\n"
        ")\n"
        "build_argo, build_kfp = make_builders('mine', lambda config: [], lambda graph: None)\n"
    )
    followed = follow(str(tmp_path / "mine.py"), CPU, f"base_model={smollm2}")
    assert followed.keys() == {
        "tuning.epochs",
        "tuning.warmup_steps",
        "tuning.max_length",
        "tuning.per_device_train_batch_size",
        "tuning.gradient_accumulation_steps",
    }


@pytest.mark.parametrize(
    "item", ["rollout=7", "rollout.max_tokens=many", "engine.args=7", "cluster=[]", "engine=x"]
)
def test_a_wrong_value_is_refused_as_before(smollm2: Path, item: str) -> None:
    with pytest.raises(ValueError, match=re.escape(item.partition("=")[0])):
        follow("grpo", PODS, f"base_model={smollm2}", item)


def test_the_machine_is_the_pods_where_the_settings_describe_them() -> None:
    assert choose_machine({"cluster": {"trainer": {"gpus": 2}}}) == Machine(trainer_gpus=2)
    assert not choose_machine({"cluster": {"queue": "mine"}}).is_cluster
    shared = choose_machine({"cluster": {"share": {"device_class": "gpu", "count": 4}}})
    assert (shared.trainer_gpus, shared.sampler_gpus) == (4, 4)


def test_rules_replace_defaults_that_exist() -> None:
    """A default of a stage that changes alone would silently end its rule."""
    components = {
        part.name: part
        for part in (
            data_prep.data_prep,
            evaluate.evaluate,
            policy_update.policy_update,
            preference.preference,
            reference_logprobs.reference_logprobs,
            reward_model.reward_model,
            rollout.rollout,
            sft.sft,
        )
    }
    for rule in RULES:
        for name in set(rule.stages) & components.keys():
            fields = components[name].Params.model_fields
            if rule.setting not in fields or rule.setting == "max_tokens":
                continue
            assert fields[rule.setting].default in rule.demo, (name, rule.setting)
    draft = Draft(
        config=find_pipeline("grpo").Config,
        values={"engine": {"kind": "vllm"}},
        facts=read_model_facts("tiny-qwen3"),
        machine=CPU,
    )
    for rule in RULES:
        for section in {"trainer", *PLAIN_SECTIONS} & set(rule.stages):
            assert draft.has_field(section, rule.setting), (section, rule.setting)
            default = draft.read_default(section, rule.setting)
            assert default in rule.demo, (section, rule.setting)
    for pipeline in ("sft", "grpo", "dpo"):
        config: Any = find_pipeline(pipeline).Config()
        assert config.evaluate.max_tokens == 8


def test_every_rule_has_a_row_in_the_documentation() -> None:
    text = Path(__file__).parents[3].joinpath("docs/defaults.md").read_text()
    settings = " ".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))
    for rule in RULES:
        assert rule.setting in settings
        # A row of a setting that is the trainer's, too, names only that section.
        if "trainer" not in rule.stages:
            sections = {SECTIONS.get(stage, stage) for stage in rule.stages}
            assert all(section in settings for section in sections), rule.setting


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"XDG_CACHE_HOME": "/x/caches"},
        {"XDG_CACHE_HOME": "/x/caches", "HF_HOME": "~/hf"},
        {"HUGGINGFACE_HUB_CACHE": "/x/old", "HF_HOME": "/x/hf"},
        {"HF_HUB_CACHE": "$HOME/hub", "HF_HOME": "/x/hf"},
    ],
)
def test_the_cache_is_where_the_library_has_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    program = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    expected = subprocess.check_output([sys.executable, "-c", program], text=True).strip()
    assert str(find_hub_cache()) == expected
