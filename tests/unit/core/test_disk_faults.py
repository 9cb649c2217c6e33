"""What a disk refuses ends a program with 75 and one line, whatever library says it and however."""

import errno
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.disks import NoMounts, SmallDisk, mount_small_disk
from tuneloop.core import component
from tuneloop.core.component import Results, Stage
from tuneloop.core.disk_faults import FAULTS, find_refusal
from tuneloop.core.errors import (
    EXIT_RETRY,
    EXIT_USER,
    DiskError,
    Unavailable,
    UserError,
    find_disk_error,
    name_disk_errors,
    report_errors,
)
from tuneloop.core.program import run_component
from tuneloop.core.store import Store

NUMBERS = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota used up",
    errno.EROFS: "read-only file system",
    errno.EIO: "I/O error of the disk",
}
MANY = 1 << 18
"""Numbers that are written: a MiB as float32, twice what the disk has."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk of half a MiB."""
    try:
        with mount_small_disk(tmp_path / "disk", 1 << 19) as small:
            yield small
    except NoMounts as error:
        pytest.skip(f"no disk can be mounted here: {error}")


def write_safetensors(directory: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(MANY)}, directory / "a.safetensors")


def write_torch(directory: Path) -> None:
    import torch

    torch.save(torch.zeros(MANY), directory / "a.pt")


def write_torch_to_file(directory: Path) -> None:
    import torch

    with (directory / "a.pt").open("wb") as file:
        torch.save(torch.zeros(MANY), file)


def write_distributed_checkpoint(directory: Path) -> None:
    import torch
    import torch.distributed.checkpoint

    state = {"a": torch.zeros(MANY)}
    torch.distributed.checkpoint.save(state, checkpoint_id=directory / "dcp")


def write_numpy(directory: Path) -> None:
    import numpy as np

    np.zeros(MANY, np.float32).tofile(directory / "a.bin")


def write_parquet(directory: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({"a": os.urandom(1 << 20).hex(" ").split()})
    pyarrow.parquet.write_table(table, directory / "a.parquet")


def write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {f"{number} is a word": number for number in range(40_000)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="?")).save(str(directory / "tokenizer.json"))


def write_objects(directory: Path) -> None:
    import obstore

    obstore.put(obstore.store.LocalStore(directory), "a", os.urandom(1 << 20))


def write_zstandard(directory: Path) -> None:
    import zstandard

    with (directory / "a.zst").open("wb") as file:
        with zstandard.ZstdCompressor().stream_writer(file) as out:
            out.write(os.urandom(1 << 20))


def write_database(directory: Path) -> None:
    with sqlite3.connect(directory / "a.db") as database:
        database.execute("create table t (a)")
        database.execute("insert into t values (?)", (os.urandom(1 << 20),))


def copy_tree(directory: Path) -> None:
    source = directory.parent / "source"
    source.mkdir()
    (source / "a").write_bytes(os.urandom(1 << 20))
    shutil.copytree(source, directory / "copy")


def write_text(directory: Path) -> None:
    (directory / "a").write_text("a" * (1 << 20))


