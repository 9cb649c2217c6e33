"""Limits that can be known before anything starts: of the base model, its context, memory and
devices.

`find_limits` is the one list of checks, which `plan`, `lint`, `run`, `submit`, `schedule` and the
commands for Kubeflow Pipelines share. Everything is read from the rendered workflow and from the
model's files; nothing is loaded. `cli/checks.py: check_limits` prints and refuses.

A workflow without a plan is not checked at all. Where its stages lack `base_model`, nothing is known
of the model. A check reads stages and parameters by their names, so a parameter that is renamed ends
the check without a word, unless a line of `tests/unit/planning/test_limits.py` or
`tests/unit/cli/mistakes.py` notices.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel

from tuneloop.argo.memory_estimate import (
    UNKNOWN_MODEL,
    Part,
    compute_memory_request,
    estimate_memory_parts,
)
from tuneloop.config.followed import SECTION_SUFFIX
from tuneloop.config.machine import Machine, describe_pods
from tuneloop.config.model_facts import Model, ModelFacts
from tuneloop.config.sections import list_classes
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.store import local_path
from tuneloop.data.files import TableSource, list_sources
from tuneloop.data.readers.hub import is_saved
from tuneloop.data.readers.opening import (
    explain_suffix,
    has_known_suffix,
    is_on_hub,
    list_files,
)
from tuneloop.data.sources import FILES, find_source_of
from tuneloop.formats.adapter_files import AdapterFiles, is_path, read_adapter
from tuneloop.formats.model_files import list_missing_parts
from tuneloop.formats.stored_models import is_reference
from tuneloop.formats.template_settings import read_template
from tuneloop.planning.adapters import check_target_modules
from tuneloop.planning.plan import describe_parts
from tuneloop.planning.pod_paths import check_file_path, check_model_path
from tuneloop.planning.pods import PlannedPods, list_planned_pods
from tuneloop.planning.warmup import find_long_warmup
from tuneloop.runs.summary import format_size
from tuneloop.stages.base_model import TINY, base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.sft import sft
from tuneloop.training.delegation import CONVERSATION_CHOICES, explain_undelegated
from tuneloop.workflow.plan import NATIVE, VLLM, PodPlan, ServerPlan, StagePlan, find_plan
from tuneloop.workflow.quantities import parse_resource_quantity

LARGEST_NODE = 8 << 40
"""Bytes of memory (8 TiB) that no node has: a pod that needs more is never scheduled. It also
stands for the limit of a pod that has none."""
GPU_SHARE = 0.95
"""The part of an accelerator's memory that programs can use: the driver and CUDA's context have the
rest.
"""
SHARED_UTILIZATION = 0.6
"""The largest `gpu_memory_utilization` of a vLLM that leaves a trainer on the same GPU some room."""
UTILIZATION = 0.9
"""vLLM's own default of `gpu_memory_utilization`."""


NO_MODEL = ModelFacts(name="", directory=None, shape=UNKNOWN_MODEL)
"""The facts of a pipeline that has no stage `base_model`."""


@dataclass(frozen=True)
class Limit:
    """Something that a run would break.

    Attributes:
        error: the setting, its value, and what to do.
        is_estimate: whether it follows from arithmetic that a user may overrule
            (`--ignore-limits`).
        is_note: whether the run goes on all the same, though probably not as the user intends; it
            is only printed.
    """

    error: UserError
    is_estimate: bool = False
    is_note: bool = False


@dataclass(frozen=True)
class CheckedRun:
    """What the checks read.

    Attributes:
        settings: the pipeline's configuration.
        pods: the stages and servers that run.
        facts: what is known of the base model.
        machine: what it all runs on.
        mounts: paths of the pods' volumes; None: the run is not about to be submitted.
    """

    settings: BaseModel
    pods: PlannedPods
    facts: ModelFacts
    machine: Machine
    mounts: Sequence[str] | None = None

    def name_setting(self, stage: StagePlan, parameter: str) -> str:
        """Return the key of the setting of a stage's parameter: in the section of the stage, else
        in ``trainer``. If neither has the parameter, the key begins with the stage's name and may
        be none that the user can set.
        """
        component = stage.component
        name = component.name if component else stage.template
        field = parameter.partition(".")[0]
        # What all stages that train have in common is in the section `trainer`.
        for owner in (name, "trainer"):
            for section, info in type(self.settings).model_fields.items():
                for section_class in list_classes(info):
                    is_owners = section_class.__name__ == f"{owner}{SECTION_SUFFIX}"
                    if is_owners and field in section_class.model_fields:
                        return f"{section}.{parameter}"
        return f"{name}.{parameter}"


