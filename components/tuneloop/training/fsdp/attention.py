"""The attention of a policy: the implementation, whether rows are packed, a kernel for such rows.

Packed rows hold several documents, which must not attend to one another. With a dense mask that
costs the square of the row's length. Kernels for sequences of varying length take the documents'
boundaries instead: FlashAttention has such kernels, and so has torch itself, in
`torch.nn.attention.varlen`. The latter is registered with transformers as the attention ``varlen``.
Where torch's kernel cannot run, on a CPU or in float32, ``varlen`` computes document by document,
which is the reference of its tests.
"""

import importlib.util
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from tuneloop.core.errors import UserError
from tuneloop.formats.architectures import (
    ATTENTION_LAYERS,
    choose_dense_attention,
    find_model_class,
    find_recurrent_layers,
    supports_attention,
)
from tuneloop.training.batching import Batch
from tuneloop.training.options import Dtype, Packing

VARLEN = "varlen"
"""The name of this module's attention in transformers, and a value of `attn_implementation`.
Another process does not have it: `training/delegation.py` gives its backend sdpa instead.
"""
FLASH = "flash_attention_2"
LAYERS = ATTENTION_LAYERS - {"chunked_attention"}
"""Types of layers that the kernels compute: a mask of chunks cannot be given to them."""
LARGEST_HEAD = 256
"""The largest head that FlashAttention's kernels have, in torch too."""


@dataclass(frozen=True)
class Choice:
    """The attention of a policy.

    Attributes:
        attention: transformers' name of the implementation.
        packed: whether several documents share a row.
        obstacle: why ``auto`` pads where a kernel for packed rows could run, for people; empty
            where it packs, or was not asked.
    """

    attention: str
    packed: bool
    obstacle: str = ""

    @property
    def takes_boundaries(self) -> bool:
        """Whether the kernel keeps documents apart by their boundaries, and needs no mask."""
        return self.packed and (self.attention == VARLEN or "flash" in self.attention)


def choose_attention(
    model: Path, device: torch.device, dtype: Dtype, attention: str, packing: Packing
) -> Choice:
    """Choose the attention and the layout of rows for the model in a Hugging Face directory.

    ``auto`` packs where a kernel for packed rows can run, on a GPU with 16 bits: FlashAttention 2
    where it is installed, else torch's own. Otherwise it pads: a dense mask over packed rows was
    measured slower than padding within similar lengths. It also pads a model with layers whose
    state would go on from one document into the next, whatever attention was asked for.

    A model that has no sdpa, as gpt-oss, computes with ``eager``.

    Raises:
        UserError: the attention asked for cannot compute what the model's does, or a packed row
            would mix its documents.
    """
    obstacle = ""
    model_class = find_model_class(model)
    if not supports_attention(model_class, attention):
        remedy = f"transformers' {model_class.__name__} cannot compute with it; take auto or eager"
        raise UserError("--attn-implementation", attention, remedy)
    if attention == "auto":
        attention = choose_dense_attention(model_class)
        if device.type == "cuda" and packing != "padded":
            obstacle = find_device_obstacle(device, dtype) or find_model_obstacle(model)
            if not obstacle:
                attention = FLASH if _has("flash_attn") else VARLEN
    elif attention == VARLEN:
        obstacle = find_model_obstacle(model)
        if obstacle:
            remedy = f"{obstacle}; leave it at auto, which pads rows"
            raise UserError("--attn-implementation", VARLEN, remedy)
    has_kernel = attention == VARLEN or "flash" in attention
    packed = has_kernel if packing == "auto" else packing == "packed"
    recurrent = find_recurrent_layers(model) if packed else []
    if recurrent:
        obstacle = (
            f"this model has layers ({', '.join(recurrent)}) whose state would go on from one "
            "document of a row into the next"
        )
        if packing == "packed":
            raise UserError("--packing", packing, f"{obstacle}; take auto or padded")
    return Choice(attention, packed and not recurrent, obstacle)


def find_device_obstacle(device: torch.device, dtype: Dtype) -> str:
    """Say why no kernel for packed rows can run on a GPU, or return an empty string."""
    if dtype == "float32":
        return "kernels for packed rows compute in 16 bits, and dtype is float32"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "kernels for packed rows need compute capability 8.0"
    return ""


