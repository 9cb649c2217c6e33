"""Multiple choice: the completion chooses the answer's letter, or says the text of that choice.

The answer is a letter, or the text of one of ``metadata["choices"]`` (a list of texts, in the order
of their letters). A completion chooses by its last box, else by its last "The answer is …" or
"Answer: …", else by all of its text or its last line: ``C``, ``(C)``, ``C. Paris``, ``Paris``. One
that names two choices has chosen none.

`data/layouts/choices.py` writes such rows. Files without ``choices`` may have a letter as the
answer.
"""

import re
import string
from collections.abc import Sequence

from tuneloop.core.json_types import JsonObject
from tuneloop.rewards.answers.extraction import find_final_answer
from tuneloop.rewards.answers.notation import normalize_notation
from tuneloop.rewards.outcomes import Unverifiable

TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
"""LaTeX's plain text in a formula, whose content is compared."""
LETTER = re.compile(
    r"(?:(?i:option|choice|answer)\s*)?\(?([A-Z])(\)?[.:]?)(?![\w'’])\s*(.*)", re.DOTALL
)
"""A letter, and what is said of it: ``C``, ``(C)``, ``Option C.``, ``C. Paris``."""
BEGINS = re.compile(r"\W*[A-Z](?![\w'])")
"""The beginning of a text that names a letter."""
ANOTHER = re.compile(r"(?:\b(?:or|and)\b|[,/&]).*\(?\b[A-Z]\b|\([A-Z]\)", re.DOTALL)
"""Another letter behind the first: two choices are none. A change of these patterns is tried on the
texts of ``tests/unit/rewards/test_choice_and_json.py``."""


def score(completion: str, answer: str, metadata: JsonObject) -> float:
    """Return 1.0 if `completion` chooses the answer, else 0.0.

    Raises:
        Unverifiable: the answer is no letter and no choice, or the choices are no texts.
    """
    choices = read_choices(metadata)
    right = find_letter(answer, choices)
    if right is None:
        raise Unverifiable(f"the answer {answer!r:.80} is no letter of a choice, and no choice")
    # Whatever the completion makes a pattern raise, it is no choice.
    try:
        return float(read_choice(completion, choices) == right)
    except MemoryError:
        # Earlier calls may hold it: a new process judges again (`judging.py: judge`).
        raise
    except Exception:
        return 0.0


def write_answers(answer: str, metadata: JsonObject) -> list[str]:
    """Write the letter in a box and in sentences, by which `rewards/proof.py` proves gold answers."""
    letter = find_letter(answer, read_choices(metadata))
    if letter is None:
        return [answer]
    return [f"\\boxed{{{letter}}}", f"The answer is ({letter}).", f"Answer: {letter}"]


def read_choices(metadata: JsonObject) -> list[str]:
    """Read the choices; empty without any. Raises Unverifiable: they are no list of texts."""
    choices = metadata.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise Unverifiable(f"metadata['choices'] is no list of texts: {choices!r:.80}")
    return choices


def read_choice(completion: str, choices: Sequence[str]) -> str | None:
    """Read which letter a completion chooses; None if it chooses none."""
    final = find_final_answer(completion)
    letter = find_letter(final.text, choices)
    # Reasons may stand before the choice, on lines of their own.
    if letter is None and final.source == "text":
        lines = final.text.splitlines()
        letter = find_letter(lines[-1], choices) if lines else None
    return letter


def find_letter(text: str, choices: Sequence[str]) -> str | None:
    """Find the letter that `text` chooses; None if it chooses none, or two."""
    plain = _simplify(text)
    letters = string.ascii_uppercase[: len(choices) or None]
    match = LETTER.fullmatch(plain)
    if match is not None and match[1] in letters:
        remainder = match[3].strip()
        if not remainder:
            return match[1]
        named = _find_text(remainder, choices)
        # After the letter stands its own text, or words that choose nothing else.
        if named is not None:
            return match[1] if named == match[1] else None
        if match[2] and not _names_another(remainder):
            return match[1]
    return _find_text(plain, choices)


def _names_another(remainder: str) -> bool:
    return BEGINS.match(remainder) is not None or ANOTHER.search(remainder) is not None


def _find_text(text: str, choices: Sequence[str]) -> str | None:
    """Find the letter of the one choice whose text this is."""
    folded = text.casefold().strip(" .")
    letters = [
        letter
        for letter, choice in zip(string.ascii_uppercase, choices)
        if _simplify(choice).casefold().strip(" .") == folded
    ]
    return letters[0] if len(letters) == 1 else None


def _simplify(text: str) -> str:
    """Take markup off a text."""
    plain = TEXT.sub(r"\1", normalize_notation(text)).replace("*", "")
    return " ".join(plain.split()).strip(" .")