WRITERS = [
    write_safetensors,
    write_torch,
    write_torch_to_file,
    write_distributed_checkpoint,
    write_numpy,
    write_parquet,
    write_tokenizer,
    write_objects,
    write_zstandard,
    write_database,
    copy_tree,
    write_text,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_full_disk_is_no_bug_whatever_library_meets_it(
    write: Callable[[Path], None], disk: SmallDisk, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those that raise errors of their own ended with 1 and a traceback: 8 of these 12."""

    def work() -> None:
        with name_disk_errors(disk.path):
            write(disk.path)

    assert run_component(work) == EXIT_RETRY
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("unavailable: "), last
    assert str(disk.path) in last and "free space there" in last, last


@component.component("thing")
def tensors(stage: Stage) -> Results:
    """Write tensors."""
    write_safetensors(stage.out)
    return {}


def test_a_stage_whose_library_meets_a_full_disk_leaves_nothing_and_resumes(
    disk: SmallDisk, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--thing", f"{disk.path}/thing"]
    assert tensors.run(words) == EXIT_RETRY
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.search(rf"{disk.path}/thing \(0\.\d of 0\.5 MB free\)", last), last
    assert [path for path in disk.path.rglob("*") if path.is_file()] == []
    disk.resize(8 << 20)
    assert tensors.run(words) == 0


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (OSError, "{0}"),
        (sqlite3.OperationalError, "{0} ({1})"),
        (RuntimeError, "I/O error: {0} (os error {1})"),
        (RuntimeError, "Error. Detail: [errno {1}] {0}"),
        (RuntimeError, "[Errno {1}] {0}: '/nowhere'"),
    ],
)
def test_each_number_is_recognized_in_the_text_of_a_library(
    number: int, kind: type[Exception], form: str
) -> None:
    error = kind(form.format(os.strerror(number), number))
    disk = find_disk_error(error, [Path("/nowhere/at/all")])
    assert disk and str(disk).startswith(f"{NUMBERS[number]}: /nowhere/at/all"), disk
    assert disk.is_read_only == (number == errno.EROFS)


@pytest.mark.parametrize("number", NUMBERS)
def test_each_number_is_found_behind_and_inside_other_errors(number: int) -> None:
    root = OSError(number, os.strerror(number), "/nowhere/file")
    wrapped = RuntimeError("it did not work")
    wrapped.__cause__ = root
    mistake = UserError("tokenizer", "/nowhere", "cannot be read; choose another")
    mistake.__context__ = root
    copies = shutil.Error([("/from", "/nowhere/file", str(root))])
    ranks = BaseException("write", {0: (root, ["a frame"])})
    for error in (root, wrapped, mistake, copies, ranks, ExceptionGroup("several", [root])):
        disk = find_disk_error(error)
        assert disk and str(disk).startswith(f"{NUMBERS[number]}: /nowhere/file"), error


def test_other_errors_are_not_of_the_disk() -> None:
    """A mistake that quotes such a text, one that hides what it was raised from, and ends of other classes."""
    quoted = UserError("prompt", "No space left on device", "write another")
    hidden = UserError("store", "/x", "choose another")
    hidden.__context__ = OSError(errno.EROFS, "Read-only file system")
    hidden.__suppress_context__ = True
    interrupted = Unavailable("the server is away")
    interrupted.__context__ = OSError(errno.ENOSPC, "No space left on device")
    others = [ValueError("400 requested"), OSError(errno.EACCES, "No"), FileNotFoundError("x")]
    for error in (quoted, hidden, interrupted, SystemExit("Input/output error"), *others):
        assert find_disk_error(error) is None, error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA driver error: unknown error (error 30)"),
        RuntimeError("curl failed (error 28)"),
        RuntimeError("NCCL: unhandled (error 5)"),
        ValueError("answer 'Input/output error' scored 0"),
        KeyError("No space left on device"),
        AssertionError("expected 'Disk quota exceeded'"),
    ],
)
def test_numbers_and_words_of_others_are_not_of_the_disk(error: Exception) -> None:
    """A bug that was taken for a fault of the disk was tried again, hidden."""
    assert find_disk_error(error) is None


def test_errors_of_torch_that_are_not_of_its_writer_are_not_of_the_disk() -> None:
    import torch
    import torch.distributed

    text = "NCCL error: unhandled system error: Input/output error (error 5)"
    for kind in (torch.OutOfMemoryError, torch.distributed.DistBackendError):
        assert find_disk_error(kind(text)) is None, kind


def test_an_error_that_refers_to_itself_is_read_to_an_end() -> None:
    error = ValueError("a")
    error.__context__ = ValueError("b")
    error.__context__.__context__ = error
    assert find_refusal(error) is None


def test_a_read_only_store_is_a_mistake_at_the_start_and_away_later(
    disk: SmallDisk, capfd: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk.path)], check=True)
    with pytest.raises(UserError, match="read-only file system; choose a writable place"):
        Store(f"{disk.path}/run").check_writable()
    with pytest.raises(DiskError, match="mount it for writing"):
        Store(f"{disk.path}/run").put("key", b"")
    assert tensors.run(["--thing", f"{disk.path}/thing"]) == EXIT_RETRY
    assert "unavailable: read-only file system: " in capfd.readouterr().err


def test_a_program_whose_log_is_on_the_full_disk_keeps_its_exit_code(tmp_path: Path) -> None:
    """The interpreter replaced it by 120, since it could not write out what was printed."""
    program = (
        "import sys; "
        "from tests.unit.core.test_disk_faults import failing; failing.main(['--thing', sys.argv[1]])"
    )
    line = [sys.executable, "-c", program, str(tmp_path / "thing")]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for environment in (buffered, buffered | {"PYTHONUNBUFFERED": "1"}):
        with open("/dev/full", "w") as full:
            done = subprocess.run(line, stdout=full, stderr=full, env=environment)
        assert done.returncode == EXIT_RETRY


@component.component("thing")
def failing(stage: Stage) -> Results:
    """Print a line, and fail as a library does on a full disk."""
    print("a line of the stage")
    raise RuntimeError("I/O error: No space left on device (os error 28)")


def test_programs_that_are_no_stages_say_so_too(capfd: pytest.CaptureFixture[str]) -> None:
    def fill() -> int:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    def err() -> int:
        raise UserError("a", 1, "another")

    assert report_errors(fill)() == EXIT_RETRY
    assert "file could not be written" in capfd.readouterr().err
    assert report_errors(err)() == EXIT_USER
    assert len(FAULTS) == 5
