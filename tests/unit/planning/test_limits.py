"""Limits that are refused before anything starts, by `plan`, `lint`, `run` and `submit` alike."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.making import commit
from tests.unit.config.test_followed import CPU, LLAMA_8B, ONE_GPU, PODS
from tuneloop.cli import run_cli
from tuneloop.config.extended import dump_settings
from tuneloop.config.loading import dump_workflow, find_pipeline
from tuneloop.config.machine import Machine
from tuneloop.core.artifacts import Draft
from tuneloop.core.errors import UserError
from tuneloop.planning.disk import check_store, estimate_footprint
from tuneloop.planning.limits import find_limits, read_pods
from tuneloop.runs.forking import begin_workflow
from tuneloop.runs.records import Record, list_runs
from tuneloop.runs.run_record import Run
from tuneloop.training.delegation import check_conversation_choices
from tuneloop.workflow.plan import read_plan


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    """A directory with the configuration of a Llama of 8 billion parameters, and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def limits(pipeline: str, machine: Machine | None, *sets: str) -> list[str]:
    """Return the limits that a pipeline with these settings would break, as its user reads them."""
    found = find_pipeline(pipeline)
    settings = found.configure_for(machine, None, sets).settings
    broken = find_limits(settings, found.build(settings), machine or read_pods(settings))
    return [str(limit.error) for limit in broken]


@pytest.mark.parametrize("pipeline", ["sft", "grpo", "sft_then_grpo", "dpo"])
@pytest.mark.parametrize("machine", [CPU, ONE_GPU, PODS, None])
def test_the_demo_breaks_nothing(pipeline: str, machine: Machine | None) -> None:
    assert limits(pipeline, machine) == []


def test_a_pretrained_model_breaks_nothing_by_default(smollm2: Path) -> None:
    for pipeline in ("sft", "grpo", "sft_then_grpo", "dpo"):
        small = [Machine(is_cluster=False, memory=size * 10**9) for size in (8, 12, 64)]
        for machine in (CPU, ONE_GPU, PODS, *small):
            assert limits(pipeline, machine, f"base_model={smollm2}") == [], (pipeline, machine)


def test_what_readme_prints_works(smollm2: Path) -> None:
    sets = ["rollout.max_tokens=512", "evaluate.max_tokens=512"]
    for base in ("tiny-qwen3", str(smollm2)):
        assert limits("grpo", CPU, f"base_model={base}", *sets) == []


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (
            ["rollout.max_tokens=8192"],
            "rollout.max_tokens: 8192: leaves no room for a prompt in the model's context (8192): lower it",
        ),
        (
            ["evaluate.max_tokens=512", "engine.args.max_model_len=512"],
            "evaluate.max_tokens: 512: leaves no room for a prompt in engine.args.max_model_len (512)",
        ),
        (
            ["engine.args.max_model_len=16384"],
            "engine.args.max_model_len: 16384: is more than the context of",
        ),
        (
            ["trainer.per_device_train_batch_size=128"],
            "trainer.per_device_train_batch_size: 128: policy-update takes about 202 GB",
        ),
        (
            ["trainer.per_device_train_batch_size=32"],
            "trainer.per_device_train_batch_size: 32: sft takes about 52.2 GB",
        ),
        (
            ["sft.max_length=9000"],
            "sft.max_length: 9000: is more than the context of",
        ),
        (
            ["model.chat_template=nofile.jinja"],
            "model.chat_template: 'nofile.jinja': cannot be read: No such file or directory",
        ),
        (
            ["trainer.lora={target_modules: [q_proj, c_attn]}"],
            "trainer.lora.target_modules: 'c_attn': names no layer of",
        ),
        (
            ["trainer.lora={target_modules: q_proj}"],
            "trainer.lora.target_modules: 'q_proj': is a regular expression that no module's whole "
            "name matches; for all modules of this name write [q_proj]",
        ),
        (
            ["trainer.lora={target_modules: '.*[.]query'}"],
            "the model has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
        ),
        (
            ["trainer.lora={target_modules: [lm_head]}"],
            "trainer.lora.target_modules: 'lm_head': leave embeddings and the output layer out",
        ),
        (
            ["data.history=per-turn", "sft.backend=trl"],
            "data.history: 'per-turn': does not reach another backend, which renders conversations "
            "itself: leave data.history at as-rendered, or leave sft.backend out",
        ),
        (
            ["data.reasoning=drop", "sft.backend=trl"],
            "data.reasoning: 'drop': does not reach another backend",
        ),
        (["data=/no/such.jsonl"], "data.source: '/no/such.jsonl': no such file here"),
        (["data=nowhere/*.jsonl"], "data.source: 'nowhere/*.jsonl': no file there ends in one of"),
        (
            ["data.source=files", "data.source_args.path=[pyproject.toml, none.csv]"],
            "data.source_args.path: 'none.csv': no such file here",
        ),
        (
            ["data=pyproject.toml", "data.source_args.eval=nofile.jsonl"],
            "data.source_args.eval: 'nofile.jsonl': no such file here",
        ),
        (
            ["data.mixture=[{source: a.jsonl, weight: 1}, {source: b.csv, weight: 2}]"],
            "data.mixture.0.source: 'a.jsonl': no such file here",
        ),
    ],
)
def test_a_limit_is_one_line_that_names_the_setting(
    smollm2: Path, sets: list[str], line: str
) -> None:
    found = limits("sft_then_grpo", CPU, f"base_model={smollm2}", *sets)
    assert [each for each in found if line in each and "\n" not in each]


