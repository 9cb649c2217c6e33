"""Tiny models of many architectures, random, each with the kind of tokenizer that its family has.

What differs between families is what breaks tools: how text is split, which token begins and ends it, whether there is
a padding token or a chat template, rows of embeddings that no token has, and settings of sampling beside the weights.

    python -m tests.models DIRECTORY [NAME ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as cores
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

SENTENCES = [
    *(f"{a} + {b} = {a + b}" for a in range(0, 90, 4) for b in range(0, 90, 7)),
    "The quick brown fox jumps over the lazy dog, while rivers run slowly to the sea.",
    "Question: what is the sum of these two numbers? Answer: the sum is",
    "say user system assistant model, and put the final answer within braces.",
]
CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
HEADERS = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{{- message.content | trim + '<|eot_id|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{%- endif -%}"
)
INSTRUCTIONS = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{%- else -%}{{ ' ' + message.content + eos_token }}{%- endif -%}"
    "{%- endfor -%}"
)
TURNS = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- set role = 'model' if message.role == 'assistant' else message.role -%}"
    "{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
PHI = (
    "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- else -%}{{ eos_token }}{%- endif -%}"
)
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
"""Heads of 32: vLLM's attention on a CPU takes multiples of that."""


def byte_level(specials: list[str], begin: str | None = None) -> Tokenizer:
    """A byte-level BPE, as of GPT-2, Llama 3 and Qwen; `begin` is put before every text."""
    core = Tokenizer(cores.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(SENTENCES, trainer)
    return _beginning_with(core, begin)


def byte_fallback(specials: list[str], begin: str | None = None, prefix: bool = True) -> Tokenizer:
    """A BPE as sentencepiece makes them, of Llama 2, Mistral and Gemma: spaces are ▁, unknown characters bytes.

    With `prefix` a text begins with a space, as Llama's do and Gemma's do not."""
    core = Tokenizer(cores.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    core.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    byte_tokens = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=448, special_tokens=[*specials, *byte_tokens], show_progress=False
    )
    core.train_from_iterator(SENTENCES, trainer)
    core.pre_tokenizer = None
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    core.decoder = decoders.Sequence(steps)
    # Bytes are ordinary tokens of such a tokenizer: text that spells one is not it.
    state = json.loads(core.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["content"] not in byte_tokens
    ]
    return _beginning_with(Tokenizer.from_str(json.dumps(state)), begin)


def _beginning_with(core: Tokenizer, begin: str | None) -> Tokenizer:
    if begin:
        core.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A",
            pair=f"{begin} $A {begin} $B",
            special_tokens=[(begin, core.token_to_id(begin))],
        )
    return core


def _wrap(core: Tokenizer, template: str | None = None, **tokens: str) -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, **tokens
    )
    tokenizer.chat_template = template
    return tokenizer


