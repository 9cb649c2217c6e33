"""The stages: one program each, run in a pod as ``python -m tuneloop.stages.<name>``; one file a
stage.

A stage is one function under `tuneloop.core.component.component`. It reads artifacts, writes one,
and knows no other stage, no graph and no cluster.
"""
