"""Evaluation by other harnesses: EleutherAI's lm-evaluation-harness, as a stage."""

from tuneloop.core.hooks import Extension

EXTENSION = Extension(
    name="evaluation",
    stages={"evaluate_lm_eval": "tuneloop.extensions.evaluation.evaluate_lm_eval:evaluate_lm_eval"},
)
