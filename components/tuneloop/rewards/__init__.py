"""Reward functions: one file a reward."""
