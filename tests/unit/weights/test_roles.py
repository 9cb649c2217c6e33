"""What each tensor is for: counted in models that transformers makes, and used to read no more than that."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GPTNeoXConfig, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tests import policies
from tests.unit.weights.exports import Model, save, update
from tuneloop.cli import run_cli
from tuneloop.core.errors import UserError
from tuneloop.core.store import Store
from tuneloop.weights.inspect import diff_versions
from tuneloop.weights.layout import Checkpoint
from tuneloop.weights.publish import publish_version
from tuneloop.weights.roles import classify_tensors
from tuneloop.weights.versions import Chain

DENSE = {"embedding": 1, "attention_column": 6, "attention_row": 2, "mlp_column": 4, "mlp_row": 2}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [0],
}
OF_EXPERTS = {"mlp_column": 2, "mlp_row": 1, "expert_column": 8, "expert_row": 4, "router": 1}


@pytest.mark.parametrize("known", [True, False], ids=["by the model", "by names"])
@pytest.mark.parametrize(
    ("family", "tied", "counts"),
    [
        (LlamaConfig, False, {**DENSE, "norm": 5, "head": 1}),
        (
            Qwen2Config,
            False,
            {**DENSE, "norm": 5, "head": 1, "attention_column": 12},
        ),  # with biases
        (Qwen3Config, True, {**DENSE, "norm": 9}),
        (partial(Qwen3MoeConfig, **EXPERTS), False, {**DENSE, **OF_EXPERTS, "norm": 9, "head": 1}),
    ],
    ids=["llama", "qwen2", "qwen3 tied", "experts"],
)
def test_every_tensor_of_a_model_has_its_role(
    tmp_path: Path, family: Any, tied: bool, counts: dict[str, int], known: bool
) -> None:
    policies.model(tied=tied, family=family).save_pretrained(tmp_path)
    if not known:
        (tmp_path / "config.json").write_text('{"model_type": "somebody-elses"}')
    assert Counter(classify_tensors(tmp_path, Checkpoint(tmp_path).tensors).values()) == counts


def test_what_ranks_share_of_a_module_is_said_by_the_model_where_its_name_does_not(
    tmp_path: Path,
) -> None:
    """No name of GPT-NeoX's MLP is one that Llama's have; biases of rows are whole, as those of columns are not."""
    GPTNeoXConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    layer = "gpt_neox.layers.1"
    names = {
        f"{layer}.mlp.dense_h_to_4h.weight": "mlp_column",
        f"{layer}.mlp.dense_4h_to_h.weight": "mlp_row",
    }
    names |= {
        f"{layer}.attention.dense.weight": "attention_row",
        f"{layer}.attention.dense.bias": "replicated",
    }
    names |= {
        f"{layer}.attention.query_key_value.bias": "attention_column",
        "gpt_neox.embed_in.weight": "embedding",
    }
    names |= {"embed_out.weight": "head", f"{layer}.input_layernorm.weight": "norm"}
    assert classify_tensors(tmp_path, names) == names


class Counting(Store):
    """An object store that counts the bytes of ranges that were asked of it."""

    asked = 0

    def _read_range(self, key: str, start: int, length: int) -> memoryview:
        self.asked += length
        return super()._read_range(key, start, length)


def test_who_wants_the_experts_reads_no_other_bytes(tmp_path: Path) -> None:
    rng, store = np.random.default_rng(0), Counting("memory:///roles")
    shapes = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": (256, 512) for i in range(4)}
    shapes |= {
        "model.embed_tokens.weight": (2048, 512),
        "model.layers.0.self_attn.q_proj.weight": (1024, 1024),
    }
    state: Model = {
        n: ("BF16", shape, bytearray(rng.bytes(2 * shape[0] * shape[1])))
        for n, shape in shapes.items()
    }
    changed = {
        name: update(np.random.default_rng(1), {name: tensor}, 0.5)[name]
        for name, tensor in state.items()
    }
    full, experts = 2 * sum(a * b for a, b in shapes.values()), 4 * 2 * 256 * 512
    publish_version(store, 0, save(tmp_path / "0", state))
    publish_version(store, 1, save(tmp_path / "1", changed), encoding=None)
    before = store.asked
    found = diff_versions(store, 0, 1, "expert")
    assert set(found.changed) == {name for name in shapes if "experts" in name} and not found.same
    assert 2 * experts <= store.asked - before < 2 * experts + 4 * (1 << 16) < full
    whole = diff_versions(store, 0, 1)
    assert len(whole.changed) == 6 and {n: whole.changed[n] for n in found.changed} == found.changed
    with pytest.raises(
        UserError, match="no tensor has it; there are: attention_column, embedding, expert_column"
    ):
        diff_versions(store, 0, 1, "scale")


def test_deltas_have_the_roles_of_the_version_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, root = np.random.default_rng(0), f"{tmp_path}/weights"
    names = (
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.mlp.down_proj.weight_scale_inv",
        "else",
    )
    state: Model = {name: ("F32", (64, 64), bytearray(rng.bytes(1 << 14))) for name in names}
    for version in range(3):
        publish_version(root, version, save(tmp_path / f"{version}", state))
        state = {
            name: (dtype, shape, bytearray([data[0] ^ 1, *data[1:]]))
            for name, (dtype, shape, data) in state.items()
        }
    assert Chain(root).entry(0).index.tuneloop.roles == dict(
        zip(names, ("norm", "head", "scale", "replicated"))
    )
    assert Chain(root).entry(2).index.encoding and not Chain(root).entry(2).index.tuneloop.roles
    assert run_cli(["weights", "diff", root, "1", "2", "--role", "scale"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if "model." in line or "else" in line)
    assert row.split() == [names[2], "scale", "0.02%"] and last == "unchanged: 0 tensors"
