"""What a user types into the form of KFP's UI: checked by the pipeline's schema, in the first task of a run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tuneloop.config.explicit_values import configure_values, find_explicit_values
from tuneloop.config.loading import Pipeline, find_pipeline
from tuneloop.core.errors import EXIT_USER, UserError
from tuneloop.kfp import configure
from tuneloop.kfp.configure import RunSettings, find_changes, list_doubts, read_files
from tuneloop.kfp.form import list_parameters

PIPELINES = sorted(path.stem for path in Path(__file__).parents[3].glob("pipelines/*.py"))
MEMORY = [f"cluster.{role}.memory=16Gi" for role in ("trainer", "sampler", "scorer", "cpu")]


def prepare(name: str, *sets: str) -> RunSettings:
    pipeline = find_pipeline(name)
    return RunSettings(pipeline, find_explicit_values(pipeline, pipeline.configure(None, sets)))


def change(runs: RunSettings, **typed: Any) -> dict[str, Any]:
    """Return task → what it does otherwise, where it does; keys of settings have ``__`` for a dot."""
    keys = {key.replace("__", "."): value for key, value in typed.items()}
    changes = find_changes(runs.compiled.plan, runs.configure(keys).plan)
    decoded = {task.removesuffix("_settings"): json.loads(text) for task, text in changes.items()}
    return {task: parameters for task, parameters in decoded.items() if parameters}


@pytest.mark.parametrize("name", PIPELINES)
def test_parameters_are_the_settings_that_people_set_first(name: str) -> None:
    pipeline = find_pipeline(name)
    parameters = list_parameters(pipeline.configure())
    keys = {parameter.key for parameter in parameters}
    assert {"base_model", "seed", "data.source"} < keys
    assert any(key.endswith(".learning_rate") for key in keys)
    assert len({parameter.name for parameter in parameters}) == len(parameters) < 30
    for parameter in parameters:
        assert parameter.name.isidentifier() and parameter.description
        assert type(parameter.default) is parameter.type
    assert not any(key.startswith(("cluster.", "kfp.", "engine.")) for key in keys)


def test_a_team_chooses_the_parameters() -> None:
    config: Any = find_pipeline("grpo").configure(None, ["kfp.parameters=[rollout.temperature]"])
    (parameter,) = list_parameters(config)
    assert (parameter.name, parameter.type, parameter.default) == (
        "rollout_temperature",
        float,
        1.0,
    )


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("rollout.temprature", "is no setting of this pipeline"),
        ("processes", "decides the graph or its pods"),
        ("cluster.trainer.gpus", "decides the graph or its pods"),
        ("data.columns", "one number, text or truth value"),
        ("data.train", "while it has no value"),
    ],
)
def test_a_team_cannot_choose(key: str, problem: str) -> None:
    config: Any = find_pipeline("grpo").configure(None, [f"kfp.parameters=[{key}]"])
    with pytest.raises(UserError, match=f"kfp.parameters: '{key}': .*{problem}"):
        list_parameters(config)


@pytest.mark.parametrize("name", PIPELINES)
def test_explicit_values_make_the_same_configuration(name: str) -> None:
    pipeline = find_pipeline(name)
    sets = ["seed=3", "evaluate.max_tokens=9", "trainer.lora.r=4", "cluster.trainer.memory=4Gi"]
    config = pipeline.configure(None, sets)
    values = find_explicit_values(pipeline, config)
    assert configure_values(pipeline, values) == config
    assert values["seed"] == 3 and "sft" not in values and "engine" not in values
    # One that was not made by `configure`: nothing follows.
    plain = pipeline.Config()
    assert configure_values(pipeline, find_explicit_values(pipeline, plain)) == plain


def test_nothing_typed_changes_nothing() -> None:
    runs = prepare("sft_then_grpo")
    form = list_parameters(runs.compiled.settings)
    # KFP's numbers are floats.
    values = {
        parameter.name: float(parameter.default) if parameter.type is int else parameter.default
        for parameter in form
    }
    assert runs.read_typed(values) == {}
    assert change(runs) == {}


def test_what_is_typed_reaches_all_that_follows_it() -> None:
    """As on the command line: the room for completions, their evaluation, and the loop's own task."""
    runs = prepare("grpo")
    typed = runs.read_typed({"rollout_max_tokens": 6.0, "settings": {"update.max_steps": 7.0}})
    assert typed == {"rollout.max_tokens": 6, "update.max_steps": 7}
    changes = change(runs, **{key.replace(".", "__"): value for key, value in typed.items()})
    assert changes["base_model"]["completion_tokens"] == {"train": 6, "eval": 6}
    assert changes["evaluate"]["max_tokens"] == 6
    sampling, _, update = json.loads(changes["iterations"]["loop"])["steps"]
    assert sampling["flags"][sampling["flags"].index("--max-tokens") + 1] == "6"
    assert update["flags"][update["flags"].index("--max-steps") + 1] == "7"
    assert change(runs, loop__iterations=2) == {"iterations": {"iterations": 2}}
    assert runs.configure({"loop.target_reward": 0.5}).settings.loop.ending_reward == 0.5


