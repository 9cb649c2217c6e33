"""How a command ends: errors are one line, and the exit code says whose they are."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import typer

from tuneloop.core.errors import EXIT_USER, NoKeys, Retryable, UserError, failed, say


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code."""
    try:
        return command() or 0
    except NoKeys as error:
        return failed(error.mistake)
    except (UserError, Retryable) as error:
        return failed(error)
    except (KeyboardInterrupt, typer.Abort):
        return say("interrupted", 130)
    except BrokenPipeError:  # `tuneloop … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except typer.TyperException as error:
        return say(f"error: {error.format_message()} (see --help)", EXIT_USER)
