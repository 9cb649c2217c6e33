"""The real lm-eval, on tasks made here, of a policy in this process; and what it cannot do, each in one line."""

import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.lm_eval_tasks import TEXTS, write_tasks
from tests.policies import commit_policy
from tests.waiting import LIMIT_S
from tests.warm import python
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Interrupted, Unavailable, UserError
from tuneloop.runs.run_record import Run
from tuneloop.stages.evaluate_lm_eval import evaluate_lm_eval


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Version 3, of the second iteration of a run."""
    return commit_policy(tmp_path_factory.mktemp("runs") / "r/iterations/2/policy-update", version=3)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, policy: Artifact) -> tuple[str, float]:
    folder, right = write_tasks(tmp_path_factory.mktemp("tasks") / "mine", policy)
    return str(folder), right


def measure(out: Path, policy: Artifact, made: tuple[str, float], **options: Any) -> Artifact:
    evaluate_lm_eval(out=str(out), policy=policy.ref, **{"tasks": ["digits"], "include_path": made[0], **options})
    return Artifact(str(out))


def test_scores_are_those_of_the_policy(policy: Artifact, tasks: tuple[str, float]) -> None:
    """By our own engine's log-probabilities and greedy tokens, too; they are in the run's curves."""
    store = Path(policy.url.removeprefix("file://")).parents[3]
    made = measure(
        store / "r" / "lm-eval",
        policy,
        tasks,
        metric="acc",
        tasks=["digits_choose"],
        model_args={"batch_size": 4, "dtype": "float32"},
    )
    assert made.manifest.results == {"score": tasks[1], "samples": len(TEXTS)}
    facts = made.manifest.facts
    assert (facts["version"], facts["digest"]) == (3, policy.manifest.digest)
    assert facts["tasks"]["digits_choose"].items() >= {"samples": 12, "acc": tasks[1]}.items()
    rows = pq.read_table(made.path / "samples.parquet").to_pylist()
    assert [row["prompt"] for row in rows] == TEXTS
    assert [row["score"] for row in rows] == [float(row["completion"] == row["answer"]) for row in rows]
    both = measure(store / "r" / "both", policy, tasks, model_args={"dtype": "float32"})
    figures = both.manifest.facts["tasks"]
    assert figures["digits_say"]["exact_match"] == 0.5
    assert both.manifest.results == {
        "score": (figures["digits_choose"]["acc_norm"] + 0.5) / 2,
        "samples": 2 * len(TEXTS),
    }
    curves = {curve.name: curve for curve in Run("r", str(store)).curves()}
    assert (curves["digits_say/exact_match"].x, curves["digits_say/exact_match"].y) == ([2.0], [0.5])
    assert (curves["digits_choose/acc"].axis, curves["digits_choose/acc"].y) == ("iteration", [tasks[1]] * 2)


def test_other_task_files_are_other_work(tmp_path: Path, policy: Artifact, tasks: tuple[str, float]) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for file in Path(tasks[0]).iterdir():
        (mine / file.name).write_text(file.read_text())
    few = {"tasks": ["digits_choose"], "limit": 2}
    assert measure(tmp_path / "m", policy, tasks, **few).manifest.results["samples"] == 2
    again = (str(mine), 0.0)
    assert (
        measure(tmp_path / "m", policy, again, **few).manifest.results["samples"] == 2
    )  # elsewhere: committed already
    (mine / "rows.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"--task-files.*is committed already"):
        measure(tmp_path / "m", policy, again, **few)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tasks": ["nope"]}, r"tasks: \['nope'\]: .*'nope' is not a registered task"),
        ({"include_path": "/nowhere"}, "'digits' is not a registered task"),
        ({"metric": "bleu", "limit": 1}, "metric: 'bleu': is none of digits_choose, which has acc_norm, "),
        ({"model_args": {"heads": 3}}, "model_args: {'heads': 3}: .*unexpected keyword argument 'heads'"),
        ({"engine": "endpoint"}, "--endpoint: None: is required: an OpenAI API"),
        (
            {"engine": "endpoint", "endpoint": "http://x", "model_args": {"heads": 3}},
            "model_args.heads: 3: unknown; lm-eval takes model, ",
        ),
    ],
)
def test_mistakes(
    tmp_path: Path, policy: Artifact, tasks: tuple[str, float], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        measure(tmp_path / "m", policy, tasks, **options)


@pytest.mark.parametrize(("status", "raised"), [(404, UserError), (503, Unavailable), (None, Unavailable)])
def test_a_server_that_refuses_or_is_away(
    tmp_path: Path, policy: Artifact, tasks: tuple[str, float], status: int | None, raised: type[Exception]
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


def test_a_signal_ends_it_at_the_next_answer(tmp_path: Path, policy: Artifact, tasks: tuple[str, float]) -> None:
    (tmp_path / "stop.py").write_text(
        "import os\n\ndef ask(doc):\n    os.kill(os.getpid(), 15)\n    return doc['question']\n"
    )
    text = (Path(tasks[0]) / "choose.yaml").read_text().replace("digits_choose", "stopped")
    (tmp_path / "stopped.yaml").write_text(text.replace("'{{question}}'", "!function stop.ask"))
    with pytest.raises(Interrupted):
        measure(tmp_path / "m", policy, (str(tmp_path), 0.0), tasks=["stopped"])
    assert not [*(tmp_path / "m").glob("*")]


def test_a_task_of_the_hub_where_no_hub_is_to_be_asked(tmp_path: Path, policy: Artifact) -> None:
    words = ["--policy", policy.ref, "--metrics", str(tmp_path / "m"), "--tasks", json.dumps(["arc_easy"])]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    program = [python(), "-m", "tuneloop.stages.evaluate_lm_eval", *words]
    done = subprocess.run(program, capture_output=True, text=True, env=env, timeout=LIMIT_S)
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stderr.splitlines()[-1].startswith("error: tasks: ['arc_easy']: lm-eval cannot do with it: ")
