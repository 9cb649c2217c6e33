"""How a command ends: errors are one line, and the exit code says whose they are."""

import os
import sys
from collections.abc import Callable

import typer

from tuneloop.core.errors import EXIT_USER, NoKeys, Retryable, UserError, find_full_disk, print_diagnostic, report_error


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code."""
    try:
        return command() or 0
    except NoKeys as error:
        return report_error(error.mistake)
    except (UserError, Retryable) as error:
        code = report_error(error)
        for other in getattr(error, "__notes__", ()):
            print_diagnostic(f"error: {other}", 0)
        return code
    except (KeyboardInterrupt, typer.Abort):
        return print_diagnostic("interrupted", 130)
    except BrokenPipeError:  # `tuneloop … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if full := find_full_disk(error):
            return report_error(full)
        raise
    except typer.TyperException as error:
        return print_diagnostic(f"error: {error.format_message()} (see --help)", EXIT_USER)
