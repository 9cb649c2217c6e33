"""tuneloop: LLM post-training loops as containerized, resumable workflow stages."""

__version__ = "0.1.0"
