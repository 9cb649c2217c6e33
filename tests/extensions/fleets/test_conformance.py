"""The conformance kit passes a peer that keeps to the protocol, and catches each fault that is planted in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.inference.peer import VOCABULARY, Model, Peer, serving
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.extensions.fleets.conformance import Probe, run_checks
from tuneloop.formats.canary import Canary, Noise

FAULTS = {
    "another version echoed": "weights",
    "serves any version": "exact_version",
    "echoes the demanded version": "exact_version",
    "ignores the minimum": "min_version",
    "stale weights": "weights",
    "retokenizes the prompt": "prompt_ids",
    "log-probabilities before temperature": "temperature",
    "works for who hung up": "aborts",
    "cuts the distribution": "scored",
    "ignores seeds": "seeds",
    "samples at random": "seeds",
    "runs past stop tokens": "stops",
    "drops the stop token": "stops",
    "one token too many": "lengths",
    "streams too little": "streams",
    "mixes answers up": "concurrent",
    "loses a log-probability": "form",
    "takes any ids": "refuses",
    "shifts the prompt's log-probabilities": "scored",
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """What the peer should serve: a version and its canary."""
    url = str(tmp_path_factory.mktemp("policy"))
    ids, model = list(range(3, 27)), Model(3)
    logprobs = [float(model.logprobs(ids[:k])[ids[k]]) for k in range(1, len(ids))]
    draft = Draft(url)
    noise = Noise(dtype="float32", mean=0.0, max=0.0, rms=0.0)
    Canary(ids=ids, logprobs=logprobs, noise=noise).write(draft.path / "canary.json")
    draft.commit(stage="sft", facts={"version": 3})
    return Artifact(url)


@pytest.mark.parametrize(("fault", "caught_by"), [("", None), *FAULTS.items()])
def test_faults_are_caught(fault: str, caught_by: str | None, policy: Artifact) -> None:
    with serving(Peer(3, fault)) as url:
        patience = (
            1.5 if fault == "works for who hung up" else 60.0
        )  # which it makes the check wait for
        outcomes = list(run_checks(Probe(url, policy, VOCABULARY, timeout_s=patience)))
    failed = [name for name, result, _ in outcomes if result == "failed"]
    assert fault == "ignores seeds" or "skipped" not in [result for _, result, _ in outcomes]
    assert failed == [] if caught_by is None else caught_by in failed, [
        o for o in outcomes if o[1] != "ok"
    ]


def test_command(policy: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    for fault, code in (("", 0), ("ignores seeds", 1)):
        with serving(Peer(3, fault)) as url:
            assert (
                run_cli(
                    [
                        "endpoint",
                        "check",
                        url,
                        "--policy",
                        policy.ref,
                        "--vocabulary",
                        str(VOCABULARY),
                    ]
                )
                == code
            )
    printed = capsys.readouterr().out
    assert (
        "15 of 15 checks without a fault" in printed
        and "gives the same tokens for eight seeds" in printed
    )


def test_nobody_there() -> None:
    outcomes = list(run_checks(Probe("http://127.0.0.1:9", timeout_s=1)))
    assert {result for _, result, _ in outcomes} == {
        "failed",
        "skipped",
    } and "ConnectionRefused" in outcomes[0][2]


def test_the_peer_is_not_imported_by_the_package() -> None:
    assert not list((Path(__file__).parents[3] / "components").rglob("peer.py"))
