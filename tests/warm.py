"""One warm process for a whole run of the tests: ``pytest -p tests.warm``, as the Makefile does.

Every `tuneloop run` of the tests then forks its stages from that process (`tuneloop.local.warm`). So does the program
that `python` names, which stands for Python where a test, kfp's local runner or torchrun starts one with ``-m``.
Without the plugin all of them start afresh: slower, and the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.waiting import until
from tuneloop.local.processes import WARM, base_environment
from tuneloop.local.warm import READ_AT_IMPORT, READ_AT_START

MORE = ("peft", "torch.distributed.run", "uvicorn")
"""Imported besides what stages need."""
VLLM = ("vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker")
BEFORE: dict[str, str] = {}
"""This process's environment when its first test began."""


def python() -> str:
    """What stands for Python where there is a warm process."""
    return os.environ.get("PYTHON_EXEC", sys.executable)


def forked(pid: int) -> int:
    """The process that `python` stands for, started as process `pid`."""
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    return int(name.removeprefix("fork-")) if name.startswith("fork-") else pid


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--warm-vllm",
        action="store_true",
        help="have the warm process import vLLM, for many servers",
    )


def pytest_configure(config: pytest.Config) -> None:
    if WARM not in os.environ:  # else a worker of pytest-xdist, or somebody's own
        _start(config)
    BEFORE.update(os.environ)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Take back what a stage in this process, torch, or Ray has set: with it nothing is a fork of the warm process."""
    prefixes = READ_AT_IMPORT + READ_AT_START
    for name in [name for name in {*os.environ, *BEFORE} if name.startswith(prefixes)]:
        if name in BEFORE:
            os.environ[name] = BEFORE[name]
        else:
            del os.environ[name]


def _start(config: pytest.Config) -> None:
    directory = Path(tempfile.mkdtemp(prefix="tuneloop-"))
    program, path = directory / "python", directory / "socket"
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -S -E {Path(__file__).with_name("forked.py")} "$@"\n'
    )
    program.chmod(0o755)
    os.environ["PYTHON_EXEC"] = str(program)  # torchrun's own name of what starts its ranks
    os.environ.update(
        base_environment({})
    )  # what is not started by an executor is to find the same
    more = [*MORE, *VLLM] if config.getoption("--warm-vllm") else MORE
    warm = subprocess.Popen(
        [sys.executable, "-m", "tuneloop.local.warm", "stages", str(path), *more],
        stdin=subprocess.DEVNULL,
    )
    until(path.exists, child=warm)
    os.environ[WARM] = str(path)

    def end() -> None:
        warm.kill()
        warm.wait()
        shutil.rmtree(directory)

    config.add_cleanup(end)
