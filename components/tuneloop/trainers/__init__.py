"""Trainer backends: one file a backend (``fsdp``); ``_batch`` and ``_dcp`` are what they share."""
