"""The client of a cluster: submit, follow and stop a run, preflight, drift, schedules; and the
steps of workflows that call the Kubernetes API. Workflows are drawn by `argo`; the connection is
`kube`.
"""
