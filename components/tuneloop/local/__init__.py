"""The executor of rendered workflows on this machine: graph, pods as process groups, retries, the journal of a run. It
does what Argo's controller and the kubelet do on a cluster. Workflows are drawn by `argo`, runs read by `runs`."""
