"""Kubeflow Pipelines: stages as container components, platform settings, runs of compiled pipelines.

Only `template`, `local` and `client` import kfp. What runs inside a stage's container (`stage`, `iterations`,
`report`, and what they use) needs tuneloop alone: the training images have no kfp in them.
"""
