"""The contract that every stage stands on: components, artifacts, the store, errors, ends, plug-ins.

Here belongs what a stage needs before it knows what it computes. Importing a module of this package
imports neither torch, Hera, KFP nor the Kubernetes client (`core/processor.py` imports torch within
functions). Nothing here knows a stage."""
