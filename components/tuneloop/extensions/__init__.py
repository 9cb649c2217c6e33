"""What most users do not need: each folder is an extension, which joins the core by its declaration alone.

Nothing outside of this package imports from it (import-linter), so that every pipeline renders and runs without it. The
declarations are `tuneloop.core.hooks.Extension`.
"""