def test_another_model_brings_its_defaults(smollm2: Path) -> None:
    runs = prepare("sft", *MEMORY)
    changes = change(runs, base_model=str(smollm2))
    assert changes["base_model"]["model"] == str(smollm2)
    assert changes["data_prep"]["chat"] is True
    assert changes["sft"]["learning_rate"] == 2e-5
    assert (
        change(runs, base_model=str(smollm2), sft__learning_rate=1e-5)["sft"]["learning_rate"]
        == 1e-5
    )
    # What was set when the pipeline was compiled stands.
    fixed = prepare("sft", *MEMORY, "sft.learning_rate=3e-4")
    assert "learning_rate" not in change(fixed, base_model=str(smollm2))["sft"]


def test_a_model_that_does_not_fit_the_compiled_pods_is_refused(smollm2: Path) -> None:
    with pytest.raises(
        UserError, match=r"base_model: .*sft would need \d+Mi .*--set cluster.trainer.memory=\d+Mi"
    ):
        prepare("sft").configure({"base_model": str(smollm2)})


def test_the_limits_that_were_compiled_count(smollm2: Path, tmp_path: Path) -> None:
    """The pods were compiled for a model whose facts this machine does not know."""
    sft = find_pipeline("sft")
    values = {"base_model": "owner/unknown-model"}
    unlimited = RunSettings(sft, values)
    assert unlimited.limits == {}
    unlimited.configure({"base_model": str(smollm2)})
    runs = RunSettings(sft, values, {"sft": "300Mi"})
    with pytest.raises(UserError, match=r"sft would need \d+Mi of memory and has 300Mi"):
        runs.configure({"base_model": str(smollm2)})
    run = runs.configure({"base_model": "owner/other-model"})
    assert list_doubts(run.plan, runs.limits) == [
        "it is not known whether 300Mi of memory are enough for sft"
    ]


