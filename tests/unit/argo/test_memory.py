"""What pods ask for where nobody says how much memory they need, and the memory of runs that share a node."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.utils import parse_quantity

from tests.unit.planning.test_plan import PUBLISHED
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError
from tuneloop.workflow.quantities import parse_resource_quantity

GIB = 2**30


def memory(*sets: str) -> dict[str, tuple[float, float | None]]:
    """Template → GiB that its container requests, and its limit; of a JobSet, each of its pods. A pod a stage, unless
    `sets` say otherwise."""
    pipeline = find_pipeline("sft_then_grpo")
    found = {}
    for template in pipeline.build(pipeline.configure(sets=["loop.iterations_per_pod=0", *sets]))[
        "spec"
    ]["templates"]:
        container: dict[str, Any] = template.get("container", {})
        if "resource" in template:
            pod = yaml.safe_load(template["resource"]["manifest"])["spec"]["replicatedJobs"][0][
                "template"
            ]["spec"]
            (container,) = pod["template"]["spec"]["containers"]
        if container:
            limit = container["resources"].get("limits", {}).get("memory")
            asked = float(
                parse_resource_quantity(container["resources"]["requests"]["memory"]) / GIB
            )
            found[template["name"]] = (
                asked,
                float(parse_resource_quantity(limit) / GIB) if limit else None,
            )
    return found


def test_known_needs_are_request_and_limit_and_a_guess_limits_nothing() -> None:
    found = memory()
    # 853,376 × 16 bytes, 32 × 256 tokens of activations and logits, and the program's GiB
    assert found["sft"] == (1.5, 1.5)
    assert (
        found["policy-update"][0] == found["policy-update"][1]
    )  # lengths are limited by vLLM's max_model_len
    assert found["data-prep"] == found["reward"] == (2.0, None)
    alone = memory("engine.kind=transformers")
    assert alone["policy-update"] == (2.0, None), (
        "of sequences without a limit only a part is known"
    )


def test_what_a_user_says_holds() -> None:
    found = memory("cluster.trainer.memory=3Gi", "cluster.cpu.memory=1Gi")
    assert {found[name] for name in ("sft", "policy-update")} == {(3.0, 3.0)}
    assert {found[name] for name in ("data-prep", "rollout", "evaluate")} == {(1.0, 1.0)}, (
        "clients of the server"
    )
    assert found["serve"] == memory()["serve"] and found["continue"] == (0.25, 0.25)


def test_a_server_that_is_suspended_has_its_cache_on_the_host() -> None:
    sets = (
        "cluster.sampler.gpus=1",
        "engine.args={max_model_len: 256, kv_cache_memory_bytes: 4294967296}",
    )
    assert memory(*sets, "engine.snapshot=true")["serve"][0] == memory(*sets)["serve"][0] + 4
    pod = (*sets, "cluster.trainer.gpus=1", "loop.iterations_per_pod=auto")
    assert memory(*pod, "engine.snapshot=true")["iterations"] == memory(*pod)["iterations"], (
        "a client suspends nothing"
    )
    dropped = [
        each.replace("}", ", enable_sleep_mode: true}") for each in sets
    ]  # before the server is suspended
    assert memory(*dropped, "engine.snapshot=true")["serve"] == memory(*dropped)["serve"]


def test_every_pod_of_a_jobset_asks_for_its_share(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-0.6B"][1]))
    sets = [f"base_model={tmp_path}", "trainer.per_device_train_batch_size=1", "sft.max_length=32"]
    one, two = memory(*sets), memory(*sets, "nodes=2")
    states = PUBLISHED["Qwen3-0.6B"][0] * 16 / GIB
    assert one["sft"][1] > states + 1
    assert abs(one["sft"][1] - two["sft-job"][1] - states / 2) <= 0.25  # as they are rounded
    assert two["sft-result"] == (2.0, None)
    # The first rank of four pods opens the written model: 2 bytes a parameter, where gradients of 4 / 4 were.
    four, wide = memory(*sets, "nodes=4"), memory(*sets, "nodes=4", "trainer.save_dtype=float32")
    parameters = PUBLISHED["Qwen3-0.6B"][0] / GIB
    assert abs(one["sft"][1] - four["sft-job"][1] - parameters * (16 - 16 / 4 - 1)) <= 0.25
    assert abs(wide["sft-job"][1] - four["sft-job"][1] - parameters * 2) <= 0.25


def test_a_pod_of_several_stages_holds_what_all_of_them_do() -> None:
    fine, coarse = (
        memory("cluster.trainer.gpus=1"),
        memory("cluster.trainer.gpus=1", "loop.iterations_per_pod=10"),
    )
    assert coarse["iterations"][1] == fine["policy-update"][1] > 8, "programs with a GPU"


def test_of_a_model_that_is_elsewhere_nothing_is_known() -> None:
    limits = {
        name: limit
        for name, (_, limit) in memory("base_model=some/model").items()
        if name != "continue"
    }
    assert set(limits.values()) == {None}


def test_quantities_are_what_kubernetes_says() -> None:
    for text in (
        "500m",
        "2Gi",
        "8",
        "1e3",
        "5E",
        "1.5Ki",
        "100n",
        ".5",
        "3.",
        "7u",
        "128974848",
        "129e6",
        "123Mi",
    ):
        assert parse_resource_quantity(text) == parse_quantity(text), text
    for text in ("", "2gi", "Gi", "1 Gi", "1.2.3", "NaN"):
        with pytest.raises(UserError, match="is not a Kubernetes quantity"):
            parse_resource_quantity(text)
