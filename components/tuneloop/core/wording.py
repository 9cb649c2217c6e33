"""Words of messages that depend on numbers."""


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Format a number of things, as in ``1 row``, ``0 rows`` and ``1,234 rows``.

    Args:
        number: how many there are.
        noun: the word for one of them.
        plural: the word for several, where that is not `noun` with an ``s``.
    """
    word = noun if number == 1 else plural or f"{noun}s"
    return f"{number:,} {word}"
