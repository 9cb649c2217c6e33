"""`tuneloop generate` answers with the model of a run: SmolLM2, as a checkpoint and as an export."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest

from tuneloop.cli import run_cli
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import UserError
from tuneloop.formats.rollouts import Request
from tuneloop.formats.tokens import decode_ids, encode_prompt, stop_ids
from tuneloop.inference.chat import ChatOptions, LoadedModel
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines.transformers import Transformers

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def copy_model(source: Path, target: Path) -> None:
    """Copy a model's files; as further names of the same files where the disk has them already."""
    try:
        shutil.copytree(source, target, copy_function=os.link, dirs_exist_ok=True)
    except OSError:
        shutil.copytree(source, target, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def store(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the run `r`: version 0 as a checkpoint, version 1 as checkpoint and export."""
    root = tmp_path_factory.mktemp("store")
    for version, stage in enumerate(("base-model", "sft")):
        draft = Draft(f"{root}/r/{stage}")
        copy_model(smollm2, draft.path / "model")
        draft.commit(stage=stage, role="trainer", kind="checkpoint", facts={"version": version})
    draft = Draft(f"{root}/r/export")
    copy_model(smollm2, draft.path)
    digest = Artifact(f"{root}/r/sft").manifest.digest
    draft.commit(stage="export", kind="model", facts={"version": 1, "digest": digest})
    return root


def test_the_newest_model_answers_and_is_named(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["generate", "r", "--store", str(store), "--prompt", QUESTION]) == 0
    output = capsys.readouterr()
    assert output.out == f"{ANSWER}\n"
    digest = Artifact(f"{store}/r/sft").manifest.digest[: len("sha256:") + 12]
    assert f"r: version 1 (export, {digest}); its chat template; answers end at" in output.err
    assert "<|im_end|>" in output.err


def test_lines_of_standard_input_are_one_chat(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n\nAnd of Italy?\n"))
    command = ["generate", "r", "--store", str(store), "--version", "0", "--max-tokens", "16"]
    assert run_cli(command) == 0
    output = capsys.readouterr()
    assert "r: version 0 (base-model, sha256:" in output.err
    first, second = output.out.splitlines()
    assert first == ANSWER
    # The second answer is that to the whole chat, and not to its last line alone.
    model = LoadedModel(Artifact(f"{store}/r/sft").part("model"), ChatOptions(max_tokens=16))
    chat = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "And of Italy?"},
    ]
    pieces: list[str] = []
    assert model.answer(chat, pieces.append) == second == "".join(pieces)
    assert len(pieces) > 1, "it is written as it is sampled"
    assert model.answer(chat[2:], pieces.append) != second


def test_greedy_text_is_that_of_the_engine(store: Path) -> None:
    policy = Artifact(f"{store}/r/sft")
    model = LoadedModel(policy.part("model"), ChatOptions(max_tokens=24))
    message = {"role": "user", "content": "Name three colours."}
    engine = Transformers()
    engine.load(policy)
    ids = encode_prompt(model.tokenizer, json.dumps([message]), chat=True)
    sampling = Sampling(
        temperature=0.0,
        max_tokens=24,
        stop_token_ids=stop_ids(model.tokenizer, policy.part("model")),
    )
    ((completion,),) = engine.generate([Request("a", ids, [0])], sampling, lambda _: None)
    text = decode_ids(model.tokenizer, completion.ids)
    assert model.answer([message], lambda _: None) == text != ""


def test_a_seed_decides_what_is_sampled(store: Path) -> None:
    directory = Artifact(f"{store}/r/sft").part("model")
    answers: list[str] = []
    for seed in (0, 0, 1):
        options = ChatOptions(max_tokens=16, temperature=1.0, seed=seed)
        model = LoadedModel(directory, options, is_plain=True)
        answers.append(model.answer([{"role": "user", "content": "Once"}], lambda _: None))
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--version", "7"], "--version: 7: is not in r, which has the versions v0, v1"),
        (["--plain", "--system", "s"], "is for a chat, and this model has no chat template"),
        (["--device", "cuda:9"], "--device: 'cuda:9': is not here"),
    ],
)
def test_mistakes_are_one_line(
    store: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "r", "--store", str(store), "--prompt", QUESTION, *words]
    assert run_cli(command) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1


def test_a_prompt_beyond_the_context_is_refused(store: Path) -> None:
    model = LoadedModel(Artifact(f"{store}/r/sft").part("model"), ChatOptions())
    with pytest.raises(UserError, match=r"tokens': fills the context of [\d,]+ tokens; shorten it"):
        model.answer([{"role": "user", "content": "word " * 10_000}], lambda _: None)


def test_a_run_without_a_model_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Draft(f"{tmp_path}/r/data-prep").commit(stage="data_prep", kind="prompts")
    assert run_cli(["generate", "r", "--store", str(tmp_path), "--prompt", "a"]) == 2
    assert "has made no version yet" in capsys.readouterr().err
