"""Adapters that were taken out of a checkpoint, as peft and transformers themselves load and write them."""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.making import checkpoint_artifact, prompts_artifact, rewards_artifact
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import UserError
from tuneloop.stages.export import export, write_adapter
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.sft import sft

IDS = torch.arange(3, 41)[None]


def tune(out: Path, policy: Artifact, **options: Any) -> Artifact:
    prompts = prompts_artifact(out.with_name(f"{out.name}-prompts"))
    options = {
        "max_steps": 4,
        "learning_rate": 1e-2,
        "device": "cpu",
        "save_dtype": "float32",
        **options,
    }
    sft(out=str(out), policy=policy.ref, prompts=prompts.ref, **options)
    return Artifact(str(out))


def open_model(artifact: Artifact) -> Any:
    return AutoModelForCausalLM.from_pretrained(artifact.path / "model", dtype=torch.float32)


def compute_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def check_adapter(base: Artifact, made: Artifact, folder: Path, again: Path) -> PeftConfig:
    """Load `folder` over `base` by peft and by transformers: both are the merged model, and peft writes it again."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of weights that are missing, or that nothing takes
        model = PeftModel.from_pretrained(open_model(base), str(folder))
    found = compute_logits(model)
    torch.testing.assert_close(found, compute_logits(open_model(made)), rtol=1e-4, atol=1e-4)
    assert (found - compute_logits(open_model(base))).abs().max() > 0.03
    model.save_pretrained(again)
    name = "adapter_model.safetensors"
    assert (again / name).read_bytes() == (folder / name).read_bytes()
    ours, theirs = (PeftConfig.from_pretrained(str(place)).to_dict() for place in (folder, again))
    differ = {key for key, value in ours.items() if value != theirs[key]}
    assert differ <= {"base_model_name_or_path", "inference_mode"}, (ours, theirs)
    other = open_model(base)
    other.load_adapter(str(folder))
    torch.testing.assert_close(compute_logits(other), found, rtol=1e-5, atol=1e-5)
    return model.peft_config["default"]


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
@pytest.mark.parametrize(
    "lora",
    [
        {"r": 2},
        {
            "r": 4,
            "lora_alpha": 3,
            "use_rslora": True,
            "target_modules": ["q_proj", "down_proj"],
            "lora_dropout": 0.1,
        },
        {"r": 3, "target_modules": r".*layers\.1\..*_proj"},
    ],
    ids=["all-linear", "rslora", "expression"],
)
def test_an_exported_adapter_is_what_was_trained(
    tmp_path: Path, arch: str, lora: dict[str, Any]
) -> None:
    base = checkpoint_artifact(tmp_path / "base", arch)
    made = tune(tmp_path / "sft", base, lora=lora)
    whole = export(out=str(tmp_path / "whole"), policy=made.ref)
    manifest = export(out=str(tmp_path / "model"), policy=made.ref, adapter=True)
    assert manifest.results == whole.results
    assert {
        name: each for name, each in manifest.files.items() if not name.startswith("adapter/")
    } == whole.files
    folder = Artifact(str(tmp_path / "model")).part("adapter")
    assert sorted(path.name for path in folder.iterdir()) == [
        *("README.md", "adapter_config.json", "adapter_model.safetensors"),
    ]

    state = load_file(made.part("trainer") / "rank-00000.safetensors")
    trained = {name: value for name, value in state.items() if name.startswith("model.")}
    taken = load_file(folder / "adapter_model.safetensors")
    assert (
        len(taken)
        == len(trained)
        == 2 * (14 if "target_modules" not in lora else 4 if lora["r"] == 4 else 7)
    )
    for name, value in taken.items():
        key = name.removeprefix("base_model.").replace(".lora_A.", ".lora_A.default.")
        assert value.equal(trained[key.replace(".lora_B.", ".lora_B.default.")])

    config = check_adapter(base, made, folder, tmp_path / "again")
    assert isinstance(config, LoraConfig) and config.task_type == "CAUSAL_LM"
    asked = {"lora_alpha": 32, "use_rslora": False, "lora_dropout": 0.0, **lora}
    asked.pop("target_modules", None)
    assert {name: getattr(config, name) for name in asked} == asked
    theirs = get_peft_model(
        open_model(base), LoraConfig(target_modules=lora.get("target_modules", "all-linear"), r=2)
    )
    ours = PeftModel.from_pretrained(open_model(base), str(folder))
    assert ours.base_model.targeted_module_names == theirs.base_model.targeted_module_names


def test_adapters_of_several_updates_go_over_the_base_of_the_first(tmp_path: Path) -> None:
    base = policy = tune(tmp_path / "sft", checkpoint_artifact(tmp_path / "start"), max_steps=2)
    for i in range(1, 4):
        rewards = rewards_artifact(tmp_path / f"rewards{i}", policy)
        out = f"{tmp_path}/x/iterations/{i}/policy-update"
        about = {
            "iteration": i,
            "lora": {"r": 2, "use_rslora": True},
            "save_dtype": "float32",
            "learning_rate": 1e-2,
        }
        policy_update(
            out=out, policy=policy.ref, rewards=rewards.ref, device="cpu", warmup_steps=0, **about
        )
        policy = Artifact(out)
    write_adapter(policy, tmp_path / "adapter", "me/tiny")
    check_adapter(base, policy, tmp_path / "adapter", tmp_path / "again")
    assert (
        json.loads((tmp_path / "adapter/adapter_config.json").read_text())[
            "base_model_name_or_path"
        ]
        is None
    )
    card = (tmp_path / "adapter/README.md").read_text()
    weights = hashlib.sha256((base.part("model") / "model.safetensors").read_bytes()).hexdigest()
    for said in (
        f"version 4, artifact `{policy.manifest.digest}`",
        f"version 1 of the policy, made by the stage `sft`, artifact `{base.manifest.digest}`",
        f"`model/model.safetensors` {weights}\n",
        'AutoModelForCausalLM.from_pretrained("BASE")\nmodel = PeftModel.from_pretrained(base, "me/tiny")',
    ):
        assert said in card, card
    assert "base_model:" not in card and "rank-0" not in card


@pytest.mark.parametrize(
    ("model", "revision", "found"),
    [
        ("hf://me/tiny@v1", None, ("me/tiny", "v1")),
        ("hf://gpt2", None, ("gpt2", None)),
        ("hf://me/tiny", "v2", ("me/tiny", "v2")),
        *(
            (each, None, (None, None))
            for each in ("tiny-qwen3", "/models/tiny", "a/b/c", "here/tiny")
        ),
    ],
)
def test_a_base_from_the_hub_is_named(
    tmp_path: Path, model: str, revision: str | None, found: tuple[str | None, ...]
) -> None:
    """A folder is not, nor what may have been one where `base_model` ran, nor a model that was made there."""
    start = checkpoint_artifact(tmp_path / "start")
    draft = Draft(str(tmp_path / "base"), attempt="data-test")
    (start.path / "model").rename(draft.path / "model")
    (start.path / "canary.json").rename(draft.path / "canary.json")
    params = {"model": model, "revision": revision}
    draft.commit(stage="base_model", params=params, facts={"version": 0})
    write_adapter(
        tune(tmp_path / "sft", Artifact(draft.url), lora={"r": 1}), tmp_path / "adapter", "me/lora"
    )
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == found
    card = (tmp_path / "adapter/README.md").read_text()
    assert card.startswith(
        f"---\nlibrary_name: peft\nbase_model: {found[0]}\ntags"
        if found[0]
        else "---\nlibrary_name: peft\ntags"
    )
    pin = f', revision="{found[1]}"' if found[1] else ""
    assert card.count(f'from_pretrained("{found[0] or "BASE"}"{pin})') == 2
    assert (
        f"vllm serve {found[0] or 'BASE'}{f' --revision {found[1]}' if found[1] else ''} --enable"
        in card
    )


def test_what_has_no_adapters_is_refused_in_one_line(tmp_path: Path) -> None:
    base = checkpoint_artifact(tmp_path / "base")
    whole = tune(tmp_path / "sft", base, max_steps=1)
    about = {"lora": {"r": 1}, "state_every": 2, "iteration": 1, "device": "cpu"}
    rewards = rewards_artifact(tmp_path / "rewards", base)
    policy_update(out=str(tmp_path / "update"), policy=base.ref, rewards=rewards.ref, **about)
    for policy, why in (
        (base, "is not of LoRA"),
        (whole, "is not of LoRA"),
        (Artifact(str(tmp_path / "update")), "state_every"),
    ):
        with pytest.raises(UserError, match=why) as caught:
            export(out=str(tmp_path / "model"), policy=policy.ref, adapter=True)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "model/manifest.json").exists()
