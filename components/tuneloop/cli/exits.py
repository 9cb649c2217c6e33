"""The end of a command: errors are one line, and the exit code says whether they are the user's.

The programs of pods end by `core/errors.py: report_errors`, which handles fewer kinds of errors: a
class of errors that is added is looked at in both.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import typer

from tuneloop.core import errors


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code.

    Args:
        command: returns its exit code, or None for 0.

    Returns:
        The exit code of the command or of its error. Errors that are for people are printed in one
        line on standard error.

    Raises:
        Exception: anything that is a bug of ours, with its traceback.
    """
    try:
        return command() or 0
    except errors.NoKeys as error:
        return errors.report_error(error.mistake)
    except (errors.UserError, errors.Retryable) as error:
        # A full disk is the cause of many errors; a read-only one was said where it was found.
        disk = errors.find_disk_error(error)
        if disk and not disk.is_read_only:
            return errors.report_error(disk)
        code = errors.report_error(error)
        for note in getattr(error, "__notes__", ()):
            errors.print_diagnostic(f"error: {note}", 0)
        return code
    except (KeyboardInterrupt, typer.Abort):
        # 128 and the number of SIGINT, as a shell has it.
        return errors.print_diagnostic("interrupted", 130)
    except BrokenPipeError:
        # The reader of `tuneloop … | head` has ended: without this, Python's own flush of standard
        # output at exit would fail, and print that.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except typer.TyperException as error:
        message = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            # Its message is the help, which is not one line.
            sys.stderr.write(f"{message}\n")
            return errors.EXIT_USER
        line = errors.shorten_text(message, 400)
        return errors.print_diagnostic(f"error: {line} (see --help)", errors.EXIT_USER)
    except Exception as error:
        # An error while writing names no file: the free bytes of both folders tell which disk it
        # is.
        disk = errors.find_disk_error(error, [Path.cwd(), Path(tempfile.gettempdir())])
        if disk:
            return errors.report_error(disk)
        raise
