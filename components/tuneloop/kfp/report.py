"""The report of a run, as a task of Kubeflow Pipelines: ``python -m tuneloop.kfp.report …``"""

import sys
from collections.abc import Sequence

from tuneloop.kfp.io import Task
from tuneloop.kfp.run_name import name_run
from tuneloop.runs.run_record import Run
from tuneloop.ui.report import render_page


def main(argv: Sequence[str]) -> int:
    """Write the report of a run's committed artifacts, even if the run failed.

    KFP's UI shows it as HTML, and the mean rewards of the evaluations as scalars. `pipeline.py:
    build_steps` declares the parameters and both outputs. An error here is not retried in the
    process, and not recorded in the store.
    """
    task = Task.read(argv[1])
    run = Run(name_run(task.parameters), task.parameters["store"])
    task.write("report", render_page(run))
    # One method may have judged several versions, and KFP takes one value for a name.
    rewards = {
        f"{score.method} (version {score.version})": score.value for score in run.evaluations()
    }
    task.write_metrics("rewards", rewards)
    task.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
