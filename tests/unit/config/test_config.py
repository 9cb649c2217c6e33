import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tuneloop.config import loading
from tuneloop.config.loading import Pipeline, find_pipeline
from tuneloop.core.errors import UserError

TOY = str(Path(__file__).parents[1] / "toy_pipeline.py")
SMALL = '''
"""A pipeline."""
from __future__ import annotations
from typing import Any
from pydantic import BaseModel, ConfigDict, Field

class Loop(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    iterations: int = Field(3, ge=1)
    rate: float = 0.1

class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    seed: int = 0
    loop: Loop = Loop()
    args: dict[str, Any] = {}

def build_argo(config):
    raise NotImplementedError
'''


@pytest.fixture
def small(tmp_path: Path) -> Pipeline:
    (tmp_path / "small.py").write_text(SMALL)
    return loading.find_pipeline(str(tmp_path / "small.py"))


def refusal(pipeline: Pipeline, file: Path | None = None, *sets: str) -> UserError:
    with pytest.raises(UserError) as caught:
        pipeline.configure(file, sets)
    assert "\n" not in str(caught.value)
    return caught.value


def plain(made: BaseModel) -> dict[str, object]:
    return made.model_dump()


def test_set_overrides_the_file_which_overrides_defaults(small: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("seed: 1\nloop: {iterations: 7}\n")
    made = plain(
        small.configure(tmp_path / "c.yaml", ["loop.rate=1e-5", "args.x=[1, a]", "seed=2"])
    )
    assert made == {"seed": 2, "loop": {"iterations": 7, "rate": 1e-5}, "args": {"x": [1, "a"]}}
    assert plain(small.configure())["loop"] == {"iterations": 3, "rate": 0.1}


def test_a_run_says_how_its_chain_begins() -> None:
    grpo = loading.find_pipeline("grpo")
    pulled = ["engine=endpoint", "engine.rollout_endpoint_url=http://a:1"]
    pulled += ["engine.weights=pull", "loop.iterations_per_pod=0"]
    for sets, encoding, published in (
        ([], "gap8-xor", "true"),
        (["engine.weights.encoding=xor", "engine.weights.fleet_has_base=true"], "xor", "false"),
    ):
        templates = grpo.build(grpo.configure(None, [*pulled, *sets]))["spec"]["templates"]
        (flags,) = (each["container"]["args"] for each in templates if each["name"] == "base-model")
        begins = [
            flags[flags.index(name) + 1] for name in ("--weight-encoding", "--publish-weights")
        ]
        assert begins == [encoding, published]


def test_a_dumped_configuration_reads_back_as_itself(small: Pipeline) -> None:
    made = small.configure(None, ["loop.iterations=9"])
    assert small.validate(made.model_dump(mode="json")) == made


def test_an_unknown_key_is_named_with_the_near_one(small: Pipeline) -> None:
    error = refusal(small, None, "loop.iteration=3")
    assert (error.field, error.value) == ("loop.iteration", 3)
    assert "did you mean iterations?" in str(error)
    assert "known: iterations, rate" in str(refusal(small, None, "loop.zzz=3"))


@pytest.mark.parametrize(
    ("item", "field", "says"),
    [
        ("loop.iterations=many", "loop.iterations", "whole number"),
        ("loop.iterations=0", "loop.iterations", "greater than or equal to 1"),
        ("seed", "--set", "key=value"),
        ("=3", "--set", "key=value"),
        ("args.x=[1", "--set", "not YAML"),
    ],
)
def test_bad_settings_say_field_and_remedy(
    small: Pipeline, item: str, field: str, says: str
) -> None:
    error = refusal(small, None, item)
    assert error.field == field
    assert says in str(error)


def test_a_value_is_no_section(small: Pipeline) -> None:
    assert "seed is a value" in str(refusal(small, None, "seed=1", "seed.x=2"))


@pytest.mark.parametrize(
    ("text", "says"), [("- 1", "mapping"), ("a: [", "not YAML"), (None, "cannot be read")]
)
def test_bad_files_are_refused(
    small: Pipeline, tmp_path: Path, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
    assert says in str(refusal(small, tmp_path / "c.yaml"))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1", "has no Config"),
        ("class Config: pass", "has no build_argo"),
        ("import nowhere_to_be_found", "No module named"),
        ("def (", "SyntaxError"),
    ],
)
def test_files_that_are_no_pipelines_are_refused(tmp_path: Path, source: str, says: str) -> None:
    (tmp_path / "p.py").write_text(source)
    with pytest.raises(UserError, match=says):
        loading.find_pipeline(str(tmp_path / "p.py"))


