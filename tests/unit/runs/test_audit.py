"""An audit proves a run from its root to its files, and names what does not fit."""

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit import toy
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import (
    CHECKSUM,
    MANIFEST,
    STATED,
    Artifact,
    Draft,
    Manifest,
    dump_checked_json,
    hash_files,
    parse_manifest,
)
from tuneloop.core.errors import Corrupt
from tuneloop.runs.audit import Proof, _check_manifest, audit_run, compute_root
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run

COMMITTED = 10
"""Artifacts of a toy run of two iterations."""


def audit(store: Path) -> dict[str, Proof]:
    return {proof.key: proof for proof in audit_run(Run.open("toy", str(store)))}


def forge(place: Path, **changed: Any) -> None:
    """Change an artifact's manifest, and make it prove itself."""
    made = Manifest.model_validate_json((place / MANIFEST).read_text())
    made = made.model_copy(update={**changed, "files": hash_files(place / made.root)})
    told = made.model_copy(update={"digest": made.compute_digest()}).model_dump_json()
    (place / MANIFEST).write_bytes(dump_checked_json(json.loads(told), MANIFEST))


def test_equal_runs_have_one_root_wherever_they_lie(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roots = []
    for place in ("here", "there"):
        toy.make(f"{tmp_path}/{place}/toy")
        proofs = audit(tmp_path / place)
        assert len(proofs) == COMMITTED and not any(proof.problems for proof in proofs.values())
        roots.append(compute_root(Run.open("toy", f"{tmp_path}/{place}")))
    assert roots[0] == roots[1]
    assert run_cli(["audit", "toy", "--store", f"{tmp_path}/here", "--root", roots[0]]) == 0
    assert roots[0] in capsys.readouterr().out
    toy.make(f"{tmp_path}/longer/toy", iterations=3)
    assert run_cli(["audit", "toy", "--store", f"{tmp_path}/longer", "--root", roots[0]]) == 2
    assert "it is another run, or was changed since" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["results", "provenance"])
def test_a_manifest_that_the_index_has_with_other_content_is_a_flaw(
    tmp_path: Path, field: str
) -> None:
    """Its digest is the one that it states: what is told of a run comes from the index, which proves nothing."""
    toy.make(f"{tmp_path}/toy")
    run = Run.open("toy", str(tmp_path))
    entry = run.entries[-1]
    assert not [*_check_manifest(run, entry)]
    forged = entry.manifest.model_copy(update={field: {"reward": 1.0}})
    assert forged.digest == entry.manifest.digest
    (flaw,) = _check_manifest(run, dataclasses.replace(entry, manifest=forged))
    assert "has changed: its digest was" in flaw


def test_a_changed_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = toy.make(f"{tmp_path}/toy")
    key = f"iterations/1/policy-update/{made['1/policy-update'].root}/model/weights.json"
    (tmp_path / "toy" / key).write_text('{"skill": 3}')
    assert run_cli(["audit", "toy", "--store", str(tmp_path)]) == 2
    assert f"error: iterations/1/policy-update: {key} was changed" in capsys.readouterr().err


def test_a_folder_of_runs_that_was_copied_or_moved_is_read_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, copy, moved = (tmp_path / name for name in ("first", "copy", "moved"))
    record = Record(
        run="r", pipeline="toy_pipeline", path="toy.py", config={}, store=f"file://{first}"
    )
    Run.create(record, "")
    toy.make(f"{first}/r", 1)
    shutil.copytree(first, copy)
    next((copy / "r/sft").rglob("metrics.jsonl")).write_text("{}")
    for place, code in ((first, 0), (copy, 2)):
        assert run_cli(["audit", "r", "--store", str(place)]) == code
    capsys.readouterr()
    first.rename(moved)
    assert run_cli(["audit", "r", "--store", str(moved)]) == 0 and not first.exists()
    assert "0 of 0" not in capsys.readouterr().out
    assert run_cli(["resume", "r", "--store", str(moved)]) == 2
    assert f"was begun in {first}, and goes on there alone" in capsys.readouterr().err


def test_nothing_is_no_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run.create(
        Record(run="r", pipeline="toy", path="toy.py", config={}, store=f"file://{tmp_path}"), ""
    )
    assert run_cli(["audit", "r", "--store", str(tmp_path)]) == 2
    assert "run: 'r': has committed nothing" in capsys.readouterr().err


