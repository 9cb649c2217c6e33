"""Draw what a command printed: `tuneloop demo 2>&1 | python docs/images/console.py 'tuneloop demo' > run.svg`.

Long lines are cut, lines of progress left out; of what is still long the middle is, which is said. Paths below the
current folder are shown relative to it.
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 112
FIRST, LAST = 9, 13


def main() -> None:
    """Read the output from standard input and print the picture."""
    told = sys.stdin.read().rstrip().replace(f"{Path.cwd()}/", "").splitlines()
    lines = [line for line in told if not re.search(r"\w: \d+/\d+ \w", line)]
    left_out = len(lines) - FIRST - LAST
    if left_out > 0:
        lines[FIRST:-LAST] = [f"          … {left_out} lines …"]
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ {sys.argv[1]}", style="bold"))
    for line in lines:
        console.print(Text(line), overflow="ellipsis", no_wrap=True)
    picture = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=""), flags=re.S)
    print(picture)  # without fonts, which would be fetched from elsewhere


if __name__ == "__main__":
    main()