def test_pipelines_are_found_by_name_here_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"sft", "grpo", "sft_then_grpo"} <= loading.list_pipelines().keys(), (
        "those of the checkout"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "grpo.py").write_text(SMALL)
    assert loading.find_pipeline("grpo").path == tmp_path / "pipelines" / "grpo.py"
    with pytest.raises(UserError, match=r"known: .*\bgrpo\b.*; or give the path"):
        loading.find_pipeline("nope")
    with pytest.raises(UserError, match="no such file"):
        loading.find_pipeline("nope.py")


def test_a_pipeline_extends_the_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(SMALL)
    (tmp_path / "more.py").write_text(
        "from tuneloop.config.loading import load_pipeline\nbase = load_pipeline('base', beside=__file__)\n"
        "class Config(base.Config):\n    extra: int = 5\nbuild_argo = base.build_argo\n"
    )
    assert (
        plain(loading.find_pipeline(str(tmp_path / "more.py")).configure(None, ["seed=4"]))["extra"]
        == 5
    )


def test_equal_configurations_render_equal_bytes() -> None:
    toy = loading.find_pipeline(TOY)
    one, two = (
        loading.dump_workflow(toy.build(toy.configure(None, ["iterations=4"]))) for _ in range(2)
    )
    assert one == two
    assert one != loading.dump_workflow(toy.build(toy.configure(None, ["iterations=5"])))


@pytest.mark.parametrize(
    ("pipeline", "item", "field", "says"),
    [
        (
            "grpo",
            "update.algorithm.epsilon=-1",
            "update.algorithm.epsilon",
            "greater than 0",
        ),
        (
            "grpo",
            "update.algorithm.bta=1",
            "update.algorithm.bta",
            "unknown key; did you mean beta?",
        ),
        (
            "grpo",
            "update.algorithm=dr_grpo",
            "update.algorithm",
            "max_completion_length must be set",
        ),
        (
            "grpo",
            "update.algorithm=dpo",
            "update.algorithm.kind",
            "preferences are for the stage preference",
        ),
        ("grpo", "update.lr_scheduler_type=linear", "update.max_steps", "must know where it ends"),
        (
            "dpo",
            "preference.algorithm=grpo",
            "preference.algorithm.kind",
            "for the stage policy_update",
        ),
        (
            "dpo",
            "preference.algorithm.label_smoothing=1",
            "preference.algorithm.label_smoothing",
            "less than",
        ),
        (
            "grpo",
            "update.algorithm_args.beta=1",
            "update.algorithm_args",
            "is now update.algorithm: --set update.algorithm.beta=0.05",
        ),
        (
            "grpo",
            "update.algorithm.baseline=group",
            "update.algorithm.baseline",
            "is a setting of kind reinforce_plus_plus, not of grpo",
        ),
        ("grpo", "data.rewards.exactt=1", "data.rewards.exactt", "unknown; known: choice, code"),
        (
            "grpo",
            "reward.reward_weights.exactt=1",
            "reward.reward_weights.exactt",
            "unknown; known: choice, code",
        ),
        ("sft", "sft.lora.r=4", "sft.lora.r", "did you mean trainer.lora.r?"),
        ("grpo", "update.dtype=bfloat16", "update.dtype", "did you mean trainer.dtype?"),
        ("sft", "trainer.lora.rank=4", "trainer.lora.rank", "is called trainer.lora.r here"),
    ],
)
def test_what_training_can_not_do_is_refused_before_anything_runs(
    pipeline: str, item: str, field: str, says: str
) -> None:
    error = refusal(loading.find_pipeline(pipeline), None, item)
    assert error.field == field
    assert says in str(error)


@pytest.mark.parametrize(
    ("sets", "name", "options"),
    [
        ([], "grpo", {}),
        (["update.algorithm=gspo"], "gspo", {}),
        (["update.algorithm.epsilon=0.3"], "grpo", {"epsilon": 0.3}),
        (["update.algorithm=gspo", "update.algorithm.epsilon=0.2"], "gspo", {"epsilon": 0.2}),
        (["update.algorithm=my.pkg:Loss", "update.algorithm.x=1"], "my.pkg:Loss", {"x": 1}),
    ],
)
def test_a_stage_gets_the_name_of_its_algorithm_and_the_options(
    sets: list[str], name: str, options: dict[str, Any]
) -> None:
    grpo = loading.find_pipeline("grpo")
    config = grpo.configure(None, sets)
    parameters = config.update.to_parameters()
    assert parameters["algorithm"] == name
    assert parameters["algorithm_args"] == options
    # What a run records is read again with the same result.
    again = grpo.validate(config.model_dump(mode="json"))
    assert again.update.to_parameters() == parameters