@pytest.mark.parametrize("pipeline", ["sft", "grpo", "sft_then_grpo", "dpo"])
def test_adapters_of_every_trainer_are_checked(smollm2: Path, pipeline: str) -> None:
    wrong = "trainer.lora={target_modules: [attention]}"
    for base in (str(smollm2), "tiny-llama"):
        (line,) = limits(pipeline, CPU, f"base_model={base}", wrong)
        assert f"trainer.lora.target_modules: 'attention': names no layer of {base}" in line


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        "[q_proj, down_proj]",
        "[self_attn.q_proj]",
        "'.*[.]layers[.]1[.].*_proj'",
        "'model[.]layers[.][0-9]+[.]mlp[.]up_proj'",
    ],
)
def test_adapters_of_modules_that_exist_pass(smollm2: Path, targets: str) -> None:
    lora = f"trainer.lora={{target_modules: {targets}}}"
    assert limits("sft", CPU, f"base_model={smollm2}", lora) == []
    assert limits("sft", CPU, "base_model=some/model", lora) == [], "its files are elsewhere"


def test_a_model_that_is_too_large_names_what_saves_memory(llama_8b: Path) -> None:
    found = limits("sft", CPU, f"base_model={llama_8b}")
    assert [line for line in found if "has no tokenizer" in line]
    (memory,) = [line for line in found if "sft takes about" in line]
    assert memory.startswith("base_model: ") and "this machine has 24 GB" in memory
    assert "train adapters (lora)" in memory
    (device,) = [
        line for line in limits("sft", ONE_GPU, f"base_model={llama_8b}") if "accelerators" in line
    ]
    assert "the accelerators here have 76 GB" in device


def test_memory_of_pods_is_what_the_settings_say(smollm2: Path) -> None:
    base = f"base_model={smollm2}"
    assert limits("sft", None, base, "cluster.trainer.memory=8Gi") == []
    (line,) = limits("sft", None, base, "cluster.trainer.memory=2Gi")
    assert "sft takes about" in line and "its pod has 2.15 GB" in line
    (vast,) = limits("sft", None, base, "trainer.per_device_train_batch_size=16384")
    assert "no node has more than" in vast


def test_activations_of_terabytes_are_refused_or_not_chosen(llama_8b: Path) -> None:
    base = f"base_model={llama_8b}"
    assert limits("grpo", None, base) == []
    batch = ["trainer.per_device_train_batch_size=128", "engine.args.max_model_len=32768"]
    off = "trainer.gradient_checkpointing=false"
    (line,) = limits("grpo", None, base, *batch, off)
    assert re.search(r"55 TB activations \(128 sequences × 32,768 tokens × 32 layers ", line)


def test_one_gpu_for_trainer_and_server(smollm2: Path) -> None:
    base = f"base_model={smollm2}"
    (line,) = limits("grpo", ONE_GPU, base, "engine.colocate=false")
    assert line.startswith("engine.colocate: False: trainer and vLLM would both take the one GPU")
    smaller = "engine.args.gpu_memory_utilization=0.4"
    assert limits("grpo", ONE_GPU, base, "engine.colocate=false", smaller) == []
    transformers = "engine.kind=transformers"
    assert limits("grpo", ONE_GPU, base, transformers) == []


