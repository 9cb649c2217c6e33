"""What needs no lm-eval; then, slow, the real one on tasks made here, and what it cannot do, each in one line."""

import json
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.lm_eval_tasks import TEXTS, count_said, write_tasks
from tests.policies import commit_policy
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Interrupted, Unavailable, UserError
from tuneloop.extensions.evaluation.evaluate_lm_eval import (
    evaluate_lm_eval,
    find_metrics,
    hash_task_files,
    list_samples,
)
from tuneloop.formats.rollouts import Request
from tuneloop.formats.tokens import load_tokenizer, stop_ids
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines.transformers import Transformers
from tuneloop.runs.run_record import Run

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Version 3, of the second iteration of a run."""
    return commit_policy(
        tmp_path_factory.mktemp("runs") / "r/iterations/2/policy-update", version=3
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, policy: Artifact) -> str:
    return write_tasks(tmp_path_factory.mktemp("tasks") / "mine", policy)


@pytest.fixture
def tasks(folder: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tasks made here; lm-eval does not read its own thousands, which takes it half a minute."""
    import lm_eval.tasks

    alone = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", alone)
    return folder


def measure(out: Path, policy: Artifact, folder: str | None, **options: Any) -> Artifact:
    evaluate_lm_eval(
        out=str(out), policy=policy.ref, **{"tasks": ["digits"], "include_path": folder, **options}
    )
    return Artifact(str(out))


