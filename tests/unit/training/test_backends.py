"""Trainer backends: registration, argv, and what they refuse."""

import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.waiting import until
from tuneloop.argo.lint import lint_workflow
from tuneloop.core.errors import UserError
from tuneloop.core.program import encode_value
from tuneloop.extensions.trainers.trainjob import (
    as_job,
    as_jobset,
    as_rayjob,
    as_trainjob,
    as_workflow,
    build_raycluster,
    build_rayservice,
    prepare_rayjob,
)
from tuneloop.stages.preference import preference
from tuneloop.stages.sft import sft
from tuneloop.training.backends import (
    LLMBackend,
    list_backends,
    load_backend,
    register_backend,
    run_here,
)
from tuneloop.training.backends.native import Native
from tuneloop.training.backends.torchtune import (
    LORA,
    MANAGED,
    QUANTIZED,
    RUNTIMES,
    InstructDataset,
    Lora,
    Torchtune,
    TorchtuneConfig,
)
from tuneloop.training.backends.trl import Trl, score
from tuneloop.workflow.loop import StageSpec
from tuneloop.workflow.settings import AcceleratorResources, Cluster

FULL = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o"}


@dataclass(frozen=True, kw_only=True)
class Echo(LLMBackend):
    """Prints its arguments and what torchrun is told of the world."""

    def framework(self) -> str:
        return "torch"

    def to_command(self) -> list[str]:
        return [
            "python",
            "-c",
            "import os, sys; print(os.environ['PET_NPROC_PER_NODE'], *sys.argv[1:]); sys.exit(3)",
        ]

    def to_args(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.args.items()]

    def validate(self) -> None:
        self.require("a")


