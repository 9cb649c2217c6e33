"""Training: policy and optimizer on any number of ranks, batches, losses of a step, checkpoints, LLM backends.

Here belongs what the stages that train have in common. Advantages and losses themselves are in `algorithms`, the
stages in `stages`.
"""
