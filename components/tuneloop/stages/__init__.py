"""The stages: one program each, run in a pod as ``python -m tuneloop.stages.<name>``; one file a
stage.

A stage is one function under `tuneloop.core.component.component`. It reads artifacts, writes one,
and knows no other stage, no graph and no cluster.

What follows from a stage's signature:

- Its docstring is the help of its program and its page in ``docs/components``, and its first
  paragraph the text of its component on KFP; its parameters are in ``tests/golden``. `make golden`
  after a change.
- A parameter that is added needs a default that changes nothing: outputs of an earlier release do
  not have it, and a run of that release resumes only at the default (`core/component.py:
  Component._check_same_origin`). A renamed parameter counts as added; a removed one is not
  compared.
- A parameter is a setting of each pipeline that takes the stage's `settings`, unless it is among
  `config/pipeline.py: SET_BY_PIPELINE`, as those that a graph wires.
- Parameters that several stages share are a class of options, whose `flags` names those that a stage
  takes (`inference/generate.py: SHARED_FLAGS`).
- docs/stages.md has a table of all stages.
- A default that a rule replaces is in `config/rules.py: RULES`, too
  (`tests/unit/config/test_followed.py`).
- Metrics of a stage without a `role` are drawn nowhere (`runs/run_record.py: RECORDING_ROLES`).
- A stage that trains is in `config/choices.py: TRAINERS` and `LEARNING_RATES`, or no rule is for
  it.
- The kind of the output is matched by name: `kfp/template.py: TYPES`, `runs/mirroring.py`,
  `planning/plan.py`, `planning/disk.py`. What other stages read of its facts is in
  `formats/facts.py`.
"""
