"""Models pushed to a hub and loaded from it, by the real client library against a small server of its requests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.making import checkpoint_artifact, rewards_artifact
from tests.unit.hub import Repos, open_hub
from tests.waiting import free_port
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import UserError
from tuneloop.core.hub import split_hub_address
from tuneloop.extensions.provenance.attestation import CARD_HEAD, _write_card, push_version
from tuneloop.runs.run_record import Run
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.sft import sft

ROOT = Path(__file__).parents[3]


def call(
    address: str, home: Path, *words: object, token: str = "hf_secret"
) -> subprocess.CompletedProcess[str]:
    """Run Python's `words` where `address` is the hub; its library reads that when it is imported."""
    known = {
        "HF_ENDPOINT": address,
        "HF_TOKEN": token,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
    }
    known |= {
        "PYTHONPATH": f"{ROOT / 'components'}:{ROOT}",
        "no_proxy": "*",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, env={**os.environ, **known}, cwd=home.parent, capture_output=True, text=True
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A run of one checkpoint, a real model."""
    data_prep(out=f"{tmp_path}/store/x/data-prep", source="digits", train=4, eval=2, sft=2)
    base_model(out=f"{tmp_path}/store/x/base-model", prompts=f"{tmp_path}/store/x/data-prep")
    return tmp_path / "store"


def test_a_card_says_what_an_older_checkpoint_does_not_state(tmp_path: Path) -> None:
    """It ended in a KeyError, after the audit of the whole run."""
    draft = Draft(f"{tmp_path}/x/sft", attempt="data-test")
    draft.commit(stage="sft", kind="checkpoint", facts={"version": 1}, provenance={"code": "c0de"})
    run = Run.open("x", str(tmp_path))
    card = _write_card(run, run.entries[0], run.entries, CARD_HEAD.format(title="x"), "")
    assert "tuneloop not stated, code `c0de`, image `not stated`" in card


def test_a_pushed_model_has_its_card_and_is_loaded_again_by_its_revision(
    store: Path, tmp_path: Path
) -> None:
    push = ("-m", "tuneloop.cli", "push", "x", "me/tiny", "--store", store)
    with open_hub() as (address, repos):
        done = call(address, tmp_path / "home", *push)
        assert done.returncode == 0, done.stderr
        at = f"{1:040}"
        assert done.stdout.strip() == f"pushed: {address}/me/tiny/commit/{at}"
        files, model = repos["me/tiny"][-1], Artifact(f"{store}/x/base-model").part("model")
        assert {name: data for name, data in files.items() if name != "README.md"} == {
            path.name: path.read_bytes() for path in model.iterdir()
        }
        card = files["README.md"].decode()
        for said in (
            '`base-model`: model `"tiny-qwen3"`',
            "Version 0 of the run `x`",
            'from_pretrained("me/tiny")',
        ):
            assert said in card, card
        assert "sigstore" not in card and 'source `"digits"`' in card
        assert (
            "chat_template" in "".join(files) or b"chat_template" in files["tokenizer_config.json"]
        )

        repos["me/tiny"][-1]["model-00001-of-00002.safetensors"] = b"of an earlier version"
        repos["me/tiny"].append({**repos["me/tiny"][-1], "config.json": b"{}"})
        loaded = tmp_path / "loaded"
        words = (
            "-m",
            "tuneloop.stages.base_model",
            "--model",
            f"hf://me/tiny@{at}",
            "--checkpoint",
            loaded,
        )
        done = call(address, tmp_path / "home", *words)
        assert done.returncode == 0, done.stderr
        ours, theirs = (
            Artifact(str(each)).part("model") for each in (store / "x/base-model", loaded)
        )
        assert (ours / "model.safetensors").read_bytes() == (
            theirs / "model.safetensors"
        ).read_bytes()
        others = {
            "onnx/model.safetensors", "model/model.safetensors", "adapter_model.bin", "model-q8/x.safetensors",
            "experts/model-00001-of-00002.safetensors", "model-00001-of-00002.safetensors/model.safetensors",
        }  # fmt: skip
        repos["me/tiny"].append({**repos["me/tiny"][-1], **dict.fromkeys(others, b"somebody's")})
        repos["me/tiny"][-1] |= {
            "model-00002-of-00002.safetensors": b"",
            "model.safetensors.index.json": b"{}",
        }
        assert call(address, tmp_path / "home", *push).returncode == 0
        made = {
            name for name in files if not name.startswith(("model-0", "model.safetensors.index"))
        }
        assert repos["me/tiny"][-1].keys() == made | others


BEGIN = f"""
from tuneloop.cli import run_cli
from tuneloop.stages.base_model import base_model

assert run_cli(["push", "x", "me/tiny", "--store", "store"]) == 0
assert run_cli(["push", "x", "me/none", "--store", "store", "--adapter"]) == 2
base_model(out="store/y/base-model", model="hf://me/tiny@{1:040}")
"""
PUSH = """
import torch
from peft import AutoPeftModelForCausalLM

from tuneloop.cli import run_cli

for how in (["--adapter"], [], ["--adapter"]):
    assert run_cli(["push", "y", "me/lora", "--store", "store", *how]) == 0
with torch.no_grad():
    found = AutoPeftModelForCausalLM.from_pretrained("me/lora").eval()(input_ids=torch.arange(3, 41)[None]).logits
torch.save(found, "logits")
"""


def test_a_pushed_adapter_names_its_base_and_peft_loads_both(store: Path, tmp_path: Path) -> None:
    """The base was taken from the hub. In a repository a whole model and an adapter take each other's place."""
    home = tmp_path / "home"
    with open_hub() as (address, repos):
        done = call(address, home, "-c", BEGIN)
        assert done.returncode == 0, done.stderr
        refused = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(refused) == 1 and "is not of LoRA; take the whole model" in refused[0]
        assert repos.keys() == {"me/tiny"}
        about = {
            "lora": {"r": 2},
            "save_dtype": "float32",
            "learning_rate": 1e-2,
            "device": "cpu",
            "max_steps": 4,
        }
        sft(
            out=f"{store}/y/sft",
            policy=f"{store}/y/base-model",
            prompts=f"{store}/x/data-prep",
            **about,
        )
        done = call(address, home, "-c", PUSH)
        assert done.returncode == 0, done.stderr
    _, files, whole, again = repos["me/lora"]
    assert files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    config, card = json.loads(files["adapter_config.json"]), files["README.md"].decode()
    assert (config["base_model_name_or_path"], config["revision"]) == ("me/tiny", f"{1:040}")
    loads = f'("me/tiny", revision="{1:040}")\nmodel = PeftModel.from_pretrained(base, "me/lora")'
    for said in ("library_name: peft\nbase_model: me/tiny\n", loads, "Version 1 of the run `y`"):
        assert said in card, card
    assert "model.safetensors" in whole and not {
        name for name in whole if name.startswith("adapter_")
    }
    assert "model.safetensors" not in again and files.items() <= again.items()
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(
            Artifact(f"{store}/y/sft").part("model")
        ).eval()
        wanted = merged(input_ids=torch.arange(3, 41)[None]).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits"), wanted, rtol=1e-4, atol=1e-4)


def test_adapters_that_were_changed_are_not_pushed(tmp_path: Path) -> None:
    """Those of an update are an artifact below its checkpoint."""
    base = checkpoint_artifact(tmp_path / "x/sft")
    rewards = rewards_artifact(tmp_path / "x/iterations/1/reward", base)
    out = tmp_path / "x/iterations/1/policy-update"
    about = {"iteration": 1, "lora": {"r": 2}, "device": "cpu"}
    policy_update(out=str(out), policy=base.ref, rewards=rewards.ref, **about)
    file = Artifact(f"{out}/state").part("trainer") / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    run = Run.open("x", str(tmp_path))
    with pytest.raises(
        UserError, match="does not pass the audit: iterations/1/policy-update/state"
    ):
        push_version(run, run.checkpoints[-1], "me/lora", None, adapter=True)


def test_what_a_hub_refuses_is_one_line(store: Path, tmp_path: Path) -> None:
    def push(address: str, repo: str, token: str, code: int) -> str:
        words = ("-m", "tuneloop.cli", "push", "x", repo, "--store", store)
        done = call(address, tmp_path / "home", *words, token=token)
        assert done.returncode == code and done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    with open_hub() as (address, repos):
        assert (
            "error: REPO: 'me/tiny': " in (said := push(address, "me/tiny", "hf_401", 2))
            and "HF_TOKEN" in said
        )
        assert "hf auth login" in push(address, "me/tiny", "hf_403", 2)
        assert "error: REPO: 'a/b/c': " in push(address, "a/b/c", "hf_secret", 2)
        for token in ("hf_408", "hf_429", "hf_500"):
            assert push(address, "me/tiny", token, 75).startswith("unavailable: hub: me/tiny: ")
        assert repos == Repos()
    assert "hub: me/tiny: " in push(f"http://127.0.0.1:{free_port()}", "me/tiny", "hf_secret", 75)


@pytest.mark.parametrize(
    ("given", "revision", "found"),
    [
        ("hf://me/tiny@v1", None, ("me/tiny", "v1")),
        ("hf://datasets/me/rows", "v2", ("me/rows", "v2")),
        ("hf://gpt2@a/b", "a/b", ("gpt2", "a/b")),
        ("me/tiny", "v3", ("me/tiny", "v3")),
        ("/models/a@b", None, ("/models/a@b", None)),
    ],
)
def test_addresses_on_the_hub(
    given: str, revision: str | None, found: tuple[str, str | None]
) -> None:
    assert split_hub_address("model", given, revision) == found


@pytest.mark.parametrize(
    ("given", "revision", "why"),
    [
        *((given, None, f"{given}': is not an address on the hub; write hf://OWNER/NAME@REVISION")
          for given in ("hf://", "hf://a/b/c", "hf://a/b@")),
        ("hf://a/b@v1", "v2", "another revision than v2"),
    ],
)  # fmt: skip
def test_what_is_not_an_address_on_the_hub_is_refused(
    given: str, revision: str | None, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        split_hub_address("model", given, revision)
