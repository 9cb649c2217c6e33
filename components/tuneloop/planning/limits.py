"""Limits that can be known before anything starts: of the base model, its context, memory and
devices.

`find_limits` is the one list of checks, which `plan`, `lint`, `run` and `submit` share. Everything
is read from the rendered workflow and from the model's files; nothing is loaded."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel

from tuneloop.argo.colocation import parse_resource_quantity
from tuneloop.argo.memory_estimate import (
    Part,
    compute_memory_request,
    context_of,
    estimate_memory_parts,
    facts_of,
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
from tuneloop.data.readers.opening import is_on_hub, list_files
from tuneloop.data.sources import FILES, is_source_name
from tuneloop.formats.adapter_files import AdapterFiles, is_path, read_adapter
from tuneloop.formats.model_files import list_missing_parts
from tuneloop.formats.template_settings import read_template
from tuneloop.planning.adapters import check_target_modules
from tuneloop.planning.plan import list_running_pods
from tuneloop.planning.warmup import find_long_warmup
from tuneloop.runs.summary import format_size
from tuneloop.stages.base_model import TINY, base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.sft import sft
from tuneloop.training.delegation import CONVERSATION_CHOICES, explain_undelegated
from tuneloop.workflow.plan import NATIVE, PodPlan, ServerPlan, StagePlan, find_plan

LARGEST_NODE = 8 << 40
"""Bytes of memory that no node has: a pod that needs more is never scheduled."""
GPU_SHARE = 0.95
"""The part of an accelerator's memory that programs can use: the driver and CUDA's context have the
rest."""
SHARED_UTILIZATION = 0.6
"""The largest `gpu_memory_utilization` of a vLLM that leaves a trainer on the same GPU some
room."""


@dataclass(frozen=True)
class Limit:
    """Something that a run would break.

    Attributes:
        is_estimate: whether it follows from arithmetic that a user may overrule.
        is_note: whether the run goes on all the same, but hardly as the user means it.
    """

    error: UserError
    is_estimate: bool = False
    is_note: bool = False


@dataclass(frozen=True)
class Subject:
    """What the checks read: the settings, the stages and servers that run, the model and what it
    all runs on."""

    settings: BaseModel
    stages: list[StagePlan]
    servers: list[ServerPlan]
    facts: ModelFacts
    machine: Machine

    @property
    def pods(self) -> list[PodPlan]:
        """The stages and the servers."""
        return [*self.stages, *self.servers]

    def name_setting(self, stage: StagePlan, parameter: str) -> str:
        """Return the setting of a stage's parameter: its section's, where the configuration has
        one."""
        component = stage.component
        name = component.name if component else stage.template
        field = parameter.partition(".")[0]
        # What all stages that train have in common is in the section `trainer`.
        for owner in (name, "trainer"):
            for section, info in type(self.settings).model_fields.items():
                for section_class in list_classes(info):
                    is_wanted = section_class.__name__ == f"{owner}{SECTION_SUFFIX}"
                    if is_wanted and field in section_class.model_fields:
                        return f"{section}.{parameter}"
        return f"{name}.{parameter}"


def find_limits(settings: BaseModel, workflow: JsonMapping, machine: Machine) -> list[Limit]:
    """Return what a run of a rendered workflow would break, on this machine or in pods.

    Of a workflow without a plan, as one that was drawn by hand, nothing is known.
    """
    plan = find_plan(workflow)
    if plan is None:
        return []
    pods = list_running_pods(workflow, plan).values()
    stages = [pod for pod in pods if isinstance(pod, StagePlan)]
    servers = [pod for pod in pods if isinstance(pod, ServerPlan)]
    facts = facts_of(stages)
    if facts is None:
        return []
    subject = Subject(settings, stages, servers, facts, machine)
    # Stages that have a setting in common break it in the same line.
    limits: dict[str, Limit] = {}
    for check in CHECKS:
        for limit in check(subject):
            limits.setdefault(str(limit.error), limit)
    return list(limits.values())


def read_pods(settings: BaseModel) -> Machine:
    """Return what the pods of a pipeline's settings compute on."""
    cluster = getattr(settings, "cluster", None)
    return describe_pods(cluster.model_dump() if isinstance(cluster, BaseModel) else {})