@pytest.mark.parametrize("name", ["./nope", "/no/where", "~/model", "a/b/c", "some model"])
def test_a_base_model_that_is_nowhere(name: str) -> None:
    (line,) = limits("sft", CPU, f"base_model={name}")
    assert line == f"base_model: {name!r}: is not a directory here; name one, or a model of the hub"
    assert limits("sft", None, f"base_model={name}") == [], "pods may have it"


def test_names_on_the_hub_pass() -> None:
    for name in ("gpt2", "org/name", "hf://org/name@main"):
        assert limits("sft", CPU, f"base_model={name}") == []


def test_every_process_has_a_gpu(smollm2: Path) -> None:
    base = f"base_model={smollm2}"
    (line,) = limits("sft", ONE_GPU, base, "processes=2")
    assert line.startswith("processes: 2: each process takes a GPU, and this machine has 1")
    (line,) = limits("sft", None, base, "processes=4", "cluster.trainer.gpus=2")
    assert "a trainer's pod has 2" in line
    assert limits("sft", CPU, base, "processes=2") == []


def test_what_is_not_known_of_a_model_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["plan", "sft", "--set", "base_model=some/model"]) == 0
    assert "note: some/model is not here: its context, size and chat" in capsys.readouterr().err


def test_a_template_that_only_pods_have_and_the_context_of_a_tiny_model_pass(
    smollm2: Path,
) -> None:
    template = "model.chat_template=nofile.jinja"
    assert limits("sft", None, f"base_model={smollm2}", template) == []
    assert limits("sft", CPU, "model.max_position_embeddings=128") == []
    one = [f"base_model={smollm2}", "sft.max_length=8192", "trainer.per_device_train_batch_size=1"]
    assert not [line for line in limits("sft", CPU, *one) if "context" in line]


@pytest.mark.parametrize(
    ("sets", "is_warned"),
    [
        ([], True),
        (["data.eval=8"], True),
        (["data=x.jsonl"], False),
        (["data.source=digits"], False),
        (["data.mixture=[{source: a.jsonl, weight: 1}]"], False),
    ],
)
def test_a_pretrained_model_on_the_data_of_the_demo_is_named(
    smollm2: Path, sets: list[str], is_warned: bool
) -> None:
    configured = find_pipeline("sft").configure_for(CPU, None, [f"base_model={smollm2}", *sets])
    line = f"{smollm2} would be trained on sums of digits, the demo's data"
    assert any(note.startswith(line) for note in configured.notes) == is_warned
    assert find_pipeline("sft").configure_for(CPU, None, ()).notes == ()