def test_trainer_and_server_on_one_device_are_never_awake_together() -> None:
    """The server boots once SFT is over, and sleeps when it is not sampling: stages know by the engine's options."""
    pipeline = loading.find_pipeline("sft_then_grpo")
    made = pipeline.build(pipeline.configure(sets=["engine.colocate=true"]))
    templates = {template["name"]: template for template in made["spec"]["templates"]}
    tasks = {task["name"]: task.get("depends") for task in templates["main"]["dag"]["tasks"]}
    assert tasks["serve"] == "sft"
    for name in ("serve", "rollout", "evaluate"):
        words = templates[name]["container"]["args"]
        assert json.loads(words[words.index("--engine-args") + 1])["enable_sleep_mode"] is True


@pytest.mark.parametrize(
    ("sets", "source", "arguments"),
    [
        (["data=chats.jsonl"], "chats.jsonl", {}),
        (["data=hf://owner/name@main"], "hf://owner/name@main", {}),
        (["data=a/*.jsonl", "data.source_args.shuffle=false"], "a/*.jsonl", {"shuffle": False}),
        (["data=[a.jsonl, b.csv]"], "files", {"path": ["a.jsonl", "b.csv"]}),
    ],
)
def test_a_text_for_the_section_data_is_its_source(
    tmp_path: Path, sets: list[str], source: str, arguments: dict[str, Any]
) -> None:
    pipeline = loading.find_pipeline("sft")
    config: Any = pipeline.configure(sets=sets)
    assert (config.data.source, config.data.source_args) == (source, arguments)
    file = tmp_path / "c.yaml"
    file.write_text("data: chats.jsonl\n")
    config = pipeline.configure(file, ["data.train=3"])
    assert (config.data.source, config.data.train) == ("chats.jsonl", 3)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["engine=nope"], "engine.kind: 'nope': unknown; known: endpoint, transformers, vllm, or"),
        (
            ["engine=transformers", "engine.port=1"],
            "engine.port: 1: is a setting of kind vllm, not of transformers, which has args",
        ),
        (
            ["engine.fleet_has_base=true"],
            "engine.fleet_has_base: True: is now engine.weights.fleet_has_base",
        ),
        (["engine.name=vllm"], "engine.name: 'vllm': is now engine.kind"),
        (["engine.pull=true"], "engine.pull: True: is now engine.weights: --set engine.weights=pu"),
        (["engine.weights=s3://a/b"], "engine.weights.kind: 's3://a/b': is a kind, load or pull;"),
        (
            ["engine.weights=refit"],
            "engine.weights.kind: 'refit': is for engine.kind=endpoint; of vllm: load, pull",
        ),
        (
            ["engine.weights.encoding=xor"],
            "engine.weights.encoding: 'xor': is a setting of kind pull, not of load, which has no "
            "settings",
        ),
        (["engine.weights=pull", "engine.weights.encoding=x"], "engine.weights.encoding: 'x': has"),
        (
            ["engine.weights=pull", "engine.weights.fleet_has_base=true"],
            "engine.weights.fleet_has_base: True: is a setting of kind endpoint, not of vllm, whi",
        ),
        (["engine=endpoint"], "endpoint needs the address of its servers"),
        (["engine=endpoint", "engine.weights=refit"], "engine.weights.fleet: None: is required"),
        (
            ["engine=endpoint", "engine.weights.fleet=http://a:1"],
            "engine.weights.fleet: 'http://a:1': is a setting of kind refit, not of pull",
        ),
        (["engine=7"], "engine: 7: is a section: write its keys"),
        (["engine.args=7"], "engine.args: 7: has to be a mapping"),
        (
            ["engine=my.module:open_it", "engine.replicas=2"],
            "not of my.module:open_it, which has args, wei",
        ),
    ],
)
def test_an_engine_has_the_keys_of_its_kind_alone(sets: list[str], message: str) -> None:
    assert message in str(refusal(loading.find_pipeline("grpo"), None, *sets))


