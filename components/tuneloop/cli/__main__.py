"""``python -m tuneloop.cli``."""

from tuneloop.cli import main

main()
