"""What the pages are given of a finished, a running, a failed and a damaged run, and that no text can run in them."""

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.objects import serve_bucket
from tests.policies import commit_policy
from tests.rollouts import SAMPLES, commit_scored_rollouts
from tests.unit import toy
from tests.unit.cluster.api import serving
from tests.waiting import LIMIT_S
from tuneloop.cli.ui import LOOPBACK
from tuneloop.cluster.watch import NODE_NAME
from tuneloop.core.artifacts import MANIFEST, Artifact
from tuneloop.core.store import normalize_url
from tuneloop.formats.tokens import load_tokenizer
from tuneloop.local.journal import Journal, Node, Workflow, lock_workdir
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run
from tuneloop.ui.app import OPEN_RUNS, STATIC, OpenRuns, build_app
from tuneloop.ui.samples import MOST_TOKENS, PAGE_SIZE
from tuneloop.weights.publish import publish_version
from tuneloop.workflow.settings import QUEUE_LABEL, RUN_LABEL

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(build_app(str(tmp_path)), raise_server_exceptions=True) as opened:
        yield opened


def make_run(
    store: Path, name: str, iterations: int = 2, *, whole: bool = True, **config: Any
) -> None:
    tasks = "[{name: sft, template: sft}, {name: export, template: export, depends: sft}]"
    workflow = f"spec: {{templates: [{{name: main, dag: {{tasks: {tasks}}}}}, {{name: sft}}]}}"
    record = Record(run=name, pipeline="toy", path="toy.py", config=config, store=f"file://{store}")
    Run.create(record, workflow)
    toy.make(f"{store}/{name}", iterations, whole=whole)


def commit_rollouts(run: Path, count: int, group: int = 64, iteration: int = 1) -> Artifact:
    """Commit rollouts of a policy whose tokenizer can be read; each completion's text is its number."""
    place = run / "base-model"
    policy = Artifact(str(place)) if place.exists() else commit_policy(place)
    words, texts = (
        load_tokenizer(policy.path / "model"),
        [f"{number:05d}" for number in range(count)],
    )
    commit_scored_rollouts(
        run,
        iteration,
        texts,
        [words.encode(text) for text in texts],
        policy,
        prompt=EVIL,
        group=group,
    )
    return policy


def test_the_list_of_runs(client: TestClient, tmp_path: Path) -> None:
    make_run(tmp_path, "good")
    make_run(tmp_path, "other", 1)
    assert client.get("/api/runs").json() == {"store": str(tmp_path), "runs": ["good", "other"]}
    now = client.get("/api/runs/good/now").json()
    assert (now["record"]["pipeline"], now["phase"], now["iteration"], now["committed"]) == (
        "toy",
        "created",
        2,
        10,
    )
    assert now["rewards"] == [0.5, 0.75] and "0.500 → 1.000" in now["reward"]
    assert {stage["stage"]: stage["phase"] for stage in now["stages"]}[
        "policy-update"
    ] == "Committed"


def test_all_that_a_run_has_committed(client: TestClient, tmp_path: Path) -> None:
    make_run(tmp_path, "good", seed=3)
    run = client.get("/api/runs/good").json()
    assert run["record"]["config"] == {"seed": 3} and run["alarms"] == [] and run["failures"] == {}
    (template,) = run["templates"]
    assert [task["name"] for task in template["dag"]["tasks"]] == ["sft", "export"]
    artifacts = {each["key"]: each for each in run["artifacts"]}
    assert artifacts["export"]["inputs"] == {"policy": "iterations/2/policy-update"}
    assert artifacts["iterations/2/reward"]["inputs"] == {"rollouts": "iterations/2/rollout"}
    assert artifacts["iterations/2/policy-update"]["version"] == 3
    assert {curve["name"] for curve in run["curves"]} >= {
        "mean_reward",
        "kl",
        "entropy",
        "loss",
        "mean_length",
    }