GPU_SETTINGS = {
    "device": "cuda",
    "cpu_offload": True,
    "use_liger_kernel": True,
    "attn_implementation": "flash_attention_2",
}
"""Parameter of a stage that trains → the value that needs a GPU. A further one that needs a GPU
goes here."""


def find_limits(
    settings: BaseModel,
    workflow: JsonMapping,
    machine: Machine,
    *,
    mounts: Sequence[str] | None = None,
) -> list[Limit]:
    """Return what a run of a rendered workflow would break, on this machine or in pods.

    With `mounts`, the paths of the pods' volumes, the run is about to be submitted: then a setting
    that names a path of this machine is refused. Of a workflow without a plan, as one that was
    drawn by hand, nothing is known.
    """
    plan = find_plan(workflow)
    if plan is None:
        return []
    pods = list_planned_pods(workflow, plan)
    run = CheckedRun(
        settings=settings,
        pods=pods,
        facts=pods.facts or NO_MODEL,
        machine=machine,
        mounts=mounts,
    )
    # By their text: two stages that share a setting would yield the same line twice.
    limits: dict[str, Limit] = {}
    for check in CHECKS:
        for error in check.find(run):
            limit = Limit(error, is_estimate=check.is_estimate, is_note=check.is_note)
            limits.setdefault(str(error), limit)
    return list(limits.values())


def read_pods(settings: BaseModel) -> Machine:
    """Return what the pods of a pipeline's settings compute on."""
    cluster = getattr(settings, "cluster", None)
    return describe_pods(cluster.model_dump() if isinstance(cluster, BaseModel) else {})


def check_base_model(run: CheckedRun) -> Iterator[UserError]:
    """Find a base model that is neither a complete directory, here or in a store, nor a name on the
    hub."""
    stages = run.pods.list_stages_of(base_model)
    # A fork does not run the stage, and a pipeline may have none.
    if not stages:
        return
    facts = run.facts
    name = facts.name
    if is_reference(name):
        for stage in stages:
            revision = stage.parameters.get("revision")
            if revision is not None:
                setting = run.name_setting(stage, "revision")
                yield UserError(setting, revision, "is for a name on the hub; leave it out")
        if facts.problem is None:
            yield from check_model_files(run, name, facts.directory)
        elif facts.holds_in_pods or not run.machine.is_cluster:
            yield facts.problem
        return
    # Which directories pods see is not known.
    if run.machine.is_cluster or name in TINY:
        return
    directory = Path(name)
    if not directory.is_dir():
        if is_path(name):
            remedy = "is not a directory here; name one, or a model of the hub"
            yield UserError("base_model", name, remedy)
        return
    yield from check_model_files(run, name, directory)


def check_model_files(run: CheckedRun, name: str, directory: Path | None) -> Iterator[UserError]:
    """Find what the directory of the base model lacks."""
    if directory is None:
        return
    adapter = read_adapter(directory)
    if adapter is not None:
        yield from check_adapter_base(run, adapter)
        return
    for remedy in list_missing_parts(directory):
        yield UserError("base_model", name, remedy)


def check_adapter_base(run: CheckedRun, adapter: AdapterFiles) -> Iterator[UserError]:
    """Find adapters as a base model that name no model, or a directory that is not here."""
    stage = run.pods.list_stages_of(base_model)[0]
    try:
        adapter.choose_base(run.facts.name, stage.parameters.get("adapter_base"))
    except UserError as error:
        yield error


def check_pod_paths(run: CheckedRun) -> Iterator[UserError]:
    """Find paths of this machine in the settings of a run that is about to be submitted. A
    parameter that names a file and is not asked for here fails in its pod."""
    if run.mounts is None:
        return
    for stage in run.pods.list_stages_of(base_model):
        if run.facts.name not in TINY:
            yield from check_model_path("base_model", run.facts.name, run.mounts)
        base = stage.parameters.get("adapter_base")
        if base is not None:
            setting = run.name_setting(stage, "adapter_base")
            yield from check_model_path(setting, base, run.mounts)
        template = stage.parameters.get("chat_template")
        if template is not None:
            setting = run.name_setting(stage, "chat_template")
            yield from check_file_path(setting, template, run.mounts)
    for stage in run.pods.list_stages_of(data_prep):
        for source in list_data_sources(stage):
            setting = run.name_setting(stage, source.setting)
            for address in source.addresses:
                yield from check_file_path(setting, address, run.mounts)


