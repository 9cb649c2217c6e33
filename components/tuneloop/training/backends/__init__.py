"""Training programs, of tuneloop and of others, each as a command that any launcher can start.

A backend is one file here, or an entry point in the group ``tuneloop.backends``::

    @register_backend("mine")
    @dataclass(frozen=True, kw_only=True)
    class Mine(LLMBackend): ...

The launcher of several ranks reads torchrun's environment (``PET_NNODES``, ``PET_NPROC_PER_NODE``,
``PET_NODE_RANK``, ``PET_MASTER_ADDR``, ``PET_MASTER_PORT``), which Kubeflow Trainer sets in a
TrainJob's pods and `tuneloop.extensions.trainers.trainjob` in all others. So a command names no
addresses, and is the same in a TrainJob, a JobSet, a pod and here.

Two things use a backend: `extensions/trainers/trainjob.py` renders any as a job of its own, and
`training/delegation.py` lets one train for the stages `sft` and `preference`.
"""

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import ClassVar, TypeVar

from tuneloop.core import plugins
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.program import encode_value
from tuneloop.core.threads import forward_signals

_registered: "dict[str, type[LLMBackend]]" = {}


@dataclass(frozen=True, kw_only=True)
class LLMBackend(ABC):
    """A trainer to run.

    Attributes:
        image: the image of tuneloop that contains it (``<image>-libraries`` in
            ``images/Dockerfile``).
        nodes: the pods.
        processes: ranks in each pod.
        args: the trainer's options, under its own names.
    """

    image: ClassVar[str] = "trainer"
    nodes: int = 1
    processes: int = 1
    args: JsonMapping = field(default_factory=dict)

    @abstractmethod
    def framework(self) -> str:
        """Return the value of the label ``trainer.kubeflow.org/framework`` of its runtime, which
        has to be among those of ``manifests/components/trainer``.
        """

    def get_runtime_name(self) -> str:
        """Return the name of the runtime in ``manifests/components/trainer`` that a TrainJob refers
        to.
        """
        return f"tuneloop-{self.framework()}"

    @abstractmethod
    def to_command(self) -> list[str]:
        """Return the program."""

    @abstractmethod
    def to_args(self) -> list[str]:
        """Return its arguments, all of them."""

    @abstractmethod
    def validate(self) -> None:
        """Raise UserError for an option that is missing or impossible, before anything starts."""

    def to_runtime_args(self) -> list[str]:
        """Return its arguments in a TrainJob, without those that the Trainer's plugin for the
        framework adds itself.
        """
        return self.to_args()

    @classmethod
    def build_for_stage(
        cls,
        options: JsonMapping,
        *,
        model: str | None = None,
        data: str | None = None,
        out: str | None = None,
    ) -> "LLMBackend":
        """Build the trainer for `sft`, or for `preference`, whose `options` have an ``algorithm``.

        `tuneloop.training.delegation` describes the directories, and what has to be in `out` at the
        end. It calls this twice: while settings are validated, with the options alone, and in the
        stage. An option that the backend does not read is ignored, so refuse what it cannot do.

        Args:
            options: the stage's parameters; while settings are validated those that are declared
                before `backend`.
            model: the directory with the model; None where only the options are checked, as for
                the next two.
            data: the directory with the Parquet files.
            out: the directory to write to.

        Raises:
            UserError: it cannot train with these options.
        """
        remedy = "cannot train for a stage: use native or trl, or start a job"
        raise UserError("", cls.__name__.lower(), remedy)

    def require(self, *names: str) -> None:
        """Raise UserError for the first of `names` that `args` leaves out."""
        for name in names:
            if self.args.get(name) in (None, ""):
                raise UserError(f"args.{name}", None, f"is required by {type(self).__name__}")


Backend = TypeVar("Backend", bound=type[LLMBackend])


def register_backend(name: str) -> Callable[[Backend], Backend]:
    """Register a backend under `name`. Raises UserError if the name is taken."""

    def register(backend: Backend) -> Backend:
        former = _registered.setdefault(name, backend)
        # A module that is imported again makes an equal class anew.
        is_same = (former.__module__, former.__qualname__) == (
            backend.__module__,
            backend.__qualname__,
        )
        if not is_same:
            raise UserError(
                "backend",
                name,
                f"is {former.__module__}.{former.__qualname__} already; "
                f"register {backend.__qualname__} under another name",
            )
        return backend

    return register


def load_backend(name: str) -> type[LLMBackend]:
    """Load the backend called `name`, or at ``package.module:Class``.

    Raises:
        UserError: there is none, or two backends have one name.
    """
    return list_backends().get(name) or plugins.load_variant("backends", name)


def list_backends() -> Mapping[str, type[LLMBackend]]:
    """Return all backends by name: shipped ones and those of entry points.

    Raises:
        UserError: two have one name.
    """
    for name in plugins.list_shipped_variants("backends"):
        # The import of a shipped backend registers it.
        plugins.load_variant("backends", name)
    for entry in entry_points(group="tuneloop.backends"):
        register_backend(entry.name)(entry.load())
    return dict(sorted(_registered.items()))


def run_here(backend: LLMBackend, environment: Mapping[str, str] | None = None) -> int:
    """Run a backend on this machine, and pass SIGTERM and SIGINT on to it.

    Args:
        environment: variables beside those of this process.

    Returns:
        Its exit code.

    Raises:
        UserError: an option is impossible, or it is for several nodes.
    """
    backend.validate()
    if backend.nodes > 1:
        remedy = f"needs several machines; set 1, and processes={backend.nodes}"
        raise UserError("nodes", backend.nodes, remedy)
    variables = dict(os.environ)
    variables["PET_NNODES"] = "1"
    variables["PET_NPROC_PER_NODE"] = str(backend.processes)
    # torchrun then chooses a free port itself, so that several runs can share this machine.
    variables["PET_STANDALONE"] = "1"
    variables |= environment or {}
    command = backend.to_command() + backend.to_args()
    # The search path may have another Python, or none.
    if command[0] == "python":
        command[0] = sys.executable
    with (
        subprocess.Popen(command, env=variables) as process,
        forward_signals(process.send_signal),
    ):
        return process.wait()


def build_flags(args: JsonMapping) -> list[str]:
    """Build flags as HfArgumentParser reads them.

    ``{"a_b": 1, "c": [1, 2]}`` gives ``["--a_b", "1", "--c", "1", "2"]``. None is left out.
    """
    flags: list[str] = []
    for name, value in args.items():
        if value is None:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        flags.append(f"--{name}")
        flags += map(encode_value, values)
    return flags
