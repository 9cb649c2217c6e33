"""tuneloop: LLM post-training loops as containerized, resumable workflow stages.

This package contains only packages, each of them a layer: docs/architecture.md has them in order.
"""

__version__ = "0.1.0"
