"""``python -m tests.certify [--real | --cluster | --full-disk] [--seed N] [--injections N]``: make a certificate.

`--only INDEX` makes one injection of the plan alone.

With `--real`, of stages that train and sample with torch. With `--cluster`, of runs on the cluster that KUBECONFIG
names: it disturbs their pods, the controller, store and node. With `--full-disk`, of such stages on disks that are too
small, which this user has to be allowed to mount.

Exit code 1 where an injection ended otherwise than the undisturbed run; the first is named, and how to repeat it alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.certify.supervise import Task, make_certificate


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.certify", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the plan")
    parser.add_argument(
        "--cluster", action="store_true", help="on the cluster that KUBECONFIG names"
    )
    parser.add_argument(
        "--real", action="store_true", help="stages that train and sample with torch, not the toy's"
    )
    parser.add_argument(
        "--full-disk", action="store_true", help="stages that train and sample, on small disks"
    )
    parser.add_argument(
        "--injections",
        type=int,
        help="how many (default: 1000; real 50; on a cluster 30; full disks 20)",
    )
    parser.add_argument("--only", type=int, metavar="INDEX", help="this one of the plan alone")
    parser.add_argument("--kind", default="", help="those alone whose kind contains this")
    parser.add_argument(
        "--jobs", type=int, help="processes at a time (default: 2); on a cluster, runs (3)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the certificate there as JSON, too"
    )
    given = parser.parse_args(argv)
    if given.real and given.cluster:
        parser.error(
            "--real and --cluster exclude each other: the cluster's certificate is of the toy's stages"
        )
    if given.full_disk:
        return certify_small_disks(given)
    return certify_cluster(given) if given.cluster else certify_here(given)


def certify_here(given: argparse.Namespace) -> int:
    """Certify runs on this machine, and return the exit code."""
    injections = given.injections or (50 if given.real else 1000)
    made = make_certificate(
        Task(given.seed, injections, given.only, given.kind, given.real), given.jobs or 2
    )
    made.print()
    if given.output:
        given.output.write_text(made.dump())
    if made.violations:
        first = made.violations[0].injection
        what = "tests.certify --real" if given.real else "tests.certify"
        again = (
            f"python -m {what} --seed {given.seed} --injections {injections} --only {first.index}"
        )
        print(
            f"\n{len(made.violations)} violations; the first: {first}\nrepeat it alone: {again}",
            file=sys.stderr,
        )
    return bool(made.violations)


def certify_small_disks(given: argparse.Namespace) -> int:
    """Certify runs on disks that are too small, and return the exit code."""
    from tests.certify.full_disk import certify_full_disks

    certificate = certify_full_disks(given.injections or 20)
    certificate.print()
    if given.output:
        given.output.write_text(certificate.dump())
    return bool(certificate.violations)


def certify_cluster(given: argparse.Namespace) -> int:
    """Certify runs on a cluster, and return the exit code."""
    from tests.certify.cluster_rig import make_cluster_certificate

    plan = {"seed": given.seed, "injections": given.injections or 30}
    made = make_cluster_certificate(**plan, only=given.only, kind=given.kind, jobs=given.jobs or 3)
    made.print()
    if given.output:
        given.output.write_text(made.dump())
    for line in made.violations:
        print(f"violation: {line}", file=sys.stderr)
    return bool(made.violations)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
