"""A loop killed at ten points and resumed ends with the digests of one that was left alone."""

import os
import random
from pathlib import Path

import pytest

from tests.local.loops import command, digests, finish, kill_inside
from tuneloop.argo import state
from tuneloop.artifacts import Artifact

pytestmark = pytest.mark.local
KILLS = 10


def test_killed_at_ten_points_and_resumed_is_the_undisturbed_run(tmp_path: Path) -> None:
    seed = int(os.environ.get("TUNELOOP_TEST_SEED") or random.SystemRandom().randrange(10**6))
    print(f"kill points from TUNELOOP_TEST_SEED={seed}")
    finish(command("run", "sft_then_grpo", "--run", "calm", store=tmp_path))
    calm = state.read(tmp_path / "calm")
    assert calm is not None
    pods = [node for node in calm.nodes.values() if node.type == "Pod" and node.finished]
    assert len({pod.template for pod in pods}) >= 8, "points spread over all stages"

    chosen = points(random.Random(seed), pods)
    line = command("run", "sft_then_grpo", "--run", "killed", store=tmp_path)
    seen = []
    for pod, delay in chosen:
        seen.append((pod.template, kill_inside(line, tmp_path / "killed", pod.id, delay)))
        line = command("resume", "killed", store=tmp_path)
    print("killed in:", seen)
    assert sum(phase in ("Pending", "Running") for _, phase in seen) >= 3, "kills must land inside stages"
    finish(line)
    assert digests(tmp_path, "killed") == digests(tmp_path, "calm")


def test_an_asynchronous_loop_samples_beside_its_updates_and_resumes_the_same(tmp_path: Path) -> None:
    settings = {"loop.asynchronous": True, "sft.max_steps": 10}
    finish(command("run", "sft_then_grpo", "--run", "calm", store=tmp_path, **settings))
    calm = state.read(tmp_path / "calm")
    assert calm is not None
    pods = [node for node in calm.nodes.values() if node.type == "Pod" and node.finished]
    updates, samplings = ([p for p in pods if p.template == name] for name in ("policy-update", "rollout"))
    beside = [s for s in samplings if any(u.started < s.finished and s.started < u.finished for u in updates)]
    assert len(beside) == 2, "of three, all but the first"
    versions = [Artifact(f"{tmp_path}/calm/iterations/{i}/reward").manifest.facts["version"] for i in (1, 2, 3)]
    assert versions == [1, 1, 2], "the update of iteration 2 makes version 3 of 2, and so on"
    line = command("run", "sft_then_grpo", "--run", "killed", store=tmp_path, **settings)
    assert kill_inside(line, tmp_path / "killed", beside[0].id, 0.1) in ("Pending", "Running")
    finish(command("resume", "killed", store=tmp_path))
    assert digests(tmp_path, "killed") == digests(tmp_path, "calm")


def points(rng: random.Random, pods: list[state.Node]) -> list[tuple[state.Node, float]]:
    """Ten pods in the order they run, every template among them, each with a delay inside its run time."""
    first = {pod.template: pod for pod in sorted(pods, key=lambda _: rng.random())}
    rest = [pod for pod in pods if pod not in first.values()]
    chosen = [*first.values(), *rng.sample(rest, KILLS - len(first))]
    # Rather early, as stages may take less time when they are killed than when nobody disturbed them.
    return [(pod, rng.random() ** 2 * (pod.finished - pod.started)) for pod in sorted(chosen, key=lambda p: p.started)]