def check_base_model(subject: Subject) -> Iterator[Limit]:
    """Find a base model that is neither a complete directory here nor a name on the hub. What pods
    see is not known."""
    name = subject.facts.name
    if subject.machine.is_cluster or name in TINY:
        return
    adapter = read_adapter(Path(name)) if Path(name).is_dir() else None
    if adapter is not None:
        yield from check_adapter_base(subject, adapter)
        return
    if Path(name).is_dir():
        for remedy in list_missing_parts(Path(name)):
            yield Limit(UserError("base_model", name, remedy))
        return
    if is_path(name):
        remedy = "is not a directory here; name one, or a model of the hub"
        yield Limit(UserError("base_model", name, remedy))


def check_adapter_base(subject: Subject, adapter: AdapterFiles) -> Iterator[Limit]:
    """Find adapters as a base model that name no model, or a directory that is not here."""
    stage = next(stage for stage in subject.stages if stage.component is base_model)
    try:
        adapter.choose_base(subject.facts.name, stage.parameters.get("adapter_base"))
    except UserError as error:
        yield Limit(error)


def check_adapters(subject: Subject) -> Iterator[Limit]:
    """Find adapters for modules that the model does not have, where its files are here."""
    for stage in subject.stages:
        setting = subject.name_setting(stage, "lora")
        for error in check_target_modules(subject.facts, setting, stage.parameters.get("lora")):
            yield Limit(error)


def check_conversations(subject: Subject) -> Iterator[Limit]:
    """Find choices of how conversations are learned that a trainer of another backend does not
    know: it reads their text, and not the rows that tuneloop makes of them."""
    if not any(stage.component is sft and is_delegated(stage) for stage in subject.stages):
        return
    for stage in subject.stages:
        if stage.component is not data_prep:
            continue
        # Rows of single turns exist only as tokens, which other backends do not read.
        for name, default in CONVERSATION_CHOICES.items():
            value = stage.parameters.get(name, default)
            if value != default:
                remedy = explain_undelegated(name, default)
                yield Limit(UserError(subject.name_setting(stage, name), value, remedy))


def check_warmup(subject: Subject) -> Iterator[Limit]:
    """Find warm-ups that last as long as the training."""
    for stage in subject.stages:
        section = subject.name_setting(stage, "warmup_steps").rpartition(".")[0]
        for error in find_long_warmup(stage.parameters, section):
            yield Limit(error, is_note=True)


def is_delegated(stage: StagePlan) -> bool:
    """Return whether a stage trains by another backend than tuneloop's own."""
    return stage.backend != NATIVE


def check_chat_template(subject: Subject) -> Iterator[Limit]:
    """Find a file of a chat template that cannot be read on this machine; what pods see is not
    known."""
    if subject.machine.is_cluster:
        return
    for stage in subject.stages:
        file = stage.parameters.get("chat_template")
        if stage.component is not base_model or file is None:
            continue
        try:
            read_template(file)
        except UserError as error:
            yield Limit(error)


def check_data_files(subject: Subject) -> Iterator[Limit]:
    """Find files of the data that are not on this machine; what pods see is not known."""
    if subject.machine.is_cluster:
        return
    for stage in subject.stages:
        if stage.component is not data_prep:
            continue
        for source in list_data_sources(stage):
            setting = subject.name_setting(stage, source.setting)
            for address in source.addresses:
                yield from check_data_address(setting, address, source.split)


