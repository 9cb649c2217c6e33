"""Train a causal language model of transformers, sharded by FSDP2 over the ranks of torchrun, or
whole on one.

`policy.py` has the model, `trainer.py` the optimizer, `export.py` writes the model's files, which
`rounding.py` rounds; `attention.py` chooses the kernel, `ranks.py` joins the processes.

Parameters are float32 masters. With ``dtype="bfloat16"`` the forward and backward pass runs in
bfloat16: autocast in one process, FSDP's `MixedPrecisionPolicy` in several. A single process starts
faster, without a process group. Gradients are *summed* over micro-batches and ranks
(`Policy._place`), so a loss must be divided by the count of the whole batch; then every division
into micro-batches gives the same step.
"""