def test_every_command_says_it(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["--set", f"base_model={smollm2}", "--set", "rollout.max_tokens=9000"]
    remote = ["--run", "x", "--store", "s3://bucket/runs", "--dry-run"]
    for words in (
        ["plan", "grpo", *sets],
        ["lint", "grpo", *sets],
        ["run", "grpo", *sets, "--run", "never"],
        ["submit", "grpo", *sets, *remote],
    ):
        assert run_cli(words) == 2, words
        assert "rollout.max_tokens: 9000: leaves no room" in capsys.readouterr().err, words


def test_a_plan_says_each_default_and_the_bytes_of_the_run(
    smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pods = ["--set", "cluster.trainer.gpus=1", "--set", "cluster.sampler.gpus=1"]
    assert run_cli(["plan", "grpo", "--set", f"base_model={smollm2}", *pods]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "update.learning_rate=1e-06 the default of the library TRL" in text
    assert "data.chat=true the model has a chat template" in text
    assert "60 iterations write 1.88 GB each, 113 GB in all" in text
    assert (
        "7.26 GB at most are kept: the newest 2 checkpoints, and the model alone of iterations 10"
        in text
    )


def footprint(*sets: str) -> Any:
    found = find_pipeline("sft_then_grpo")
    return estimate_footprint(found.build(found.configure(None, sets)))


def test_the_bytes_of_a_run(llama_8b: Path) -> None:
    parameters = 8_030_261_248
    base = f"base_model={llama_8b}"
    whole = footprint(base, "update.save_total_limit=null", "loop.iterations=10")
    assert whole.iteration == parameters * 14
    # The base model, the model and state of SFT, the export, and ten checkpoints.
    assert whole.total == parameters * (2 + 14 + 2) + 10 * parameters * 14
    kept = footprint(base, "loop.iterations=100")
    # Three checkpoints while the next one is written, and the model of each tenth.
    assert kept.retained == parameters * (3 * 14 + 10 * 2) and kept.iterations == 100
    twice = footprint(
        base, "update.save_total_limit=null", "loop.iterations=10", "export.gguf=true"
    )
    assert twice.total == whole.total + parameters * 2
    adapters = footprint(base, "trainer.lora={r: 8}", "loop.iterations=10")
    assert parameters * 2 < adapters.iteration < parameters * 2.1


def test_a_store_without_room_is_refused(llama_8b: Path, tmp_path: Path) -> None:
    found = find_pipeline("sft_then_grpo")
    vast = [f"base_model={llama_8b}", "update.save_total_limit=null", "loop.iterations=100000"]
    workflow = found.build(found.configure(None, vast))
    (limit,) = check_store(workflow, str(tmp_path / "not" / "there"))
    assert limit.is_estimate and "free, and the run takes up to 1.12e+04 TB" in str(limit.error)
    assert "(all; set update.save_total_limit" in str(limit.error)
    assert [*check_store(workflow, "s3://bucket/runs")] == []
    assert [*check_store(found.build(found.configure()), str(tmp_path))] == []


ALONE = """
from tuneloop.cli.pipeline_file import make_builders
from tuneloop.config.pipeline import SET_BY_PIPELINE, PipelineConfig
from tuneloop.stages.data_prep import data_prep
from tuneloop.workflow.loop import StageSpec

Config = PipelineConfig.with_sections(data=data_prep.settings(without=SET_BY_PIPELINE))

def stages(config):
    return [StageSpec(data_prep, config.data)]

def draw(graph):
    "Data alone."
    graph.stage(data_prep)

build_argo, build_kfp = make_builders("alone", stages, draw)
"""


def test_a_pipeline_without_a_model_is_checked_too(tmp_path: Path) -> None:
    file = tmp_path / "alone.py"
    file.write_text(ALONE)
    assert limits(str(file), CPU) == []
    (problem,) = limits(str(file), CPU, f"data={tmp_path}/rows.jsonl")
    assert problem.endswith("no such file here: correct the path")


LOOPED = ("rollout", "reward", "policy-update")
"""The stages of an iteration of `grpo`."""


@pytest.fixture
def origin(smollm2: Path, tmp_path: Path) -> Run:
    """A run of `grpo`, as far as a fork asks for it: its record, and its first iteration."""
    pipeline = find_pipeline("grpo")
    settings = pipeline.configure(None, [f"base_model={smollm2}", "loop.iterations=4"])
    store = f"file://{tmp_path}/runs"
    record = Record(
        run="x",
        pipeline="grpo",
        path=str(pipeline.path),
        config=dump_settings(settings),
        store=store,
    )
    workflow = pipeline.build(settings)
    Run.create(record, dump_workflow(workflow))
    for name, stage in read_plan(workflow).stages.items():
        component = stage.component
        assert component
        params = component.validate(stage.parameters)
        tracked = params.model_dump(mode="json", exclude=component.untracked)
        key = f"iterations/1/{name}" if name in LOOPED else name
        Draft(f"{store}/x/{key}").commit(stage=component.name, params=tracked)
    return Run.open("x", store)


def test_a_fork_is_checked_as_a_run(origin: Run, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fork", "x", "1", "--store", origin.store_url]
    assert run_cli([*words, "--set", "rollout.max_tokens=100000"]) == 2
    assert "rollout.max_tokens: 100000: leaves no room for a prompt" in capsys.readouterr().err
    assert run_cli([*words, "--set", "trainer.per_device_train_batch_size=100000"]) == 2
    assert "or start it as it is with --ignore-limits" in capsys.readouterr().err
    assert list_runs(origin.store_url) == ["x"]


def test_a_fork_counts_the_iterations_that_are_left(origin: Run) -> None:
    grpo = find_pipeline("grpo")
    settings = grpo.configure(Path(origin.directory, "config.yaml"))
    whole = estimate_footprint(grpo.build(settings))
    fork = estimate_footprint(begin_workflow(grpo, settings, origin, 1))
    assert whole and fork
    assert (whole.iterations, fork.iterations) == (4, 3)
    assert fork.once < whole.once, "the base model is the origin's"


def test_the_stage_refuses_choices_that_another_backend_does_not_know(tmp_path: Path) -> None:
    for name, value in (("history", "per-turn"), ("reasoning", "drop")):
        prompts = commit(tmp_path / name, "data_prep", **{name: value})
        with pytest.raises(UserError, match=rf"data\.{name}: '{value}': does not reach another"):
            check_conversation_choices(prompts)
    check_conversation_choices(commit(tmp_path / "plain", "data_prep", history="as-rendered"))
