"""Device leases and claim reservations: runs that share accelerators, one after the other.

This is optional: a run that shares nothing never uses it. The setting `cluster.share`, what a
rendered workflow has for it and the checks are in `extensions/sharing`. Here is what pods run: its
module names and flags stand in workflows that were rendered by earlier releases.
``docs/sharing.md`` describes it.
"""
