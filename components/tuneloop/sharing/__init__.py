"""Device leases and claim reservations: runs that share accelerators, one after the other.

This is optional: a run that shares nothing never uses it. What is set, drawn and checked for it is
`extensions.sharing`; here is what pods run, whose module names stand in rendered workflows.
"""
