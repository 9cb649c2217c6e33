"""Kubeflow Pipelines: stages as container components, platform settings, runs of compiled
pipelines.

Nothing that runs in a task's container (`stage`, `iterations`, `launch`, …) imports kfp: the images
do not have it.
"""
