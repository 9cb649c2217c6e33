"""Pipelines and their configuration. What a setting means belongs to the package that uses it."""
