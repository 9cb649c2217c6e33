"""The executor of rendered workflows on this machine.

It does what Argo's controller and the kubelet do on a cluster: graphs, pods as process groups,
retries, and the journal of a run. Workflows are rendered by `argo`, and runs are read by `runs`.
"""
