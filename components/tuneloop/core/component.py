"""The contract of a stage: a typed function becomes a program that commits one artifact, exactly once.

::

    @component("rollouts", image="rollout", accelerator=True, role="sampler", results={"mean_length": float})
    def rollout(stage: Stage, policy: Input, prompts: Input, *, temperature: Temperature = 1.0) -> Results: ...

    if __name__ == "__main__":
        rollout.main()

Run as ``python -m tuneloop.stages.rollout --policy REF --prompts REF --rollouts URL --temperature 1.0``. The function
writes files below ``stage.out``; when it returns, they are committed under a manifest, and its results are
written one file each to ``$TUNELOOP_OUTPUTS`` for the workflow engine. A stage whose output is committed
already, from the same inputs and parameters, ends at once with the same results. `errors` has the exit codes."""

import contextlib
import copy
import importlib
import inspect
import os
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import ValidationError, create_model
from pydantic.config import JsonDict

from tuneloop.core import artifacts, errors, program
from tuneloop.core.artifacts import (
    Artifact,
    Draft,
    Manifest,
    Role,
    dump_canonical_json,
    find_manifest,
    split_ref,
)
from tuneloop.core.attempts import admit_attempt
from tuneloop.core.context import Options, Params, Stage, handle_signals
from tuneloop.core.errors import UserError
from tuneloop.core.program import to_kebab_case
from tuneloop.core.provenance import collect_provenance, list_device_ids
from tuneloop.core.store import Store, local_path
from tuneloop.core.threads import BACKGROUND

Input = Annotated[Artifact, "input"]
"""An input artifact: the stage gets it opened and verified."""
OptionalInput = Annotated[Artifact | None, "input"]
"""An input that may be left out."""
Results = Mapping[str, Any]
Image = Literal["base", "trainer", "rollout"]
TORCHRUN = ("python", "-m", "tuneloop.training.torchrun")

UNTRACKED: JsonDict = {"tuneloop": "identity"}
"""``Field(json_schema_extra=UNTRACKED)``: do not compare a parameter, such as an address, with a committed output's."""