def test_built_in_and_registered_ones_are_found_and_duplicates_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"native", "trl", "torchtune"} <= list_backends().keys()
    assert load_backend("trl") is Trl
    with pytest.raises(TypeError, match="abstract"):
        LLMBackend()  # type: ignore[abstract]
    with pytest.raises(UserError, match=r"is tuneloop\.training\.backends\.trl\.Trl already"):
        register_backend("trl")(Echo)
    with pytest.raises(UserError, match="known: native, torchtune, trl"):
        load_backend("nothing")
    # a third party's package, installed
    (tmp_path / "theirs.py").write_text(
        "from tuneloop.training.backends.trl import Trl\nclass Theirs(Trl): ...\n"
    )
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    entry = info / "entry_points.txt"
    entry.write_text("[tuneloop.backends]\ntheirs = theirs:Theirs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_backend("theirs").__qualname__ == "Theirs"
    assert load_backend("theirs:Theirs").__qualname__ == "Theirs"
    entry.write_text("[tuneloop.backends]\nnative = theirs:Theirs\n")
    with pytest.raises(UserError, match="already"):
        list_backends()


def test_trl_argv() -> None:
    made = Trl(
        trainer="grpo",
        args={
            **FULL,
            "bf16": False,
            "learning_rate": 1e-5,
            "reward_funcs": ["a.b", "c.d"],
            "x": None,
        },
    )
    made.validate()
    assert made.to_command() == [
        "python",
        "-m",
        "tuneloop.training.torchrun",
        "-m",
        "tuneloop.training.rank",
        "trl.scripts.grpo",
    ]
    assert made.to_args() == [
        *("--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"),
        *("--bf16", "false", "--learning_rate", "1e-05", "--reward_funcs", "a.b", "c.d"),
    ]


def test_trl_judges_rows_by_their_own_rewards() -> None:
    said = ["4", [{"role": "assistant", "content": "5"}], "4"]
    spec = '{"exact": 2.0}'
    found = score(
        said,
        ["4", "4", "4"],
        [spec, spec, '{"environment": 1.0}'],
        ["{}", "", "{}"],
        prompts=[],
        id=[],
    )
    assert found == [2.0, 0.0, None]  # the last: no episode, so nothing to judge by


@pytest.mark.parametrize(
    ("row", "function", "told"),
    [
        (
            {"prompt": "[]", "chat": True},
            "a.b",
            "holds chats as JSON, which TRL reads as plain text; fetch it by",
        ),
        (
            {"prompt": "2 + 2 =", "chat": False},
            "think_format_reward",
            "reads messages, and prompts in .* are plain",
        ),
        (
            {"prompt": [{"role": "user", "content": "?"}]},
            "accuracy_reward",
            "reads the column solution, which",
        ),
        (
            {"prompt": "2 + 2 =", "chat": False},
            "tuneloop.training.backends.trl.score",
            "reads the column answer, which",
        ),
    ],
)
def test_rows_that_trl_would_stumble_over(
    tmp_path: Path, row: dict[str, object], function: str, told: str
) -> None:
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    args = {**FULL, "dataset_name": str(tmp_path)}
    with pytest.raises(UserError, match=told):
        Trl(trainer="grpo", args={**args, "reward_funcs": function}).validate()
    kept = {**row, "chat": False, "answer": "4", "reward": "{}", "metadata": "{}"}
    pq.write_table(pa.Table.from_pylist([kept]), tmp_path / "train.parquet")
    Trl(
        trainer="grpo", args={**args, "reward_funcs": "tuneloop.training.backends.trl.score"}
    ).validate()


@pytest.mark.parametrize(
    ("model", "nodes", "processes", "args", "recipe", "config"),
    [
        ("llama3_2/1B", 1, 1, {}, "full_finetune_single_device", "llama3_2/1B_full_single_device"),
        ("llama3_2/1B", 1, 4, {}, "full_finetune_distributed", "llama3_2/1B_full"),
        ("llama3_3/70B", 2, 8, {}, "full_finetune_distributed", "llama3_3/70B_full_multinode"),
        (
            "llama3_2/3B",
            1,
            1,
            {"lora"},
            "lora_finetune_single_device",
            "llama3_2/3B_lora_single_device",
        ),
        ("llama3_2/3B", 1, 2, {"lora"}, "lora_finetune_distributed", "llama3_2/3B_lora"),
        (
            "llama3_2/1B",
            1,
            1,
            {"lora", "q"},
            "lora_finetune_single_device",
            "llama3_2/1B_qlora_single_device",
        ),
        ("llama3_3/70B", 1, 8, {"lora", "q"}, "lora_finetune_distributed", "llama3_3/70B_qlora"),
        (
            "llama3_3/70B",
            1,
            8,
            {"lora", "q", "dora"},
            "lora_finetune_distributed",
            "llama3_3/70B_lora",
        ),
        ("llama3_3/70B", 1, 8, {"lora", "no q"}, "lora_finetune_distributed", "llama3_3/70B_lora"),
        (
            "llama3_2/1B",
            1,
            1,
            {"no q"},
            "full_finetune_single_device",
            "llama3_2/1B_full_single_device",
        ),
        (
            "llama3_3/70B",
            1,
            8,
            {"lora", "no dora", "q"},
            "lora_finetune_distributed",
            "llama3_3/70B_qlora",
        ),
    ],
)
def test_torchtune_chooses_the_recipe_that_the_trainer_chooses(
    model: str, nodes: int, processes: int, args: set[str], recipe: str, config: str
) -> None:
    known = {"lora": ("model.lora_attn_modules", ["q_proj"]), "q": ("model.quantize_base", True)}
    known |= {"dora": ("model.use_dora", True), "no dora": ("model.use_dora", False)}
    known["no q"] = ("model.quantize_base", False)
    given = dict(known[name] for name in sorted(args))
    on = {**{name: value for name, value in given.items() if value is not False}, "epochs": 2}
    made = Torchtune(model=model, nodes=nodes, processes=processes, args={**given, "epochs": 2})
    made.validate()
    assert made.to_command() == ["tune", "run"]
    ranks = ["--nnodes", str(nodes), "--nproc_per_node", str(processes)]
    words = [f"{name}={encode_value(of)}" for name, of in on.items()]
    start = (
        [] if recipe.endswith("single_device") else ranks
    )  # by which `tune` knows that there are several
    assert made.to_args() == [*start, recipe, "--config", config, *words]
    # The Trainer reads of these no more than their names.
    assert made.to_runtime_args() == words


def test_torchtunes_typed_configuration_has_the_arguments_of_kubeflows_sdk() -> None:
    lora = Lora(
        apply_lora_to_mlp=True,
        apply_lora_to_output=False,
        lora_rank=8,
        lora_alpha=16,
        lora_dropout=0.5,
    )
    columns = {"input": "prompt", "output": "completion"}
    rows = InstructDataset(
        source="parquet",
        split="train[:10%]",
        train_on_input=False,
        new_system_prompt="Add.",
        column_map=columns,
    )
    loss = "torchtune.modules.loss.CEWithChunkedOutputLoss"
    config = TorchtuneConfig(
        dtype="bf16", batch_size=4, epochs=2, loss=loss, model=lora, dataset=rows
    )
    expected = [
        *("dtype=bf16", "batch_size=4", "epochs=2", f"loss={loss}"),
        *("model.apply_lora_to_mlp=True", "model.apply_lora_to_output=False", "model.lora_rank=8"),
        *(
            "model.lora_alpha=16",
            "model.lora_dropout=0.5",
            "model.lora_attn_modules=[q_proj,v_proj,output_proj]",
        ),
        *(
            "dataset=torchtune.datasets.instruct_dataset",
            "dataset.source=parquet",
            "dataset.split=train[:10%]",
        ),
        *("dataset.train_on_input=False", "dataset.new_system_prompt=Add."),
        "dataset.column_map={'input': 'prompt', 'output': 'completion'}",
    ]
    for given in (config, config.model_dump(exclude_none=True)):
        made = Torchtune(config=given)
        assert made.to_runtime_args() == expected
        assert made.recipe() == ("lora_finetune_single_device", "llama3_2/1B_lora_single_device")
    quantized = Torchtune(
        config={"model": {"quantize_base": True, "use_dora": False}}, args={"epochs": 3}
    )
    assert quantized.recipe()[1] == "llama3_2/1B_qlora_single_device"
    assert (
        quantized.to_runtime_args()[0] == "model.quantize_base=True"
        and "epochs=3" in quantized.to_args()
    )


def test_every_torchtune_job_has_a_runtime_and_the_image() -> None:
    component = Path(__file__).parents[3] / "manifests" / "components" / "trainer"
    shipped = yaml.safe_load((component / "kustomization.yaml").read_text())["resources"]
    for model in RUNTIMES:
        made = Torchtune(model=model, processes=8)
        job = as_trainjob(made, "job", Cluster())
        assert job["spec"]["trainer"]["image"] == "tuneloop/torchtune:dev"
        name = job["spec"]["runtimeRef"]["name"].removeprefix("tuneloop-")
        assert f"torchtune/{name}" in shipped
        told = yaml.safe_load((component / "torchtune" / name / "kustomization.yaml").read_text())
        command = yaml.safe_load(told["patches"][0]["patch"])[1]["value"]
        assert command[:2] == made.to_command()
        taken = {word.partition("=")[0] for word in command if "=" in word}
        assert taken >= {*MANAGED} - {"tokenizer.merges_file"} and taken <= {*MANAGED}


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (Trl(trainer="ppo", args=FULL), "is not one of TRL's scripts"),
        (Trl(args={"model_name_or_path": "m"}), "args.dataset_name: None: is required"),
        (Trl(trainer="grpo", args=FULL), "args.reward_funcs"),
        (Trl(trainer="grpo", args={**FULL, "reward_funcs": "pkg.mod:score"}), "nor a dotted path"),
        (Torchtune(model="gpt/2"), "no torchtune runtime"),
        (Torchtune(nodes=2), "must be 1 for llama3_2/1B"),
        *(
            (Torchtune(model="llama3_3/70B", nodes=2, args={name: [1]}), "must be 1 with LoRA")
            for name in (LORA, QUANTIZED)
        ),
        (
            Torchtune(config={"dtype": "fp16"}),
            "config.dtype: 'fp16': has to be 'bf16' or 'fp32'",
        ),
        (
            Torchtune(config={"model": {"lora_rnak": 8}}),
            r"config\.model\.lora_rnak: 8: unknown key",
        ),
        (Torchtune(config={"epochs": 0}), r"config\.epochs: 0: "),
        (Torchtune(model="llama3_3/70B", nodes=2, config={"model": {}}), "must be 1 with LoRA"),
        (Torchtune(processes=2, args={"model.quantize_base": True}), "processes: 2: must be 1"),
        (Torchtune(model="qwen2_5/1.5B", args={"model.quantize_base": True}), "is not supported"),
        (
            Torchtune(model="qwen2_5/1.5B", config={"model": {"quantize_base": True}}),
            "args.model.quantize_base: 'True': is not supported for qwen2_5/1.5B",
        ),
        (Native(stage="rollout"), "is not a stage that trains; name one"),
        (Native(stage="nothing"), "nothing"),
        (Native(stage="preference"), "args.policy: None: is required"),
        (Native(args={"policy": "p"}), "args.prompts"),
        (
            Native(args={"policy": "p", "prompts": "q", "checkpoint": "c", "max_steps": 0}),
            "sft.max_steps",
        ),
    ],
)
def test_refused_before_anything_starts(made: LLMBackend, told: str) -> None:
    with pytest.raises(UserError, match=told):
        made.validate()
    with pytest.raises(UserError, match=told):
        as_trainjob(made, "job", Cluster())


