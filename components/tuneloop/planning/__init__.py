"""What a rendered workflow will need: pods, memory, disk, time, and the limits that it would break.

Everything is read from the rendered workflow, which carries its plan (`workflow/plan.py`), and for
costs from an earlier run, if the user names one. Nothing is launched here. `pods.py` joins plan and
graph for all other modules; `plan.py` prints, and `limits.py` refuses.
"""
