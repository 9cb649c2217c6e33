"""What a rendered workflow will do before it does it: graph, pods, accelerators, steps, tokens, memory.

Everything is read from the workflow itself: the stage's flags are those that its container will get. Counts are upper
bounds where the graph decides while it runs (``when``, loops that may stop early), and say so.

Memory of training, bytes a parameter: fp32 master weights 4, gradients 4, Adam's two moments 8, as in Rajbhandari et
al., "ZeRO" (2020), §3.1, for full precision; divided by the ranks that FSDP shards over. Activations a layer and token:
34 × hidden bytes, Korthikanti et al., "Reducing Activation Recomputation" (2022), eq. 2 without the attention matrix,
which fused attention does not keep, at 2 bytes a number, doubled for float32; with gradient checkpointing, the input of
each layer (2 × hidden), and one layer whole. Logits: 4 bytes each, and their gradient, as many as are held at once.
KV cache a token: 2 × layers × KV heads × head size × bytes a number.

What a pod asks for (`asked`) is that and the programs around it, on a CPU. On a GPU all this lies in the GPU's memory;
the pod's own holds the programs, and once the weights and the optimizer's state, as they come from the store and go.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuneloop.argo import colocation
from tuneloop.argo.claims import TAKE
from tuneloop.argo.spec import applied, calls
from tuneloop.errors import UserError
from tuneloop.grain import ITERATION, LOST, REQUEUE, compare, possible, unfolded
from tuneloop.summary import size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.tree import Tree

TRAINED = ("sft", "policy_update", "preference", "reward_model")
PAIRED = ("preference", "reward_model")
"""Stages whose batch counts pairs of sequences."""
AT_ONCE = 1 << 25
"""Logits that the trainer holds at a time: `tuneloop.trainers.fsdp.LOGITS`, which needs torch to be read."""
SAMPLED = ("rollout", "evaluate")
HELD = ("base_model", "reference_logprobs", "model_reward")
"""Stages that hold a model's weights, and little else."""
CPU_POOL = 1 << 30
"""Bytes of KV cache that our vLLM server asks for on a CPU, unless told otherwise."""
PROGRAM = {"serve": 3 << 30, "gpu": 8 << 30, "": 1 << 30}
"""Bytes of a process beside its model: of vLLM's server, of any with a GPU, of one with torch. The last was measured on
a CPU (a peak of 0.5 GiB; the rest is room). The server's is what it ran in, with its pool, in 4 GiB; that with a GPU
(CUDA's libraries, pinned buffers) is an allowance, and was not measured."""
STEP = 1 << 28
"""Memory is asked for in multiples of this."""


@dataclass(frozen=True)
class Model:
    """Shape of a decoder.

    Attributes:
        parameters: how many, and `how` they were counted.
        linears: of each layer, what adapters can go to: name → inputs and outputs; empty where they are not known.
    """

    name: str
    parameters: int
    how: str
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocab: int
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache a token, at 2 bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


@dataclass(frozen=True)
class Stage:
    """A template that runs a tuneloop stage.

    Attributes:
        name: of the template.
        stage: of the module: ``policy_update``; None for a container of another program.
        flags: name (snake_case) → text, as the container gets them.
        ranks: of torchrun, in a pod.
        nodes: pods that work together.
        memory: what a pod asks for, as Kubernetes writes it.
    """

    name: str
    stage: str | None
    flags: dict[str, str]
    image: str
    accelerators: int
    ranks: int
    nodes: int = 1
    memory: str = ""

    @property
    def engine_args(self) -> dict[str, Any]:
        """What is passed on to the engine; empty where the stage has none."""
        try:
            return dict(json.loads(self.flags.get("engine_args", "{}")))
        except ValueError:
            return {}

    def number(self, name: str) -> float | None:
        """A flag as a number; None where it is absent, null or decided while the workflow runs."""
        try:
            return float(self.flags[name])
        except (KeyError, ValueError):
            return None


