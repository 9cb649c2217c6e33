"""The client of a cluster: submit, follow and stop a run, preflight, drift, schedules; and the steps of a workflow that
themselves call the Kubernetes API.

What such a workflow looks like is drawn by `argo`; the connection is `kube`.
"""
