"""What a machine has, read without loading CUDA: with device files and an nvidia-smi made here."""

from pathlib import Path

import pytest

from tuneloop.config import machine
from tuneloop.config.machine import describe_pods, read_gpu_memories, read_machine


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the device files of two GPUs, and a program that answers as nvidia-smi does."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81559\necho 40960\n")
    program.chmod(0o755)
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_gpus_are_counted_with_their_memory(
    two_gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_gpu_memories() == [81559 << 20, 40960 << 20]
    here = read_machine()
    assert (here.trainer_gpus, here.gpu_memory) == (2, 40960 << 20), "the smallest limits all"
    for visible, count in (("0", 1), ("0,1", 2), ("", 0), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(read_gpu_memories()) == count, visible


def test_without_nvidia_smi_the_memory_is_not_known(
    two_gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(two_gpus / "nowhere"))
    here = read_machine()
    assert (here.trainer_gpus, here.gpu_memory) == (2, None)


def test_a_control_group_limits_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine.read_host_memory()
    monkeypatch.setattr(machine, "CGROUP_LIMIT", tmp_path / "memory.max")
    physical = machine.read_host_memory()
    assert 0 < whole <= physical
    for text, limit in (("1073741824\n", 1 << 30), ("max\n", physical), (f"{1 << 60}\n", physical)):
        (tmp_path / "memory.max").write_text(text)
        assert machine.read_host_memory() == limit


def test_pods_are_what_the_settings_say() -> None:
    pods = describe_pods({"trainer": {"gpus": 4}, "sampler": {"gpus": "many"}, "cpu": 3})
    assert (pods.is_cluster, pods.trainer_gpus, pods.sampler_gpus) == (True, 4, 0)
    assert describe_pods({}).is_cpu and not describe_pods({}).has_shared_gpu
