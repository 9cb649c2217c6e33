"""Engines, which turn prompt ids into completion ids.

A variant is a module with ``open_engine(endpoint, args, timeout_s) -> Engine``, which `rollout` and
`evaluate` call. An engine serves one set of weights at a time and says which. A module that ships
with tuneloop describes itself besides, and so may one that an entry point names as a whole:

- ``CAPABILITIES`` (`tuneloop.inference.capabilities`).
- ``check_engine_args(args, prefix)`` refuses arguments.
- ``check_here(args, prefix)``, optional: refuses what cannot be started on this machine.
- ``open_served_engine(args)``, of an engine that serves: what its servers compute with
  (`tuneloop.inference.served`).
- ``SECTION``, of an engine whose settings are its own: ``package.module:Class`` of the class that
  `tuneloop.config.engines` takes for them.

The engine's package goes into `core/provenance.py: LIBRARIES`, into an extra of pyproject.toml and
``banned-module-level-imports`` there, into ``requirements/compile.sh``, and into the image
``rollout``, which all servers and all stages that sample run.

All of this is read before anything runs, on a machine that may lack the engine's libraries, and so
the module imports none of these at its head. A module of this package is an engine that users may
name, unless its name begins with an underscore.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol, runtime_checkable

from pydantic import Field

from tuneloop.core import plugins
from tuneloop.core.artifacts import Artifact
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.formats.rollouts import Completion, Request, TokenId


@dataclass(frozen=True)
class Sampling:
    """Sampling in vLLM's terms, without top-p or top-k.

    It is sent to servers (`inference/http_api.py: GenerateBody`), and one that does not know a
    field ignores it without a word. Each engine has to heed it: `submit` of
    `inference/engines/vllm.py`, `_generate_batch` of `inference/engines/transformers.py`.
    `extensions/fleets/conformance.py: SAMPLING` and the fact ``sampling`` (`inference/generate.py`) list
    the fields, too.

    Attributes:
        temperature: 0 is greedy.
        max_tokens: of a completion.
        stop_token_ids: a completion ends with the first of these that is sampled, and includes it.
    """

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 16
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=4096)] = ()


Done = Callable[[int], None]
"""Called with the number of requests finished so far; what it raises ends the generation.

A stage learns of SIGTERM by it (`inference/generate.py`): an engine calls it often, also while no
request ends.
"""


@dataclass(frozen=True)
class EngineReport:
    """What an engine says of itself since it loaded a policy. The defaults say nothing.

    A field that is added is noted only if `list_notes` lists it. `runs/delivery.py` reads the notes
    ``pulled`` and ``refitted``.

    Attributes:
        max_staleness: versions that a token may be older than the policy; not a note, but part of
            the fact ``staleness`` (`inference/generate.py`).
        pulled: timings of the last pull of a published version, by its servers.
        replicas: URL of a server → the ``requests`` that it finished and, if it was ``lost``, why.
        determinism: what decides the bits: ``device``, ``threads``, ``batch_invariant``.
        refitted: timings of the last refit of its fleet.
    """

    max_staleness: int = 0
    pulled: JsonMapping = field(default_factory=dict)
    replicas: JsonMapping = field(default_factory=dict)
    determinism: JsonMapping = field(default_factory=dict)
    refitted: JsonMapping = field(default_factory=dict)

    def list_notes(self) -> JsonObject:
        """Return what a stage's manifest notes of the engine: only what the engine has."""
        notes = {
            "pulled": self.pulled,
            "replicas": self.replicas,
            "determinism": self.determinism,
            "refitted": self.refitted,
        }
        return {name: note for name, note in notes.items() if note}


class Engine(Protocol):
    """Generates and scores with the checkpoint of `version` and `digest`.

    They are -1 and "" while none is loaded. `context` is the maximum number of tokens of a prompt
    with its completion.

    Engines do not extend it. A member that is added is missing from those of third parties, and
    `isinstance` then says that they are neither `Remote` nor `Readable`: their tensors are no
    longer compared, and their restarts no longer proved, without a word. Those that ship are
    `Vllm`, `Transformers`, `Endpoint`, `Client` and `Replicas`.
    """

    name: str
    context: int
    version: int
    digest: str

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        """Serve the weights of a checkpoint; do nothing if its digest is served, unless `force`."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        done: Done,
    ) -> list[list[Completion]]:
        """Generate completions, in the order of `requests` and their seeds."""

    def score(self, ids: Sequence[int]) -> list[float]:
        """Compute the log-probability, at temperature 1, of each id but the first.

        Each is computed given all ids before it, in nats.
        """

    def report(self) -> EngineReport:
        """Report what the engine did since it loaded the policy."""

    def close(self) -> None:
        """Release memory and connections."""


@runtime_checkable
class Remote(Engine, Protocol):
    """An engine in another process, which may die and be restarted while it is used.

    `inference/generate.py` sets both attributes of an engine that has them: `Client` and
    `Replicas`. `Endpoint` has neither: it demands a version with every request, and checks that of
    every answer.

    Attributes:
        check: called during a wait for that process; an error that it raises ends the wait.
        prove: called with the engine once a restarted process serves the policy; raises an error
            if it does not.
    """

    check: Callable[[], None]
    prove: Callable[[Engine], None]


@dataclass(frozen=True)
class TensorProof:
    """What reading back said of an engine.

    A server sends it (`inference/http_api.py: served`), and a client of another release makes it of
    the fields that arrive (`inference/engines/_client.py: read_back`), which refuses unknown ones
    and needs those without a default. `inference/proof.py: describe` writes it into manifests.

    Attributes:
        digest: of the files that the engine's tensors were compared with (`digest_model`).
        dtype: of the engine. The files' tensors were cast to it, if theirs is another.
        tensors: in the files.
        identical: equal bit for bit, but for the sign of a zero in packed layers.
        unread: kept by the engine in a form that cannot be compared.
        different: the others.
        example: the name of one that differs, or empty.
    """

    digest: str
    dtype: str
    tensors: int
    identical: int
    unread: int = 0
    different: int = 0
    example: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every tensor was compared and found equal."""
        return self.tensors == self.identical > 0


@runtime_checkable
class Readable(Engine, Protocol):
    """An engine whose tensors can be compared with a checkpoint's (`inference/proof.py`)."""

    def read_back(self, policy: Artifact) -> TensorProof | None:
        """Compare the tensors that the engine holds with a checkpoint's; None if it cannot."""


def check_args(name: str, args: JsonMapping, prefix: str) -> None:
    """Check the arguments of an engine that describes itself; any other's are checked in its stage.

    Raises:
        UserError: the engine refuses one; the field is `prefix` and the argument's name.
    """
    # What the user chose has to be refused before its libraries are needed.
    module = plugins.find_module("engines", name)
    if module and hasattr(module, "check_engine_args"):
        module.check_engine_args(args, prefix)


def check_here(name: str, args: JsonMapping, prefix: str) -> None:
    """Check that the processes of an engine can be started on this machine, where it can say so.

    Raises:
        UserError: they cannot; the field is ``engine.kind``, or `prefix` and an argument's name.
    """
    module = plugins.find_module("engines", name)
    if module and hasattr(module, "check_here"):
        module.check_here(args, prefix)