def test_a_section_that_is_typed_as_a_mapping_sets_what_it_names() -> None:
    runs = prepare("grpo", "rollout.max_tokens=6")
    typed = runs.read_typed(
        {"settings": {"rollout": {"temperature": 0.5}, "trainer": {"lora": {"r": 4.0}}}}
    )
    assert typed == {"rollout.temperature": 0.5, "trainer.lora.r": 4}
    run = runs.configure(typed)
    assert (run.settings.rollout.temperature, run.settings.rollout.max_tokens) == (0.5, 6)
    # A setting whose value is a mapping is none.
    arguments = {"settings": {"data": {"columns": {"prompt": "question"}}}}
    assert runs.read_typed(arguments) == {"data.columns": {"prompt": "question"}}


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("engine.kind", "transformers", "engine.kind: 'transformers': is fixed when the pipeline"),
        ("sft.learning_rate", -1, "sft.learning_rate: -1: "),
        ("sft.max_length", "long", "sft.max_length: 'long': "),
        ("rollout.tempratur", 1, "rollout.tempratur: 1: "),
        ("processes", 2, "processes: 2: is fixed when the pipeline is compiled"),
        ("tokenize", True, "tokenize: True: is fixed"),
        ("cluster.cpu.cpu", "2", "cluster.cpu.cpu: '2': is fixed"),
        ("loop.asynchronous", True, "loop.asynchronous: True: is built for Argo"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(key: str, value: Any, problem: str) -> None:
    runs = prepare("sft_then_grpo")
    with pytest.raises(UserError) as refused:
        runs.configure({"seed": 1, key: value})
    assert str(refused.value).startswith(problem)


def test_the_iterations_of_a_written_out_loop_are_fixed() -> None:
    runs = prepare("grpo", "loop.iterations=2", "kfp.unroll=2")
    assert "loop.iterations" not in {item.key for item in list_parameters(runs.compiled.settings)}
    with pytest.raises(UserError, match=r"loop.iterations: 3: is fixed"):
        runs.configure({"loop.iterations": 3})


def start(store: Path, *flags: str, **parameters: Any) -> tuple[int, dict[str, Any]]:
    """Run the first task of a run; return its exit code and its outputs."""
    output = store.parent / "executor_output.json"
    output.unlink(missing_ok=True)
    values = {"store": str(store), "run": "", "pipeline": "sft", "run_id": "1b2c3d4e-ffff-0000"}
    message = {
        "inputs": {"parameterValues": values | parameters},
        "outputs": {
            "parameters": dict.fromkeys(("url", "sft_settings", "my_settings")),
            "outputFile": str(output),
        },
    }
    words = [*flags, "--values", "{}", "--executor-input", json.dumps(message)]
    code = configure.main(words)
    written = json.loads(output.read_text())["parameterValues"] if output.exists() else {}
    return code, written


def test_the_first_task_names_the_run(tmp_path: Path) -> None:
    """By KFP's run: the same one keeps its name, and another one trains anew."""
    store = tmp_path / "store"
    code, outputs = start(store, "--pipeline", "sft", sft_learning_rate=0.5)
    assert code == 0 and outputs["url"] == f"{store}/sft-1b2c3d4e"
    assert json.loads(outputs["sft_settings"]) == {"learning_rate": 0.5}
    assert start(store, "--pipeline", "sft")[1]["url"] == outputs["url"]
    assert start(store, "--pipeline", "sft", run_id="ab-cd")[1]["url"] == f"{store}/sft-abcd"
    assert start(store, "--pipeline", "sft", run="mine")[1]["url"] == f"{store}/mine"


def test_the_first_task_refuses_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert start(store, "--pipeline", "sft", sft_learning_rate=-1.0) == (EXIT_USER, {})
    (line,) = capfd.readouterr().err.splitlines()
    assert "sft.learning_rate: -1: " in line
    assert start(store, "--pipeline", "sft", run="My Run") == (EXIT_USER, {})
    assert "run: 'My Run': use at most 40 lower-case letters" in capfd.readouterr().err
    assert not store.exists()


def test_the_model_of_another_run_is_typed(
    tmp_path: Path, smollm2: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    folder = store / "first" / "export"
    shutil.copytree(smollm2, folder)
    flags = ["--pipeline", "sft"]
    code, outputs = start(store, *flags, base_model="run://first", run="second")
    assert (code, outputs) == (EXIT_USER, {})
    assert "would need" in capfd.readouterr().err
    limits = ["--limits", json.dumps({"sft": "64Gi"})]
    code, outputs = start(store, *flags, *limits, base_model="run://first", run="second")
    assert code == 0
    changes = json.loads(outputs["sft_settings"])
    assert changes["learning_rate"] == 2e-5
    assert f"base_model = 'file://{folder}@sha256:" in capfd.readouterr().err
    code, outputs = start(store, *flags, base_model="run://frist", run="second")
    assert code == EXIT_USER
    assert "base_model: 'run://frist': has no files" in capfd.readouterr().err
    code, outputs = start(store, *flags, base_model="owner/unknown-model", run="second")
    assert code == 0
    err = capfd.readouterr().err
    assert "note: owner/unknown-model is not here: its context" in err
    assert "note: it is not known whether" in err


OWN = '''"""One stage that is in the image, and a graph that is not."""

from tuneloop.cli.pipeline_file import make_builders
from tuneloop.config.loading import load_pipeline
from tests.unit.toy import sft
from tuneloop.config.pipeline import SET_BY_PIPELINE, PipelineConfig
from tuneloop.workflow.loop import StageSpec

names = load_pipeline("names", beside=__file__)
Config = PipelineConfig.with_sections(sft=sft.settings(without=SET_BY_PIPELINE))


def stages(config):
    return [StageSpec(sft, config.sft)]


def draw(graph):
    """{{NOT A TAG}} $(HOME)"""
    graph.stage(sft, names.STAGE)


build_argo, build_kfp = make_builders("my", stages, draw)
'''


def test_a_pipeline_that_is_not_in_the_image_comes_with_the_task(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(OWN)
    (tmp_path / "names.py").write_text('"""A name."""\n\nSTAGE = "first"\n')
    pipeline: Pipeline = find_pipeline(str(tmp_path / "my.py"))
    files = read_files(pipeline)
    assert files == {path.name: path.read_text() for path in tmp_path.glob("*.py")}
    assert read_files(find_pipeline("sft")) == {}
    for path in tmp_path.glob("*.py"):
        path.unlink()
    flags = ("--pipeline", "my", "--files", json.dumps(files))
    code, outputs = start(tmp_path / "store", *flags, pipeline="my", settings={"sft.skill": 2.0})
    assert code == 0 and outputs["url"].endswith("/my-1b2c3d4e")
    assert json.loads(outputs["sft_settings"]) == {"skill": 2}
    assert start(tmp_path / "store", *flags, settings={"sft.skill": 9.0}) == (EXIT_USER, {})