def check_data_address(setting: str, address: str, split: str) -> Iterator[Limit]:
    """Find files that an address on this machine names, and that are not there."""
    # What `save_to_disk` wrote has its splits in itself, not in the names of its files.
    if is_on_hub(address) or local_path(address) is None or is_saved(address):
        return
    try:
        files = list_files(address, split)
    except UserError as error:
        yield Limit(UserError(setting, address, error.remedy))
        return
    for file in files:
        if not Path(file).expanduser().exists():
            yield Limit(UserError(setting, file, "no such file here"))


def list_data_sources(stage: StagePlan) -> list[TableSource]:
    """List what `data_prep` reads tables from, as it opens them."""
    source = stage.parameters.get("source", "")
    mixture = stage.parameters.get("mixture")
    arguments = {**stage.parameters.get("source_args", {}), "mixture": mixture}
    if mixture or source == FILES:
        return list_sources(arguments)
    if not source or is_source_name(source):
        return []
    sources = list_sources({**arguments, "path": source})
    return [
        replace(table, setting="source") if table.setting == "source_args.path" else table
        for table in sources
    ]


def check_context(subject: Subject) -> Iterator[Limit]:
    """Find completions that leave no room for a prompt in the engine's context, and a context above
    the model's."""
    model_context = subject.facts.context
    stated = context_of(subject.pods)
    if model_context and stated and stated > model_context:
        remedy = (
            f"is more than the context of {subject.facts.name}: set it to at most {model_context}"
        )
        yield Limit(UserError("engine.args.max_model_len", stated, remedy))
    samplers = [stage for stage in subject.stages if stage.role == "sampler"]
    evaluators = [stage for stage in subject.stages if stage.role == "evaluator"]
    refused: set[float] = set()
    for stage in samplers + evaluators:
        tokens = stage.number("max_tokens")
        # An evaluation follows the sampler: one line is enough for both.
        if tokens is None or tokens in refused:
            continue
        engine = stage.engine_args.get("max_model_len")
        limits = {"the model's context": model_context, "engine.args.max_model_len": engine}
        contexts = {name: int(limit) for name, limit in limits.items() if limit}
        name = min(contexts, key=lambda limit: contexts[limit], default=None)
        if name and tokens >= contexts[name]:
            refused.add(tokens)
            remedy = f"leaves no room for a prompt in {name} ({contexts[name]}): lower it"
            remedy += "" if name == "the model's context" else ", or raise that"
            setting = subject.name_setting(stage, "max_tokens")
            yield Limit(UserError(setting, int(tokens), remedy))


def check_training_length(subject: Subject) -> Iterator[Limit]:
    """Find sequences of a trainer that are longer than the context of a pretrained model. Those of
    a tiny one are the demo's, whatever its context is."""
    model_context = subject.facts.context
    if not model_context or subject.facts.is_demo:
        return
    refused: set[str] = set()
    for stage in subject.stages:
        length = stage.number("max_length")
        setting = subject.name_setting(stage, "max_length")
        if length is None or length <= model_context or setting in refused:
            continue
        refused.add(setting)
        remedy = (
            f"is more than the context of {subject.facts.name}: set it to at most {model_context}"
        )
        yield Limit(UserError(setting, int(length), remedy))


def check_devices(subject: Subject) -> Iterator[Limit]:
    """Find processes that would share a GPU, and a trainer and a rollout server that would both
    take the one GPU of this machine."""
    gpus = subject.machine.trainer_gpus
    for stage in subject.stages:
        is_crowded = 0 < gpus < stage.ranks
        if stage.role == "trainer" and is_crowded and not is_delegated(stage):
            owner = "a trainer's pod has" if subject.machine.is_cluster else "this machine has"
            remedy = f"each process takes a GPU, and {owner} {gpus}: set it to at most that"
            yield Limit(UserError("processes", stage.ranks, remedy))
            break
    server = next(iter(subject.servers), None)
    if server is None or not subject.machine.has_shared_gpu or subject.facts.is_demo:
        return
    args = server.engine_args
    share = args.get("gpu_memory_utilization", 0.9)
    limited = "kv_cache_memory_bytes" in args or (
        isinstance(share, float | int) and share <= SHARED_UTILIZATION
    )
    if not args.get("enable_sleep_mode") and not limited:
        remedy = (
            "trainer and vLLM would both take the one GPU here: set it to true, or limit "
            "engine.args.gpu_memory_utilization, or use engine=transformers"
        )
        yield Limit(UserError("engine.colocate", False, remedy))


