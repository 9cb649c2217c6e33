"""Run a module as one rank of another project's trainer, so that its process ends when it is done.

``python -m tuneloop.training.rank trl.scripts.sft …`` is ``python -m trl.scripts.sft …``. With
torch 2.13 and gloo the latter hangs now and then after the model was saved, mostly on a busy
machine. The script destroys the process group, then drops its model, whose
`DistributedDataParallel` has the last reference to the group. The group's destructor waits for its
threads with the GIL held, and one of them waits for the GIL, to drop the last tensor that it sent
(similar to pytorch/pytorch issue 56297). Where Python has the last reference, the GIL is released.
So this module keeps one.

`training/backends/trl.py` and `manifests/components/trainer/trl/trl.yaml` start it.
`tests/local/test_trl.py` has a test of it.
"""

import runpy
import sys
from collections.abc import Sequence
from typing import Any

from tuneloop.core.errors import report_errors
from tuneloop.core.processor import check_processor


@report_errors
def main(argv: Sequence[str]) -> int:
    """Run the module that the first argument names as a program, with the other arguments."""
    import torch.distributed as dist

    check_processor()
    groups: list[Any] = []
    destroy_group = dist.destroy_process_group

    def keep_and_destroy(group: Any = None) -> None:
        groups.append(dist.group.WORLD)
        destroy_group(group)

    dist.destroy_process_group = keep_and_destroy
    sys.argv = list(argv)
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    # From Python, which releases the GIL while the group's threads end.
    groups.clear()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
