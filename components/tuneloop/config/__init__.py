"""Pipelines and their configuration. What a setting means belongs to the package that uses it.

Order of the modules: `loading.py` reads a pipeline and the user's values; `rules.py` adds what
follows the model; `pipeline.py`, `loop.py`, `engines.py`, `trainer.py` and `algorithms.py` are the
classes that the values are checked by; `refusals.py` explains what they refuse; `listing.py`
describes them.
"""
