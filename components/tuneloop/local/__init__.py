"""The executor of rendered workflows on this machine: graph, pods as process groups, retries, the journal of a run.

Here belongs what Argo's controller and the kubelet do on a cluster. Workflows are drawn by `argo`, read by `runs`.
"""
