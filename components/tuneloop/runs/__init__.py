"""Readers of what a run has committed: its record, report, summary, mirrors in trackers, retention.

Nothing here changes an artifact, and nothing here needs the cluster that the run was on.
"""