def check_memory(subject: Subject) -> Iterator[Limit]:
    """Find stages whose model, optimizer and activations take more memory than there is."""
    model = subject.facts.shape
    if not isinstance(model, Model):
        return
    context = context_of(subject.pods)
    for pod in subject.pods:
        parts = estimate_memory_parts(pod, model, context)
        needed = sum(size for _, size in parts)
        room = find_room(subject, pod, model, context)
        if not parts or room is None or needed <= room.size:
            continue
        sums = " + ".join(f"{text} = {format_size(size)}" for text, size in parts)
        setting, value = name_largest(subject, pod, parts)
        remedy = (
            f"{pod.template} takes about {format_size(needed)} ({sums}); {room.owner} "
            f"{format_size(room.size)}: {'' if setting == 'base_model' else 'lower it, or '}"
            f"{suggest_savings(pod)}"
        )
        yield Limit(UserError(setting, value, remedy), is_estimate=True)


@dataclass(frozen=True)
class Room:
    """Bytes that a stage may use, and whose they are."""

    size: float
    owner: str


def find_room(subject: Subject, pod: PodPlan, model: Model, context: int | None) -> Room | None:
    """Return the memory that a pod may use for its model; None where nothing limits it."""
    machine = subject.machine
    if machine.is_cluster:
        if pod.resources.accelerators:
            return None
        limit = pod.resources.memory_limit
        size = float(parse_resource_quantity(limit)) if limit else LARGEST_NODE
        if size < LARGEST_NODE:
            return Room(size, "its pod has")
        return Room(LARGEST_NODE, "no node has more than")
    if not machine.is_cpu:
        if machine.gpu_memory is None:
            return None
        devices = machine.sampler_gpus
        if isinstance(pod, StagePlan) and pod.role == "trainer":
            devices = pod.ranks
        return Room(GPU_SHARE * machine.gpu_memory * devices, "the accelerators here have")
    if machine.memory is None:
        return None
    # The rollout server boots with the base model, and stays while other stages run.
    is_base = isinstance(pod, StagePlan) and pod.component is base_model
    is_alone = is_base or isinstance(pod, ServerPlan)
    servers = [] if is_alone else subject.servers
    server_bytes = sum(
        compute_memory_request([server], estimate_memory_parts(server, model, context))
        for server in servers
    )
    owner = "this machine has beside the rollout server" if server_bytes else "this machine has"
    return Room(max(0, machine.memory - server_bytes), owner)


def name_largest(subject: Subject, pod: PodPlan, parts: list[Part]) -> tuple[str, object]:
    """Return the setting, and its value, on which the largest part of a pod's memory depends."""
    text, _ = max(parts, key=lambda part: part[1])
    if isinstance(pod, StagePlan):
        if "activations" in text or "logits" in text:
            batch = pod.number("per_device_train_batch_size") or 0
            return subject.name_setting(pod, "per_device_train_batch_size"), int(batch)
        if "KV cache" in text:
            return "engine.args.max_num_seqs", pod.engine_args.get("max_num_seqs")
    return "base_model", subject.facts.name


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


CHECKS = (
    check_base_model,
    check_adapters,
    check_conversations,
    check_chat_template,
    check_data_files,
    check_context,
    check_training_length,
    check_devices,
    check_memory,
    check_warmup,
)
"""The checks of `find_limits`, in the order of their lines."""