def find_model_obstacle(directory: Path) -> str:
    """Say what the attention of a model does that the kernels do not, or return an empty string.

    Only the configuration and the architecture's class are read, no weights.
    """
    from transformers import AutoConfig

    architecture = find_model_class(directory)
    if architecture is None:
        # `Policy` opens the model next, and says what is wrong with it.
        return "its architecture is not one of transformers' language models"
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    name = architecture.__name__
    # A model that refuses sdpa has attention sinks or a bias, which the kernels lack, too.
    supported = architecture._supports_flash_attn and architecture._supports_sdpa
    if not (supported and architecture._can_set_attn_implementation()):
        return f"{name} has no attention that kernels for packed rows compute"
    return _find_config_obstacle(config.get_text_config(), name, architecture._is_stateful)


def _find_config_obstacle(config: Any, name: str, is_stateful: bool) -> str:
    stateful_types = set(getattr(config, "layer_types", None) or ()) - LAYERS
    if is_stateful or stateful_types:
        kinds = ", ".join(sorted(stateful_types)) or "recurrent layers"
        return f"{name} has {kinds}, which carry state from one document of a row to the next"
    if getattr(config, "attn_logit_softcapping", None):
        return f"{name} caps attention logits (attn_logit_softcapping), which the kernels do not"
    if getattr(config, "attention_dropout", None):
        return f"{name} has attention_dropout {config.attention_dropout}, which the kernels lack"
    # Models with latent attention name the width of the queries' heads apart; most older ones name
    # none.
    head = (
        getattr(config, "qk_head_dim", None)
        or getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    if head > LARGEST_HEAD or head % 8:
        return f"{name} has heads of {head}; kernels for packed rows have multiples of 8 up to 256"
    return ""


def list_boundary_arguments(batch: Batch) -> dict[str, Any]:
    """Name a batch's boundaries as transformers' models pass them on to their attention."""
    return {
        "cu_seq_lens_q": batch.boundaries,
        "cu_seq_lens_k": batch.boundaries,
        "max_length_q": batch.longest,
        "max_length_k": batch.longest,
    }


def register_varlen() -> None:
    """Register ``varlen`` with transformers; without a mask function, models make no mask for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, compute_attention)


def compute_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within documents, as transformers' attention functions do.

    Their signature is transformers': what a model passes beside these goes into `unused`. What
    it asks for and is not computed here has to be refused in `find_model_obstacle`.

    Arguments:
        query: ``[rows, heads, length, head]``; `key` and `value` may have fewer heads, and `value`
            a smaller head.
        sliding_window: tokens that a token attends to, itself included; None: all before it.
        cu_seq_lens_q: int32 ``[documents + 1]``, where documents begin in the rows laid end to end.
        max_length_q: length of the longest document.

    Returns:
        ``[rows, length, heads, head of value]``, and None in place of weights.
    """
    if cu_seq_lens_q is None:
        raise RuntimeError(f"{type(module).__name__} does not pass documents' boundaries on")
    rows = query.shape[0]
    length = query.shape[2]
    width = query.shape[3]
    value_width = value.shape[-1]
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        # Norms with float32 weights leave float32 under autocast, which the kernel does not take.
        low = torch.get_autocast_dtype("cuda")
        query = query.to(low)
        key = key.to(low)
        value = value.to(low)
    # The kernel takes heads of one width; the columns that are added here are cut off at the end.
    if value_width < width:
        value = pad(value, (0, width - value_width))
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    # A window as long as every document hides nothing.
    if sliding_window is not None and sliding_window >= max_length_q:
        sliding_window = None
    if query.is_cuda and query.dtype != torch.float32:
        output = _attend_by_kernel(flat, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    else:
        output = _attend_by_document(flat, cu_seq_lens_q, scaling, sliding_window)
    output = output[..., :value_width]
    return output.unflatten(0, (rows, length)), None


def _attend_by_kernel(
    tensors: list[Tensor],
    boundaries: Tensor,
    longest: int,
    scale: float | None,
    window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = tensors
    options: dict[str, Any] = {}
    # torch before 2.12 has the kernel for grouped heads, but not the argument that asks for it.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    # The kernel counts the tokens before one, without the token itself.
    before = -1 if window is None else window - 1
    output: Tensor = varlen_attn(
        query,
        key,
        value,
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scale,
        window_size=(before, 0),
        **options,
    )
    return output


def _attend_by_document(
    tensors: list[Tensor], boundaries: Tensor, scale: float | None, window: int | None
) -> Tensor:
    lengths = boundaries.diff().tolist()
    outputs: list[Tensor] = []
    for query, key, value in zip(*(tensor.split(lengths) for tensor in tensors), strict=True):
        mask = None
        if window is not None:
            ones = torch.ones(len(query), len(query), dtype=torch.bool, device=query.device)
            mask = ones.tril() & ones.triu(1 - window)
        output = scaled_dot_product_attention(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