def test_an_artifact_that_was_forged_whole_is_not_what_others_were_made_from(
    tmp_path: Path,
) -> None:
    toy.make(f"{tmp_path}/toy")
    place = tmp_path / "toy/iterations/1/rollout"
    forge(place, facts={**Artifact(str(place)).manifest.facts, "sampling": {"temperature": 0.5}})
    problems = {key: proof.problems for key, proof in audit(tmp_path).items() if proof.problems}
    (ref,) = problems
    assert ref.startswith(f"{(place).as_uri()}@") or ref.startswith(f"{place}@")
    assert "input rollouts is not in this run" in problems[ref][0]


def test_what_retention_never_deletes_is_missed(tmp_path: Path) -> None:
    made = toy.make(f"{tmp_path}/toy", iterations=3)
    keys = {"export", "iterations/3/policy-update", "iterations/1/rollout"}
    for key in keys:
        root = tmp_path / "toy" / key / made[key.removeprefix("iterations/")].root
        for path in root.rglob("*"):
            if path.is_file() and path.name != "metrics.jsonl":
                path.unlink()
    assert {key for key, proof in audit(tmp_path).items() if proof.problems} == keys


def test_a_state_is_proved_beside_its_checkpoint(tmp_path: Path) -> None:
    draft = Draft(f"{tmp_path}/toy/sft")
    (draft.path / "model").mkdir()
    (draft.path / "model/w").touch()
    draft.commit(stage="sft", facts={"version": 1, "trainer_state": {"digest": "x"}})
    for facts, wrong in (({"digest": "x"}, False), ({"digest": "y"}, True)):
        Draft(f"{tmp_path}/toy/sft/state").commit(stage="sft", facts=facts)
        assert bool(audit(tmp_path)["sft/state"].problems) is wrong
        shutil.rmtree(tmp_path / "toy/sft/state")


def test_old_checkpoints_that_were_deleted_are_no_problem(tmp_path: Path) -> None:
    toy.make(f"{tmp_path}/toy", iterations=3)
    place = tmp_path / "toy/iterations/1/policy-update"
    shutil.rmtree(place / Artifact(str(place)).manifest.root / "model")
    proof = audit(tmp_path)["iterations/1/policy-update"]
    assert proof.deleted and not proof.problems and proof.files == 1


def mutate(value: Any, chance: random.Random) -> Any:
    """Change one thing somewhere in a JSON value: a number, a letter, a key that goes, a value that becomes null."""
    if isinstance(value, dict) and value:
        key = chance.choice(sorted(value))
        if chance.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutate(value[key], chance)}
    if isinstance(value, list) and value:
        at = chance.randrange(len(value))
        return [*value[:at], mutate(value[at], chance), *value[at + 1 :]]
    kinds = [None, 0, 7.5, "x", [], {}, True]
    if isinstance(value, str) and value and chance.random() < 0.7:
        at = chance.randrange(len(value))
        return value[:at] + chance.choice("0af./x") + value[at + 1 :]
    if isinstance(value, int | float) and not isinstance(value, bool):
        kinds += [value + 1, -value, value * 0.5]
    return chance.choice(kinds)


def stated(manifest: Manifest) -> Any:
    """What readers of a manifest act on; references by their digests, as another place of the same is the same."""
    fields = manifest.model_dump(include={*STATED})
    return {
        **fields,
        "inputs": {name: ref.rpartition("@")[2] for name, ref in manifest.inputs.items()},
    }


def test_text_that_looks_like_a_reference_is_covered(tmp_path: Path) -> None:
    Draft(f"{tmp_path}/a").commit(stage="test", facts={"answer": "forty-two @sha256:x"})
    told = json.loads((tmp_path / "a" / MANIFEST).read_text().replace("forty-two", "fifty"))
    told.pop(CHECKSUM)
    with pytest.raises(Corrupt, match="was changed: it states"):
        parse_manifest("a", dump_checked_json(told, MANIFEST))


def test_no_change_of_a_manifest_is_accepted_with_another_meaning(tmp_path: Path) -> None:
    toy.make(f"{tmp_path}/toy")
    chance, accepted, refused = random.Random(0), 0, 0
    for path in sorted((tmp_path / "toy").rglob(MANIFEST)):
        committed = parse_manifest("here", path.read_bytes())
        for _ in range(300):
            told = mutate(json.loads(path.read_bytes()), chance)
            told.pop(CHECKSUM, None)
            try:
                found = parse_manifest("here", dump_checked_json(told, MANIFEST))
            except Corrupt:
                refused += 1
            else:
                accepted += 1
                assert stated(found) == stated(committed), told
    assert refused > 1000 and accepted > 0, "times, places and notes may differ"