def chatml_tokenizer() -> Any:
    """Qwen's: the end of a turn is the end of sequence, and another token pads."""
    core = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return _wrap(core, CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def llama3_tokenizer() -> Any:
    """Llama 3's: both the template and the tokenizer begin with BOS; nothing pads."""
    begin = "<|begin_of_text|>"
    specials = [begin, "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return _wrap(byte_level(specials, begin), HEADERS, bos_token=begin, eos_token="<|eot_id|>")


def llama2_tokenizer() -> Any:
    """Llama 2's and Mistral's: nothing pads, and a turn ends with the end of sequence."""
    core = byte_fallback(["<unk>", "<s>", "</s>"], "<s>")
    return _wrap(core, INSTRUCTIONS, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def gemma_tokenizer() -> Any:
    """Gemma's: a turn ends with a token that is not the tokenizer's end of sequence."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    core = byte_fallback(specials, "<bos>", prefix=False)
    return _wrap(
        core, TURNS, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def phi_tokenizer() -> Any:
    """Phi-3's: padding is the end of sequence, which is not what ends a turn."""
    specials = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
    core = byte_fallback([*specials, "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"])
    end = "<|endoftext|>"
    return _wrap(core, PHI, bos_token="<s>", eos_token=end, pad_token=end, unk_token="<unk>")


def olmo_tokenizer() -> Any:
    """OLMo's: one token begins, ends and pads."""
    end = "<|endoftext|>"
    core = byte_level([end, "<|im_start|>", "<|im_end|>"])
    return _wrap(core, CHATML, bos_token=end, eos_token=end, pad_token=end)


def plain_tokenizer() -> Any:
    """GPT-NeoX's and StarCoder's: neither a padding token nor a chat template."""
    end = "<|endoftext|>"
    return _wrap(byte_level([end, "<|padding|>"]), bos_token=end, eos_token=end, unk_token=end)


@dataclass(frozen=True)
class Architecture:
    """How a tiny model is made. `options` are those of the configuration class, beside `SHAPE`.

    Attributes:
        padding: rows of embeddings that no token has.
        ends: tokens that end a completion beside the tokenizer's own, in generation_config.json.
        by_vllm: whether vLLM of this project's version computes it on a CPU in float32.
    """

    config: str
    tokenizer: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    padding: int = 0
    dtype: str = "bfloat16"
    ends: tuple[str, ...] = ()
    by_vllm: bool = True


EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
SCALED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
ARCHITECTURES = {
    "llama3": Architecture(
        "LlamaConfig",
        llama3_tokenizer,
        {"rope_parameters": SCALED_ROPE},
        padding=128,
        ends=("<|end_of_text|>",),
    ),
    "llama2": Architecture("LlamaConfig", llama2_tokenizer, dtype="float16"),
    "mistral": Architecture(
        "MistralConfig", llama2_tokenizer, {"head_dim": 32, "sliding_window": None}
    ),
    "qwen2": Architecture(
        "Qwen2Config", chatml_tokenizer, {"tie_word_embeddings": True}, padding=100
    ),
    "qwen3": Architecture(
        "Qwen3Config",
        chatml_tokenizer,
        {"head_dim": 32, "tie_word_embeddings": True},
        padding=100,
        ends=("<|endoftext|>",),
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeConfig", chatml_tokenizer, {"head_dim": 32, "norm_topk_prob": True, **EXPERTS}
    ),
    "gemma2": Architecture(
        "Gemma2Config",
        gemma_tokenizer,
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64},
        ends=("<end_of_turn>",),
    ),
    "gemma3": Architecture(
        "Gemma3TextConfig",
        gemma_tokenizer,
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
            "num_hidden_layers": 6,
        },
        ends=("<end_of_turn>",),
    ),
    "phi3": Architecture("Phi3Config", phi_tokenizer, padding=64, ends=("<|end|>",)),
    "olmo2": Architecture("Olmo2Config", olmo_tokenizer, dtype="float32"),
    "granite": Architecture(
        "GraniteConfig",
        plain_tokenizer,
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0156,
        },
    ),
    "starcoder2": Architecture("Starcoder2Config", plain_tokenizer),
    "gpt_neox": Architecture(
        "GPTNeoXConfig",
        plain_tokenizer,
        {"rotary_pct": 0.25},
        padding=64,
        dtype="float16",
        # vLLM 0.32 has no class of its own for it, and computes other log-probabilities.
        by_vllm=False,
    ),
    "gpt_oss": Architecture(
        "GptOssConfig",
        olmo_tokenizer,
        {
            "head_dim": 32,
            "intermediate_size": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
        },
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3Config",
        olmo_tokenizer,
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            # Not of transformers' class, but in every published config.json, and vLLM reads it.
            "topk_method": "noaux_tc",
        },
        by_vllm=False,
    ),
    "qwen3_next": Architecture(
        "Qwen3NextConfig",
        chatml_tokenizer,
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 64,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 1,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            **EXPERTS,
        },
        by_vllm=False,
    ),
    "qwen3_5": Architecture(
        "Qwen3_5TextConfig",
        chatml_tokenizer,
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 1,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        by_vllm=False,
    ),
    "lfm2": Architecture(
        "Lfm2Config",
        chatml_tokenizer,
        {
            "num_hidden_layers": 4,
            "block_auto_adjust_ff_dim": False,
            # Not of transformers' class, but in every published config.json, and vLLM reads them.
            "conv_dim": 128,
            "block_dim": 128,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        },
        by_vllm=False,
    ),
}


def write_model(name: str, directory: Path, seed: int = 0, **save: Any) -> Path:
    """Write the tiny model `name` to `directory`, and return that; `save` goes to `save_pretrained`."""
    architecture = ARCHITECTURES[name]
    tokenizer = architecture.tokenizer()
    config = getattr(transformers, architecture.config)(
        **{**SHAPE, **architecture.options},
        vocab_size=len(tokenizer) + architecture.padding,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    _sharpen(model)
    ends = [tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, architecture.ends)]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends if architecture.ends else ends[0],
        pad_token_id=tokenizer.pad_token_id,
    )
    if architecture.ends:
        model.generation_config.update(
            do_sample=True, temperature=0.6, top_k=20, repetition_penalty=1.05
        )
    model.to(getattr(torch, architecture.dtype)).save_pretrained(directory, **save)
    tokenizer.save_pretrained(directory)
    return directory


def _sharpen(model: Any) -> None:
    """Make random matrices larger, so that distributions have peaks and the greedy choice is no matter of rounding."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)


if __name__ == "__main__":
    for name in sys.argv[2:] or ARCHITECTURES:
        print(write_model(name, Path(sys.argv[1]) / name))
