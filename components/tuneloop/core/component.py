"""The contract of a stage: a typed function becomes a program that commits one artifact, exactly
once.

::

    @component(
        "rollouts",
        image="rollout",
        accelerator=True,
        role="sampler",
        results={"mean_length": float},
    )
    def rollout(
        stage: Stage, policy: Input, prompts: Input, *, temperature: Temperature = 1.0
    ) -> Results: ...

    if __name__ == "__main__":
        rollout.main()

Run as ``python -m tuneloop.stages.rollout --policy REF --prompts REF --rollouts URL --temperature
1.0``. The function writes files below ``stage.out``. When it returns, they are committed under a
manifest, and its results are written one file each to ``$TUNELOOP_OUTPUTS`` for the workflow
engine. A stage whose output is committed already, from the same inputs and parameters, ends at once
with the same results. `errors` has the exit codes.
"""

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
from pydantic_core import to_jsonable_python

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
from tuneloop.core.hooks import find_extension_stage
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import to_kebab_case
from tuneloop.core.provenance import collect_provenance, list_device_ids
from tuneloop.core.store import Store, local_path
from tuneloop.core.threads import BACKGROUND

Input = Annotated[Artifact, "input"]
"""An input artifact: the stage gets it opened and verified."""
OptionalInput = Annotated[Artifact | None, "input"]
"""An input that may be left out."""
Results = JsonMapping
Image = Literal["base", "trainer", "rollout"]
"""The container images that stages run in; `images/Dockerfile`, `docker-bake.hcl` and
`images/build.sh` build them. A pod of several iterations runs all its stages in ``rollout``,
whatever they name (`argo/run_plan.py: plan_pod`): that image has the libraries of the others. A
stage with an accelerator that neither trains nor scores is a sampler's pod in the image
``rollout``, and a scorer's in any other (`argo/pod_fields.py: find_role`)."""
TORCHRUN = ("python", "-m", "tuneloop.training.torchrun")
"""How a command begins that starts ranks; `extensions/trainers/kubeflow_sdk.py` recognizes such commands by it."""

UNTRACKED: JsonDict = {"tuneloop": "untracked"}
"""``Field(json_schema_extra=UNTRACKED)``: the parameter, such as an address, is not part of an output's
identity, and is not compared with that of a committed output. With other entries for the schema it is
``UNTRACKED | {…}``. The manifest does not have it, so that replay computes with its default: see
`note_replay_params` where facts follow from it."""
COMMITTED = "committed already, nothing to do"
"""What a stage logs that finds its output committed; `tuneloop.cli.live` recognizes this line of
data_prep."""
REPLAY_PARAMS = "replay_params"
"""The note with those untracked parameters from which facts of the output follow, by name: to
replay the stage takes them, too."""


def note_replay_params(stage: Stage, *names: str) -> None:
    """Note untracked parameters, from which facts of the output follow; `runs/replay.py` reads
    them."""
    stage.notes[REPLAY_PARAMS] = stage.params.model_dump(mode="json", include=set(names))


