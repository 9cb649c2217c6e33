"""Names of versions: who gets one, what is said of it later, and that retention keeps it."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.unit import toy
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import Artifact, Draft, dump_checked_json
from tuneloop.core.errors import Corrupt
from tuneloop.core.store import Store
from tuneloop.extensions.provenance.promotion import promote_version
from tuneloop.formats.promotions import read_history
from tuneloop.runs.retention import delete_leftovers, find_leftovers
from tuneloop.runs.run_record import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Versions 1 to 4, of which 1, 2 and 4 are evaluated: at 0.5, 0.75 and 1."""
    toy.make(f"{tmp_path}/x", iterations=3)
    toy.evaluate(
        out=f"{tmp_path}/x/iterations/1/evaluate", policy=f"{tmp_path}/x/iterations/1/policy-update"
    )
    return Run("x", str(tmp_path))


def promote(run: Run, *words: str) -> int:
    return run_cli(["promote", run.name, *words, "--store", str(run.directory.parent)])


def test_a_version_that_passes_has_a_name_with_a_history(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert promote(run, "4", "production", "--min", "mean_reward=0.9") == 0
    assert promote(run, "2", "production", "--min", "mean_reward=0.75") == 0
    assert promote(run, "4", "candidate", "--min", "mean_reward=1") == 0
    capsys.readouterr()
    store = ["--store", str(run.directory.parent)]
    assert run_cli(["promoted", *store]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines() if "sha256:" in line]
    assert rows == [["candidate", "x", "4"], ["production", "x", "2"], ["production", "x", "4"]]
    assert run_cli(["promoted", "production", *store]) == 0
    newest, oldest = (line for line in capsys.readouterr().out.splitlines() if "sha256:" in line)
    assert newest.split()[2] == "2" and "mean_reward 0.75 (≥ 0.75)" in newest
    assert oldest.split()[2] == "4" and oldest.endswith(
        Artifact(f"{run.url}/iterations/3/policy-update").ref
    )
    assert run_cli(["promoted", "production", "--json", *store]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == 1 and [each["version"] for each in told["promotions"]] == [2, 4]
    assert told["promotions"] == [*reversed(read_history(Store(run.store_url))[0][:2])]
    first, *_ = read_history(Store(run.store_url))[0]
    assert first["evaluation"] == Artifact(f"{run.url}/evaluate-after").ref and first[
        "figures"
    ] == {"mean_reward": 1.0}
    assert run_cli(["promoted", "nobody", *store]) == 2
    assert "error: NAME: 'nobody': was not promoted in" in capsys.readouterr().err


def test_the_newest_evaluation_that_has_the_figures_decides(run: Run) -> None:
    """Another kind of evaluation, that came later, has others."""
    policy = Artifact(f"{run.url}/iterations/3/policy-update")
    draft = Draft(f"{run.url}/lm-eval")
    draft.commit(
        stage="measure", role="evaluator", inputs={"policy": policy.ref}, results={"score": 0.25}
    )
    assert promote(run, "4", "production", "--min", "mean_reward=0.9") == 0
    assert promote(run, "4", "production", "--min", "score=0.25") == 0
    assert promote(run, "4", "production", "--min", "score=0.3") == 2
    told = [
        (each["evaluation"].split("@")[0], each["figures"])
        for each in read_history(Store(run.store_url))[0]
    ]
    assert told == [
        (f"{run.url}/evaluate-after", {"mean_reward": 1.0}),
        (f"{run.url}/lm-eval", {"score": 0.25}),
    ]


def test_a_promotion_that_stands_is_not_recorded_again(run: Run) -> None:
    """One that has other figures to reach is, and one that gives a name back."""
    for words in (
        ("4", "0.9"),
        ("v4", "0.9"),
        ("v4", "0.8"),
        ("2", "0.7"),
        ("4", "0.8"),
        ("4", "0.8"),
    ):
        assert promote(run, words[0], "production", "--min", f"mean_reward={words[1]}") == 0
    assert promote(run, "4", "candidate", "--min", "mean_reward=0.8") == 0
    made = [
        (each["name"], each["version"], each["least"]["mean_reward"])
        for each in read_history(Store(run.store_url))[0]
    ]
    production = [("production", *each) for each in ((4, 0.9), (4, 0.8), (2, 0.7), (4, 0.8))]
    assert made == [*production, ("candidate", 4, 0.8)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["9", "production", "--min", "mean_reward=0"], "'v9': is not in x"),
        (["3", "production", "--min", "mean_reward=0"], "VERSION: 3: was not evaluated by x"),
        (
            ["2", "production", "--min", "mean_reward=0.8"],
            "is not reached by iterations/1/evaluate: 0.75",
        ),
        (["2", "production", "--min", "kindness=0.1"], "--min: 'kindness': is not a figure of"),
        (
            ["2", "production", "--min", "mean_reward=nan"],
            "--min: 'mean_reward=nan': is not reached",
        ),
        (
            ["four", "production", "--min", "mean_reward=0"],
            "VERSION: 'four': write its number, as in 4 or v4",
        ),
        (["2", "production", "--min", "high"], "--min: 'high': write METRIC=VALUE"),
        (
            ["2", "Production!", "--min", "mean_reward=0"],
            "NAME: 'Production!': use at most 40 lower-case letters",
        ),
    ],
)
def test_what_does_not_pass_is_named(
    run: Run, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert promote(run, *words) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert (
        not (run.directory.parent / "promoted.json").exists()
        and not (run.directory / "pins").exists()
    )


def test_the_audit_is_of_what_made_the_version_and_of_nothing_else(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def damage(key: str) -> None:
        place = run.directory / key
        file = next((place / Artifact(str(place)).manifest.root).glob("*.*"))
        file.write_bytes(file.read_bytes() + b" ")

    damage("iterations/2/rollout")
    assert promote(run, "2", "production", "--min", "mean_reward=0") == 0
    assert promote(run, "4", "production", "--min", "mean_reward=0") == 2
    assert "VERSION: 4: does not pass the audit: iterations/2/rollout: " in capsys.readouterr().err


def test_retention_keeps_what_was_promoted_and_what_it_deleted_is_not(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version 3 is evaluated, and then deleted; version 2 was promoted."""
    toy.evaluate(
        out=f"{run.url}/iterations/2/evaluate", policy=f"{run.url}/iterations/2/policy-update"
    )
    promote_version(run, 2, "production", {"mean_reward": 0.7})
    delete_leftovers(run, find_leftovers(run, keep=1))
    kept = {
        i
        for i in (1, 2, 3)
        if any((run.directory / f"iterations/{i}/policy-update").glob("data-*/model/*"))
    }
    assert kept == {1, 3}
    assert promote(run, "3", "production", "--min", "mean_reward=0") == 2
    said = "VERSION: 3: does not pass the audit: iterations/2/policy-update: its files were deleted"
    assert said in capsys.readouterr().err
    assert promote(run, "4", "production", "--min", "mean_reward=0") == 0, (
        "of what it was made from manifests are left"
    )


def test_two_who_promote_at_once_are_both_in_the_history(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has read the history before the other has written."""
    both, swap = threading.Barrier(2), Store.swap
    met = set[int]()

    def late(self: Store, key: str, expected: bytes | None, data: bytes) -> None:
        if threading.get_ident() not in met:
            met.add(threading.get_ident())
            both.wait(timeout=300)
        swap(self, key, expected, data)

    monkeypatch.setattr(Store, "swap", late)
    runs = {version: Run("x", run.store_url) for version in (1, 4)}
    threads = [
        threading.Thread(target=promote_version, args=(r, v, "production", {}))
        for v, r in runs.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each["version"] for each in read_history(Store(run.store_url))[0]) == [1, 4]


def test_a_history_that_was_changed_is_refused(run: Run) -> None:
    promote_version(run, 2, "production", {"mean_reward": 0.7})
    path = run.directory.parent / "promoted.json"
    path.write_text(
        path.read_text()
        .replace('"version": 2', '"version": 4')
        .replace('"version":2', '"version":4')
    )
    with pytest.raises(Corrupt, match="was changed since it was written"):
        read_history(Store(run.store_url))


@pytest.mark.parametrize(
    "change", [{"time": "now"}, {"time": float("inf")}, {"figures": None}, {"version": True}]
)
def test_a_history_made_to_fit_its_checksum_is_read_by_its_types(
    run: Run, change: dict[str, Any]
) -> None:
    told = promote_version(run, 2, "production", {"mean_reward": 0.7})
    assert read_history(Store(run.store_url))[0] == [told]
    forged = dump_checked_json({"promotions": [{**told, **change}]}, "promoted.json")
    (run.directory.parent / "promoted.json").write_bytes(forged)
    with pytest.raises(Corrupt, match="was changed since it was written"):
        read_history(Store(run.store_url))
