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
