"""Find where brackets close, and split text outside of them."""

CLOSING = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle"}
"""Opening bracket → the one that closes it."""


def closes_at_end(text: str) -> bool:
    """Return whether the bracket that opens `text` closes at its end."""
    level = 0
    position = 0
    while position < len(text):
        for bracket in (*CLOSING, *CLOSING.values(), "{", "}"):
            if text.startswith(bracket, position):
                level += 1 if bracket in CLOSING or bracket == "{" else -1
                position += len(bracket)
                break
        else:
            position += 2 if text[position] == "\\" else 1
        if level == 0:
            return position >= len(text)
    return False


def split_outside_brackets(text: str, separators: tuple[str, ...]) -> list[str]:
    """Split `text` at separators that stand in no bracket; do not split where brackets do not
    match."""
    parts: list[str] = []
    level = 0
    begin = 0
    position = 0
    while position < len(text):
        separator = next((one for one in separators if text.startswith(one, position)), None)
        if level == 0 and separator is not None and not _goes_on(text, position, separator):
            parts.append(text[begin:position])
            position += len(separator)
            begin = position
            continue
        step = 2 if text[position] == "\\" and position + 1 < len(text) else 1
        sign = text[position + step - 1]
        if sign in "([{":
            level += 1
        elif sign in ")]}":
            level -= 1
            if level < 0:
                return [text]
        position += step
    parts.append(text[begin:])
    return parts if level == 0 else [text]


def measure_depth(text: str) -> int:
    """Count how deep brackets nest."""
    level = 0
    deepest = 0
    for sign in text:
        if sign in "([{":
            level += 1
            deepest = max(deepest, level)
        elif sign in ")]}":
            level -= 1
    return deepest


def _goes_on(text: str, position: int, separator: str) -> bool:
    """Return whether `separator`, a command, is only the beginning of a longer one."""
    end = position + len(separator)
    return separator.startswith("\\") and text[end : end + 1].isalpha()
