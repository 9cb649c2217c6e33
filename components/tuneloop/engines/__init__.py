"""Rollout engines: one file an engine."""
