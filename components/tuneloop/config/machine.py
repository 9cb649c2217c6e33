"""What the stages of a run compute on: this machine, or the pods that a cluster's settings
describe.

Rules choose by it (`config/choices.py`), and `planning/limits.py` checks against it. `tuneloop run`
reads this machine; `plan` decides by `config/rules.py: choose_machine`; what goes to a cluster is
planned by the pods alone (`planning/limits.py: read_pods`), so that equal settings render equal
files anywhere.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tuneloop.config.extended import load_sections
from tuneloop.core.json_types import JsonMapping
from tuneloop.workflow.pod_hook import list_pod_hooks

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The memory limit of the process's control group, version 2: bytes, or ``max``."""
DEVICES = Path("/dev")
"""Where NVIDIA's driver has a file for each GPU, also in containers."""
ROLES = ("trainer", "sampler", "scorer")
"""The roles of pods that may have accelerators: `ROLES` of `workflow/settings.py` without
``cpu``."""


@dataclass(frozen=True)
class Machine:
    """What stages compute on.

    Attributes:
        is_cluster: whether stages are pods, each with devices of its own; else all share this
            machine.
        trainer_gpus: accelerators of a stage that trains.
        sampler_gpus: accelerators of the rollout server.
        gpu_memory: bytes of an accelerator, of the smallest one here; None: not known, as of pods.
        memory: bytes of host memory of this machine; None: pods get what they need.
    """

    is_cluster: bool = True
    trainer_gpus: int = 0
    sampler_gpus: int = 0
    gpu_memory: int | None = None
    memory: int | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether nothing here trains on an accelerator."""
        return self.trainer_gpus == 0

    @property
    def has_shared_gpu(self) -> bool:
        """Whether trainer and rollout server have to use one accelerator."""
        return not self.is_cluster and self.trainer_gpus == 1


def describe_pods(cluster: JsonMapping) -> Machine:
    """Return what the pods of a pipeline's section `cluster` compute on."""
    gpus: dict[str, int] = {}
    for role in ROLES:
        # Nothing is validated yet: a wrong type is refused later, by its setting's name.
        resources = cluster.get(role)
        number = resources.get("gpus") if isinstance(resources, Mapping) else None
        gpus[role] = number if isinstance(number, int) else 0
    for hook in list_pod_hooks():
        devices = hook.count_devices(cluster)
        if devices is not None:
            gpus = dict.fromkeys(ROLES, devices)
    return Machine(trainer_gpus=gpus["trainer"], sampler_gpus=gpus["sampler"])


def has_pod_resources(cluster: JsonMapping) -> bool:
    """Return whether the settings describe pods: then `tuneloop plan` takes the run to be meant for
    a cluster. It goes by the sections of roles and by those that extensions add below ``cluster``;
    any other setting of ``cluster``, such as ``queue``, does not count."""
    names = [*ROLES, "cpu"]
    # What an extension adds to the section is about pods, too.
    names += [key.removeprefix("cluster.") for key in load_sections() if key.startswith("cluster.")]
    return any(cluster.get(name) for name in names)


def read_machine() -> Machine:
    """Return what stages compute on that run here. NVIDIA's devices are counted without loading
    CUDA."""
    memories = read_gpu_memories()
    return Machine(
        is_cluster=False,
        trainer_gpus=len(memories),
        sampler_gpus=len(memories),
        gpu_memory=min(memories, default=0) or None,
        memory=read_host_memory(),
    )


def read_host_memory() -> int:
    """Return the bytes of memory that processes here may use: the machine's, or less by a control
    group."""
    # A container sees the machine's memory, and is killed at the limit of its group.
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = CGROUP_LIMIT.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def read_gpu_memories() -> list[int]:
    """Return the bytes of each GPU that CUDA_VISIBLE_DEVICES leaves visible; 0 for each where
    nvidia-smi does not answer. GPUs of other vendors are not seen.

    Which GPUs the variable names does not count, only how many: those of a machine are taken to be
    alike.
    """
    # A machine without the driver's files has no GPU: it needs no process of nvidia-smi.
    devices = sorted(DEVICES.glob("nvidia[0-9]*"))
    if not devices:
        return []
    memories = query_gpu_memories() or [0] * len(devices)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return memories
    # An empty value and -1 hide devices.
    names = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return memories[: len(names)]


def query_gpu_memories() -> list[int]:
    """Return the bytes of each GPU by nvidia-smi; empty where that cannot be asked."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        # A driver that hangs must not keep a plan from being printed.
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = answer.stdout.split()
    return [int(line) << 20 for line in lines] if all(map(str.isdigit, lines)) else []
