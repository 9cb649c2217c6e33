"""Pipelines and their configuration: finding a pipeline file, merging settings, naming the field of a mistake.

What a setting means belongs to the package that uses it.
"""