def test_without_lm_eval(tmp_path: Path, policy: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(
        UserError, match=r"package: 'lm_eval': is not installed; pip install 'tuneloop\[lm-eval\]'"
    ):
        measure(tmp_path / "m", policy, None)


def test_metrics_are_read_as_lm_eval_writes_them() -> None:
    said = {
        "alias": "x",
        "sample_len": 4,
        "acc,none": 0.5,
        "acc_stderr,none": "N/A",
        "exact_match,strict-match": 1,
    }
    assert find_metrics("x", said, None) == {"acc": 0.5, "exact_match/strict-match": 1.0}
    for wanted in ("exact_match", "exact_match/strict-match"):
        assert next(iter(find_metrics("x", said, wanted))) == "exact_match/strict-match"
    with pytest.raises(
        UserError, match="metric: 'bleu': is none of x, which has acc, exact_match/strict-match"
    ):
        find_metrics("x", said, "bleu")
    assert find_metrics("group", {"alias": "group"}, "bleu") == {}


def test_samples_are_read_as_lm_eval_writes_them() -> None:
    asked = {"arguments": [("2+2=", {})], "target": "4", "doc_id": 0, "exact_match": 1.0}
    twice = [
        {**asked, "filter": kept, "filtered_resps": [kept]}
        for kept in ("flexible-extract", "strict-match")
    ]
    (row,) = list_samples("sums", twice, {"exact_match/strict-match": 0.5})
    assert list(row.values()) == ["sums/0", "2+2=", "strict-match", "4", 1.0, "score"]
    chosen = {
        "arguments": [("Q", " a"), ("Q", " b")],
        "filtered_resps": [(-2.0, False), (-1.0, True)],
        "target": 0,
    }
    both = [
        {**chosen, "doc_id": 1, "filter": "none", "acc": 0.0},
        {**chosen, "doc_id": 2, "filter": "none"},
    ]
    rows = [list(row.values()) for row in list_samples("quiz", both, {"acc": 0.5})]
    assert rows == [
        ["quiz/1", "Q", " b", " a", 0.0, "score"],
        ["quiz/2", "Q", " b", " a", None, "unverifiable"],
    ]


def test_task_files_are_told_by_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    given, first = (
        SimpleNamespace(include_path=str(tmp_path)),
        hash_task_files(SimpleNamespace(include_path=str(tmp_path))),
    )
    assert hash_task_files(given) == first != hash_task_files(SimpleNamespace(include_path=None))
    (tmp_path / "rows.jsonl").write_text("[]")
    assert hash_task_files(given) != first
    with pytest.raises(UserError, match=r"--include-path: '.*nowhere': is not a directory"):
        hash_task_files(SimpleNamespace(include_path=str(tmp_path / "nowhere")))


def test_an_address_is_for_a_server(tmp_path: Path, policy: Artifact) -> None:
    with pytest.raises(UserError, match="--endpoint: 'http://x/v1': is for --engine endpoint"):
        measure(tmp_path / "m", policy, None, endpoint="http://x/v1")


@slow
def test_scores_are_those_of_the_policy(policy: Artifact, tasks: str) -> None:
    """By our own engine's log-probabilities and greedy tokens, too; they are in the run's curves."""
    store, float32 = (
        Path(policy.url.removeprefix("file://")).parents[3],
        {"dtype": "float32", "batch_size": 4},
    )
    both = measure(store / "r" / "both", policy, tasks, model_args=float32)
    said = count_said(tasks)
    assert both.manifest.results == {"score": (0.75 + said) / 2}
    facts = both.manifest.facts
    assert (facts["version"], facts["digest"]) == (3, policy.manifest.digest)
    figures = facts["tasks"]["digits_choose"]
    assert (figures["samples"], figures["acc"], facts["tasks"]["digits_say"]["exact_match"]) == (
        12,
        0.75,
        said,
    )
    rows = pq.read_table(both.path / "samples.parquet").to_pylist()
    assert [row["prompt"] for row in rows] == [*TEXTS, *TEXTS]
    assert [row["score"] for row in rows] == [
        float(row["completion"] == row["answer"]) for row in rows
    ]
    normed = {"tasks": ["digits_choose"], "metric": "acc_norm", "model_args": float32}
    assert measure(store / "r" / "normed", policy, tasks, **normed).manifest.results == {
        "score": figures["acc_norm"]
    }
    assert figures["acc_norm"] != 0.75
    curves = {curve.name: curve for curve in Run("r", str(store)).curves()}
    assert (curves["digits_say/exact_match"].x, curves["digits_say/exact_match"].y) == (
        [2.0],
        [said],
    )
    assert (curves["digits_choose/acc"].axis, curves["digits_choose/acc"].y) == (
        "iteration",
        [0.75, 0.75],
    )


@slow
def test_other_task_files_are_other_work(tmp_path: Path, policy: Artifact, tasks: str) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for file in Path(tasks).iterdir():
        (mine / file.name).write_text(file.read_text())
    few = {"tasks": ["digits_choose"], "limit": 2}
    first = measure(tmp_path / "m", policy, tasks, **few).manifest
    assert first.facts["tasks"]["digits_choose"]["samples"] == 2
    again = str(mine)
    assert measure(tmp_path / "m", policy, again, **few).manifest == first, (
        "elsewhere, and committed already"
    )
    (mine / "rows.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"--task-files.*is committed already"):
        measure(tmp_path / "m", policy, again, **few)


@slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tasks": ["nope"]}, r"tasks: \['nope'\]: .*'nope' is not a registered task"),
        (
            {"metric": "acc_nrm", "model_args": {"heads": 3}},
            "metric: 'acc_nrm': is none of digits_choose, which has acc, ",
        ),
        (
            {"tasks": ["digits_say"], "gen_kwargs": {"heads": 3}, "limit": 1},
            "arguments: .*: lm-eval refuses it.*heads",
        ),
        (
            {"model_args": {"heads": 3}},
            "model_args: {'heads': 3}: .*unexpected keyword argument 'heads'",
        ),
        ({"engine": "endpoint"}, "--endpoint: None: is required: an OpenAI API"),
        (
            {"engine": "endpoint", "endpoint": "http://x", "model_args": {"heads": 3}},
            "model_args.heads: 3: unknown; lm-eval takes model, ",
        ),
    ],
)
def test_mistakes(
    tmp_path: Path, policy: Artifact, tasks: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        measure(tmp_path / "m", policy, tasks, **options)


@slow
@pytest.mark.parametrize(
    ("status", "raised"), [(404, UserError), (503, Unavailable), (None, Unavailable)]
)
def test_a_server_that_refuses_or_is_away(
    tmp_path: Path, policy: Artifact, tasks: str, status: int | None, raised: type[Exception]
) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status or 500)
            self.end_headers()
            self.wfile.write(b"the model does not exist")

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        if status:
            threading.Thread(target=server.handle_request).start()
        else:
            server.server_close()
        with pytest.raises(raised, match=url if status is None else "the model does not exist"):
            measure(tmp_path / "m", policy, tasks, engine="endpoint", endpoint=url)


