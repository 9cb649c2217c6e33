"""The command `generate`, which talks to a model that a run has made.

It loads the model with transformers in this process (`inference/chat.py`), without an engine.
"""

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tuneloop.cli.arguments import RUN, STORE
from tuneloop.cli.inspect import open_run
from tuneloop.core.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from tuneloop.core.artifacts import Artifact
    from tuneloop.formats.chat_forms import Message
    from tuneloop.inference.chat import LoadedModel
    from tuneloop.runs.run_record import Run

ChatDtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Values of ``--dtype``; `inference/chat.py` turns them into types of torch."""
DIGEST_LENGTH = len("sha256:") + 12
"""Characters of a digest that are shown; `show.py: show_weights` shows as many digits."""
INVITATION = "> "
"""What a person is asked with for the next message."""


def generate_text(
    name: RUN,
    version: Annotated[
        int | None,
        typer.Option(min=0, help="Of the policy, as `weights ls` lists it; default: the newest."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Answer this and end; default: chat, a line of standard input a message."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, help="0: the most probable token, as `evaluate` takes it.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling, with a temperature.")] = 0,
    plain: Annotated[
        bool, typer.Option("--plain", help="Leave the chat template out: go on with the text.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda, or cuda:1 for the second GPU.")
    ] = "cpu",
    dtype: Annotated[
        ChatDtype,
        typer.Option(help="Of the weights; auto: float32 on a CPU, else as they are saved."),
    ] = "auto",
    store: STORE = "runs",
) -> None:
    """Answer prompts with a model that a run has made. Streams to the terminal; needs no server.

    The model is verified by its digest first, and which version answers is said on standard error.
    Its chat template and its stop tokens are those of the exported model.
    """
    from tuneloop.inference.chat import ChatOptions, LoadedModel

    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UserError("--device", device, "has to be cpu, or cuda, or cuda:1 for the second GPU")
    run = open_run(name, store)
    artifact, number = find_model(run, version)
    directory = locate_model(artifact)
    options = ChatOptions(max_tokens, temperature, seed, device, dtype)
    model = LoadedModel(directory, options, is_plain=plain)
    if system is not None and not model.is_chat:
        raise UserError("--system", system, "is for a chat, and this model has no chat template")
    digest = artifact.manifest.facts.get("digest", artifact.manifest.digest)
    maker = artifact.url.removeprefix(f"{run.url}/")
    header = f"{name}: version {number} ({maker}, {digest[:DIGEST_LENGTH]}); {model.describe()}"
    typer.echo(header, err=True)
    messages: list[Message] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    if prompt is not None:
        answer_message(model, messages, prompt)
        return
    for line in read_messages():
        answer_message(model, messages, line)
        if not model.is_chat:
            messages.clear()


def answer_message(model: "LoadedModel", messages: "list[Message]", text: str) -> None:
    """Answer a message of the user's on standard output, and add both to the chat."""
    messages.append({"role": "user", "content": text})
    answer = model.answer(messages, lambda piece: typer.echo(piece, nl=False))
    typer.echo()
    messages.append({"role": "assistant", "content": answer})


def read_messages() -> Iterator[str]:
    """Yield the lines of standard input that are not blank; a person is asked for each."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        typer.echo("A line is a message; end with Ctrl-D.", err=True)
    while True:
        if is_terminal:
            typer.echo(INVITATION, nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip("\r\n")


def find_model(run: "Run", version: int | None) -> "tuple[Artifact, int]":
    """Find the model of a policy version, by default of the newest, and that version.

    An export is preferred to the checkpoint that it was made from: it is what others will serve.

    Raises:
        UserError: the run has no such version, or none at all.
    """
    from tuneloop.core.artifacts import Artifact
    from tuneloop.runs.stored_checkpoints import find_checkpoint

    checkpoint = find_checkpoint(run, version)
    number = checkpoint.version
    for entry in reversed(run.entries):
        is_export = entry.manifest.kind == "model" and "config.json" in entry.manifest.files
        if is_export and entry.manifest.facts.get("version") == number:
            return Artifact(f"{run.url}/{entry.key}"), number
    return Artifact(f"{run.url}/{checkpoint.key}"), number


def locate_model(artifact: "Artifact") -> "Path":
    """Return the local directory of an artifact's model, verified. Raises UserError where
    retention has deleted it."""
    if "config.json" in artifact.manifest.files:
        return artifact.path
    return artifact.part("model", remedy="name a version that has a model")