def check_adapters(run: CheckedRun) -> Iterator[UserError]:
    """Find adapters for modules that the model does not have, where its files are here."""
    for stage in run.pods.stages:
        lora = stage.parameters.get("lora")
        setting = run.name_setting(stage, "lora")
        yield from check_target_modules(run.facts, setting, lora)


def check_conversations(run: CheckedRun) -> Iterator[UserError]:
    """Find choices of how conversations are learned that a trainer of another backend ignores.

    Such a trainer reads the text of conversations, and not the rows that tuneloop makes of them.
    The stage itself refuses them, too (`training/delegation.py`), by the same list
    `CONVERSATION_CHOICES`.
    """
    delegated = [stage for stage in run.pods.list_stages_of(sft) if is_delegated(stage)]
    if not delegated:
        return
    for stage in run.pods.list_stages_of(data_prep):
        # The choices take effect when tuneloop makes tokens of conversations. Another backend does
        # not read these tokens, but the text.
        for name, default in CONVERSATION_CHOICES.items():
            value = stage.parameters.get(name, default)
            if value != default:
                setting = run.name_setting(stage, name)
                remedy = explain_undelegated(name, default)
                yield UserError(setting, value, remedy)


def check_warmup(run: CheckedRun) -> Iterator[UserError]:
    """Find warm-ups that last as long as the training."""
    for stage in run.pods.stages:
        section = run.name_setting(stage, "warmup_steps").rpartition(".")[0]
        yield from find_long_warmup(stage.parameters, section)


def is_delegated(stage: StagePlan) -> bool:
    """Return whether a stage trains by another backend than tuneloop's own."""
    return stage.backend != NATIVE


def check_chat_template(run: CheckedRun) -> Iterator[UserError]:
    """Find a file of a chat template that cannot be read on this machine."""
    # Which files pods see is not known.
    if run.machine.is_cluster:
        return
    for stage in run.pods.list_stages_of(base_model):
        file = stage.parameters.get("chat_template")
        if file is None:
            continue
        try:
            read_template(file)
        except UserError as error:
            yield error


def check_data_files(run: CheckedRun) -> Iterator[UserError]:
    """Find files of the data that are not on this machine."""
    # Which files pods see is not known.
    if run.machine.is_cluster:
        return
    for stage in run.pods.list_stages_of(data_prep):
        for source in list_data_sources(stage):
            setting = run.name_setting(stage, source.setting)
            for address in source.addresses:
                yield from check_data_address(setting, address, source.split)


def check_data_address(setting: str, address: str, split: str) -> Iterator[UserError]:
    """Find files that an address on this machine names, and that are not there."""
    # What `save_to_disk` wrote has its splits in itself, not in the names of its files.
    if is_on_hub(address) or local_path(address) is None or is_saved(address):
        return
    try:
        files = list_files(address, split)
    except UserError as error:
        # The reader names its argument; the user knows the setting.
        yield UserError(setting, address, error.remedy)
        return
    for file in files:
        path = Path(file).expanduser()
        if not path.exists():
            yield UserError(setting, file, "no such file here: correct the path")
        elif not has_known_suffix(file):
            yield UserError(setting, file, explain_suffix())
        elif path.is_file() and path.stat().st_size == 0:
            yield UserError(setting, file, "is empty: write a row a line, or name another file")


def list_data_sources(stage: StagePlan) -> list[TableSource]:
    """List what `data_prep` reads tables from, without opening anything."""
    source, arguments = find_source_of(stage.parameters)
    if source != FILES:
        return []
    tables = list_sources(arguments)
    # An address as the source is short for the source `files` with this path.
    if stage.parameters["source"] == FILES:
        return tables
    return [
        replace(table, setting="source") if table.setting == "source_args.path" else table
        for table in tables
    ]


def check_context(run: CheckedRun) -> Iterator[UserError]:
    """Find an engine's context above the model's, and completions that leave no room for a
    prompt.
    """
    context = run.facts.context
    stated = run.pods.context
    if context and stated and stated > context:
        remedy = explain_context(run.facts)
        yield UserError("engine.args.max_model_len", stated, remedy)
    refused: set[float] = set()
    for stage in run.pods.list_role("sampler") + run.pods.list_role("evaluator"):
        tokens = stage.number("max_tokens")
        # An evaluation follows the sampler: one line is enough for both.
        if tokens is None or tokens in refused:
            continue
        setting = run.name_setting(stage, "max_tokens")
        engine_context = stage.engine_args.get("max_model_len")
        error = check_prompt_room(setting, tokens, context, engine_context)
        if error:
            refused.add(tokens)
            yield error


