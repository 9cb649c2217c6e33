"""Readers of what a run has committed: its record, report, summary, metrics for MLflow, retention.

Nothing here changes an artifact, and nothing here needs the cluster that the run was on.
"""