@pytest.mark.parametrize(
    ("pipeline", "sets", "message"),
    [
        (
            "grpo",
            ["engine.fleet=http://a:1"],
            "engine.fleet: 'http://a:1': is now engine.weights.fleet, of servers of yours alone: "
            "--set engine=endpoint --set engine.weights.kind=refit --set engine.weights.fleet=ADDRESS",
        ),
        ("grpo", ["sft.lora.r=8"], "sft.lora.r: 8: unknown key; did you mean trainer.lora.r?"),
        (
            "sft_then_grpo",
            ["sft.lora.r=8"],
            "sft.lora.r: 8: unknown key; did you mean trainer.lora.r?",
        ),
        (
            "grpo",
            ["sft.epochs=1"],
            "sft.epochs: 1: unknown key; this pipeline has no section sft, only se",
        ),
        ("grpo", ["engine.url=http://a"], "--set engine.rollout_endpoint_url=URL"),
        ("grpo", ["engine.endpoint=http://a"], "--set engine.rollout_endpoint_url=URL"),
        (
            "grpo",
            ["engine.max_model_len=512"],
            "option of the engine's own: --set engine.args.max_mode",
        ),
        ("grpo", ["engine.dtype=half"], "mean trainer.dtype? (an option of the engine's own: engi"),
        ("grpo", ["engine.replica=2"], "did you mean replicas?"),
        (
            "grpo",
            ["trainer.lora=true"],
            "trainer.lora: True: is a section: write its keys, as in trainer.lora.r=16, or leave "
            "it out with null",
        ),
        ("grpo", ["cluster.share=true"], "write its keys, as in cluster.share.group=VALUE"),
        ("grpo", ["loop=3"], "loop: 3: is a section: write its keys, as in loop.iterations=60"),
        ("grpo", ["engine=[1]"], "engine: [1]: is a section: write its keys, as in engine.kind=vl"),
        (
            "grpo",
            ["update.algorithm=nope"],
            "update.algorithm.kind: 'nope': unknown; known: cispo, dapo, dr_grpo, grpo, gspo, "
            "reinforce_plus_plus, rloo, or a dotted path pkg.mod:attr",
        ),
        ("dpo", ["preference.algorithm=nope"], "unknown; known: dpo, ipo, kto, or a dotted path"),
        ("sft_then_grpo", ["update.weight_decay=0.1"], "did you mean trainer.weight_decay?"),
        ("sft", ["sft.adam_beta1=0.8"], "did you mean trainer.adam_beta1?"),
        ("dpo", ["preference.adam_beta2=0.8"], "did you mean trainer.adam_beta2?"),
        ("sft", ["sft.max_grad_norm=0"], "did you mean trainer.max_grad_norm?"),
        ("sft", ["sft.expected_world_size=2"], "is the pipeline's own: set processes, and nodes"),
        ("grpo", ["data.preference=3"], "is for the pipeline dpo, which trains on pairs"),
        ("dpo", ["reference.max_length=9"], "is now preference.max_length, for the reference, too"),
        ("sft", ["model.publish_weights=true"], "set engine.weights.fleet_has_base"),
        ("sft", ["model.weight_encoding=xor"], "is now engine.weights.encoding"),
    ],
)
def test_a_key_that_is_elsewhere_is_named(pipeline: str, sets: list[str], message: str) -> None:
    assert message in str(refusal(loading.find_pipeline(pipeline), None, *sets))


@pytest.mark.parametrize(
    "sets",
    [
        ["engine=nope"],
        ["engine=my.module:open_it", "engine.replicas=2"],
        ["engine.weights=nope"],
        ["update.algorithm=nope"],
        ["update.algorithm.foo=1"],
        ["update.algorithm.soft_punish_cache=1"],
        ["engine.nope=1"],
    ],
)
def test_the_class_of_other_kinds_has_no_name(sets: list[str]) -> None:
    assert "plugin" not in str(refusal(loading.find_pipeline("grpo"), None, *sets))


def find_stage(pipeline: str, stage: str, *sets: str) -> Any:
    """Return the parameters of a stage, as a pipeline gives them."""
    module: Any = loading.find_pipeline(pipeline)
    specs = module.module.stages(module.configure(None, sets))
    (spec,) = [spec for spec in specs if spec.component.name == stage]
    return spec.component.validate(spec.parameters)


def test_the_optimizer_of_all_stages_is_set_once() -> None:
    sets = ("trainer.weight_decay=0.1", "trainer.max_grad_norm=2")
    for pipeline, stage in (("sft_then_grpo", "sft"), ("grpo", "policy_update")):
        parameters = find_stage(pipeline, stage, *sets)
        assert (parameters.weight_decay, parameters.max_grad_norm) == (0.1, 2.0)
    # A stage keeps its own default until the setting is there.
    assert find_stage("sft", "sft").adam_beta2 == 0.95
    assert find_stage("dpo", "preference").adam_beta2 == 0.99
    assert find_stage("sft", "sft", "trainer.adam_beta2=0.9").adam_beta2 == 0.9


