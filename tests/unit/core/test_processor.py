"""What a processor that can not do what it advertises changes."""

import os
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from tuneloop.core import processor
from tuneloop.core.errors import UserError
from tuneloop.core.provenance import collect_provenance

WHY = "it is advertised, but SIGILL ended a bfloat16 product"
LIMITS = {"amx": "not used", "why": WHY, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}


class Machine:
    """Advertises AMX; a program on it is `run`."""

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = patch, capsys
        self._multiply = processor._multiply

    def run(self, ended_by: int = 0, tried: bool = True, **env: str) -> str:
        """What a program says that is about to multiply, and does so twice.

        Args:
            ended_by: the signal that ends a product; 0: it is really computed.
            tried: whether the program may try one.
        """
        with self._patch.context() as patch:
            for name in (processor.VARIABLE, *processor.ONEDNN, "RANK"):
                patch.setenv(name, "to be put back")
                patch.delenv(name)
            for name, value in env.items():
                patch.setenv(name, value)
            for question in ("_is_amx_tile_supported", "_is_amx_fp16_supported", "_init_amx"):
                patch.setattr(torch.cpu, question, lambda: True)
            patch.setattr(processor, "LIMITED", {})
            patch.setattr(processor, "advertises_amx", lambda: True)
            patch.setattr(
                processor, "_multiply", (lambda: _end(ended_by)) if ended_by else self._multiply
            )
            if not tried:
                patch.setattr(processor, "try_product", lambda: pytest.fail("a product was tried"))
            processor._find_here.cache_clear()
            for _ in range(2):
                processor.check_processor()
            processor._find_here.cache_clear()
            self.isa = os.environ.get("ONEDNN_MAX_CPU_ISA")
            self.amx = (
                torch.cpu._is_amx_tile_supported(),
                torch.cpu._is_amx_fp16_supported(),
                torch.cpu._init_amx(),
            )
            self.recorded: Any = collect_provenance(0.0, 1).get("processor")
        return self._capsys.readouterr().err


def _end(number: int) -> None:
    """By a signal, without what pytest's fault handler would say of it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Machine:
    return Machine(monkeypatch, capsys)


def test_a_product_that_dies_limits_onednn_and_vllm(machine: Machine) -> None:
    line = f"processor: AMX is not used ({WHY}); oneDNN and vLLM are held to AVX512_CORE_FP16\n"
    assert machine.run(ended_by=signal.SIGILL) == line
    assert (machine.isa, machine.amx, machine.recorded) == (
        "AVX512_CORE_FP16",
        (False, False, False),
        LIMITS,
    )
    assert "SIGTERM" in machine.run(ended_by=signal.SIGTERM)
    assert machine.isa == "AVX512_CORE_FP16"


def test_a_product_that_succeeds_changes_nothing(machine: Machine) -> None:
    assert machine.run() == ""
    assert (machine.isa, machine.amx, machine.recorded) == (None, (True, True, True), None)


@pytest.mark.parametrize(
    ("set_before", "then"),
    [("avx2", "avx2"), ("AVX512_CORE_AMX", "AVX512_CORE_FP16"), ("ALL", "AVX512_CORE_FP16")],
)
def test_a_lower_limit_stays(machine: Machine, set_before: str, then: str) -> None:
    machine.run(ended_by=signal.SIGILL, ONEDNN_MAX_CPU_ISA=set_before)
    assert (machine.isa, machine.recorded["ONEDNN_MAX_CPU_ISA"]) == (then, then)


def test_good_and_bad_answer_without_a_product(machine: Machine) -> None:
    machine.run(tried=False, TUNELOOP_PROCESSOR_CHECK="good")
    assert machine.recorded is None
    assert (
        machine.run(tried=False, TUNELOOP_PROCESSOR_CHECK="bad", RANK="1") == ""
    )  # the first rank's to say
    assert machine.recorded == {**LIMITS, "why": "TUNELOOP_PROCESSOR_CHECK=bad"}


def test_another_word_is_refused(machine: Machine) -> None:
    with pytest.raises(UserError, match="must be auto, good or bad"):
        machine.run(TUNELOOP_PROCESSOR_CHECK="maybe")


def test_a_child_that_fails_by_itself_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_multiply", lambda: os._exit(1))
    with pytest.raises(RuntimeError, match="TUNELOOP_PROCESSOR_CHECK"):
        processor.try_product()


def test_only_the_processors_flags_advertise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, advertised in (
        ("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile amx_int8\n", True),
        ("flags\t\t: fpu avx512_bf16\nbugs\t\t: amx_tile\n", False),
        ("Features\t: fp asimd bf16\n", False),
    ):
        (tmp_path / "cpuinfo").write_text(text)
        assert processor.advertises_amx(tmp_path / "cpuinfo") is advertised
    assert not processor.advertises_amx(tmp_path / "none")

    monkeypatch.setattr(processor, "advertises_amx", lambda: False)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a child was started"))
    monkeypatch.delenv(processor.VARIABLE, raising=False)
    processor._find_here.cache_clear()
    assert processor.find_answer()[0] == "good"
    processor._find_here.cache_clear()


def test_vllms_own_processes_get_the_limit_by_its_plugins(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    (plugin,) = project["entry-points"]["vllm.general_plugins"].values()
    assert EntryPoint("", plugin, "").load() is processor.limit_workers
    monkeypatch.setattr(processor, "check_processor", processor.limit_workers)
    machine.run(TUNELOOP_PROCESSOR_CHECK="bad")
    assert (machine.isa, machine.amx) == ("AVX512_CORE_FP16", (False, False, False))
    machine.run()  # somebody else's vLLM
    assert (machine.isa, machine.amx) == (None, (True, True, True))


@pytest.mark.skipif(not processor.advertises_amx(), reason="this processor has no AMX")
def test_the_permission_for_tiles_is_given() -> None:
    """A program that has computed nothing has no permission, and has it once the processor was checked."""
    code = """
import ctypes
from tuneloop.core import processor
mask = ctypes.c_uint64()
def has_permission():
    call = ctypes.CDLL(None).syscall(processor.ARCH_PRCTL, 0x1022, ctypes.byref(mask))
    return call == 0 and bool(mask.value >> processor.TILE_DATA & 1)
before = has_permission()
processor.request_tile_permission()
print(before, has_permission())
"""
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.split() == ["False", "True"]
