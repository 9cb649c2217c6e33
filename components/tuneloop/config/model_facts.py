"""What is known of a base model without loading it: its shape, context, dtype and chat template.

Everything is read from the files beside the weights and from the headers of the weights. The model
may be a directory here, one of a store, or a hub name whose files are in the hub's cache; of any
other model nothing is known. Of a store these files and headers are fetched, and nothing else.

Every command that configures a run reads it, so that it has to take milliseconds and to work
offline for a model of this machine. The stage `base_model` finds out the rest.

To read a further file: of a model in a store only files that `config/stored_facts.py: READ` names
are fetched. Tests: `tests/unit/config/test_followed.py`,
`tests/unit/planning/test_model_references.py` (stores), `tests/unit/planning/test_plan.py`
(shapes).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tuneloop.config.stored_facts import preview_model
from tuneloop.core.errors import UserError
from tuneloop.core.hub import split_hub_address
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.formats.adapter_files import STACKED, explain_base, read_adapter
from tuneloop.formats.stored_models import is_reference
from tuneloop.stages.base_model import TINY, TINY_SHAPE, base_model
from tuneloop.stages.export import count_parameters
from tuneloop.weights.layout import read_header

OLDER_NAMES = {
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
}
"""Key of a configuration → what GPT-2's calls it. `shape_of` needs these three and
``vocab_size``."""
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Keys under which configurations state the longest sequence, the most usual first. A model with
another key has no known context here; what loads it asks transformers (`formats/architectures.py:
get_context`)."""
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Name of a dtype in the headers of safetensors files → as torch names it. Quantized weights have
others, so that their dtype is not known."""


DEMO_PARAMETERS = 5_000_000
"""Models with fewer parameters are trained with the demo's settings; the demo's own have less than
a million. docs/defaults.md states the number."""


@dataclass(frozen=True)
class Model:
    """Shape of a decoder.

    `shape_of` gives the fields from `layers` on by their position: a further field comes last.

    Attributes:
        name: as `base_model` names it.
        parameters: how many it has.
        derivation: how they were counted, for people.
        layers: its decoder layers.
        hidden: width of the residual stream.
        kv_heads: heads of keys and values.
        head_dim: width of a head.
        vocab: tokens of its vocabulary.
        linears: linear of a layer, by its name → (inputs, outputs), for adapters; empty: not known.
            Only a dense decoder has them, by which `planning/arithmetic.py` recognizes one.
    """

    name: str
    parameters: int
    derivation: str
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
class ModelFacts:
    """What is known of a base model.

    Attributes:
        name: as `base_model` names it.
        directory: where its files are on this machine; None: they are elsewhere, or it is made
            here.
        shape: its shape, or why it is not known.
        context: tokens of its longest sequence; None: not known.
        dtype: of its weights, as torch names it; None: not known.
        has_chat_template: None: not known.
        problem: why nothing is known of a model in a store.
        holds_in_pods: whether `problem` is the same for pods; else they may have other keys or
            files.
    """

    name: str
    directory: Path | None
    shape: Model | str
    context: int | None = None
    dtype: str | None = None
    has_chat_template: bool | None = None
    problem: UserError | None = None
    holds_in_pods: bool = False

    @property
    def is_demo(self) -> bool:
        """Whether the demo's settings are for it: it is made here, or is nearly as small
        (`DEMO_PARAMETERS`)."""
        small = isinstance(self.shape, Model) and self.shape.parameters < DEMO_PARAMETERS
        return self.name in TINY or small


def read_model_facts(
    name: str,
    revision: str | None = None,
    *,
    adapter_base: str | None = None,
    vocab_size: int | None = None,
    max_position_embeddings: int | None = None,
) -> ModelFacts:
    """Read what is known of the base model `name`.

    The other arguments are parameters of the stage `base_model`. Two callers collect them: of
    settings `config/rules.py: read_base_model`, of a plan `argo/memory_estimate.py: facts_of`. A
    parameter that changes the model's shape or context has to be passed on by both.

    Args:
        name: a directory, a hub name, a reference to a model in a store, or a model that is made
            here.
        revision: of a hub name.
        adapter_base: the model under adapters; None: the one that they name.
        vocab_size: of a tiny model; None: the default of the stage `base_model`.
        max_position_embeddings: of a tiny model; None: the default, too.

    Raises:
        UserError: a file is not JSON, or the base model of adapters has adapters, too.
    """
    if name in TINY:
        return describe_tiny_model(name, vocab_size, max_position_embeddings)
    if is_reference(name):
        preview = preview_model(name)
        if preview.problem is not None:
            return ModelFacts(
                name=name,
                directory=None,
                shape=f"{name}: not estimated, it {preview.problem.remedy}",
                problem=preview.problem,
                holds_in_pods=preview.holds_in_pods,
            )
    directory = find_model_directory(name, revision)
    adapter = read_adapter(directory) if directory else None
    # What is trained is the model under adapters; only a chat template may be their own.
    base = (adapter_base or adapter.base) if adapter else None
    if adapter and base:
        revision = None if adapter_base else adapter.revision
        base_directory = find_model_directory(base, revision)
        # Refused here, as two adapters that name each other would be followed without end.
        if base_directory and read_adapter(base_directory):
            raise UserError("base_model", name, explain_base(base, STACKED))
        facts = read_model_facts(base, revision)
        own_template = find_chat_template(adapter.directory)
        has_template = facts.has_chat_template if own_template is None else own_template
        return replace(facts, name=name, has_chat_template=has_template)
    if directory is None or not (directory / "config.json").is_file():
        missing = f"{name}: not estimated, there is no directory here with a config.json"
        return ModelFacts(name=name, directory=directory, shape=missing)
    document = read_json(directory / "config.json")
    config = document.get("text_config") or document
    return ModelFacts(
        name=name,
        directory=directory,
        shape=shape_of(name, config, directory),
        context=read_context(config),
        dtype=read_dtype(document, config, directory),
        has_chat_template=find_chat_template(directory),
    )


def describe_tiny_model(
    name: str, vocab_size: int | None, max_position_embeddings: int | None
) -> ModelFacts:
    """Return the facts of a model that the stage `base_model` makes itself."""
    defaults = base_model.Params.model_fields
    config: JsonObject = dict(TINY_SHAPE)
    config["vocab_size"] = vocab_size or defaults["vocab_size"].default
    config["model_type"] = name.removeprefix("tiny-")
    return ModelFacts(
        name=name,
        directory=None,
        shape=shape_of(name, config, None),
        context=max_position_embeddings or defaults["max_position_embeddings"].default,
        dtype="float32",
        has_chat_template=True,
    )


def find_model_directory(name: str, revision: str | None = None) -> Path | None:
    """Find the directory of a model: the path itself, the preview of one in a store, or the
    snapshot of a hub name in the hub's cache."""
    if is_reference(name):
        return preview_model(name).directory
    if Path(name).is_dir():
        return Path(name)
    hub_name, hub_revision = split_hub_address("base_model", name, revision)
    cached = find_hub_cache() / f"models--{hub_name.replace('/', '--')}"
    reference = cached / "refs" / (hub_revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else hub_revision
    snapshot = cached / "snapshots" / (commit or "none")
    return snapshot if snapshot.is_dir() else None


def find_hub_cache() -> Path:
    """Return the directory where huggingface_hub keeps models. The library has it in
    ``huggingface_hub.constants``, whose import takes too long for a command."""
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{caches}/huggingface")
    # The second is the former name of the first.
    old_name = os.environ.get("HUGGINGFACE_HUB_CACHE", f"{home}/hub")
    cache = os.environ.get("HF_HUB_CACHE", old_name)
    return Path(os.path.expandvars(cache)).expanduser()


def read_json(path: Path) -> JsonObject:
    """Read a mapping from a file beside a model's weights; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(
            "base_model", str(path.parent), f"its {path.name} is not JSON ({error})"
        ) from error
    return values if isinstance(values, dict) else {}


def read_context(config: JsonMapping) -> int | None:
    """Return the tokens of a model's longest sequence, by the first of `CONTEXT_KEYS` that is a
    number; None if none is."""
    stated = (config.get(key) for key in CONTEXT_KEYS)
    return next((int(length) for length in stated if isinstance(length, int)), None)


def read_dtype(document: JsonMapping, config: JsonMapping, directory: Path) -> str | None:
    """Return the dtype of a model's weights: as configured, else that of most tensors in its first
    file."""
    for part in (document, config):
        stated = part.get("dtype") or part.get("torch_dtype")
        if isinstance(stated, str) and stated != "auto":
            return stated.removeprefix("torch.")
    # Where nothing is stated, most tensors count: norms may be kept in float32.
    first = min(directory.glob("*.safetensors"), default=None)
    if first is None:
        return None
    dtypes = [tensor.dtype for tensor in read_header(first).tensors.values()]
    return DTYPES.get(max(dtypes, key=dtypes.count, default=""))


def find_chat_template(directory: Path) -> bool | None:
    """Return whether the tokenizer in `directory` has a chat template; None where there is no
    tokenizer."""
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    if any((directory / name).exists() for name in files):
        return True
    if not any(
        (directory / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")
    ):
        return None
    return bool(read_json(directory / "tokenizer_config.json").get("chat_template"))


def shape_of(name: str, config: JsonMapping, directory: Path | None) -> Model | str:
    """Return the shape of the model that a Hugging Face configuration describes.

    Parameters are counted in the headers of the weights, where these are here. The formula is for
    Llama's decoders and those that add only biases or norms (`extra`): a family with other weights
    needs a branch, and a line in `tests/unit/planning/test_plan.py` with its published size.

    Args:
        name: the model's.
        config: its ``config.json``.
        directory: where its weights are counted; None: by the formula of Llama's decoders.

    Returns:
        The shape, or a line that says why it is not known.
    """
    # If a configuration has both names, today's counts.
    older_values = {key: config[older] for key, older in OLDER_NAMES.items() if older in config}
    config = older_values | dict(config)
    try:
        heads = config["num_attention_heads"]
        hidden = config["hidden_size"]
        layers = config["num_hidden_layers"]
        vocab = config["vocab_size"]
    except KeyError as error:
        return f"{name}: not estimated, its config.json has no {error}"
    kv = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    counted = sum(map(count_parameters, directory.glob("*.safetensors"))) if directory else 0
    dense = "intermediate_size" in config and not any("experts" in key for key in config)
    # Of experts and of other decoders the linears are not known, nor what adapters would add.
    linears: dict[str, tuple[int, int]] = {}
    if dense:
        inner = config["intermediate_size"]
        queries = (hidden, heads * head)
        keys = (hidden, kv * head)
        linears = {
            "q_proj": queries,
            "k_proj": keys,
            "v_proj": keys,
            "o_proj": queries[::-1],
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }
    shape = (layers, hidden, kv, head, vocab, linears)
    if counted:
        return Model(name, counted, "counted in the headers of its safetensors files", *shape)
    if not dense:
        return (
            f"{name}: not estimated, it has no weights here to count and is not a dense Llama-like "
            "decoder"
        )
    attention = 2 * hidden * heads * head + 2 * hidden * kv * head
    kind = config.get("model_type")
    extra = 0
    if kind == "qwen2":
        # Biases of queries, keys and values.
        extra = (heads + 2 * kv) * head
    elif kind == "qwen3":
        # Norms of queries and keys.
        extra = 2 * head
    mlp = 3 * hidden * config["intermediate_size"]
    tied = 1 if config.get("tie_word_embeddings") else 2
    total = tied * vocab * hidden + layers * (attention + extra + mlp + 2 * hidden) + hidden
    # The vocabulary of a model that is made here is at most what was asked for.
    bound = "" if directory else "at most "
    derivation = (
        f"{bound}{tied} × {vocab} × {hidden} embeddings + {layers} layers × ({attention:,} "
        f"attention + {mlp:,} MLP + {2 * hidden + extra:,} norms and biases) + {hidden}"
    )
    return Model(name, total, derivation, *shape)


def count_layer_bytes(model: Model, dtype: str) -> int:
    """Count the bytes of activations that a layer keeps of a token, with fused attention. The rules
    (`config/choices.py`) and the memory of pods (`argo/memory_estimate.py`) both follow it.

    Norms and residuals are kept in float32 under autocast to bfloat16 too, and norms of queries and
    keys are counted for every model. The coefficients were fitted to the tensors that torch saves
    for the backward pass (`tests/unit/config/test_activations.py`). On a GPU a Qwen3 of 0.6 billion
    parameters took 83 × hidden; this counts 84.
    """
    # Without a known shape: one like Llama's.
    queries = model.linears["q_proj"][1] if model.linears else model.hidden
    inner = model.linears["gate_proj"][1] if model.linears else 4 * model.hidden
    keys = model.kv_heads * model.head_dim
    if dtype == "bfloat16":
        return 24 * model.hidden + 12 * (queries + keys) + 8 * inner
    return 24 * model.hidden + 16 * (queries + keys) + 16 * inner


def count_activation_bytes(model: Model, is_checkpointed: bool, dtype: str) -> int:
    """Count the bytes that training keeps of a token: all of each layer, or with gradient
    checkpointing each layer's input in float32, and one whole layer."""
    layer = count_layer_bytes(model, dtype)
    if is_checkpointed:
        return model.layers * 4 * model.hidden + layer
    return model.layers * layer
