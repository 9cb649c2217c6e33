"""Device leases and claim reservations: runs that share accelerators, one after the other.

This is optional: a run that shares nothing never uses it. The pods' side is drawn by
`argo.lease_sidecar` and `argo.claims`.
"""
