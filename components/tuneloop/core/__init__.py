"""The contract that every stage stands on: components, artifacts, the store, errors, ends, plug-ins.

Here belongs what a stage needs before it knows what it computes. Nothing here imports torch, Hera, KFP or the
Kubernetes client, and nothing here knows a stage."""
