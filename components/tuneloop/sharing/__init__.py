"""Runs that share accelerators: claims on devices, turns to use them, and what that costs in time."""