def test_the_reference_scores_what_is_trained_on(smollm2: Path) -> None:
    model = f"base_model={smollm2}"
    lengths = {
        find_stage("dpo", stage, model).max_length for stage in ("reference_logprobs", "preference")
    }
    assert len(lengths) == 1 and lengths.pop() > 256


def test_an_evaluation_judges_as_the_loop_does() -> None:
    grpo = loading.find_pipeline("grpo")
    config: Any = grpo.configure(None, ["reward.timeout_s=30", "reward.error_budget=0.2"])
    assert (config.evaluate.reward_timeout_s, config.evaluate.error_budget) == (30.0, 0.2)
    judging = ["reward.punish=false", "reward.escape_score=-1", "reward.memory_mb=512"]
    config = grpo.configure(None, judging)
    assert not config.evaluate.punish
    assert (config.evaluate.escape_score, config.evaluate.memory_mb) == (-1.0, 512)
    config = grpo.configure(None, ["reward.timeout_s=30", "evaluate.reward_timeout_s=9"])
    assert config.evaluate.reward_timeout_s == 9.0


def test_an_evaluation_of_another_kind_inherits_what_it_has() -> None:
    class Benchmark(BaseModel, frozen=True, extra="forbid"):
        max_turns: int = 8

    config = loading.find_pipeline("grpo").Config.with_sections(evaluate=Benchmark)
    values = {"rollout": {"max_tokens": 5, "max_turns": 3}, "reward": {"error_budget": 0.2}}
    assert config(**values).evaluate == Benchmark(max_turns=3)


def test_a_text_for_a_section_of_several_kinds_is_its_kind(tmp_path: Path) -> None:
    grpo = loading.find_pipeline("grpo")
    assert grpo.configure(sets=["engine=transformers"]) == grpo.Config(engine="transformers")
    file = tmp_path / "c.yaml"
    file.write_text("engine: vllm\n")
    config: Any = grpo.configure(file, ["engine.weights=pull", "engine.weights.url=s3://a/b"])
    assert config.engine.publication.url == "s3://a/b" and config.engine.server.replicas == 1
    assert grpo.validate(config.model_dump(mode="json")) == config
    plugin: Any = grpo.configure(sets=["engine=my.module:open_it", "engine.args.x=1"])
    assert plugin.engine.kind == "my.module:open_it" and plugin.engine.options == {"x": 1}


@pytest.mark.parametrize("pipeline", ["sft", "sft_then_grpo"])
def test_null_for_a_section_that_must_be_there_is_its_defaults(
    pipeline: str, tmp_path: Path
) -> None:
    """A heading below which nothing is set, in a file as in ``--set``."""
    found = find_pipeline(pipeline)
    file = tmp_path / "c.yaml"
    file.write_text("sft:\n")
    assert found.configure(sets=["sft=null"]) == found.configure(file) == found.configure()


def test_an_evaluation_inherits_what_rollouts_set() -> None:
    grpo = loading.find_pipeline("grpo")
    sets = ["rollout.max_tokens=32", "rollout.environment=python", "rollout.max_turns=3"]
    sets += ["rollout.environment_args.seconds=2", "rollout.temperature=0.7"]
    config: Any = grpo.configure(sets=sets)
    evaluate = config.evaluate
    assert (evaluate.max_tokens, evaluate.environment, evaluate.max_turns) == (32, "python", 3)
    assert evaluate.environment_args == {"seconds": 2}
    assert evaluate.temperature == 0.0, "an evaluation is greedy unless it says otherwise"
    assert grpo.validate(config.model_dump(mode="json")) == config
    own: Any = grpo.configure(sets=[*sets, "evaluate.max_tokens=5", "evaluate.environment=null"])
    assert (own.evaluate.max_tokens, own.evaluate.environment_args) == (5, {})


@pytest.mark.parametrize(
    "sets, line",
    [
        (["engine.weights=pull", "engine=transformers"], "is a setting of kind"),
        (["engine.weights.encoding=foo", "engine.weights=pull"], "engine.weights.encoding: 'foo'"),
    ],
)
def test_a_kind_that_is_set_later_deletes_nothing(sets: list[str], line: str) -> None:
    with pytest.raises(UserError, match=re.escape(line)):
        find_pipeline("grpo").configure(None, sets)


def test_a_kind_keeps_what_was_set_before_it() -> None:
    sets = ["engine.args={max_model_len: 512}", "engine=vllm"]
    assert find_pipeline("grpo").configure(None, sets).engine.args == {"max_model_len": 512}