class Completions(BaseHTTPRequestHandler):
    """The part of an OpenAI API that lm-eval calls, answered as vLLM's does, by our own engine."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "tuneloop"
        body = json.dumps(
            {"choices": [self.answer(i, ids, asked) for i, ids in enumerate(asked["prompt"])]}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self, index: int, ids: list[int], asked: dict[str, Any]) -> dict[str, Any]:
        engine, words, stop = getattr(self.server, "serves")  # noqa: B009 - of this test
        if asked.get("echo"):
            logprobs = [None, *engine.score(ids), 0.0]
            top = [each and {"likeliest": each} for each in logprobs]
            return {
                "index": index,
                "text": "",
                "logprobs": {"token_logprobs": logprobs, "top_logprobs": top},
            }
        ((said,),) = engine.generate(
            [Request("r", ids, [0])], Sampling(0.0, asked["max_tokens"], stop), lambda _: None
        )
        text = words.decode(said.ids, skip_special_tokens=True)
        for end in asked["stop"]:
            text = text.split(end)[0]
        return {"index": index, "text": text}


@slow
def test_a_server_proves_what_it_serves_and_scores_as_in_process(
    tmp_path: Path, policy: Artifact, tasks: str
) -> None:
    engine, files = Transformers(), policy.path / "model"
    engine.load(policy)
    with HTTPServer(("127.0.0.1", 0), Completions) as server:
        setattr(server, "serves", (engine, words := load_tokenizer(files), stop_ids(words, files)))  # noqa: B010
        threading.Thread(target=server.serve_forever).start()
        asked = {"engine": "endpoint", "endpoint": f"http://127.0.0.1:{server.server_port}/v1"}
        try:
            made = measure(tmp_path / "m", policy, tasks, **asked, model_args={"batch_size": 5})
            at_once = measure(
                tmp_path / "n", policy, tasks, **asked, model_args={"num_concurrent": 3}
            )
            with pytest.raises(
                UserError, match=r"--endpoint: 'http.*serves something else than .*/other: "
            ):
                measure(
                    tmp_path / "o", commit_policy(tmp_path / "other", version=4), tasks, **asked
                )
        finally:
            server.shutdown()
    facts = made.manifest.facts
    assert (
        facts["canary"]["mean_abs_diff"] < 0.02
        and facts["tasks"] == at_once.manifest.facts["tasks"]
    )
    assert (
        facts["tasks"]["digits_choose"]["acc"],
        facts["tasks"]["digits_say"]["exact_match"],
    ) == (
        0.75,
        count_said(tasks),
    )


@slow
def test_a_signal_ends_it_at_the_next_answer(tmp_path: Path, policy: Artifact, tasks: str) -> None:
    (tmp_path / "stop.py").write_text(
        "import os\n\ndef ask(doc):\n    os.kill(os.getpid(), 15)\n    return doc['question']\n"
    )
    text = (Path(tasks) / "choose.yaml").read_text().replace("digits_choose", "stopped")
    (tmp_path / "stopped.yaml").write_text(text.replace("'{{question}}'", "!function stop.ask"))
    with pytest.raises(Interrupted):
        measure(tmp_path / "m", policy, str(tmp_path), tasks=["stopped"])
    assert not [*(tmp_path / "m").glob("*")]


@slow
def test_a_task_of_the_hub_where_no_hub_is_to_be_asked(
    tmp_path: Path, policy: Artifact, tasks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By lm-eval's own file of it."""
    import lm_eval.tasks

    for library in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(
            f"{library}.HF_HUB_OFFLINE", True
        )  # which they read when they are imported
    with pytest.raises(UserError, match=r"tasks: \['arc_easy'\]: lm-eval refuses it: .*[Oo]ffline"):
        measure(
            tmp_path / "m",
            policy,
            str(Path(lm_eval.tasks.__file__).parent / "arc"),
            tasks=["arc_easy"],
        )