@dataclass(eq=False)
class Component:
    """A stage: its program, its parameters, and what a workflow engine needs to run it.

    Attributes:
        name: snake_case, the module's name; ``template`` is the same in kebab-case.
        kind: what the output artifact is: ``checkpoint``, ``rollouts``, ….
        output: the name of its flag: the kind, or ``<kind>_out`` where an input has that name.
        options: parameters that are flattened into `Params`: name → their model.
        inputs: input name → whether it is required.
        account: the ServiceAccount of its pod, which mounts its token; empty: the one of all stages, without rights.
    """

    function: Callable[..., Results | None]
    kind: str
    image: Image
    accelerator: bool
    role: Role | None
    results: Mapping[str, type]
    after: Callable[[Stage, Manifest], None] | None
    identity: Callable[[Any], Mapping[str, Any]] | None
    account: str = ""

    def __post_init__(self) -> None:
        function = self.function
        self.name = function.__name__
        self.template = self.name.replace("_", "-")
        self.summary = (inspect.getdoc(function) or "").split("\n")[0]
        self.inputs, self.options, self.Params = _read_signature(function)
        self.output = f"{self.kind}_out" if self.kind in self.inputs else self.kind
        flags = [*self.inputs, self.output, *self.Params.model_fields]
        assert len(flags) == len(set(flags)), f"{self.name}: two flags of one name among {flags}"
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    @property
    def untracked(self) -> set[str]:
        """The parameters that are not compared with those of a committed output."""
        return {
            name
            for name, field in self.Params.model_fields.items()
            if field.json_schema_extra == UNTRACKED
        }

    @property
    def module(self) -> str:
        """The module that ``python -m`` runs."""
        if self.__module__ != "__main__":
            return self.__module__
        spec = getattr(sys.modules["__main__"], "__spec__", None)  # None: run by its path
        return spec.name if spec else f"tuneloop.stages.{self.name}"

    def command(self, processes: int = 1, nodes: int = 1) -> list[str]:
        """Return how a container starts the stage: ``python -m``, or torchrun for several processes. On several nodes
        torchrun takes its settings from the environment."""
        if processes == nodes == 1:
            return ["python", "-m", self.module]
        here = ["--standalone", f"--nproc-per-node={processes}"] if nodes == 1 else []
        return [*TORCHRUN, *here, "-m", self.module]

    def __call__(self, *, out: str, **arguments: Any) -> Manifest:
        """Run the stage here, with references and parameters; return its manifest. Raises UserError, Retryable."""
        refs = {
            name: arguments.pop(name) for name in self.inputs if arguments.get(name) is not None
        }
        missing = [name for name, required in self.inputs.items() if required and name not in refs]
        if missing:
            raise UserError(
                f"--{to_kebab_case(missing[0])}", None, "is required: the reference of an artifact"
            )
        params = self.validate({k: v for k, v in arguments.items() if k not in self.inputs})
        inputs = {name: Artifact(ref) for name, ref in refs.items()}
        standing = find_manifest(
            split_ref(out)[0]
        )  # once: a second look might not find what the first one found
        stage = self._open(params, inputs, out, Path(os.devnull) if standing else None)
        # What is free is measured before the files of this attempt are deleted.
        with handle_signals(stage), errors.name_disk_errors(*self._list_places(stage)):
            if standing:
                self._check_standing(stage, standing)
            else:
                standing = self._run(stage, inputs)
        if self.after and stage.leader:
            self.after(stage, standing)
        if stage.later and stage.leader:
            BACKGROUND.begin(partial(self._commit_later, stage, standing))
        return standing

    def _list_places(self, stage: Stage) -> list[Path]:
        """List the directories that the stage writes to: its output, and the machine's temporary ones."""
        output = local_path(stage.out_url) or stage.out
        return [output, Path(tempfile.gettempdir())]

    def _commit_later(self, stage: Stage, standing: Manifest) -> None:
        assert stage.later
        with errors.name_disk_errors(*self._list_places(stage)):
            stage.later(standing)

    def settings(self, *, without: Iterable[str] = (), **defaults: Any) -> type[Params]:
        """Return the parameters as a section of a pipeline's configuration, `without` those that the pipeline sets
        itself (``seed``, ``iteration``, addresses), and with its own `defaults`."""
        fields: dict[str, Any] = {}
        for name, field in self.Params.model_fields.items():
            if name not in set(without):
                own = copy.copy(field)
                if name in defaults:
                    own.default = defaults.pop(name)
                fields[name] = (own.annotation, own)
        assert not defaults, f"{self.name} has no parameter {sorted(defaults)}"
        return create_model(
            f"{self.name}_settings", __base__=Params, __doc__=self.summary, **fields
        )

    def validate(self, values: Mapping[str, Any]) -> Params:
        """Return the parameters as a model. Raises UserError: an unknown name, a wrong type or an impossible value."""
        try:
            return self.Params(**values)
        except ValidationError as error:
            raise convert_validation_error(error, prefix=f"{self.name}.") from None

    def resolve_constants(
        self, given: Mapping[str, Any], dynamic: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return validated parameters as JSON values, without the `dynamic` ones of a graph. Raises as `validate`."""
        needed = {
            name: "0" for name in dynamic if self.Params.model_fields[name].is_required()
        }  # stand-ins
        resolved = self.validate({k: v for k, v in given.items() if k not in set(dynamic)} | needed)
        return resolved.model_dump(mode="json", exclude=set(dynamic))

    def build_arguments(self, params: Params, inputs: Mapping[str, Artifact]) -> dict[str, Any]:
        """Build what the function is given beside the `Stage`: its inputs, parameters, and models of options."""
        arguments: dict[str, Any] = {name: inputs.get(name) for name in self.inputs} | dict(
            params.__dict__
        )
        for name, model in self.options.items():
            arguments[name] = model.model_construct(
                **{field: arguments.pop(field) for field in model.names()}
            )
        return arguments

    def main(self, argv: Sequence[str] | None = None) -> typing.NoReturn:
        """Run as a program; never returns."""
        code = self.run(sys.argv[1:] if argv is None else argv)
        errors.flush_output()
        sys.exit(code)

    def run(self, argv: Sequence[str]) -> int:
        """Run as a program and return the exit code."""

        def work() -> None:
            flags = self.inputs, self.output, self.Params.model_fields
            given = program.parse_arguments(argv, self.module, self.__doc__, *flags)
            url = given.pop(self.output)
            manifest = self(out=url, **given)
            if int(os.environ.get("RANK", "0")) == 0:
                program.write_outputs(
                    {self.output: f"{split_ref(url)[0]}@{manifest.digest}", **manifest.results}
                )

        return program.run_component(work)

    def _open(
        self, params: Params, inputs: Mapping[str, Artifact], out: str, path: Path | None
    ) -> Stage:
        env = os.environ
        # Ranks of one torchrun attempt must agree on a name without talking to one another.
        shared = f"{env.get('TORCHELASTIC_RUN_ID')}-{env.get('TORCHELASTIC_RESTART_COUNT')}-{env.get('MASTER_PORT')}"
        name = (
            xxhash.xxh3_64_hexdigest(shared.encode())
            if "TORCHELASTIC_RUN_ID" in env
            else os.urandom(8).hex()
        )
        attempt = f"data-{name}"
        tracked = {
            k: v for k, v in params.model_dump(mode="json").items() if k not in self.untracked
        }
        if self.identity:
            tracked |= self.identity(params)
        url = split_ref(out)[0]
        return Stage(
            name=self.name,
            params=params,
            out=path or Draft(url, attempt=attempt).path,
            out_url=url,
            attempt=attempt,
            rank=int(env.get("RANK", "0")),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            world_size=int(env.get("WORLD_SIZE", "1")),
            _tracked=tracked,
            _inputs={name: artifact.ref for name, artifact in inputs.items()},
        )

    def _check_standing(self, stage: Stage, standing: Manifest) -> None:
        for what, ours, theirs in (
            ("stage", self.name, standing.stage),
            *(
                (f"--{to_kebab_case(k)}", v, standing.params.get(k))
                for k, v in stage._tracked.items()
            ),
            *(
                (f"--{to_kebab_case(k)}", v, standing.inputs.get(k))
                for k, v in stage._inputs.items()
            ),
        ):
            if dump_canonical_json(_digest_only(ours)) != dump_canonical_json(_digest_only(theirs)):
                remedy = f"{stage.out_url} is committed already, made from {theirs!r}; use another run name"
                raise UserError(what, ours, remedy)
        stage.log("committed already, nothing to do")

    def _run(self, stage: Stage, inputs: Mapping[str, Artifact]) -> Manifest:
        if stage.leader:
            admit_attempt(Store(f"{stage.out_url}/resume"), lambda: " ".join(stage.resume_points()))
        start = time.time()
        clock = time.perf_counter()
        if given := list_device_ids():
            stage.log(f"devices {', '.join(given)}")
        results = dict(self.function(stage, **self.build_arguments(stage.params, inputs)) or {})
        assert results.keys() == self.results.keys(), (
            f"{self.name} must return {sorted(self.results)}"
        )
        draft = Draft(stage.out_url, attempt=stage.attempt)
        stage._bring(draft)
        if not stage.leader:
            return Manifest(stage=self.name, root=stage.attempt, files={}, digest="")
        stage.timings["total"] = time.perf_counter() - clock
        manifest = draft.commit(
            stage=self.name,
            role=self.role,
            kind=self.kind,
            results=results,
            facts=stage.facts,
            notes=stage.notes,
            timings=stage.timings,
            provenance=collect_provenance(start, stage.world_size),
            **stage._identity(),
        )
        Store(stage.out_url).delete("resume")
        return manifest


def component(
    kind: str,
    *,
    image: Image = "base",
    accelerator: bool = False,
    role: Role | None = None,
    results: Mapping[str, type] | None = None,
    after: Callable[[Stage, Manifest], None] | None = None,
    identity: Callable[[Any], Mapping[str, Any]] | None = None,
    account: str = "",
) -> Callable[[Callable[..., Results | None]], Component]:
    """Make a stage of a typed function.

    Positional parameters after the first (the `Stage`) are input artifacts; keyword-only ones are parameters, described
    by ``Annotated[type, Field(description=…, ge=…)]``. Each field of a parameter whose type is a subclass of `Options`
    is a parameter of its own.

    Args:
        kind: what the output is; its URL's flag is ``--<kind>``, or ``--<kind>-out`` where an input has this name.
        role: what it is in a loop: reports, plans and progress ask for this, never for its name.
        results: scalars it returns; one that could not be measured is None.
        after: called once the output is committed, also if it was committed before; must be idempotent.
        identity: maps the parameters to what identifies the contents of a file that they name (it is no artifact).
        account: the ServiceAccount whose permissions its pod needs.
    """
    return lambda function: Component(
        function, kind, image, accelerator, role, results or {}, after, identity, account
    )


def find_component(module: str, template: str = "", *, load: bool = False) -> Component | None:
    """Find the stage that `module` defines: the one called `template`, else the first, else None. A module outside of
    tuneloop.stages is imported only if `load` is true, since it may be a program that starts when it is imported."""
    if load or module.startswith("tuneloop.stages."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    names = vars(sys.modules[module]) if module in sys.modules else {}
    found = [
        each for each in names.values() if isinstance(each, Component) and each.__module__ == module
    ]
    return next((each for each in found if each.template == template), found[0] if found else None)


def convert_validation_error(error: ValidationError, prefix: str = "") -> UserError:
    """Describe the first problem of a pydantic error in one line with field, value and remedy."""
    first = error.errors()[0]
    field = prefix + ".".join(str(part) for part in first["loc"] if part != "[key]")
    if isinstance(cause := first.get("ctx", {}).get("error"), ValueError):  # a validator of ours
        if isinstance(cause, UserError):
            return UserError(
                ".".join(filter(None, (field.rstrip("."), cause.field))), cause.value, cause.remedy
            )
        return UserError(field, first["input"], str(cause))
    if first["type"] == "model_type":
        return UserError(
            field, first["input"], "is a section: write its keys, as in section.key=value"
        )
    if first["type"] == "extra_forbidden":
        return UserError(
            field, first["input"], "unknown key; see `tuneloop schema` for the known ones"
        )
    if first["type"] == "missing":
        return UserError(field, None, "is required")
    return UserError(field, first["input"], first["msg"])


def _read_signature(
    function: Callable[..., Any],
) -> tuple[dict[str, bool], dict[str, type[Options]], type[Params]]:
    hints = typing.get_type_hints(function, include_extras=True)
    inputs: dict[str, bool] = {}
    options: dict[str, type[Options]] = {}
    fields: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if isinstance(hints[name], type) and issubclass(hints[name], Options):
            options[name] = hints[name]
            known = hints[name].model_fields
            fields |= {
                field: (known[field].annotation, copy.copy(known[field]))
                for field in hints[name].names()
            }
        elif parameter.kind is parameter.KEYWORD_ONLY:
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints[name], default)
        else:
            assert hints[name] in (Input, OptionalInput), (
                f"{function.__name__}({name}): Input, or keyword-only"
            )
            inputs[name] = hints[name] is Input or hints[name] == Input
    return inputs, options, create_model(f"{function.__name__}_params", __base__=Params, **fields)


def _digest_only(value: Any) -> Any:
    """Reduce a reference to its digest: the same bytes at another address are the same input."""
    if isinstance(value, str) and f"@{artifacts.DIGEST}:" in value:
        return value.rpartition("@")[2]
    return value


__all__ = [
    "UNTRACKED",
    "Component",
    "Input",
    "OptionalInput",
    "Options",
    "Params",
    "Results",
    "Stage",
    "component",
]
