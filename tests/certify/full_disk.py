"""Stages that train and sample, on disks that are too small.

``python -m tests.certify --full-disk [--injections N]`` runs the stages of
`tests.certify.real_sequence` once on a disk with room, then on N disks whose sizes are spread over
what that run took. Each of these is full in the middle of some stage, which has to end with 75 and
a line. The disk is then given room, and the run is resumed, and has to come to the same root.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

from tests.certify.attempts import Ended, Violation, run_apart, run_until_ended
from tests.certify.check import CHANCE, Standing, compare, inspect_apart
from tests.certify.real_sequence import list_real_steps
from tests.certify.sequence import RUN, run_sequence
from tests.disks import mount_small_disk
from tuneloop.core.errors import EXIT_RETRY, UNAVAILABLE
from tuneloop.local.warm import STAGES

ROOM = 1 << 30
"""Bytes of a disk that the whole run fits."""


@dataclass(frozen=True)
class Outcome:
    """How the first attempt on a disk of `size` bytes ended, and what was not as it has to be."""

    size: int
    code: int
    message: str
    problems: Sequence[str] = ()


@dataclass
class FullDiskCertificate:
    """The outcomes of all sizes, and the `root` and the `used` bytes of the undisturbed run."""

    root: str
    used: int
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def violations(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.problems]

    def print(self) -> None:
        """Print it for people."""
        print(f"an undisturbed run takes {self.used} bytes; its root is {self.root}")
        for outcome in self.outcomes:
            print(f"{outcome.size:>10} bytes: {outcome.code} {outcome.message}")
            for problem in outcome.problems:
                print(f"           violation: {problem}")
        count = len(self.outcomes) - len(self.violations)
        print(f"ended with 75 and resumed to the same root: {count} of {len(self.outcomes)}")

    def dump(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"


def certify_full_disks(count: int) -> FullDiskCertificate:
    """Run on `count` disks that are too small. Raises NoMounts where no disk can be mounted."""
    # Each attempt is a fork of this process, in which torch has computed nothing.
    for name in STAGES:
        import_module(name)
    home = Path(tempfile.mkdtemp(prefix="certify-"))
    try:
        with mount_small_disk(home / "calm/store", ROOM) as disk:
            scratch = _make_scratch(home / "calm")
            run_until_ended(lambda number: _work(disk.path), scratch)
            used = disk.count_used()
            calm = _inspect(disk.path, scratch)
        if calm.problems:
            raise Violation(f"the undisturbed run: {calm.problems}")
        certificate = FullDiskCertificate(calm.root, used)
        for number in range(count):
            size = used * (number + 1) // (count + 1)
            certificate.outcomes.append(_try_size(home / str(number), size, calm))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return certificate


def _try_size(home: Path, size: int, calm: Standing) -> Outcome:
    with mount_small_disk(home / "store", size) as disk:
        scratch = _make_scratch(home)
        try:
            ended = run_apart(_work(disk.path), scratch)
            problems = _check_end(ended, disk.path)
            disk.resize(ROOM)
            run_until_ended(lambda number: _work(disk.path), scratch)
            problems += compare(_inspect(disk.path, scratch), calm)
        except Violation as violation:
            return Outcome(size, 1, "", (str(violation),))
    return Outcome(size, ended.code, ended.message, tuple(problems))


def _check_end(ended: Ended, disk: Path) -> list[str]:
    """List what is not right about the end of a stage on a full disk."""
    problems: list[str] = []
    if ended.code != EXIT_RETRY or not ended.message.startswith(f"{UNAVAILABLE}: "):
        problems.append(f"ended with {ended.code}, {ended.message!r}")
    if str(disk) not in ended.message:
        problems.append(f"the line does not name the disk: {ended.message!r}")
    drafts = [path for path in disk.rglob("data-*") if CHANCE.fullmatch(path.name)]
    leftovers = [str(path) for path in drafts if not _is_committed(path)]
    if leftovers:
        problems.append(f"files of the attempt that ended are left: {leftovers}")
    return problems


def _is_committed(path: Path) -> bool:
    manifest = path.with_name("manifest.json")
    return manifest.is_file() and path.name in manifest.read_text()


def _make_scratch(home: Path) -> Path:
    (home / "scratch/tmp").mkdir(parents=True)
    return home / "scratch"


def _work(disk: Path) -> Callable[[], int]:
    return lambda: run_sequence(f"file://{disk}/{RUN}", list_real_steps)


def _inspect(disk: Path, scratch: Path) -> Standing:
    return inspect_apart(RUN, f"file://{disk}", scratch)
