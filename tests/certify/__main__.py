"""``python -m tests.certify [--seed N] [--injections 1000] [--only INDEX] [--output FILE]``: make a certificate.

Exit code 1 where an injection ended otherwise than the undisturbed run; the first is named, and how to repeat it alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.certify.supervise import make_certificate


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.certify", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the plan")
    parser.add_argument("--injections", type=int, default=1000, help="how many")
    parser.add_argument("--only", type=int, metavar="INDEX", help="this one of the plan alone")
    parser.add_argument("--kind", default="", help="those alone whose kind contains this")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the certificate there as JSON, too")
    given = parser.parse_args(argv)
    plan = {"seed": given.seed, "injections": given.injections}
    made = make_certificate(**plan, only=given.only, kind=given.kind, jobs=given.jobs)
    made.print()
    if given.output:
        given.output.write_text(made.dump())
    if made.violations:
        first = made.violations[0].injection
        again = f"python -m tests.certify --seed {given.seed} --injections {given.injections} --only {first.index}"
        print(f"\n{len(made.violations)} violations; the first: {first}\nrepeat it alone: {again}", file=sys.stderr)
    return bool(made.violations)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
