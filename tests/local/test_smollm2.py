"""A pretrained model through every stage: SmolLM2-135M-Instruct, in the dtype that it comes in."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.making import commit, prompts_artifact
from tests.policies import commit_prompts
from tests.waiting import LIMIT_S
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.formats.facts import CheckpointFacts
from tuneloop.formats.rollouts import Request
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines.transformers import Transformers
from tuneloop.stages.base_model import base_model
from tuneloop.stages.export import export
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.reward import reward
from tuneloop.stages.rollout import rollout
from tuneloop.stages.sft import sft
from tuneloop.training.distributed_checkpoint import load_tensors

pytestmark = [pytest.mark.local, pytest.mark.slow]
QUESTIONS = ["What is the capital of France?", "What is 3 + 4?"]
# Log-probabilities of bfloat16 differ from float32's by 0.05 to 0.08 on this model.
SAMPLING = {"engine": "transformers", "max_tokens": 12, "canary_tolerance": 0.5}


def ask(question: str) -> str:
    return json.dumps([{"role": "user", "content": question}])


def score(completion: str, answer: str, metadata: object) -> float:
    """Score a completion by its letters, so that completions of one prompt differ."""
    return sum(map(ord, completion)) % 100 / 100


def count_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_every_stage_and_the_export_says_what_the_engine_says(
    smollm2: Path, tmp_path: Path
) -> None:
    rows = [
        {"id": f"sft-{i}", "prompt": ask(text), "chat": True, "completion": "Paris."}
        for i, text in enumerate(QUESTIONS)
    ]
    demonstrations = prompts_artifact(tmp_path / "demonstrations", rows)
    # A reward that differs within a group, so that there is something to learn.
    score = json.dumps({f"{__name__}:score": 1.0})
    prompts = commit_prompts(
        tmp_path / "prompts", list(map(ask, QUESTIONS)), chat=True, reward=score
    )
    base_model(out=f"{tmp_path}/base", model=str(smollm2))
    training = {"device": "cpu", "warmup_steps": 0, "per_device_train_batch_size": 2}
    sft(
        out=f"{tmp_path}/sft",
        policy=f"{tmp_path}/base",
        prompts=demonstrations.ref,
        max_steps=2,
        learning_rate=2e-5,
        **training,
    )
    sampled = {"prompts_per_iteration": 2, "n": 2, "iteration": 1, **SAMPLING}
    rollout(out=f"{tmp_path}/rollout", policy=f"{tmp_path}/sft", prompts=prompts.ref, **sampled)
    reward(out=f"{tmp_path}/reward", rollouts=f"{tmp_path}/rollout")
    policy_update(
        out=f"{tmp_path}/update",
        policy=f"{tmp_path}/sft",
        rewards=f"{tmp_path}/reward",
        iteration=1,
        learning_rate=1e-5,
        **training,
    )
    export(out=f"{tmp_path}/export", policy=f"{tmp_path}/update")

    # A version takes what the model took as it came: two bytes a parameter.
    update = Artifact(f"{tmp_path}/update")
    sizes = [
        sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        for directory in (smollm2, update.path / "model", Artifact(f"{tmp_path}/export").path)
    ]
    assert max(sizes) - min(sizes) < 1e5 and sizes[0] == pytest.approx(2 * 134.5e6, rel=0.01)
    print(
        "bytes of an iteration:", count_bytes(tmp_path / "update"), "of these in model/:", sizes[1]
    )

    # The export answers as the engine does, which computes in float32 on a CPU.
    engine = Transformers()
    engine.load(update)
    directory = Artifact(f"{tmp_path}/export").path
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = []
    for question in QUESTIONS:
        ids = tokenizer.apply_chat_template(
            json.loads(ask(question)), add_generation_prompt=True, return_dict=False
        )
        stops = (tokenizer.eos_token_id,)
        ((completion,),) = engine.generate(
            [Request("r", ids, [0])], Sampling(0.0, 12, stops), lambda done: None
        )
        answer = model.generate(torch.tensor([ids]), max_new_tokens=12)[0, len(ids) :].tolist()
        assert answer == completion.ids
        texts.append(tokenizer.decode(answer, skip_special_tokens=True))
    assert "Paris" in texts[0]


def test_small_changes_of_every_parameter_reach_the_model_as_it_is_written(
    smollm2: Path, tmp_path: Path
) -> None:
    """Full fine-tuning at 2e-5 changes less than the distance of two numbers of bfloat16."""
    rows = [
        {
            "id": f"sft-{i}",
            "prompt": ask(f"What is {i} + {i}?"),
            "chat": True,
            "completion": f"The harbour office has {2 * i}.",
        }
        for i in range(1, 9)
    ]
    source = prompts_artifact(tmp_path / "source", rows)
    draft = Draft(str(tmp_path / "prompts"), attempt="data-test")
    for name in source.manifest.files:
        (draft.path / name).write_bytes(source.part(name).read_bytes())
    (draft.path / "sft_eval.parquet").write_bytes(source.part("sft.parquet").read_bytes())
    prompts = commit(tmp_path / "prompts", "data_prep")
    base_model(out=f"{tmp_path}/base", model=str(smollm2))
    sft(
        out=f"{tmp_path}/sft",
        policy=f"{tmp_path}/base",
        prompts=prompts.ref,
        max_steps=3,
        warmup_steps=0,
        learning_rate=2e-5,
        per_device_train_batch_size=8,
        device="cpu",
    )
    tuned = Artifact(f"{tmp_path}/sft")
    held_out = CheckpointFacts.read(tuned).held_out
    assert held_out is not None

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = []
    for row in rows:
        messages = json.loads(row["prompt"])
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        messages.append({"role": "assistant", "content": row["completion"]})
        whole = tokenizer.apply_chat_template(messages, return_dict=False)
        # The template's newline after the end of the turn is no target.
        texts.append((len(prompt), whole[:-1]))

    def compute_loss(model: torch.nn.Module) -> float:
        losses = []
        for start, ids in texts:
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            losses += [-float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))]
        assert len(losses) == held_out.targets
        return sum(losses) / len(losses)

    written = AutoModelForCausalLM.from_pretrained(tuned.part("model"), dtype=torch.float32)
    assert tuned.manifest.facts["save_dtype"] == "bfloat16"
    assert compute_loss(written) == pytest.approx(held_out.loss_after, rel=1e-3)
    # What rounding to the nearest would write, from the float32 parameters.
    state = {f"model.{name}": value.detach() for name, value in written.named_parameters()}
    load_tensors(state, tuned.part("trainer"))
    trained = compute_loss(written)
    with torch.no_grad():
        for value in written.parameters():
            value.copy_(value.bfloat16().float())
    nearest = compute_loss(written)
    print(
        f"loss in float32 {trained:.3f}, written {held_out.loss_after:.3f}, nearest {nearest:.3f}"
    )
    gain = held_out.loss_before - trained
    assert held_out.loss_before - held_out.loss_after > 0.95 * gain
    assert held_out.loss_before - nearest < 0.8 * gain


def test_the_demo_on_a_pretrained_model(smollm2: Path, tmp_path: Path) -> None:
    """What `make demo-smollm2` runs, with a tenth of its rows."""
    root = Path(__file__).parents[2]
    settings = {"base_model": str(smollm2), "data.sft": 48, "data.sft_eval": 16, "data.eval": 8}
    command = [sys.executable, "-m", "tuneloop.cli", "run", "sft", "--run", "small"]
    command += ["-c", str(root / "docs/samples/smollm2.yaml"), "--store", str(tmp_path)]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    subprocess.run(command, cwd=root, check=True, timeout=6 * LIMIT_S)
    held_out = CheckpointFacts.read(Artifact(f"{tmp_path}/small/sft")).held_out
    assert held_out is not None and held_out.demonstrations == 16
    assert held_out.loss_after < held_out.loss_before
    for stage in ("evaluate-before", "evaluate-after"):
        assert 0 <= Artifact(f"{tmp_path}/small/{stage}").manifest.results["mean_reward"] <= 1
