"""A run for each combination of settings, and the runs ranked."""

from tuneloop.core.hooks import Extension

EXTENSION = Extension(
    name="sweep", commands={"sweep": "tuneloop.extensions.sweep.command:run_sweep"}
)