def check_prompt_room(
    setting: str,
    tokens: float,
    model_context: int | None,
    engine_context: int | None,
) -> UserError | None:
    """Return the error of completions that leave no room for a prompt; None where they do.

    Args:
        setting: that limits the tokens of a completion.
        tokens: its value.
        model_context: the most tokens that the model takes; None: not known.
        engine_context: the engine's own limit; None: it has none.
    """
    # If both limits are equal, the model's own is named, which cannot be raised.
    if model_context and (not engine_context or model_context <= int(engine_context)):
        remedy = f"leaves no room for a prompt in the model's context ({model_context}): lower it"
        limit = model_context
    elif engine_context:
        limit = int(engine_context)
        remedy = f"leaves no room for a prompt in engine.args.max_model_len ({limit}): "
        remedy += "lower it, or raise that"
    else:
        return None
    return UserError(setting, int(tokens), remedy) if tokens >= limit else None


def explain_context(facts: ModelFacts) -> str:
    """Say what to do about a length that is more than the model's context."""
    return f"is more than the context of {facts.name}: set it to at most {facts.context}"


def check_training_length(run: CheckedRun) -> Iterator[UserError]:
    """Find sequences of a trainer that are longer than the context of a pretrained model."""
    context = run.facts.context
    # The lengths of a tiny model are the demo's, whatever its context is.
    if not context or run.facts.is_demo:
        return
    for stage in run.pods.stages:
        length = stage.number("max_length")
        if length is not None and length > context:
            setting = run.name_setting(stage, "max_length")
            yield UserError(setting, int(length), explain_context(run.facts))


def check_processes(run: CheckedRun) -> Iterator[UserError]:
    """Find processes of a trainer that would share a GPU."""
    gpus = run.machine.trainer_gpus
    for stage in run.pods.list_role("trainer"):
        # Another backend starts as many processes as it wants.
        if 0 < gpus < stage.ranks and not is_delegated(stage):
            owner = "a trainer's pod has" if run.machine.is_cluster else "this machine has"
            remedy = f"each process takes a GPU, and {owner} {gpus}: set it to at most that"
            yield UserError("processes", stage.ranks, remedy)
            # All trainers follow this one setting.
            return


def check_devices(run: CheckedRun) -> Iterator[UserError]:
    """Find settings of a trainer that need a GPU, where this machine has none."""
    if run.machine.is_cluster or not run.machine.is_cpu:
        return
    for stage in run.pods.list_role("trainer"):
        for name, value in GPU_SETTINGS.items():
            if stage.parameters.get(name) == value:
                remedy = "needs a GPU, and this machine has none: leave it out"
                yield UserError(run.name_setting(stage, name), value, remedy)


def check_shared_gpu(run: CheckedRun) -> Iterator[UserError]:
    """Find a trainer and a rollout server that would both take the one GPU of this machine."""
    servers = run.pods.servers
    if not servers or not run.machine.has_shared_gpu or run.facts.is_demo:
        return
    # How the server of another engine takes memory is not known.
    if servers[0].kind != VLLM:
        return
    args = servers[0].engine_args
    share = args.get("gpu_memory_utilization", UTILIZATION)
    # A server that sleeps gives its memory back while the trainer computes.
    if args.get("enable_sleep_mode") or "kv_cache_memory_bytes" in args:
        return
    if isinstance(share, float | int) and share <= SHARED_UTILIZATION:
        return
    remedy = (
        "trainer and vLLM would both take the one GPU here: set it to true, or limit "
        "engine.args.gpu_memory_utilization, or use engine=transformers"
    )
    yield UserError("engine.colocate", False, remedy)