def test_a_number_that_is_not_finite_is_null(client: TestClient, tmp_path: Path) -> None:
    commit_rollouts(tmp_path / "alone", SAMPLES)
    rows = client.get("/api/runs/alone/samples/1").json()["rows"]
    assert [row["score"] for row in rows] == [1.0, 0.0, None, 1.0] and rows[2]["advantage"] is None


def test_a_running_and_a_failed_run_say_how_their_stages_stand(
    client: TestClient, tmp_path: Path
) -> None:
    make_run(tmp_path, "live", 1, whole=False)
    journal = Journal(tmp_path / "live")
    journal.write(Workflow("toy", started=1.0, parameters={"iterations": "9"}))
    journal.write(
        Node(
            "a",
            "toy.rollout(0)",
            "rollout(0)",
            "rollout",
            "Pod",
            "Failed",
            message="killed",
            exit_code=137,
            started=1.0,
            finished=3.0,
        )
    )
    journal.write(
        Node(
            "b",
            "toy.rollout(1)",
            "rollout(1)",
            "rollout",
            "Pod",
            "Running",
            progress="3/9",
            started=4.0,
        )
    )
    with lock_workdir(tmp_path / "live"):  # as its executor would
        now = client.get("/api/runs/live/now").json()
    assert (now["phase"], now["iterations"]) == ("running", "1 of at most 9")
    (stage,) = [stage for stage in now["stages"] if stage["stage"] == "rollout"]
    assert (stage["phase"], stage["progress"], stage["retries"], stage["lost_seconds"]) == (
        "Running",
        "3/9",
        1,
        2.0,
    )
    assert "attempt 1 ended after 2 s" in stage["cause"]
    assert client.get("/api/runs/live/now").json()["phase"] == "interrupted", (
        "whose executor is gone"
    )
    journal.write(Workflow("toy", phase="Failed", started=1.0, finished=9.0))
    assert client.get("/api/runs/live/now").json()["phase"] == "failed"
    toy.make(f"{tmp_path}/live", 2, whole=False)
    assert client.get("/api/runs/live/now").json()["committed"] == 8, (
        "what was committed since is seen"
    )


def test_a_run_on_a_cluster_says_what_its_pods_wait_for(tmp_path: Path) -> None:
    toy.make(f"{tmp_path}/far", 1)
    labels, at = {RUN_LABEL: "far", QUEUE_LABEL: "tuneloop"}, "2026-01-01T00:00:00Z"
    waits = {
        "id": "n",
        "name": "far.rollout(0)",
        "displayName": "rollout(0)",
        "templateName": "rollout",
        "type": "Pod",
    }
    workflow = {"phase": "Running", "nodes": {"n": {**waits, "phase": "Pending", "startedAt": at}}}
    about = {
        "name": "pod",
        "uid": "1",
        "labels": labels,
        "annotations": {NODE_NAME: "far.rollout(0)"},
    }
    kept = {"containers": [], "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    quota = {
        "type": "QuotaReserved",
        "status": "False",
        "message": "insufficient unused quota for cpu, 2 more needed",
    }
    with serving() as (server, cluster), TestClient(build_app(str(tmp_path), cluster)) as client:
        assert "has the label" in client.get("/api/runs/far/now").json()["message"]
        metadata = {"name": "far", "labels": labels, "creationTimestamp": at}
        server.objects["workflows", "far"] = {"metadata": metadata, "spec": {}, "status": workflow}
        server.pods = [{"metadata": about, "spec": kept, "status": {"phase": "Pending"}}]
        workload = {
            "name": "w",
            "creationTimestamp": at,
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "pod", "uid": "1"}],
        }
        server.objects["workloads", "w"] = {"metadata": workload, "status": {"conditions": [quota]}}
        now = client.get("/api/runs/far/now").json()
    (stage,) = now["stages"]
    assert (now["phase"], stage["stage"], stage["phase"]) == ("running", "rollout", "Pending")
    assert stage["message"] == "queue tuneloop: insufficient unused quota for cpu, 2 more needed"


