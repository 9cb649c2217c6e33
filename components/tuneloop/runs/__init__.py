"""Runs as their stores hold them: records, summaries, audits, forks, mirrors in trackers,
retention.
"""
