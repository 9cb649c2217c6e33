"""Sources of prompts: one file a source, each with ``load(...)``."""
