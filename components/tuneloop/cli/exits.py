"""The end of a command: errors are one line, and the exit code says whether they are the user's."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import typer

from tuneloop.core import errors


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code."""
    try:
        return command() or 0
    except errors.NoKeys as error:
        return errors.report_error(error.mistake)
    except (errors.UserError, errors.Retryable) as error:
        disk = errors.find_disk_error(error)
        if disk and not disk.is_read_only:
            return errors.report_error(disk)
        code = errors.report_error(error)
        for other in getattr(error, "__notes__", ()):
            errors.print_diagnostic(f"error: {other}", 0)
        return code
    except (KeyboardInterrupt, typer.Abort):
        return errors.print_diagnostic("interrupted", 130)
    except BrokenPipeError:  # `tuneloop … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            sys.stderr.write(f"{error.format_message()}\n")
            return errors.EXIT_USER
        told = errors.shorten_text(error.format_message(), 400)
        return errors.print_diagnostic(f"error: {told} (see --help)", errors.EXIT_USER)
    except Exception as error:
        # An error while writing names no file: the free bytes of both places tell which disk it is.
        disk = errors.find_disk_error(error, [Path.cwd(), Path(tempfile.gettempdir())])
        if disk:
            return errors.report_error(disk)
        raise
