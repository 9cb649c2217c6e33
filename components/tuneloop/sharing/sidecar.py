"""Hold a device lease for the pod that this program is in: the sidecar ``lease``.

    python -m tuneloop.sharing.sidecar --group a100 --run demo --patience 30 --namespace tuneloop \
        --file /lease/lease.json

It holds the lease from the pod's start to its end. The file, which `tuneloop.core.fencing` reads in
the stage's container, exists once the lease is granted. The pod's startup probe asks for it, so
that container starts then. The lease is released when the stage asks for it (it writes a file with
the suffix `fencing.RELEASED` beside this one), at the latest on SIGTERM, which Kubernetes sends to a
sidecar when all other containers have ended. A released lease is not requested again.

A restarted sidecar goes on with the lease that the file names. If that lease was lost, the sidecar
writes so into the file and waits for the pod's end: the stage reads it, and ends. If the group
refuses the run, the file says so: the stage starts, and ends with exit code 2 and the same line.

The command line is built and parsed by `extensions.sharing`, which holds the lease itself for a pod
of the local executor.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tuneloop.core import fencing
from tuneloop.core.errors import Retryable, UserError, print_diagnostic, report_error
from tuneloop.core.program import Parser
from tuneloop.sharing.lease_queue import POLICIES
from tuneloop.sharing.lease_storage import open_lease_group
from tuneloop.sharing.leases import LeaseGroup


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of the sidecar.

    `extensions/sharing/lease_sidecar.py` writes them into rendered workflows, of earlier releases,
    too: a flag that is added has a default. `extensions/sharing/pod.py` parses them for the local
    executor, `extensions/sharing/preflight.py` to check a group before a run is submitted.
    """
    parser = Parser("python -m tuneloop.sharing.sidecar", __doc__)
    parser.add_argument("--group", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--file", required=True)
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default="fifo",
        help="which waiter is next",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=30.0,
        help="seconds after which a silent run loses its lease or request",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run as a program; never returns.

    Exit code 0 after SIGTERM, else that of the error (`core/errors.py: report_error`); Kubernetes
    starts a sidecar again after any, unless the pod ends.
    """
    flags = parse_arguments(sys.argv[1:] if argv is None else argv)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    url = f"lease://{flags.namespace}/{flags.group}"
    try:
        serve_lease(url, flags, stop)
    except (UserError, Retryable) as error:
        # While the pod ends, an error is no failure: nothing waits for this container's result.
        sys.exit(0 if stop.is_set() else report_error(error))
    sys.exit(0)


def serve_lease(url: str, flags: argparse.Namespace, stop: threading.Event) -> None:
    """Hold a device lease of the group at `url` until `stop`.

    A refusal is written to the file.

    Raises:
        UserError: the group refuses the run, and the file exists (the stage has begun, and reads
            it) or `stop` is set.
        Retryable: as `LeaseGroup.acquire`.
    """
    file = Path(flags.file)
    try:
        group = open_lease_group(
            url,
            who=flags.run,
            policy=flags.policy,
            patience=flags.patience,
        )
        hold_lease(group, file, stop)
    except UserError as error:
        if stop.is_set() or file.exists():
            raise
        # `read_lease_grant` of the stage reads `refused` before anything else: the rest is a lease
        # that never was valid.
        refusal = fencing.Grant(
            group=flags.group,
            number=0,
            ticket="",
            renewed=0,
            until=-1,
            refused=str(error),
        )
        fencing.write_lease_grant(file, refusal)
        print_diagnostic(f"lease: {error}", 0)
        # A sidecar that ends is started again: it stays until the pod ends.
        stop.wait()


def hold_lease(group: LeaseGroup, file: Path, stop: threading.Event) -> None:
    """Hold a device lease, and keep its grant in `file`, until `stop`.

    Raises:
        Retryable, UserError: as `LeaseGroup.acquire`.
    """
    if not file.exists():
        with group.acquire(stop=stop, file=file) as lease:
            print_diagnostic(f"lease: lease {lease.number} of group {group.group}", 0)
            stop.wait()
        return
    grant = fencing.Grant.model_validate_json(file.read_bytes())
    try:
        lease = group.resume(grant, stop)
    except Retryable as error:
        # The stage ends when it reads this. A new lease would let it commit after another run may
        # have used the devices.
        expired = grant.model_copy(update={"until": -1.0})
        fencing.write_lease_grant(file, expired)
        print_diagnostic(f"lease: {error}", 0)
        stop.wait()
    else:
        with lease.renewing(file):
            message = f"lease: goes on with lease {lease.number} of group {group.group}"
            print_diagnostic(message, 0)
            stop.wait()
    # Only now has the stage ended: another run may use what it held.
    group.release(grant.ticket)


if __name__ == "__main__":
    main()
