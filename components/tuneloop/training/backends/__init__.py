"""Training programs, of tuneloop and of others, each as a command that any launcher can start.

A backend is one file here, or an entry point in the group ``tuneloop.backends``::

    @register_backend("mine")
    @dataclass(frozen=True, kw_only=True)
    class Mine(LLMBackend): ...

The launcher of several ranks reads torchrun's environment (``PET_NNODES``, ``PET_NPROC_PER_NODE``, ``PET_NODE_RANK``,
``PET_MASTER_ADDR``, ``PET_MASTER_PORT``), which Kubeflow Trainer sets in a TrainJob's pods and `tuneloop.argo.trainjob`
in all others. So a command names no addresses, and is the same in a TrainJob, a JobSet, a pod and here."""

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, ClassVar, TypeVar

from tuneloop.core import plugins
from tuneloop.core.errors import UserError
from tuneloop.core.program import encode_value
from tuneloop.core.threads import forward_signals

_known: "dict[str, type[LLMBackend]]" = {}


@dataclass(frozen=True, kw_only=True)
class LLMBackend(ABC):
    """A trainer to run with `processes` ranks in each of `nodes` pods; `args` are its options under its own names."""

    image: ClassVar[str] = "trainer"
    """The image of tuneloop that contains it."""
    nodes: int = 1
    processes: int = 1
    args: Mapping[str, Any] = field(default_factory=dict)

    @abstractmethod
    def framework(self) -> str:
        """Return the value of the label ``trainer.kubeflow.org/framework`` of the runtime that fits."""

    def get_runtime_name(self) -> str:
        """Return the name of the runtime in ``manifests/components/trainer`` that a TrainJob refers to."""
        return f"tuneloop-{self.framework()}"

    @abstractmethod
    def to_command(self) -> list[str]:
        """Return the program."""

    @abstractmethod
    def to_args(self) -> list[str]:
        """Return its arguments, all of them."""

    @abstractmethod
    def validate(self) -> None:
        """Raise UserError for an option that is missing or impossible, before anything is started."""

    def to_runtime_args(self) -> list[str]:
        """Return its arguments in a TrainJob, without those that the Trainer's plugin for the framework adds itself."""
        return self.to_args()

    @classmethod
    def build_for_stage(cls, options: Mapping[str, Any], **places: str) -> "LLMBackend":
        """Build the trainer for `sft`, or for `preference`, whose `options` have an ``algorithm``; see `delegation`."""
        raise UserError(
            "", cls.__name__.lower(), "cannot train for a stage: use native or trl, or start a job"
        )

    def require(self, *names: str) -> None:
        """Raise UserError for the first of `names` that `args` leaves out."""
        for name in names:
            if self.args.get(name) in (None, ""):
                raise UserError(f"args.{name}", None, f"is required by {type(self).__name__}")


Backend = TypeVar("Backend", bound=type[LLMBackend])


def register_backend(name: str) -> Callable[[Backend], Backend]:
    """Register a backend under `name`. Raises UserError if the name is taken."""

    def add(made: Backend) -> Backend:
        standing = _known.setdefault(name, made)
        if (standing.__module__, standing.__qualname__) != (made.__module__, made.__qualname__):
            where = f"{standing.__module__}.{standing.__qualname__}"
            raise UserError(
                "backend",
                name,
                f"is {where} already; register {made.__qualname__} under another name",
            )
        return made

    return add


def load_backend(name: str) -> type[LLMBackend]:
    """Load the backend called `name`, or at ``package.module:Class``. Raises UserError: none, or two of one name."""
    return list_backends().get(name) or plugins.load_variant("backends", name)


def list_backends() -> Mapping[str, type[LLMBackend]]:
    """Return all backends by name: shipped ones and those of entry points. Raises UserError: two have one name."""
    for name in plugins.list_shipped_variants("backends"):
        plugins.load_variant("backends", name)  # which registers it
    for entry in entry_points(group="tuneloop.backends"):
        register_backend(entry.name)(entry.load())
    return dict(sorted(_known.items()))


def run_here(backend: LLMBackend, environment: Mapping[str, str] | None = None) -> int:
    """Run a backend here, with an `environment` beside this process's own; pass SIGTERM and SIGINT on, and return its
    exit code. Raises UserError: an option is impossible, or it is for several nodes."""
    backend.validate()
    if backend.nodes > 1:
        raise UserError(
            "nodes", backend.nodes, f"needs several machines; set 1, and processes={backend.nodes}"
        )
    own = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": str(backend.processes), "PET_STANDALONE": "1"}
    program, *rest = backend.to_command()
    words = [sys.executable if program == "python" else program, *rest, *backend.to_args()]
    with (
        subprocess.Popen(words, env=os.environ | own | dict(environment or {})) as process,
        forward_signals(process.send_signal),
    ):
        return process.wait()


def build_flags(args: Mapping[str, Any]) -> list[str]:
    """Build flags as HfArgumentParser reads them: ``{"a_b": 1, "c": [1, 2]}`` → ``["--a_b", "1", "--c", "1", "2"]``."""
    given = {k: v if isinstance(v, list | tuple) else [v] for k, v in args.items() if v is not None}
    return [
        word for name, values in given.items() for word in (f"--{name}", *map(encode_value, values))
    ]
