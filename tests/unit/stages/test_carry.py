"""Groups that an iteration leaves to the next, from rollout to rollout by way of rewards and checkpoint."""

import itertools
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.policies import commit_policy, commit_prompts
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.formats.carried import CARRIED, read_carried
from tuneloop.formats.rollouts import SCHEMA
from tuneloop.inference.rounds import bound_staleness
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.reward import reward
from tuneloop.stages.rollout import rollout

ITERATIONS = 6
OPTIONS = {"engine": "transformers", "prompts_per_iteration": 2, "oversampled_prompts": 5, "n": 2}
ROUNDS = {"max_tokens": 6, "carry_after": 2}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return commit_prompts(
        tmp_path_factory.mktemp("prompts") / "p", [f"reverse {i} =" for i in range(7)]
    )


def sample(out: Path, policy: Artifact, prompts: Artifact, iteration: int, **more: Any) -> Artifact:
    rollout(
        out=str(out),
        policy=policy.ref,
        prompts=prompts.ref,
        iteration=iteration,
        **OPTIONS,
        **ROUNDS,
        **more,
    )
    return Artifact(str(out))


def judge(out: Path, rollouts: Artifact) -> Artifact:
    reward(out=str(out), rollouts=rollouts.ref)
    return Artifact(str(out))


def rows(artifact: Artifact, file: str = "rollouts.parquet") -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = pq.read_table(artifact.part(file)).to_pylist()
    return made


@pytest.fixture(scope="module")
def chain(
    tmp_path_factory: pytest.TempPathFactory, prompts: Artifact
) -> list[tuple[Artifact, Artifact, Artifact]]:
    """Policy, rollouts and rewards of iterations whose policies have nothing in common but the carried groups."""
    made: list[tuple[Artifact, Artifact, Artifact]] = []
    for i in range(ITERATIONS):
        at = tmp_path_factory.mktemp(f"i{i}")
        policy = commit_policy(at / "policy", i, rewards=made[-1][2] if made else None)
        rollouts = sample(at / "rollout", policy, prompts, i)
        made.append((policy, rollouts, judge(at / "reward", rollouts)))
    return made


def test_every_group_is_rewarded_once_and_every_prompt_drawn_in_turn(
    chain: list[tuple[Artifact, Artifact, Artifact]], prompts: Artifact
) -> None:
    batches = [
        [*dict.fromkeys(row["group"] for row in rows(scored, "rewards.parquet"))]
        for *_, scored in chain
    ]
    assert all(len(batch) == 2 and batch == sorted(batch) for batch in batches)
    trained = [group for batch in batches for group in batch]
    left, about = read_carried(chain[-1][2])
    assert (
        len({*trained, *left}) == len(trained) + len(left) == about["drawn"] == 2 * ITERATIONS + 3
    )
    asked = {
        row["group"]: row["id"] for *_, scored in chain for row in rows(scored, "rewards.parquet")
    }
    asked |= {name: group.row["id"] for name, group in left.items()}
    stream = [asked[group] for group in sorted(asked)]
    assert len({*stream[:7]}) == len({*stream[7:14]}) == 7, (
        "in order of their names they are the epochs of 7 prompts"
    )
    for (_, rollouts, scored), at in zip(chain, range(ITERATIONS)):
        facts = rollouts.manifest.facts
        assert facts["carried"] == {"taken": 3 if at else 0, "left": 3} and "groups" not in facts
        assert facts["staleness"]["bound"] == bound_staleness(3, 5, 2) == 3
        assert scored.part(CARRIED).read_bytes() == rollouts.part(CARRIED).read_bytes()
        assert pq.read_schema(rollouts.part(CARRIED)).equals(SCHEMA)


