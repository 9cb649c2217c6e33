"""Kubeflow Pipelines: stages as container components, platform settings, runs of compiled
pipelines.

Two halves, which meet in the names of inputs, outputs and flags:

- On the machine that compiles or asks, with kfp: `pipeline`, `loop`, `template`, `task_pod`, `jobs`,
  `schedule`, `client`, `progress`, `doctor`, `local`.
- In a task's container, whose image has no kfp: the programs `configure`, `stage`, `iterations`,
  `register`, `report`, `check_data`, `launch`, and what they import. A module of this half may not
  import kfp or a module of the first; `tests/unit/kfp/test_stage.py` notices it for most programs.

A pipeline that was compiled by one release may run in images of another. So an input that a program
reads, and an output that it writes, may be absent.
"""
