"""Device leases and reservations: runs that share accelerators, one after the other. Optional: a run that shares
nothing never comes here. The pods' side is drawn by `argo.lease_sidecar` and `argo.claims`."""
