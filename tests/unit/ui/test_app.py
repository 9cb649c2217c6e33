"""The pages of a finished, a running and a damaged run: what they show, and that no text of a policy runs in them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from tests.policies import commit_policy
from tests.unit import toy
from tuneloop.core.artifacts import MANIFEST, Artifact, Draft
from tuneloop.formats.rollouts import SCHEMA
from tuneloop.formats.tokens import load_tokenizer
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run
from tuneloop.ui.app import build_app
from tuneloop.ui.samples import SIZE

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(build_app(str(tmp_path)), raise_server_exceptions=True) as opened:
        yield opened


def make_run(store: Path, name: str, iterations: int = 2) -> None:
    record = Record(run=name, pipeline="toy", path="toy.py", config={}, store=f"file://{store}")
    Run.create(record, "")
    toy.make(f"{store}/{name}", iterations)


def commit_rollouts(run: Path, count: int, group: int = 1024) -> Artifact:
    """Commit rollouts of a policy that can be read, and no scores; each completion's text is its number."""
    policy = commit_policy(run / "sft")
    words = load_tokenizer(policy.path / "model")
    rows: list[dict[str, Any]] = []
    for number in range(count):
        ids = words.encode(f"{number:05d}")
        rows.append(
            {
                **dict.fromkeys(SCHEMA.names, ""),
                **{"prompt": f"{EVIL}{number}", "answer": EVIL, "prompt_ids": [1], "completion_ids": ids},
                **{"logprobs": [-0.5 * i for i in range(len(ids))], "loss_mask": [True] * len(ids)},
                **{"policy_versions": [7] * len(ids)},
            }
        )
    draft = Draft(f"{run}/iterations/1/rollout")
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), draft.path / "rollouts.parquet", row_group_size=group)
    draft.commit(stage="rollout", role="sampler", inputs={"policy": policy.ref}, facts={"version": 0})
    return policy


def test_the_list_and_the_page_of_a_run(client: TestClient, tmp_path: Path) -> None:
    make_run(tmp_path, "good")
    make_run(tmp_path, "other")
    page = client.get("/").text
    assert re.findall(r'href="/runs/(\w+)"', page) == ["good", "other"] and "0.500 → 1.000" in page
    assert 'href="/runs/other"' not in client.get("/?q=goo").text
    page = client.get("/runs/good").text
    assert "<h1>good</h1>" in page and '<svg class="chart"' in page and 'href="/runs/good/samples/2"' in page
    assert client.get("/runs/good/mark").json() == {"mark": "10 created", "running": True}
    toy.make(f"{tmp_path}/good", 3, whole=False)
    assert client.get("/runs/good/mark").json()["mark"] == "13 created", "what was committed since is seen"


def test_pages_of_completions(client: TestClient, tmp_path: Path) -> None:
    commit_rollouts(tmp_path / "r", 2 * SIZE + 3, group=64)
    for number, rows in ((1, range(SIZE)), (2, range(SIZE, 2 * SIZE)), (3, range(2 * SIZE, 2 * SIZE + 3))):
        page = client.get(f"/runs/r/samples/1?page={number}").text
        text = re.sub(r"<span[^>]*>|</span>", "", page)
        assert re.findall(r"<td>(\d{5})</td>", text) == [f"{row:05d}" for row in rows]
    assert 'title="-0.500 nats, version 7"' in page and "not scored yet" in page
    assert 'href="/runs/r/samples/1?page=2"' in page and "page=4" not in page
    assert "Page 3 of 3" in client.get("/runs/r/samples/1?page=99").text


def test_where_the_tokenizer_is_gone_tokens_are_ids(client: TestClient, tmp_path: Path) -> None:
    policy = commit_rollouts(tmp_path / "r", 1)
    (policy.path / MANIFEST).parent.parent.joinpath(MANIFEST).unlink()
    assert re.search(r">⟨\d+⟩</span>", client.get("/runs/r/samples/1").text)


def test_text_of_a_policy_is_text(client: TestClient, tmp_path: Path) -> None:
    commit_rollouts(tmp_path / "r", 2)
    answer = client.get("/runs/r/samples/1")
    assert EVIL not in answer.text and "&lt;script&gt;alert(1)&lt;/script&gt;" in answer.text
    assert re.findall(r"<script[^>]*>", answer.text) == ['<script src="/ui.js" defer>']
    assert "script-src 'self'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/runs/none", 404, "not found below"),
        ("/runs/good/samples/9", 404, "has no rollouts in good; it has come to 2"),
        ("/runs/good/samples/x", 404, "Not Found"),
        ("/runs/bad", 404, "was changed: it states"),
        ("/nowhere", 404, "Not Found"),
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
    assert (answer.status_code, message in answer.text) == (status, True), answer.text
    assert "damaged" in client.get("/").text
