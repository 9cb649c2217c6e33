"""The steps of `benchmarks.on_gpu`. Each runs in a process of its own and records its figures."""
