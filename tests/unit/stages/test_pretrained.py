"""A pretrained model through base_model, training and export: dtype, files, heads and tokens stay as they came."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.making import prompts_artifact, rewards_artifact, rollout_rows
from tests.models import write_model
from tests.policies import commit_prompts
from tests.unit.formats.test_model_files import read_division
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.stages.base_model import base_model
from tuneloop.stages.export import export
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.rollout import rollout
from tuneloop.stages.sft import sft


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def take(model: Path, url: Path) -> Artifact:
    base_model(out=str(url), model=str(model))
    return Artifact(str(url))


def fine_tune(policy: Artifact, url: Path, **options: Any) -> Artifact:
    """Two steps of sft on the CPU."""
    prompts = prompts_artifact(url.with_name(f"{url.name}-prompts"))
    sft(
        out=str(url),
        policy=policy.ref,
        prompts=prompts.ref,
        max_steps=2,
        device="cpu",
        **options,
    )
    return Artifact(str(url))


def update(policy: Artifact, url: Path, **options: Any) -> Artifact:
    """One update on random rollouts."""
    rows = rollout_rows(policy)
    rewards = rewards_artifact(url.with_name(f"{url.name}-rewards"), policy, rows)
    policy_update(
        out=str(url), policy=policy.ref, rewards=rewards.ref, iteration=1, device="cpu", **options
    )
    return Artifact(str(url))


@pytest.fixture(scope="module", params=["qwen3", "llama2"])
def chain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Artifact]]:
    """A model of several files in 16 bits with settings and files of its own, and every artifact made of it."""
    work = tmp_path_factory.mktemp(request.param)
    model = write_model(request.param, work / "model", max_shard_size="150KB")
    (model / "preprocessor_config.json").write_text('{"size": 224}')
    (model / "LICENSE").write_text("Apache-2.0")
    artifacts = {"base": take(model, work / "base")}
    artifacts["sft"] = fine_tune(artifacts["base"], work / "sft")
    artifacts["update"] = update(artifacts["sft"], work / "update")
    export(out=str(work / "export"), policy=artifacts["update"].ref)
    artifacts["export"] = Artifact(str(work / "export"))
    return model, artifacts


def find_models(artifacts: dict[str, Artifact]) -> dict[str, Path]:
    """Find the model directory of each artifact."""
    return {
        name: artifact.path if name == "export" else artifact.path / "model"
        for name, artifact in artifacts.items()
    }


def test_models_keep_the_dtype_that_they_came_in(chain: Any) -> None:
    source, artifacts = chain
    dtype = json.loads((source / "config.json").read_text())["dtype"]
    assert dtype in ("bfloat16", "float16")
    for name, model in find_models(artifacts).items():
        tensors = [load_file(path) for path in model.glob("*.safetensors")]
        dtypes = {str(value.dtype) for file in tensors for value in file.values()}
        assert dtypes == {f"torch.{dtype}"}, name
        assert json.loads((model / "config.json").read_text())["dtype"] == dtype
    for name in ("base", "sft", "update"):
        assert artifacts[name].manifest.facts["save_dtype"] == dtype
    masters = load_file(artifacts["sft"].path / "trainer" / "rank-00000.safetensors")
    assert {value.dtype for value in masters.values()} == {torch.float32}


def test_models_are_cut_into_the_files_that_they_came_in(chain: Any) -> None:
    source, artifacts = chain
    largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
    models = find_models(artifacts)
    for name, model in models.items():
        sizes = [path.stat().st_size for path in model.glob("*.safetensors")]
        assert len(sizes) > 2 and max(sizes) <= largest, name
        assert read_division(model) == read_division(models["base"]), name


def test_files_beside_the_weights_are_kept(chain: Any) -> None:
    source, artifacts = chain
    names = {path.name for path in source.iterdir()}
    for stage, model in find_models(artifacts).items():
        assert names <= {path.name for path in model.iterdir()}, stage
        for name in ("preprocessor_config.json", "LICENSE"):
            assert (model / name).read_bytes() == (source / name).read_bytes()


def test_settings_of_sampling_are_those_of_the_training(chain: Any) -> None:
    """The base has its own; what was trained has none, and the manifests say which were dropped."""
    source, artifacts = chain
    settings = json.loads((source / "generation_config.json").read_text())
    sampling = ("do_sample", "temperature", "top_k", "repetition_penalty")
    dropped = {name: settings[name] for name in sampling if name in settings}
    for name, model in find_models(artifacts).items():
        kept = json.loads((model / "generation_config.json").read_text())
        assert kept["eos_token_id"] == settings["eos_token_id"]
        assert {key: kept[key] for key in sampling if key in kept} == (
            dropped if name == "base" else {}
        )
        recorded = artifacts[name].manifest.facts.get("dropped_generation_settings", {})
        assert recorded == ({} if name == "base" else dropped)


def test_a_stated_dtype_wins(tmp_path: Path) -> None:
    base = take(write_model("qwen3", tmp_path / "model"), tmp_path / "base")
    tuned = fine_tune(base, tmp_path / "sft", save_dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tuned.path / "model", dtype="auto")
    assert model.dtype == torch.float32
    # What follows goes on in it.
    assert update(tuned, tmp_path / "update").manifest.facts["save_dtype"] == "float32"


def test_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    """Where the configuration says that the head is the embedding, and the weights have another one."""
    source = write_model("qwen3", tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    torch.manual_seed(1)
    embeddings = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = torch.randn_like(embeddings) / 4
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    base = take(source, tmp_path / "base")
    tuned = fine_tune(base, tmp_path / "sft")
    export(out=str(tmp_path / "export"), policy=tuned.ref)
    for model in (base.path / "model", tuned.path / "model", Artifact(f"{tmp_path}/export").path):
        assert not json.loads((model / "config.json").read_text())["tie_word_embeddings"]
        assert any("lm_head.weight" in names for names in read_division(model))
    loaded = AutoModelForCausalLM.from_pretrained(base.path / "model")
    assert torch.equal(loaded.lm_head.weight, tensors["lm_head.weight"])
    assert torch.equal(loaded.model.embed_tokens.weight, embeddings)


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    base = take(write_model("qwen3", tmp_path / "model"), tmp_path / "base")
    tuned = fine_tune(base, tmp_path / "sft")
    for model in (base.path / "model", tuned.path / "model"):
        assert json.loads((model / "config.json").read_text())["tie_word_embeddings"]
        assert not any("lm_head.weight" in names for names in read_division(model))


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has a token without an embedding, as Gemma 3's text models have."""
    model = write_model("mistral", tmp_path_factory.mktemp("longer") / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(model)
    return model


def test_a_tokenizer_with_a_token_more_than_embeddings_is_taken(
    longer: Path, tmp_path: Path
) -> None:
    base = take(longer, tmp_path / "base")
    assert base.manifest.facts["surplus_tokens"] == 1
    tuned = fine_tune(base, tmp_path / "sft")
    size = json.loads((tuned.path / "model/config.json").read_text())["vocab_size"]
    assert len(AutoTokenizer.from_pretrained(tuned.path / "model")) == size + 1
    canary = json.loads((tuned.path / "canary.json").read_text())
    assert max(canary["ids"]) < size


def test_a_row_with_such_a_token_is_named(longer: Path, tmp_path: Path) -> None:
    """Only a template can produce it, as text is never a control token."""
    model = shutil.copytree(longer, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("[INST] ", "<image_soft_token>"))
    base = take(model, tmp_path / "base")
    chat = json.dumps([{"role": "user", "content": "say 1 ="}])
    row = {"id": "sft-0000", "prompt": chat, "chat": True, "completion": "1"}
    prompts = prompts_artifact(tmp_path / "sft-prompts", [row])
    with pytest.raises(UserError, match=r"row sft-0000: token: 448: .* embeddings for 448 ids"):
        sft(out=f"{tmp_path}/sft", policy=base.ref, prompts=prompts.ref, device="cpu")
    prompts = commit_prompts(tmp_path / "prompts", [chat], chat=True)
    options = {"engine": "transformers", "prompts_per_iteration": 1, "n": 1, "max_tokens": 2}
    with pytest.raises(UserError, match=r"row p0: '<image_soft_token>': .*embeddings for 448"):
        rollout(out=f"{tmp_path}/rollout", policy=base.ref, prompts=prompts.ref, **options)


def test_an_end_of_sequence_without_an_embedding_is_refused(longer: Path, tmp_path: Path) -> None:
    model = shutil.copytree(longer, tmp_path / "model")
    change_json(model / "tokenizer_config.json", eos_token="<image_soft_token>")
    with pytest.raises(UserError, match=r"eos_token <image_soft_token> has the id \d+"):
        take(model, tmp_path / "base")


def test_padding_without_an_embedding_becomes_the_end_of_sequence(
    longer: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(longer, tmp_path / "model")
    change_json(model / "tokenizer_config.json", pad_token="<image_soft_token>")
    base = take(model, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base.path / "model")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
