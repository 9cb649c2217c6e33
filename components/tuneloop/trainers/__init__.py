"""Trainer backends: one file a backend."""
