"""Training: policy and optimizer on any number of ranks, batches, losses of a step, checkpoints,
LLM backends.

The stages that train (`stages`) share this package. Advantages and losses themselves are in
`algorithms`.
"""