@pytest.mark.parametrize("name", MANAGED)
def test_paths_of_the_runtime_are_refused_in_a_trainjob_alone(name: str) -> None:
    made = Torchtune(args={name: "/data"})
    with pytest.raises(UserError, match=rf"args.{name}: '/data': is set by the runtime"):
        as_trainjob(made, "job", Cluster())
    (container,) = as_job(made, "job", Cluster())["spec"]["template"]["spec"]["containers"]
    assert f"{name}=/data" in container["args"]


def test_native_argv() -> None:
    made = Native(
        nodes=2,
        processes=3,
        args={"policy": "p", "prompts": "q", "checkpoint": "c", "max_steps": 5},
    )
    made.validate()
    assert made.to_command() == [
        "python",
        "-m",
        "tuneloop.training.torchrun",
        "-m",
        "tuneloop.stages.sft",
    ]
    given = "--policy p --prompts q --checkpoint c --max-steps 5 --expected-world-size 6"
    assert made.to_args() == given.split()


def test_one_command_in_every_form(capfd: pytest.CaptureFixture[str]) -> None:
    made = Echo(processes=2, args={"a": 1})
    job = as_trainjob(made, "tune", Cluster(queue="q"), dataset="s3://b/d#x", run="demo")
    trainer = job["spec"]["trainer"]
    assert (trainer["command"], trainer["args"]) == (made.to_command(), ["a=1"])
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (1, 2)
    assert job["spec"]["runtimeRef"]["name"] == "tuneloop-torch"
    assert job["spec"]["initializer"] == {"dataset": {"storageUri": "s3://b/d#x"}}
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    group = as_jobset(made, "tune", Cluster())["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]["spec"]
    (alone,) = as_job(made, "tune", Cluster())["spec"]["template"]["spec"]["containers"]
    for container in (group["containers"][0], alone):
        assert (container["command"], container["args"]) == (made.to_command(), ["a=1"])
        assert {"name": "PET_NPROC_PER_NODE", "value": "2"} in container["env"]
    assert run_here(made) == 3
    assert capfd.readouterr().out == "2 a=1\n"
    with pytest.raises(UserError, match="needs several machines"):
        run_here(Echo(nodes=2, args={"a": 1}))
    assert json.dumps(job)


@pytest.mark.parametrize("nodes", [1, 2])
def test_without_the_trainer_initializers_are_steps_of_argo(nodes: int) -> None:
    made = Trl(nodes=nodes, args=FULL)
    workflow = as_workflow(
        made, "tune", Cluster(), dataset="s3://b/d#sft.parquet", model="s3://b/m#model"
    )
    assert not lint_workflow(workflow)
    templates = {each["name"]: each for each in workflow["spec"]["templates"]}
    tasks = {each["name"]: each.get("depends", "") for each in templates["main"]["dag"]["tasks"]}
    assert tasks == {
        "dataset-initializer": "",
        "model-initializer": "",
        "node": "dataset-initializer && model-initializer",
    }
    words = {
        name: each["container"]["args"] for name, each in templates.items() if "container" in each
    }
    assert words == {
        "dataset-initializer": [
            "--messages",
            "--into",
            "/workspace/dataset",
            "s3://b/d#sft.parquet",
        ],
        "model-initializer": ["--into", "/workspace/model", "s3://b/m#model"],
    }
    job = yaml.safe_load(templates["node"]["resource"]["manifest"])
    assert (job["kind"], job["metadata"]["name"]) == ("JobSet", "{{workflow.name}}")
    group = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert group["parallelism"] == nodes
    pod = group["template"]["spec"]
    assert pod["containers"][0]["args"] == made.to_args()
    for volumes, mounts in (
        (
            templates["model-initializer"]["volumes"],
            templates["model-initializer"]["container"]["volumeMounts"],
        ),
        (pod["volumes"], pod["containers"][0]["volumeMounts"]),
    ):
        assert {
            "name": "workspace",
            "persistentVolumeClaim": {"claimName": "tuneloop-workspace"},
        } in volumes
        assert {"name": "workspace", "mountPath": "/workspace"} in mounts
    alone = as_workflow(made, "tune", Cluster(), model="s3://b/m#model")["spec"]["templates"]
    assert [each["name"] for each in alone] == ["node", "model-initializer", "main"]


def test_a_signal_reaches_what_runs_here(tmp_path: Path) -> None:
    class Waits(Echo):
        def to_command(self) -> list[str]:
            code = (
                "import pathlib, signal, sys; pathlib.Path(sys.argv[1][2:]).touch(); signal.pause()"
            )
            return ["python", "-c", code]

    def stop() -> None:
        until((tmp_path / "began").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert run_here(Waits(args={"a": tmp_path / "began"})) == -signal.SIGTERM
    thread.join()


def test_a_stage_by_trl_has_our_options_under_its_names() -> None:
    given = {
        "max_steps": 7,
        "dtype": "bfloat16",
        "per_device_train_batch_size": 4,
        "algorithm": "kto",
    }
    spec = StageSpec(
        preference, None, processes=3, backend="trl", algorithm_args={"beta": 0.5}, **given
    )
    assert (spec.processes, spec.parameters["expected_world_size"]) == (1, 3)
    options = preference.validate(
        {**spec.parameters, "backend_args": {"optim": "sgd"}}
    ).model_dump()
    made = Trl.build_for_stage(options, model="m", data="d", out="o")
    assert (made.trainer, made.processes) == ("kto", 3)
    words = " ".join([*made.to_args(), ""])
    for expected in (
        *(
            "--max_steps 7 ",
            "--save_steps 7 ",
            "--per_device_train_batch_size 8 ",
            "--bf16 true ",
            "--dtype float32 ",
        ),
        *(
            "--lr_scheduler_type constant_with_warmup ",
            "--beta 0.5 ",
            "--loss_type kto ",
            "--optim sgd ",
        ),
        *("--model_name_or_path m ", "--dataset_name d ", "--output_dir o "),
    ):
        assert expected in words
    for name in (
        "max_steps",
        "output_dir",
        "save_strategy",
    ):  # by which the stage finds what TRL has made
        with pytest.raises(
            UserError, match=f"gets {name} from the stage: leave it out of backend_args"
        ):
            Trl.build_for_stage(
                {**options, "backend_args": {name: 9}}, model="m", data="d", out="o"
            )


def test_of_whole_conversations_trl_learns_the_assistants_turns(tmp_path: Path) -> None:
    options, places = (
        sft.validate({}).model_dump(),
        {"model": "m", "data": str(tmp_path), "out": "o"},
    )
    for row, alone in (
        ({"prompt": "?", "completion": "!"}, None),
        ({"messages": [{"role": "user"}]}, True),
    ):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "sft.parquet")
        assert Trl.build_for_stage(options, **places).args.get("assistant_only_loss") is alone


EIGHT = Cluster(trainer=AcceleratorResources(gpus=8))


def test_data_prep_as_a_rayjob() -> None:
    given = {"source_args": {"digits": 3}, "train": 9, "prompts": "s3://b/p"}
    spec = prepare_rayjob(given, "rows", EIGHT, nodes=3)["spec"]
    assert spec["entrypoint"].startswith(
        "python -m tuneloop.stages.data_prep --source-args '{\"digits\":3}' --train 9 "
    )
    assert spec["entrypoint"].endswith("--prompts s3://b/p --preparation ray")
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == 2
    (worker,) = workers["template"]["spec"]["containers"]
    assert (
        "limits" not in worker["resources"] or "nvidia.com/gpu" not in worker["resources"]["limits"]
    )
    trains = as_rayjob(
        Native(nodes=2, args={"policy": "p", "prompts": "q", "checkpoint": "c"}), "t", EIGHT
    )
    (trainer,) = trains["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert (
        trainer["resources"]["limits"]["nvidia.com/gpu"] == "8"
        and "--gpus 8" in trains["spec"]["entrypoint"]
    )
    cluster = build_raycluster("try", EIGHT, 3)
    service = build_rayservice([{"name": "llm", "import_path": "mine:app"}], "answers", EIGHT, 3)
    assert cluster["spec"]["headGroupSpec"] == trains["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert cluster["spec"]["workerGroupSpecs"][0]["replicas"] == 2
    assert service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] == 2
    assert (
        yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["import_path"]
        == "mine:app"
    )
    assert service["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tuneloop-samplers"
    with pytest.raises(UserError, match=r"data_prep\.trian: 9: unknown"):
        prepare_rayjob({"trian": 9, "prompts": "p"}, "rows", Cluster())
    with pytest.raises(UserError, match="prompts: None: is required"):
        prepare_rayjob({"train": 9}, "rows", Cluster())