def test_a_run_on_a_cluster_is_listed_before_its_first_commit(tmp_path: Path) -> None:
    with serving() as (server, cluster), TestClient(build_app(str(tmp_path), cluster)) as client:
        for run, store in (("new", normalize_url(str(tmp_path))), ("elsewhere", "s3://other")):
            metadata = {
                "name": run,
                "labels": {RUN_LABEL: run},
                "creationTimestamp": "2026-01-01T00:00:00Z",
            }
            spec = {
                "arguments": {
                    "parameters": [{"name": "run", "value": run}, {"name": "store", "value": store}]
                }
            }
            server.objects["workflows", run] = {"metadata": metadata, "spec": spec}
        assert client.get("/api/runs").json()["runs"] == ["new"]
        labels = server.objects["workflows", "new"]["metadata"]["labels"]
        for phase, listed in (
            ("Running", ["new"]),
            ("Failed", ["new"]),
            ("Error", ["new"]),
            ("Succeeded", []),
        ):
            labels["workflows.argoproj.io/phase"] = phase
            assert client.get("/api/runs").json()["runs"] == listed, (
                "who failed may have committed nothing"
            )
        assert client.get("/api/runs/new/now").json()["phase"] == "pending"
        assert client.get("/api/runs/new").json()["artifacts"] == []
        assert client.get("/api/runs/elsewhere/now").status_code == 404


def test_a_store_in_s3_is_shown_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.make(f"{tmp_path}/store/good", 2)
    commit_rollouts(tmp_path / "store/tokens", 8)
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    objects = {str(path.relative_to(tmp_path / "store")): path.read_bytes() for path in files}
    objects["sessions/default/a/checkpoint/manifest.json"] = (
        b"{}"  # of a gateway, which may have the same store
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / "cache"))
    with serve_bucket(objects, monkeypatch), TestClient(build_app("s3://bucket")) as client:
        assert client.get("/api/runs").json()["runs"] == ["good", "tokens"]
        now = client.get("/api/runs/good/now").json()
        assert (now["phase"], now["iteration"], now["rewards"]) == ("elsewhere", 2, [0.5, 0.75])
        assert client.get("/api/runs/good/weights").json()["published"] == []
        shown = client.get("/api/runs/tokens/samples/1?search=00007").json()
        (row,) = shown["rows"]
        assert "".join(shown["pieces"][str(number)] for number in row["completion_ids"]) == "00007"


def test_pages_of_completions(client: TestClient, tmp_path: Path) -> None:
    commit_rollouts(tmp_path / "r", 2 * PAGE_SIZE + 4)
    for page, rows in (
        (1, range(PAGE_SIZE)),
        (2, range(PAGE_SIZE, 2 * PAGE_SIZE)),
        (3, range(2 * PAGE_SIZE, 2 * PAGE_SIZE + 4)),
        (9, range(0)),
    ):
        shown = client.get(f"/api/runs/r/samples/1?page={page}").json()
        assert [row["completion"] for row in shown["rows"]] == [f"{row:05d}" for row in rows]
        assert (shown["total"], shown["found"], shown["version"]) == (
            2 * PAGE_SIZE + 4,
            2 * PAGE_SIZE + 4,
            1,
        )
    row = client.get("/api/runs/r/samples/1?place=7").json()["rows"][0]
    assert (row["place"], row["id"], row["advantage"]) == (7, "p1", pytest.approx(1 / 3))
    assert json.loads(row["breakdown"]) == {"exact": 1.0}


@pytest.mark.parametrize(
    ("query", "places"),
    [
        ("id=p3", [12, 13, 14, 15]),
        ("group=g1&outcome=score", [4, 5, 7]),
        ("search=0000", [*range(10)]),
        ("search=ANSWER 2", [8, 9, 10, 11]),
        ("id=p0&sort=score", [1, 0, 3, 2]),
        ("id=p0&sort=-advantage", [0, 3, 1, 2]),
        ("sort=nothing&id=p1", [4, 5, 6, 7]),
        ("search=nowhere", []),
    ],
)
def test_completions_are_found_and_ordered(
    tmp_path: Path, client: TestClient, query: str, places: list[int]
) -> None:
    commit_rollouts(tmp_path / "r", 20, group=8)
    assert [
        row["place"] for row in client.get(f"/api/runs/r/samples/1?{query}").json()["rows"]
    ] == places


