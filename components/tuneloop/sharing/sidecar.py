"""Hold a turn for the pod that this program is in, from its start to its end: the sidecar ``turn``.

    python -m tuneloop.sharing.sidecar --group a100 --run demo --patience 30 --namespace tuneloop --file /turn/turn.json

The file, which `tuneloop.core.fencing` reads in the stage's container, is there once the turn has come: the pod's
startup probe asks for it, so that container starts then. The turn is given back when the stage releases it, at the
latest on SIGTERM, which Kubernetes sends to a sidecar when all other containers have ended. A restarted sidecar goes on
with the turn that the file names; where that was lost, it waits for its end, as the stage sees the loss, too, and ends.
Where the group refuses the run, the file says so: the stage starts, and ends with exit code 2 and the same line."""

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
from tuneloop.sharing.document import POLICIES
from tuneloop.sharing.places import open_turns
from tuneloop.sharing.turns import Turns


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of the sidecar, also for the local executor."""
    parser = Parser("python -m tuneloop.sharing.sidecar", __doc__)
    for name in ("group", "run", "namespace", "file"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--policy", choices=POLICIES, default="fifo", help="who is next")
    parser.add_argument(
        "--patience", type=float, default=30.0, help="seconds after which a silent one is out"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run as a program; never returns."""
    flags = parse_arguments(sys.argv[1:] if argv is None else argv)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        serve_lease(f"lease://{flags.namespace}/{flags.group}", flags, stop)
    except (UserError, Retryable) as error:
        sys.exit(0 if stop.is_set() else report_error(error))
    sys.exit(0)


def serve_lease(url: str, flags: argparse.Namespace, stop: threading.Event) -> None:
    """Hold a device lease of the group at `url` until `stop`. A refusal is written to the file or, where that exists
    (the stage has begun, and reads it) or `stop` is set, raised as UserError. Raises Retryable as `Turns.acquire`."""
    file = Path(flags.file)
    try:
        hold_lease(
            open_turns(url, who=flags.run, policy=flags.policy, patience=flags.patience), file, stop
        )
    except UserError as error:
        if stop.is_set() or file.exists():
            raise
        refusal = fencing.Grant(
            group=flags.group, number=0, ticket="", renewed=0, until=-1, refused=str(error)
        )
        fencing.write_lease_grant(file, refusal)
        print_diagnostic(f"turn: {error}", 0)
        stop.wait()


def hold_lease(turns: Turns, file: Path, stop: threading.Event) -> None:
    """Hold a device lease, and keep its grant in `file`, until `stop`. Raises as `Turns.acquire`."""
    if not file.exists():
        with turns.acquire(stop=stop, file=file) as held:
            print_diagnostic(f"turn: turn {held.number} of group {turns.group}", 0)
            stop.wait()
        return
    standing = fencing.Grant.model_validate_json(file.read_bytes())
    try:
        held = turns.resume(standing, stop)
    except Retryable as error:
        fencing.write_lease_grant(file, standing.model_copy(update={"until": -1.0}))
        print_diagnostic(f"turn: {error}", 0)
        stop.wait()
    else:
        with held.renewing(file):
            print_diagnostic(f"turn: goes on with turn {held.number} of group {turns.group}", 0)
            stop.wait()
    turns.quit(standing.ticket)  # now the stage has ended: what it held may be another's


if __name__ == "__main__":
    main()