@dataclass(eq=False)
class Component:
    """A stage: its program, its parameters, and what a workflow engine needs to run it.

    Attributes:
        name: snake_case, the module's name; ``template`` is the same in kebab-case.
        summary: the first line of the function's docstring.
        kind: what the output artifact is: ``checkpoint``, ``rollouts``, ….
        output: the name of its flag: the kind, or ``<kind>_out`` where an input has that name.
        Params: the model of all its parameters.
        options: parameters that are flattened into `Params`: name → their model.
        inputs: input name → whether it is required.
        account: the ServiceAccount of its pod, which mounts its token; empty: the one of all
            stages, without rights. Only Argo's pods get it (`argo/template.py`): a run of Kubeflow
            Pipelines has one account for all tasks.

    The others are explained at `component`, which has the same parameters: a field that is added is
    added there, too.
    """

    function: Callable[..., Results | None]
    kind: str
    image: Image
    accelerator: bool
    role: Role | None
    results: Mapping[str, type]
    after: Callable[[Stage, Manifest], None] | None
    identity: Callable[[Any], JsonMapping] | None
    account: str = ""
    resolve: Callable[[Any, str, JsonMapping], JsonMapping] | None = None

    def __post_init__(self) -> None:
        function = self.function
        self.name = function.__name__
        self.template = self.name.replace("_", "-")
        summary = (inspect.getdoc(function) or "").partition("\n\n")[0]
        self.summary = " ".join(summary.split())
        self.inputs: dict[str, bool] = {}
        self.options: dict[str, type[Options]] = {}
        self.Params = self._read_signature()
        self.output = f"{self.kind}_out" if self.kind in self.inputs else self.kind
        flags = [*self.inputs, self.output, *self.Params.model_fields]
        assert len(flags) == len(set(flags)), f"{self.name}: two flags of one name among {flags}"
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    def _read_signature(self) -> type[Params]:
        """Sort the function's parameters after the first into inputs, options and others.

        Returns:
            The model of the options' fields and of the others.
        """
        hints = typing.get_type_hints(self.function, include_extras=True)
        fields: JsonObject = {}
        for name, parameter in list(inspect.signature(self.function).parameters.items())[1:]:
            hint = hints[name]
            if isinstance(hint, type) and issubclass(hint, Options):
                self.options[name] = hint
                for flag in hint.names():
                    field = hint.model_fields[flag]
                    # A model changes the fields that it is created with.
                    fields[flag] = (field.annotation, copy.copy(field))
            elif parameter.kind is parameter.KEYWORD_ONLY:
                default = ... if parameter.default is parameter.empty else parameter.default
                fields[name] = (hint, default)
            else:
                assert hint in (Input, OptionalInput), (
                    f"{self.name}({name}): Input, or keyword-only"
                )
                self.inputs[name] = hint == Input
        return create_model(f"{self.name}_params", __base__=Params, **fields)

    @property
    def untracked(self) -> set[str]:
        """The parameters that are not compared with those of a committed output."""
        fields = self.Params.model_fields
        untracked: set[str] = set()
        for name, field in fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.items() >= UNTRACKED.items():
                untracked.add(name)
        return untracked

    @property
    def module(self) -> str:
        """The module that ``python -m`` runs."""
        if self.__module__ != "__main__":
            return self.__module__
        # A program that is run by its path has no spec.
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        return spec.name if spec else f"tuneloop.stages.{self.name}"

    def command(self, processes: int = 1, nodes: int = 1) -> list[str]:
        """Return how a container starts the stage; see `build_command`."""
        return build_command(self.module, processes, nodes)

    def __call__(self, *, out: str, **arguments: Any) -> Manifest:
        """Run the stage here.

        Args:
            out: the URL of the output.
            arguments: references of the inputs, and parameters.

        Returns:
            The manifest that is committed at `out`, by this or an earlier attempt.

        Raises UserError and Retryable.
        """
        refs: dict[str, str] = {}
        for name, is_required in self.inputs.items():
            ref = arguments.pop(name, None)
            if ref is not None:
                refs[name] = ref
            elif is_required:
                flag = f"--{to_kebab_case(name)}"
                raise UserError(flag, None, "is required: the reference of an artifact")
        params = self.validate(arguments)
        inputs = {name: Artifact(ref) for name, ref in refs.items()}
        # The store is asked once: its second answer might differ from the first.
        manifest = find_manifest(split_ref(out)[0])
        if self.resolve:
            committed = manifest.params if manifest else {}
            resolved = self.resolve(params, split_ref(out)[0], committed)
            params = params.model_copy(update=dict(resolved))
        stage = self._open(params, inputs, out, Path(os.devnull) if manifest else None)
        # The free space is measured before the files of this attempt are deleted.
        with handle_signals(stage), errors.name_disk_errors(*self._list_directories(stage)):
            if manifest:
                self._check_same_origin(stage, manifest)
            else:
                manifest = self._run(stage, inputs)
        # Also after an earlier attempt's commit: that attempt may have ended in between.
        if self.after and stage.leader:
            self.after(stage, manifest)
        if stage.later and stage.leader:
            BACKGROUND.begin(partial(self._commit_later, stage, manifest))
        return manifest

    def _list_directories(self, stage: Stage) -> list[Path]:
        """List the directories that the stage writes to: its output, and the machine's temporary
        ones.
        """
        output = local_path(stage.out_url) or stage.out
        return [output, Path(tempfile.gettempdir())]

    def _commit_later(self, stage: Stage, manifest: Manifest) -> None:
        assert stage.later
        with errors.name_disk_errors(*self._list_directories(stage)):
            stage.later(manifest)

    def settings(self, *, without: Iterable[str] = (), **defaults: Any) -> type[Params]:
        """Return the parameters as a section of a pipeline's configuration.

        Args:
            without: those that the pipeline sets itself (``seed``, ``iteration``, addresses).
            defaults: the pipeline's own, in place of the stage's.
        """
        excluded = set(without)
        fields: JsonObject = {}
        for name, field in self.Params.model_fields.items():
            if name in excluded:
                continue
            setting = copy.copy(field)
            if name in defaults:
                setting.default = defaults.pop(name)
            fields[name] = (setting.annotation, setting)
        assert not defaults, f"{self.name} has no parameter {sorted(defaults)}"
        return create_model(
            f"{self.name}_settings",
            __base__=Params,
            __doc__=self.summary,
            **fields,
        )

    def validate(self, values: JsonMapping) -> Params:
        """Return the parameters as a model.

        Raises UserError: an unknown name, a wrong type or an impossible value.
        """
        try:
            return self.Params(**values)
        except ValidationError as error:
            raise convert_validation_error(error, prefix=f"{self.name}.") from None

    def resolve_constants(self, values: JsonMapping, dynamic: Collection[str] = ()) -> JsonObject:
        """Return validated parameters as JSON values, without the `dynamic` ones of a graph.

        Raises as `validate`.
        """
        constants = {name: value for name, value in values.items() if name not in dynamic}
        # A model with all its required fields is validated, so these have values in their place.
        for name in dynamic:
            if self.Params.model_fields[name].is_required():
                constants[name] = "0"
        return self.validate(constants).model_dump(mode="json", exclude=set(dynamic))

    def build_arguments(self, params: Params, inputs: Mapping[str, Artifact]) -> JsonObject:
        """Build what the function is given beside the `Stage`: its inputs, parameters, and models
        of options.
        """
        arguments: JsonObject = {name: inputs.get(name) for name in self.inputs}
        arguments |= params.__dict__
        for name, model in self.options.items():
            # The values were validated as fields of `Params`.
            values = {flag: arguments.pop(flag) for flag in model.names()}
            arguments[name] = model.model_construct(**values)
        return arguments

    def main(self, argv: Sequence[str] | None = None) -> typing.NoReturn:
        """Run as a program; never returns."""
        code = self.run(sys.argv[1:] if argv is None else argv)
        errors.flush_output()
        sys.exit(code)

    def run(self, argv: Sequence[str]) -> int:
        """Run as a program and return the exit code."""

        def work() -> None:
            program.check_addresses(argv)
            arguments = program.parse_arguments(
                argv,
                self.module,
                self.__doc__,
                self.inputs,
                self.output,
                self.Params.model_fields,
            )
            url = arguments.pop(self.output)
            manifest = self(out=url, **arguments)
            if int(os.environ.get("RANK", "0")) == 0:
                outputs = {self.output: f"{split_ref(url)[0]}@{manifest.digest}"}
                program.write_outputs(outputs | manifest.results)

        return program.run_component(work)

    def _open(
        self,
        params: Params,
        inputs: Mapping[str, Artifact],
        out: str,
        path: Path | None,
    ) -> Stage:
        """Describe this attempt; `path` is its directory, by default that of a new draft."""
        url = split_ref(out)[0]
        tracked = params.model_dump(mode="json", exclude=self.untracked)
        if self.identity:
            tracked |= self.identity(params)
        attempt = _name_attempt()
        return Stage(
            name=self.name,
            params=params,
            out=path or Draft(url, attempt=attempt).path,
            out_url=url,
            attempt=attempt,
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            tracked=tracked,
            inputs={name: artifact.ref for name, artifact in inputs.items()},
        )

    def _check_same_origin(self, stage: Stage, manifest: Manifest) -> None:
        """Check that a committed output was made by this stage from these parameters and inputs.

        Raises UserError with the first that differs.
        """
        default_texts = {
            name: dump_canonical_json(value) for name, value in self.list_defaults().items()
        }
        origins: list[tuple[str, object, object]] = [("stage", self.name, manifest.stage)]
        for values, committed in (
            (stage.tracked, manifest.params),
            (stage.inputs, manifest.inputs),
        ):
            for name, value in values.items():
                # An earlier release did not have this parameter, whose default is what it did then.
                is_default = default_texts.get(name) == dump_canonical_json(value)
                if name not in committed and is_default:
                    continue
                origins.append((f"--{to_kebab_case(name)}", value, committed.get(name)))
        for field, value, committed_value in origins:
            # Equal text: values of the manifest were read from JSON, which has no tuples.
            text = dump_canonical_json(_digest_only(value))
            if text != dump_canonical_json(_digest_only(committed_value)):
                remedy = (
                    f"{stage.out_url} is committed already, made from {committed_value!r}; "
                    "use another run name"
                )
                raise UserError(field, value, remedy)
        stage.log(COMMITTED)

    def list_defaults(self) -> JsonObject:
        """Return the default of each parameter that has one, as JSON."""
        return {
            name: to_jsonable_python(field.get_default(call_default_factory=True))
            for name, field in self.Params.model_fields.items()
            if not field.is_required()
        }

    def _run(self, stage: Stage, inputs: Mapping[str, Artifact]) -> Manifest:
        """Call the function and commit its output; only the leader's manifest is whole."""
        if stage.leader:
            # An attempt that would not get farther than the others gives up here.
            admit_attempt(Store(f"{stage.out_url}/resume"), lambda: " ".join(stage.resume_points()))
        started = time.time()
        clock = time.perf_counter()
        devices = list_device_ids()
        if devices:
            stage.log(f"devices {', '.join(devices)}")
        results = dict(self.function(stage, **self.build_arguments(stage.params, inputs)) or {})
        assert results.keys() == self.results.keys(), (
            f"{self.name} must return {sorted(self.results)}"
        )
        draft = Draft(stage.out_url, attempt=stage.attempt)
        stage.bring(draft)
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
            provenance=collect_provenance(started, stage.world_size),
            params=stage.tracked,
            inputs=stage.inputs,
        )
        # A committed stage needs no resume points, and its budget of attempts starts anew.
        Store(stage.out_url).delete("resume")
        return manifest