def test_an_evaluation_has_completions_too(client: TestClient, tmp_path: Path) -> None:
    make_run(tmp_path, "good")
    shown = client.get("/api/runs/good/samples/evaluate-after?id=p2").json()
    assert [row["completion"] for row in shown["rows"]] == ["right"] and shown["version"] == 3


def test_tokens_have_their_text_where_the_tokenizer_is_there(
    client: TestClient, tmp_path: Path
) -> None:
    policy = commit_rollouts(tmp_path / "r", 4)
    shown = client.get("/api/runs/r/samples/1").json()
    ids = shown["rows"][1]["completion_ids"]
    assert (
        "".join(shown["pieces"][str(number)] for number in ids) == "00001"
        and shown["decoder"] == "bytes"
    )
    commit_rollouts(tmp_path / "gone", 4)
    (tmp_path / "gone/base-model" / MANIFEST).unlink()
    assert policy and set(client.get("/api/runs/gone/samples/1").json()["pieces"].values()) <= {
        None
    }


def test_a_long_completion_is_cut_but_by_itself(client: TestClient, tmp_path: Path) -> None:
    policy = commit_policy(tmp_path / "r/sft")
    commit_scored_rollouts(tmp_path / "r", 1, ["long"] * 4, [[5] * (MOST_TOKENS + 9)] * 4, policy)
    row = client.get("/api/runs/r/samples/1").json()["rows"][0]
    assert (len(row["completion_ids"]), row["length"]) == (MOST_TOKENS, MOST_TOKENS + 9)
    (row,) = client.get("/api/runs/r/samples/1?place=2").json()["rows"]
    assert len(row["completion_ids"]) == len(row["logprobs"]) == MOST_TOKENS + 9


def test_weights_say_how_they_are_stored_and_who_serves_them(
    client: TestClient, tmp_path: Path
) -> None:
    policy = commit_rollouts(tmp_path / "r", 4)
    empty = {"published": [], "deliveries": [], "served": {}}
    assert client.get("/api/runs/r/weights").json() == empty
    publish_version(f"{tmp_path}/r/weights", 0, policy.part("model"), source=policy.manifest.digest)
    found = client.get("/api/runs/r/weights").json()
    assert [(each["version"], each["encoding"], each["latest"]) for each in found["published"]] == [
        (0, None, True)
    ]


def test_only_our_scripts_run(client: TestClient) -> None:
    """The page makes no markup of text, and the browser refuses to: what is written in data stays data."""
    for path in (
        "/",
        "/runs/x",
        "/runs/x/weights",
        "/runs/x/samples/evaluate-after",
        "/compare?run=a",
    ):
        answer = client.get(path)
        assert re.findall(r"<script[^>]*>", answer.text) == [
            '<script type="module" src="/static/app.js">'
        ]
        policy = answer.headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy
            and "script-src 'self';" in policy
            and "unsafe" not in policy
        )
        assert "require-trusted-types-for 'script'" in policy
    for path in STATIC.iterdir():
        answer = client.get(f"/static/{path.name}")
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-cache"), (
            "the next version is seen"
        )
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(",
            path.read_text(),
        )


