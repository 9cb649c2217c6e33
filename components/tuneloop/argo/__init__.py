"""The Argo adapter: stage to Hera template, lint, and the local executor."""
