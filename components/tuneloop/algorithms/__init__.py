"""Objectives: advantages and losses, one file an algorithm."""
