"""Two runs of one group on this machine: they take turns, and come to what one comes to alone."""

import itertools
import subprocess
from pathlib import Path

import pytest

from tests.local.loops import command, digests, finish
from tests.waiting import LIMIT_S, until
from tuneloop.core.artifacts import find_manifest
from tuneloop.sharing.lease_storage import open_lease_group

pytestmark = [pytest.mark.local, pytest.mark.slow]
SHORT = {"loop.iterations": 1, "sft.max_steps": 2, "sft.save_steps": 2, "data.eval": 8}
PATIENCE = 60.0
SHARE = {"cluster.share.group": "g", "cluster.share.patience": PATIENCE}


def test_two_runs_take_turns(tmp_path: Path) -> None:
    runs = {"a": 0, "b": 1}

    def line(name: str, store: Path, **settings: object) -> list[str]:
        return command(
            "run", "sft_then_grpo", "--run", name, store=store, seed=runs[name], **SHORT, **settings
        )

    finish(line("a", tmp_path / "alone"))
    group = f"{tmp_path}/shared/.leases/g"
    with open_lease_group(group, who="first", patience=PATIENCE).acquire() as first:
        together = [subprocess.Popen(line(name, tmp_path / "shared", **SHARE)) for name in runs]
        until(lambda: len(first.group.read().waiting) == 2, 5 * LIMIT_S)
    assert [each.wait(10 * LIMIT_S) for each in together] == [0, 0]
    assert digests(tmp_path / "shared", "a") == digests(tmp_path / "alone", "a")
    made = [
        find_manifest(str(path.parent))
        for path in sorted((tmp_path / "shared").rglob("manifest.json"))
    ]
    took = [
        each.provenance | each.timings | each.notes
        for each in made
        if each and "lease" in each.provenance
    ]
    turns = sorted(took, key=lambda a: a["lease"]["number"])
    assert [a["lease"]["number"] for a in turns] == list(
        range(2, 12)
    )  # of each: sft, rollout, update, two evaluations
    whose = [a["lease"]["ticket"].partition(".")[0] for a in turns]
    assert len(list(itertools.groupby(whose))) > 2, "neither waited for all of the other"
    released = [a["device_released"] for a in turns if "device_released" in a]
    assert len(released) == 4 and all("device_released" in a for a in turns if "train" in a), (
        "each sft and update"
    )
    ended = [a.get("device_released", a["started"] + a["total"]) for a in turns]
    assert all(end <= following["started"] for end, following in zip(ended, turns[1:]))
    assert open_lease_group(group, who="a").read().is_idle