def draw(name: str, workflow: Mapping[str, Any], seconds: Mapping[str, float] | None = None) -> RenderableType:
    """The plan of a rendered workflow, for a terminal.

    Args:
        seconds: stage → how long it worked in an iteration of a recorded run.

    Raises:
        UserError: its model cannot be read, or runs that share a node do not fit there.
    """
    colocation.check(workflow)
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text
    from rich.tree import Tree

    workflow, grain = unfolded(workflow)
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    pods = count_pods(workflow)
    stages = [read_stage(templates[template]) for template in pods]
    shared, iterations = set(ITERATION) & set(pods) if grain else set(), _parameter(workflow, "iterations")
    total = sum(count for stage, count in pods.items() if stage not in shared) + (
        -(-iterations // grain) if grain else 0
    )
    tree = Tree(f"{name}: at most {total} pods")
    _grow(tree, workflow, templates, workflow["spec"]["entrypoint"], ())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("stage", "image", "accelerators", "pods", "memory of a pod"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("accelerators", "pods") else "left")
    model, context = model_of(stages), context_of(stages)
    sums = []
    for stage in stages:
        parts = memory(stage, model, context) if isinstance(model, Model) else []
        complete = isinstance(model, Model) and parts and whole(stage, model, context)
        known = "" if complete else " or more" if parts else " (not estimated)"
        needed = f"{stage.memory}{known}"
        count = f"{pods[stage.name]} in {-(-iterations // grain)}" if stage.name in shared else str(pods[stage.name])
        table.add_row(stage.name, stage.image, str(stage.accelerators or "cpu"), count, needed)
        if parts:
            sums.append(f"  {stage.name}: " + " + ".join(f"{text} = {size(count)}" for text, count in parts))
            sums[-1] += f"; with its programs {size(asked([stage], parts))}"
    told = f"{model.name}: {model.parameters:,} parameters ({model.how})" if isinstance(model, Model) else model
    lines = [f"work at most\n{_lines(work(stages, pods))}", f"memory of {told}", *sums]
    lines += colocation.told(workflow, model.parameters if isinstance(model, Model) else None)
    overlapped = any(call["name"] == "ahead" for template in templates.values() for call in calls(template))
    if not set(ITERATION) <= set(pods) or overlapped:  # one pod would run the stages in turn
        return Group(tree, table, Text("\n".join(lines)))
    grains = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = ("grain of the loop", "overhead an iteration", "accelerator idle", "")
    for heading in headings:
        grains.add_column(heading, no_wrap=True)
    for row in compare(grain, possible(iterations, _parameter(workflow, "per-workflow")), seconds):
        grains.add_row(*row)
    told = (
        "as measured in the run given" if seconds else "--measured RUN recommends one, by the seconds that a run took"
    )
    note = f"overhead: Argo's {REQUEUE:g} s between two pods; work: {told}\n{LOST}"
    return Group(tree, table, Text("\n".join(lines)), grains, Text(note))


def count_pods(workflow: Mapping[str, Any]) -> Counter[str]:
    """Template → pods that it can become at most, without retries; in the order of the graph."""
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    counts: Counter[str] = Counter()
    _count(workflow, templates, workflow["spec"]["entrypoint"], 1, (), counts)
    later = -(-_parameter(workflow, "iterations") // _parameter(workflow, "per-workflow")) - 1
    for name in counts:  # each workflow of a long run has a server, and each but the last starts the next
        if "tuneloop.argo.proceed" in templates[name].get("container", {}).get("command", ()):
            counts[name] = later
        elif templates[name].get("daemon") or name == TAKE:
            counts[name] *= 1 + later
    if handler := workflow["spec"].get("onExit"):
        counts[handler] = 1 + later
    return +counts


def read_stage(template: Mapping[str, Any]) -> Stage:
    """What a leaf template says of its stage."""
    job = applied(template)
    body, group = container_of(template, job), group_of(job)
    words = [*body.get("command", ()), *body.get("args", ())]
    flags: dict[str, str] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            following = words[index + 1] if index + 1 < len(words) else ""
            flags[key.replace("-", "_")] = value if equals else following
    module = next((w for w in words if w.startswith("tuneloop.") and w != "tuneloop.torchrun"), None)
    resources = body.get("resources", {})
    accelerators = sum(int(count) for name, count in resources.get("limits", {}).items() if "/" in name)
    env = {item["name"]: item.get("value") for item in body.get("env", ())}
    ranks, nodes = int(env.get("PET_NPROC_PER_NODE") or flags.get("nproc_per_node", "1")), group.get("parallelism", 1)
    world = flags.get("expected_world_size", "")
    only_reads = world.isdigit() and int(world) != ranks * nodes  # what the JobSet before it has committed
    stage = module.removeprefix("tuneloop.") if module and not only_reads else None
    memory = resources.get("requests", {}).get("memory", "")
    return Stage(template["name"], stage, flags, body.get("image", ""), accelerators, ranks, nodes, memory)


def container_of(template: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """The container that works: the template's own, or of the JobSet `job` that it applies; empty where none is."""
    if job.get("kind") == "JobSet":
        found: dict[str, Any] = group_of(job)["template"]["spec"]["containers"][0]
        return found
    return template.get("container") or template.get("script") or {}


def group_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of the one Job of our JobSets; empty for what is none."""
    if job.get("kind") != "JobSet":
        return {}
    found: dict[str, Any] = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    return found


def model_of(stages: list[Stage]) -> Model | str:
    """The model that the stage `base_model` brings; or why it is not known."""
    from tuneloop.base_model import TINY, TINY_SHAPE

    base = next((stage for stage in stages if stage.stage == "base_model"), None)
    if base is None:
        return "unknown: no stage base_model"
    name = base.flags.get("model", TINY[0])
    if name in TINY:
        vocab = int(base.number("vocab_size") or base_default("vocab_size"))
        shape = {**TINY_SHAPE, "vocab_size": vocab, "model_type": name.removeprefix("tiny-")}
        return shape_of(name, shape, None)
    directory = Path(name)
    if not (directory / "config.json").is_file():
        return f"{name}: not estimated, it is no directory here with a config.json"
    try:
        config = json.loads((directory / "config.json").read_text())
    except ValueError as error:
        raise UserError("base_model", name, f"its config.json is not JSON ({error})") from error
    return shape_of(name, config.get("text_config", config), directory)


def base_default(name: str) -> Any:
    """The default of a parameter of `base_model`."""
    from tuneloop.base_model import base_model

    return base_model.Params.model_fields[name].default


def shape_of(name: str, config: Mapping[str, Any], directory: Path | None) -> Model | str:
    """The model of a Hugging Face configuration; counted from weights in `directory`, else by the Llama formula."""
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        layers, vocab = config["num_hidden_layers"], config["vocab_size"]
    except KeyError as error:
        return f"{name}: not estimated, its config.json has no {error}"
    kv = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    counted = stored_parameters(directory) if directory else 0
    dense = "intermediate_size" in config and not any("experts" in key for key in config)
    linears = _linears(hidden, heads * head, kv * head, config["intermediate_size"]) if dense else {}
    shape = (layers, hidden, kv, head, vocab, linears)
    if counted:
        return Model(name, counted, "counted in the headers of its safetensors files", *shape)
    if not dense:
        return f"{name}: not estimated, it has no weights here to count and is no dense Llama-like decoder"
    attention = 2 * hidden * heads * head + 2 * hidden * kv * head
    kind = config.get("model_type")
    extra = (heads + 2 * kv) * head if kind == "qwen2" else 2 * head if kind == "qwen3" else 0
    mlp = 3 * hidden * config["intermediate_size"]
    tied = 1 if config.get("tie_word_embeddings") else 2
    total = tied * vocab * hidden + layers * (attention + extra + mlp + 2 * hidden) + hidden
    how = (
        f"{tied} × {vocab} × {hidden} embeddings + {layers} layers × ({attention:,} attention + {mlp:,} MLP"
        f" + {2 * hidden + extra:,} norms and biases) + {hidden}"
    )
    return Model(name, total, how, *shape)


def _linears(hidden: int, queries: int, keys: int, inner: int) -> dict[str, tuple[int, int]]:
    """The linear layers of one layer of a Llama-like decoder."""
    attention = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    return {**attention, "o_proj": (queries, hidden), **mlp}


def adapters(stage: Stage, model: Model) -> int | None:
    """Parameters of a stage's LoRA adapters: ``r × (inputs + outputs)`` each. 0 without; None where it is not known
    which layers have some."""
    from tuneloop.trainers.lora import Lora

    given = json.loads(stage.flags.get("lora") or "null")
    if given is None:
        return 0
    lora = Lora(**given)
    named = model.linears if lora.target_modules == "all-linear" else lora.target_modules
    if not model.linears or isinstance(named, str) or not set(named) <= model.linears.keys():
        return None
    return model.layers * lora.r * sum(sum(model.linears[name]) for name in set(named))


def stored_parameters(directory: Path) -> int:
    """How many numbers the safetensors files in `directory` hold, read from their headers alone."""
    total = 0
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(math.prod(about["shape"]) for key, about in header.items() if key != "__metadata__")
    return total


def memory(stage: Stage, model: Model, context: int | None) -> list[tuple[str, float]]:
    """The parts of a pod's memory that follow from the model, in words and bytes.

    Args:
        context: tokens of a prompt and its completion at most, if that is limited.
    """
    if stage.stage in TRAINED:
        return _training_memory(stage, model, context)
    if stage.stage == "serve" or (stage.stage in SAMPLED and stage.flags.get("engine") == "transformers"):
        return _sampling_memory(stage, model, context)
    if stage.stage in HELD:
        return [(f"{model.parameters:,} × 4 weights", model.parameters * 4.0)]
    return []


def whole(stage: Stage, model: Model, context: int | None) -> bool:
    """Whether `memory` has all parts: what sequences need can only be told where their length is limited."""
    if stage.stage in TRAINED:
        limited = (stage.number("max_length") or context) and stage.number("per_device_train_batch_size")
        return bool(limited) and adapters(stage, model) is not None
    return stage.stage in ("serve", *HELD) or context is not None


def asked(stages: Sequence[Stage], parts: Sequence[tuple[str, float]]) -> int:
    """Bytes that a pod asks for in which `stages` run, one after another, if `parts` are what they hold."""
    kinds = ["gpu" if stage.accelerators else stage.stage for stage in stages]
    program = max(PROGRAM.get(str(kind), PROGRAM[""]) * stage.ranks for kind, stage in zip(kinds, stages))
    torchrun = PROGRAM[""] / 2 if any(stage.ranks > 1 for stage in stages) else 0
    states = [count for text, count in parts if "gpu" not in kinds or "weights" in text]
    return math.ceil((program + torchrun + sum(states)) / STEP) * STEP


def _training_memory(stage: Stage, model: Model, context: int | None) -> list[tuple[str, float]]:
    count, ranks = model.parameters, stage.ranks
    shared = f" / {stage.nodes} pods" if stage.nodes > 1 else ""
    kept, added = "(4 weights + 4 gradients + 8 Adam)", adapters(stage, model)
    if added == 0:
        parts = [(f"{count:,} × {kept}{shared}", count * 16 / stage.nodes)]
    else:
        parts = [(f"{count:,} × 4 weights{shared}", count * 4 / stage.nodes)]
        parts += [(f"adapters' {added:,} × {kept}{shared}", added * 16 / stage.nodes)] if added else []
    if stage.stage == "policy_update" and json.loads(stage.flags.get("algorithm_args", "{}")).get("beta"):
        parts.append((f"{count:,} × 4 weights of the reference{shared}", count * 4 / stage.nodes))
    length, batch = stage.number("max_length") or context, stage.number("per_device_train_batch_size")
    if length and batch:
        batch *= 2 if stage.stage in PAIRED else 1
        tokens, wide = batch * length, 1 if stage.flags.get("dtype") == "bfloat16" else 2
        layers = f"{model.layers} layers × 34"
        numbers = model.layers * 34
        if stage.flags.get("gradient_checkpointing") == "true":
            layers, numbers = f"({model.layers} layers × 2 + 34 of one)", model.layers * 2 + 34
        each = f" × {ranks} ranks" if ranks > 1 else ""
        text = f"{batch:g} × {length:g} tokens × {layers} × {model.hidden}{' × 2 (float32)' if wide == 2 else ''}{each}"
        parts.append((f"{text} activations", tokens * numbers * model.hidden * wide * ranks))
        logits = tokens * model.vocab
        whole = f"{batch:g} × {length:g} × {model.vocab}" if logits <= AT_ONCE else f"{AT_ONCE:,}"
        parts.append((f"{whole} logits at once × 8{each}", min(logits, AT_ONCE) * 8 * ranks))
    return parts


def _sampling_memory(stage: Stage, model: Model, context: int | None) -> list[tuple[str, float]]:
    arguments = stage.engine_args
    width = 2 if stage.stage == "serve" or stage.accelerators else 4  # transformers on a CPU: float32
    parts = [(f"{model.parameters:,} × {width} weights", float(model.parameters * width))]
    if stage.stage == "serve":
        if not stage.accelerators:
            pool = int(arguments.get("kv_cache_memory_bytes", CPU_POOL))
            parts.append((f"KV cache pool of {pool // model.kv_bytes:,} tokens × {model.kv_bytes}", float(pool)))
        return parts
    most = int(arguments.get("max_num_seqs", 256))
    sequences = min(
        most, (stage.number("prompts_per_iteration") or stage.number("limit") or most) * (stage.number("n") or 1)
    )
    if context:
        each = model.kv_bytes * width // 2
        parts.append((f"{sequences:g} × {context} tokens × {each} KV cache", sequences * context * each))
    return parts


def context_of(stages: list[Stage]) -> int | None:
    """The longest prompt and completion, in tokens, that an engine of the workflow takes: vLLM's ``max_model_len``."""
    limits = [stage.engine_args["max_model_len"] for stage in stages if "max_model_len" in stage.engine_args]
    return max(map(int, limits), default=None)


def work(stages: list[Stage], pods: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Steps, completions and tokens of each stage, as far as its flags say."""
    for stage in stages:
        times, value = pods[stage.name], stage.number
        if stage.stage == "rollout" and (n := value("n")) and (prompts := value("prompts_per_iteration")):
            total = times * prompts * n
            tokens = f", at most {total * most:,.0f} tokens" if (most := value("max_tokens")) else ""
            yield stage.name, f"{times} × {prompts:g} prompts × {n:g} = {total:,.0f} completions{tokens}"
        elif stage.stage == "sft" and (steps := value("max_steps")):
            batch = (value("per_device_train_batch_size") or 1) * (value("gradient_accumulation_steps") or 1)
            batch *= stage.ranks * stage.nodes
            tokens = f", at most {steps * batch * most:,.0f} tokens" if (most := value("max_length")) else ""
            yield stage.name, f"{times * steps:,.0f} optimizer steps × {batch:g} demonstrations{tokens}"
        elif stage.stage == "policy_update":
            each = value("updates_per_batch") or 1
            yield stage.name, f"{times} × {each:g} = {times * each:,.0f} optimizer steps"
        elif stage.stage == "evaluate" and (limit := value("limit")):
            yield stage.name, f"{times} × at most {limit:g} completions"


def _lines(facts: Iterator[tuple[str, str]]) -> str:
    return "\n".join(f"  {name}: {text}" for name, text in facts)


def _count(
    workflow: Mapping[str, Any],
    templates: Mapping[str, Any],
    name: str,
    times: int,
    above: tuple[str, ...],
    counts: Counter[str],
) -> None:
    tasks = calls(templates[name])
    if not tasks:
        counts[name] += times
        return
    again = next((task for task in tasks if task.get("template") == name), {})
    rounds = _parameter(workflow, "iterations") if again else 1
    for task in tasks:
        if task["template"] not in (*above, name):
            ahead = "when" in again and task.get("when") == again["when"]  # of the next round: the last has none
            often = times * (rounds - ahead) * _fan_out(task)
            _count(workflow, templates, task["template"], often, (*above, name), counts)


def _parameter(workflow: Mapping[str, Any], name: str) -> int:
    """A parameter of the workflow: ``iterations`` is how often a template that calls itself runs at most,
    ``per-workflow`` how often in one workflow; where there is none, once and all of them."""
    for parameter in workflow["spec"].get("arguments", {}).get("parameters", ()):
        if parameter["name"] == name and "value" in parameter:
            return int(parameter["value"])
    return 1 if name == "iterations" else 1 << 30


def _fan_out(task: Mapping[str, Any]) -> int:
    if "withItems" in task:
        return len(task["withItems"])
    count = str(task.get("withSequence", {}).get("count", "1"))
    return int(count) if count.isdigit() else 1


def _grow(
    tree: Tree, workflow: Mapping[str, Any], templates: Mapping[str, Any], name: str, above: tuple[str, ...]
) -> None:
    for task in calls(templates[name]):
        target = task["template"]
        note = " (while its condition holds)" if "when" in task and target not in above and target != name else ""
        if target == name or target in above:
            tree.add(f"↺ {target} again, at most {_parameter(workflow, 'iterations')} times in all")
            continue
        template = templates[target]
        if template.get("daemon"):
            note = " (a server, until the graph around it ends)"
        items = f" × {_fan_out(task)}" if _fan_out(task) > 1 else ""
        branch = tree.add(f"{task['name']}{items}{note}")
        _grow(branch, workflow, templates, target, (*above, name))