def _name_attempt() -> str:
    """Name this attempt's data directory.

    The ranks of one torchrun attempt must agree on it without talking to one another. Retention
    recognizes attempts that did not commit by the beginning ``data-`` (`runs/retention.py`); a
    `Draft` without a given attempt has the same.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return f"data-{os.urandom(8).hex()}"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    rendezvous = f"{run}-{restarts}-{os.environ.get('MASTER_PORT')}"
    return f"data-{xxhash.xxh3_64_hexdigest(rendezvous.encode())}"


def component(
    kind: str,
    *,
    image: Image = "base",
    accelerator: bool = False,
    role: Role | None = None,
    results: Mapping[str, type] | None = None,
    after: Callable[[Stage, Manifest], None] | None = None,
    identity: Callable[[Any], JsonMapping] | None = None,
    account: str = "",
    resolve: Callable[[Any, str, JsonMapping], JsonMapping] | None = None,
) -> Callable[[Callable[..., Results | None]], Component]:
    """Make a stage of a typed function.

    Positional parameters after the first (the `Stage`) are input artifacts; keyword-only ones are
    parameters, described by ``Annotated[type, Field(description=…, ge=…)]``. Each field of a
    parameter whose type is a subclass of `Options` is a parameter of its own.

    Some names mean something outside of the stage: `seed` and `iteration` (`Stage.seed`), the
    `RUN_SETTINGS` of `config/pipeline.py`, `endpoint` (the graph sets it), `engine`, `engine_args`,
    `backend` and `expected_world_size` (`workflow/loop.py: StageSpec`,
    `workflow/plan.py: StagePlan`).

    A parameter that is added to a stage has a default that does what the stage did without it: an
    output that was committed before counts as made with the default (`_check_same_origin`). It is a
    setting of each pipeline that has the stage's `settings`, and `make golden` renders it.

    Args:
        kind: what the output is; its URL's flag is ``--<kind>``, or ``--<kind>-out`` where an input
            has this name.
        image: the container image that has its libraries.
        accelerator: whether its pod may get a GPU; one that only calls a server gets none
            (`argo/pod_fields.py: find_role`).
        role: what it is in a loop: reports, plans and progress ask for this, never for its name.
        results: scalars it returns, all of them each time; one that could not be measured is None.
            Each is an output of Argo's template, of the task on Kubeflow Pipelines, and of the
            steps of a loop, by its name in kebab-case. Some names are asked for by readers:
            `mean_reward` of scorers and evaluators (`runs/run_record.py`, `runs/promotions.py`,
            `stages/deploy_model.py`), and `loss` of a checkpoint (`kfp/ui_outputs.py`).
        after: called once the output is committed, also if it was committed before; must be
            idempotent.
        identity: maps the parameters to what identifies the contents of a file that they name (it
            is no artifact).
        account: the ServiceAccount whose permissions its pod needs.
        resolve: maps the parameters, the output's URL, and the parameters of the manifest that is
            committed there (empty: none is), to the values of those that refer to something which
            may change: the stage and its output's identity have these values.
    """
    return lambda function: Component(
        function=function,
        kind=kind,
        image=image,
        accelerator=accelerator,
        role=role,
        results=results or {},
        after=after,
        identity=identity,
        account=account,
        resolve=resolve,
    )


def build_command(module: str, processes: int = 1, nodes: int = 1) -> list[str]:
    """Return how a container starts the stage of a module.

    Args:
        module: that ``python -m`` runs.
        processes: on a node; for several it is torchrun instead of ``python -m``.
        nodes: on several of them torchrun takes its settings from the environment.
    """
    if processes == nodes == 1:
        return ["python", "-m", module]
    command = list(TORCHRUN)
    if nodes == 1:
        command += ["--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", module]
    return command


def find_component(module: str, template: str = "", *, load: bool = False) -> Component | None:
    """Find the stage that `module` defines: the one called `template`, else the first, else None.

    Without `load`, a stage outside of tuneloop.stages is found only where its module has been
    imported: plans and displays then know nothing of it but what the plan states.

    Args:
        load: import a module that is neither one of tuneloop.stages nor a stage of an extension. It
            may be a program that starts when it is imported.
    """
    if load or module.startswith("tuneloop.stages.") or _is_extension_stage(module):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    names = vars(sys.modules[module]) if module in sys.modules else {}
    first = None
    for value in names.values():
        # A module may import the stages of others.
        if isinstance(value, Component) and value.__module__ == module:
            if value.template == template:
                return value
            first = first or value
    return first


def _is_extension_stage(module: str) -> bool:
    """Return whether an extension declares the stage that a module of the same name has."""
    path = find_extension_stage(module.rpartition(".")[2])
    return bool(path) and path.partition(":")[0] == module


REMEDIES = {
    "model_type": "is a section: write its keys, as in section.key=value",
    "extra_forbidden": "unknown key; see `tuneloop schema` for the known ones",
    "bool_parsing": "has to be true or false",
    "bool_type": "has to be true or false",
    "dict_type": "has to be a mapping, as in {NAME: VALUE}",
    "float_parsing": "has to be a number",
    "float_type": "has to be a number",
    "int_from_float": "has to be a whole number",
    "int_parsing": "has to be a whole number",
    "int_type": "has to be a whole number",
    "list_type": "has to be a list, as in [A, B]",
    "string_type": "has to be a text: write it in quotes",
}
"""Type of a pydantic error → the remedy, in place of its message. Settings, stages, engines and the
gateway explain errors by it; a type that is not here has pydantic's own words."""


def convert_validation_error(error: ValidationError, prefix: str = "") -> UserError:
    """Describe the first problem of a pydantic error in one line with field, value and remedy."""
    first = error.errors()[0]
    field = prefix + ".".join(str(part) for part in first["loc"] if part != "[key]")
    # Only an error that a validator of ours raised has one in its context.
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        path = ".".join(filter(None, (field.rstrip("."), cause.field)))
        return UserError(path, cause.value, cause.remedy)
    if isinstance(cause, ValueError):
        return UserError(field, first["input"], str(cause))
    if first["type"] == "missing":
        return UserError(field, None, "is required")
    message = first["msg"].replace("Input should be ", "has to be ")
    return UserError(field, first["input"], REMEDIES.get(first["type"], message))


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
