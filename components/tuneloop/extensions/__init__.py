"""What most users do not need: each folder is an extension, which joins the core by its declaration alone.

Nothing outside of this package imports from it (import-linter), so that every pipeline renders and
runs without it. The declarations are `tuneloop.core.hooks.Extension`: the name ``EXTENSION`` in the
`__init__.py` of each folder, which is imported whenever `tuneloop` starts. No extension imports
another. A folder that is added is found by itself; it has a README, tests in
`tests/extensions/<name>` and, if it has a command, a row in docs/commands.md.
"""
