"""torchrun with an exit code that reflects those of its ranks: 2 for the user's mistake, 75 for
what is right when run again, any other for a bug (`core/errors.py`).

It has torchrun's own arguments. torchrun itself exits with 1 whatever happened to a rank, which a
workflow engine has to treat as a bug; and it kills ranks 30 s after it was told to stop, too soon
to commit a resume point. Here ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` is a day, so that the pod's grace
period is the limit.

`core/component.py` (`build_command`) puts it into the command of every stage of several processes,
and the backends native and trl begin theirs with it (`core/component.py: TORCHRUN`);
`extensions/trainers/kubeflow_sdk.py` refuses a command that does not.
`extensions/trainers/ray_driver.py` runs such a command on each node of a Ray cluster.
"""

import os
import signal
import sys
from collections.abc import Iterable, Sequence

from tuneloop.core.errors import EXIT_RETRY, EXIT_USER, INTERRUPTED, UNAVAILABLE, print_diagnostic


def main(argv: Sequence[str]) -> int:
    """Run torchrun and return the exit code for all ranks of this node."""
    # As torchrun sets it for several ranks of one node: results depend on the number of ranks, and
    # not on their nodes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "86400")
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(list(argv)))
    except SignalException as error:
        # The ranks have ended by now.
        return print_diagnostic(
            f"{INTERRUPTED}: torchrun: {signal.Signals(error.sigval).name}",
            EXIT_RETRY,
        )
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        print(f"torchrun: ranks ended with {codes}", file=sys.stderr, flush=True)
        return exit_code(codes.values())
    except (DistError, RendezvousError) as error:
        return print_diagnostic(
            f"{UNAVAILABLE}: torchrun: another node is missing: {error}",
            EXIT_RETRY,
        )
    return 0


def exit_code(codes: Iterable[int]) -> int:
    """Choose the exit code that explains those of several ranks; a negative one is a signal's.

    `extensions/trainers/ray_driver.py` and `cluster/launch.py` choose by it among nodes and pods.

    The code of the rank that failed first in cause takes precedence over the others', which lose a
    peer (75) or get SIGTERM.
    """
    causes = [code for code in codes if code not in (0, EXIT_RETRY, -signal.SIGTERM)]
    # The user's mistake explains most, then another exit code, then a signal.
    cause = min(causes, key=lambda code: (code != EXIT_USER, code < 0), default=EXIT_RETRY)
    return 128 - cause if cause < 0 else cause


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