def test_text_of_a_policy_comes_as_data(client: TestClient, tmp_path: Path) -> None:
    commit_rollouts(tmp_path / "r", 4)
    answer = client.get("/api/runs/r/samples/1")
    assert answer.json()["rows"][0]["prompt"] == f"{EVIL}0"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/api/runs/none", 404, "not found below"),
        ("/api/runs/good/samples/9", 404, "has none in good, which has come to iteration 2"),
        ("/api/runs/good/samples/x", 404, "has none in good"),
        ("/api/runs/bad", 422, "was changed since it was written"),
        ("/api/runs/bad/now", 422, "was changed since it was written"),
        ("/nowhere", 404, "Not Found"),
        ("/static/%2e%2e/app.py", 404, "Not Found"),
    ],
)
def test_what_cannot_be_shown_says_why(
    client: TestClient, tmp_path: Path, path: str, status: int, message: str
) -> None:
    make_run(tmp_path, "good")
    make_run(tmp_path, "bad")
    manifest = tmp_path / "bad/sft" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"loss": 1.0', '"loss": 0.5'))
    answer = client.get(path)
    assert (answer.status_code, message in answer.json()["error"]) == (status, True), answer.text


def test_what_has_changed_since_a_run_was_read_is_seen(client: TestClient, tmp_path: Path) -> None:
    """A new iteration by every page; a change of an old one by the question with which every page begins."""
    make_run(tmp_path, "r", 4, whole=False)
    assert client.get("/api/runs/r").json()["artifacts"][-1]["iteration"] == 4
    toy.make(f"{tmp_path}/r", 5, whole=False)
    assert client.get("/api/runs/r/samples/5").status_code == 200
    manifest = tmp_path / "r/iterations/1/reward" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"mean_reward": ', '"mean_reward": 1'))
    answer = client.get("/api/runs/r/now")
    assert (answer.status_code, "was changed since it was written" in answer.json()["error"]) == (
        422,
        True,
    )


def test_a_page_of_this_machine_answers_for_no_other_host(tmp_path: Path) -> None:
    """Else a site whose name is made to lead here could have a browser read it (DNS rebinding)."""
    app = build_app(str(tmp_path), hosts=LOOPBACK)
    for host, status in (
        ("localhost", 200),
        ("127.0.0.1:8090", 200),
        ("[::1]:8090", 200),
        ("evil.example", 400),
    ):
        assert TestClient(app).get("/api/runs", headers={"Host": host}).status_code == status


def test_a_workflow_that_was_changed_is_not_drawn(client: TestClient, tmp_path: Path) -> None:
    make_run(tmp_path, "r")
    (tmp_path / "r/workflow.yaml").write_text("spec: {templates: [{dag: {tasks: []}}]}")
    answer = client.get("/api/runs/r")
    assert (answer.status_code, "is missing or was changed" in answer.json()["error"]) == (
        422,
        True,
    )


def test_only_the_runs_that_were_asked_for_last_stay_open(tmp_path: Path) -> None:
    """The page of all runs kept each of them in memory for ever."""
    runs = OpenRuns(str(tmp_path), None)
    names = [f"r{number}" for number in range(OPEN_RUNS + 3)]
    for name in names:
        make_run(tmp_path, name, 0, whole=False)

    def use(name: str) -> Run:
        return runs.use(name, lambda run: run, all_iterations=False)

    first = use("r0")
    for name in names[1:OPEN_RUNS]:
        use(name)
    assert use("r0") is first
    for name in names[OPEN_RUNS:]:
        use(name)
    assert len(runs._runs) == OPEN_RUNS
    assert use("r0") is first, "it was used after all others"
    assert "r1" not in runs._runs and use("r1").name == "r1"


def test_ctrl_c_ends_it_without_a_word(tmp_path: Path) -> None:
    """A connection is open, and nothing is told of what was cut off."""
    make_run(tmp_path, "good", 1)
    command = [sys.executable, "-m", "tuneloop.cli", "ui", "--store", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stderr
            address = child.stderr.readline().strip().removeprefix("http://").rstrip("/")
            kept = http.client.HTTPConnection(address, timeout=LIMIT_S)
            kept.request("GET", "/api/runs")
            assert json.loads(kept.getresponse().read())["runs"] == ["good"]
            child.send_signal(signal.SIGINT)
            assert (child.wait(LIMIT_S), child.stderr.read()) == (0, "")
        finally:
            child.kill()