def test_tokens_keep_their_ids_log_probabilities_and_versions(
    chain: list[tuple[Artifact, Artifact, Artifact]],
) -> None:
    """What went on begins with what was carried, and each token has the log-probability of the version that made it."""
    plain = [
        AutoModelForCausalLM.from_pretrained(p.part("model"), dtype=torch.float32)
        for p, *_ in chain
    ]
    mixed = 0
    for (_, before, _), (_, rollouts, _) in itertools.pairwise(chain):
        carried = {row["request_id"]: row for row in rows(before, CARRIED)}
        everyone = rows(rollouts) + rows(rollouts, CARRIED)
        assert carried.keys() <= {row["request_id"] for row in everyone}
        for row in everyone:
            old = carried.get(
                row["request_id"], {"completion_ids": [], "logprobs": [], "policy_versions": []}
            )
            for name, values in (
                (name, old[name]) for name in ("completion_ids", "logprobs", "policy_versions")
            ):
                assert row[name][: len(values)] == values
    for at, (_, rollouts, _) in enumerate(chain):
        for row in rows(rollouts):
            ids, start = row["prompt_ids"] + row["completion_ids"], len(row["prompt_ids"]) - 1
            assert row["finish_reason"] == "stop" or len(row["completion_ids"]) == 6
            assert (
                row["policy_versions"] == sorted(row["policy_versions"])
                and max(row["policy_versions"]) <= at
            )
            mixed += len({*row["policy_versions"]}) > 1
            with torch.no_grad():
                said = {
                    v: plain[v](torch.tensor([ids])).logits[0].log_softmax(-1)
                    for v in {*row["policy_versions"]}
                }
            made = zip(row["completion_ids"], row["policy_versions"])
            want = [
                float(said[version][start + place][token])
                for place, (token, version) in enumerate(made)
            ]
            assert row["logprobs"] == pytest.approx(want, abs=1e-4)
    assert mixed, "some completions are of two versions"


def test_it_is_a_function_of_its_inputs(
    tmp_path: Path, chain: list[tuple[Artifact, Artifact, Artifact]], prompts: Artifact
) -> None:
    policy, rollouts, _ = chain[2]
    assert (
        sample(tmp_path / "again", policy, prompts, 2).manifest.digest == rollouts.manifest.digest
    )


def test_other_settings_drop_what_was_sampled_with_the_old(
    tmp_path: Path,
    chain: list[tuple[Artifact, Artifact, Artifact]],
    prompts: Artifact,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As in a fork: another temperature would make the log-probabilities wrong. Prompts go on where they were."""
    other = sample(tmp_path / "r", chain[2][0], prompts, 2, temperature=0.7)
    assert "3 carried groups are dropped: they were sampled with {'" in capsys.readouterr().err
    assert other.manifest.facts["carried"] == {"taken": 0, "left": 3}
    assert read_carried(other)[1]["drawn"] == read_carried(chain[2][0])[1]["drawn"] + 5
    assert {v for row in rows(other) for v in row["policy_versions"]} == {2}
    params = {
        "out": str(tmp_path / "w"),
        "policy": chain[2][0].ref,
        "prompts": prompts.ref,
        "iteration": 2,
    }
    rollout(**params, engine="transformers", prompts_per_iteration=2, n=2, max_tokens=6)
    assert "3 carried groups are dropped" in capsys.readouterr().err
    assert CARRIED not in Artifact(str(tmp_path / "w")).manifest.files


def test_the_update_hands_on_what_is_carried_and_bounds_the_age_of_what_it_takes(
    tmp_path: Path, chain: list[tuple[Artifact, Artifact, Artifact]]
) -> None:
    policy, rollouts, scored = chain[3]
    oldest = rollouts.manifest.facts["staleness"]["max"]
    assert oldest > 0
    options = {
        "device": "cpu",
        "save_dtype": "float32",
        "policy": policy.ref,
        "rewards": scored.ref,
    }
    policy_update(out=str(tmp_path / "u"), max_staleness=oldest, **options)
    made = Artifact(str(tmp_path / "u"))
    assert made.part(CARRIED).read_bytes() == rollouts.part(CARRIED).read_bytes()
    assert made.manifest.facts["rollouts"] == 4 and "groups" not in made.manifest.facts
    with pytest.raises(UserError, match=r"policy_versions of i.*max_staleness"):
        policy_update(out=str(tmp_path / "no"), max_staleness=oldest - 1, **options)
