"""Talk to one model with transformers: answers as text, piece by piece, as they are sampled.

This is for people who try a model. What is measured or trained on is sampled by an engine
(`tuneloop.inference.engines`), token by token and with proofs. Prompts, stop ids and decoding are
those of the engines (`formats/tokens.py`), so that a person sees what `evaluate` scored.

`tuneloop generate` is its only caller (`cli/generate.py`): nothing that it computes is stored. The
tests are `tests/unit/cli/test_generate.py`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.core.wording import format_count
from tuneloop.formats.architectures import get_context
from tuneloop.formats.chat_forms import Message
from tuneloop.formats.tokens import decode_ids, encode_prompt, load_tokenizer, stop_ids

HALF_CHARACTER = "\ufffd"
"""What a tokenizer decodes the bytes of a character to as long as some are missing."""


@dataclass(frozen=True)
class ChatOptions:
    """How answers are sampled, as the options of `tuneloop generate` say (`cli/generate.py`).

    Attributes:
        max_tokens: the most tokens of an answer.
        temperature: 0 takes the most probable token.
        seed: of the sampling; equal seeds, equal answers.
        device: as torch names it.
        dtype: of weights and arithmetic; ``auto``: float32 on a CPU, else as they are saved.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"


class LoadedModel:
    """A model directory that answers prompts.

    Args:
        directory: a Hugging Face model directory.
        is_plain: leave its chat template out: the model goes on with the text itself.

    Raises:
        UserError: the model or its tokenizer cannot be loaded, or there is no such device.
    """

    def __init__(self, directory: Path, options: ChatOptions, *, is_plain: bool = False) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        try:
            torch.empty(0, device=options.device)
        except (RuntimeError, AssertionError) as error:
            remedy = "is not here; leave it out for the CPU"
            raise UserError("--device", options.device, remedy) from error
        dtype = options.dtype
        if dtype == "auto" and options.device == "cpu":
            # As the engine `transformers`, which evaluates on CPUs, does.
            dtype = "float32"
        self.options = options
        self.tokenizer = load_tokenizer(directory)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        except (ImportError, OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError("model", str(directory), f"cannot be loaded ({reason})") from error
        # Of a model's own settings, as a repetition penalty, none is to apply: engines sample
        # without them, and a policy is not trained under them.
        model.generation_config = GenerationConfig()
        self.model = model.to(options.device).eval()
        self.stop_ids = stop_ids(self.tokenizer, directory)
        self.is_chat = bool(self.tokenizer.chat_template) and not is_plain
        self.context = get_context(self.model.config)

    def describe(self) -> str:
        """Describe how prompts become text, and what ends an answer."""
        form = "its chat template" if self.is_chat else "plain text, no chat template"
        stops = ", ".join(self.tokenizer.convert_ids_to_tokens(list(self.stop_ids)))
        limit = format_count(self.options.max_tokens, "token")
        return f"{form}; answers end at {stops} or after {limit}"

    def answer(self, messages: Sequence[Message], write: Callable[[str], None]) -> str:
        """Answer the last message, and return the whole answer.

        Args:
            messages: a chat; of a plain model only the last one's text counts.
            write: gets each piece of the answer as soon as it is known.

        Raises:
            UserError: the prompt leaves no room in the model's context, or cannot be rendered.
        """
        import torch

        prompt = json.dumps(list(messages)) if self.is_chat else str(messages[-1]["content"])
        ids = encode_prompt(self.tokenizer, prompt, self.is_chat)
        room = self._find_room(len(ids))
        streamer = _Streamer(self.tokenizer, self.stop_ids, write)
        tokens = torch.tensor([ids], device=self.options.device)
        torch.manual_seed(self.options.seed)
        sampling: dict[str, Any] = {"do_sample": False}
        if self.options.temperature:
            sampling = {
                "do_sample": True,
                "temperature": self.options.temperature,
                "top_k": 0,
                "top_p": 1.0,
            }
        with torch.inference_mode():
            self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=room,
                eos_token_id=list(self.stop_ids),
                pad_token_id=self.stop_ids[0],
                streamer=streamer,
                **sampling,
            )
        return streamer.finish()

    def _find_room(self, prompt_tokens: int) -> int:
        """Return how many tokens an answer may have after a prompt. Raises UserError: none."""
        room = self.context - prompt_tokens
        if room < 1:
            context = format_count(self.context, "token")
            remedy = f"fills the context of {context}; shorten it, or begin a new chat"
            raise UserError("prompt", format_count(prompt_tokens, "token"), remedy)
        return min(room, self.options.max_tokens)


class _Streamer:
    """Receives the ids of an answer from ``generate``, and writes their text as it is known."""

    def __init__(self, tokenizer: Any, stops: Sequence[int], write: Callable[[str], None]) -> None:
        self.tokenizer = tokenizer
        self.stops = frozenset(stops)
        self.write = write
        self.ids: list[int] = []
        self.written = ""
        self.has_prompt = False

    def put(self, value: Any) -> None:
        """Take new ids; the first call brings the prompt."""
        if not self.has_prompt:
            self.has_prompt = True
            return
        self.ids += [token for token in value.flatten().tolist() if token not in self.stops]
        text = self._decode()
        # The next token may bring the other bytes of the last character.
        if not text.endswith(HALF_CHARACTER):
            self._write(text)

    def end(self) -> None:
        """Nothing is left to do here: `finish` writes the rest."""

    def finish(self) -> str:
        """Write what was held back, and return the whole text."""
        text = self._decode()
        self._write(text)
        return text

    def _decode(self) -> str:
        return decode_ids(self.tokenizer, self.ids)

    def _write(self, text: str) -> None:
        # A tokenizer may change what it has said, as it joins pieces: that is not taken back.
        if text.startswith(self.written) and text != self.written:
            self.write(text[len(self.written) :])
            self.written = text
