"""A run for each combination of settings, and the runs ranked.

`command.py` starts each by the function of `tuneloop run` or `tuneloop submit`; `runs.py` has all
else.
"""

from tuneloop.core.hooks import Extension

EXTENSION = Extension(
    name="sweep", commands={"sweep": "tuneloop.extensions.sweep.command:run_sweep"}
)