def check_memory(run: CheckedRun) -> Iterator[UserError]:
    """Find stages whose model, optimizer and activations take more memory than there is."""
    model = run.facts.shape
    if not isinstance(model, Model):
        return
    for pod in run.pods.by_template.values():
        parts = estimate_memory_parts(pod, model, run.pods.context)
        needed = sum(part.size for part in parts)
        room = find_room(run, pod, model)
        if not parts or room is None or needed <= room.size:
            continue
        setting, value = name_largest(run, pod, parts)
        savings = suggest_savings(pod)
        # A model cannot be lowered.
        if setting != "base_model":
            savings = f"lower it, or {savings}"
        need = f"{format_size(needed)} ({describe_parts(parts)})"
        limit = f"{room.owner} {format_size(room.size)}"
        remedy = f"{pod.template} takes about {need}; {limit}: {savings}"
        yield UserError(setting, value, remedy)


@dataclass(frozen=True)
class Room:
    """Bytes that a stage may use, and whose they are."""

    size: float
    owner: str


def find_room(run: CheckedRun, pod: PodPlan, model: Model) -> Room | None:
    """Return the memory that a pod may use for its model; None where nothing limits it."""
    machine = run.machine
    if machine.is_cluster:
        return find_pod_room(pod)
    if not machine.is_cpu:
        if machine.gpu_memory is None:
            return None
        devices = machine.sampler_gpus
        if isinstance(pod, StagePlan) and pod.role == "trainer":
            devices = pod.ranks
        return Room(
            size=GPU_SHARE * machine.gpu_memory * devices,
            owner="the accelerators here have",
        )
    if machine.memory is None:
        return None
    server_bytes = 0
    is_base = isinstance(pod, StagePlan) and pod.component is base_model
    if not is_base and not isinstance(pod, ServerPlan):
        # The rollout server boots with the base model, and stays while other stages run.
        for server in run.pods.servers:
            parts = estimate_memory_parts(server, model, run.pods.context)
            server_bytes += compute_memory_request([server], parts)
    owner = "this machine has"
    if server_bytes:
        owner += " beside the rollout server"
    return Room(
        size=max(0, machine.memory - server_bytes),
        owner=owner,
    )


def find_pod_room(pod: PodPlan) -> Room | None:
    """Return the memory that a pod on a cluster may use; None where it is an accelerator's, whose
    kind is not known.
    """
    if pod.resources.accelerators:
        return None
    limit = pod.resources.memory_limit
    if limit:
        size = float(parse_resource_quantity(limit))
        if size < LARGEST_NODE:
            return Room(size, "its pod has")
    return Room(LARGEST_NODE, "no node has more than")


def name_largest(run: CheckedRun, pod: PodPlan, parts: Sequence[Part]) -> tuple[str, object]:
    """Return the setting, and its value, on which the largest part of a pod's memory depends, by
    the kinds of `argo/memory_estimate.py: PartKind`."""
    kind = max(parts, key=lambda part: part.size).kind
    # A server's cache has a size of its own, and does not grow with its sequences.
    if not isinstance(pod, StagePlan):
        return "base_model", run.facts.name
    if kind in ("activations", "logits"):
        name = "per_device_train_batch_size"
        batch = pod.number(name) or 0
        return run.name_setting(pod, name), int(batch)
    if kind == "kv_cache":
        name = "max_num_seqs"
        return f"engine.args.{name}", pod.engine_args.get(name)
    return "base_model", run.facts.name


def suggest_savings(pod: PodPlan) -> str:
    """Return the settings that save memory of a stage and are not in use."""
    if not isinstance(pod, StagePlan) or pod.role != "trainer":
        return "use a smaller model"
    savings: list[str] = []
    if pod.parameters.get("gradient_checkpointing") is not True:
        savings.append("set gradient_checkpointing")
    if "lora" not in pod.parameters:
        savings.append("train adapters (lora)")
    savings.append("use more devices, or a smaller model")
    return ", or ".join(savings)


@dataclass(frozen=True)
class Check:
    """A check of `find_limits`.

    Attributes:
        find: yields an error for each thing that a run would break.
        is_estimate, is_note: of the limits that it finds, as in `Limit`.
    """

    find: Callable[[CheckedRun], Iterator[UserError]]
    is_estimate: bool = False
    is_note: bool = False


CHECKS = (
    Check(check_base_model),
    Check(check_pod_paths),
    Check(check_adapters),
    Check(check_conversations),
    Check(check_chat_template),
    Check(check_data_files),
    Check(check_context),
    Check(check_training_length),
    Check(check_processes),
    Check(check_devices),
    Check(check_shared_gpu),
    Check(check_memory, is_estimate=True),
    Check(check_warmup, is_note=True),
)
"""The checks, in the order in which their lines are printed. A further check is a function and its
line here. The room in a store is another list of one: `planning/disk.py: check_store`."""
