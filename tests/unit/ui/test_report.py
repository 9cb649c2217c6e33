"""The live page, frozen into one file: what it holds, how large it may be, and that no text can run in it."""

import base64
import hashlib
import html
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.frozen import read_answers
from tests.policies import commit_policy
from tests.rollouts import commit_scored_rollouts
from tests.unit import toy
from tests.unit.ui.test_app import EVIL, make_run
from tuneloop.core.artifacts import Draft
from tuneloop.core.errors import Corrupt
from tuneloop.local.journal import Journal, Workflow
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run
from tuneloop.ui import report
from tuneloop.ui.report import CHARACTERS, IDS, POINTS, ROWS, STATIC
from tuneloop.weights.publish import publish_version


class Page(HTMLParser):
    """The scripts and styles of a page, and every address that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.parts: list[tuple[str, dict[str, str | None], str]] = []
        self.fetched: list[str] = []
        self.policy = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        self.parts.append((tag, about, ""))
        self.fetched += [about[name] or "" for name in ("src", "href") if name in about]
        if about.get("http-equiv") == "Content-Security-Policy":
            self.policy = about["content"] or ""

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:  # inside a script or a style
            tag, about, before = self.parts[-1]
            self.parts[-1] = tag, about, before + data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    store = tmp_path_factory.mktemp("store")
    make_run(store, "demo", seed=3)
    return Run.open("demo", str(store))


@pytest.fixture(scope="module")
def text(run: Run) -> str:
    return report.render_page(run)


def hash_text(said: str) -> str:
    return base64.b64encode(hashlib.sha256(said.encode()).digest()).decode()


def test_nothing_is_fetched_and_our_script_alone_may_run(text: str) -> None:
    page = Page(text)
    assert page.fetched == ["data:,", "#main", "/"], "no icon, and two links"
    scripts = [(about, said) for tag, about, said in page.parts if tag == "script"]
    (data, _), (module, script) = scripts
    assert (data, module) == ({"type": "application/json", "id": "frozen"}, {"type": "module"})
    (style,) = (said for tag, _, said in page.parts if tag == "style")
    assert (
        f"script-src 'sha256-{hash_text(script)}'; style-src 'sha256-{hash_text(style)}';"
        in page.policy
    )
    assert page.policy.startswith("default-src 'none';") and "unsafe" not in page.policy
    assert "require-trusted-types-for 'script'" in page.policy
    assert text.index("Content-Security-Policy") < text.index("<script") and len(text) < 120_000


def test_the_script_is_that_of_the_live_page(text: str) -> None:
    """All modules in one: nothing is imported any more, and no two have a name in common."""
    (script,) = (said for tag, about, said in Page(text).parts if about == {"type": "module"})
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE) and "<!--" not in script
    lines = {
        line.removeprefix("export ")
        for path in STATIC.glob("*.js")
        for line in path.read_text().splitlines()
    }
    assert {line for line in lines if not line.startswith("import ")} == {*script.splitlines()}
    names = re.findall(r"^(?:async )?(?:const|let|function\*?|class) (\w+)", script, re.MULTILINE)
    assert len(names) > 100 and sorted(names) == sorted({*names})


def test_it_holds_what_the_live_page_asks_for(text: str, run: Run) -> None:
    answers = read_answers(text)
    samples = [f"/runs/demo/samples/{at}" for at in ("evaluate-before", "evaluate-after", "1", "2")]
    assert [*answers] == ["/runs/demo", "/runs/demo/now", "/runs/demo/weights", *samples]
    about, now = answers["/runs/demo"], answers["/runs/demo/now"]
    assert (now["phase"], now["iteration"], now["committed"]) == ("created", 2, 10)
    assert about["record"]["config"] == {"seed": 3} and about["left_out"] == 0
    assert [task["name"] for task in about["templates"][0]["dag"]["tasks"]] == ["sft", "export"]
    curves = {(curve["name"], curve["stage"]): curve["y"] for curve in about["curves"]}
    assert curves["mean_reward", "reward"] == [0.5, 0.75] and curves["mean_reward", "evaluate"] == [
        0.5,
        1.0,
    ]
    assert {name for name, _ in curves} == {"mean_reward", "kl", "entropy", "loss", "mean_length"}
    phases = {each["stage"]: each["times"] for each in about["phases"]}
    assert phases == {"sft": 1, "evaluate-before": 1, "rollout": 2, "reward": 2, "policy-update": 2,
                      "evaluate-after": 1, "export": 1}  # fmt: skip
    assert ["tuneloop", run.entries[0].manifest.provenance["tuneloop"]] in about["packages"]


def test_samples_of_before_and_after(text: str) -> None:
    pages = {
        at: read_answers(text)[f"/runs/demo/samples/evaluate-{at}"]["rows"][2]
        for at in ("before", "after")
    }
    assert {row["prompt"] for row in pages.values()} == {"reverse 2<b>"}
    assert [(row["completion"], row["score"]) for row in pages.values()] == [
        ("wrong", 0.0),
        ("right", 1.0),
    ]


def test_which_artifacts_made_which_version(text: str) -> None:
    made = {each["key"]: each for each in read_answers(text)["/runs/demo"]["artifacts"]}
    update = made["iterations/2/policy-update"]
    assert update["version"] == 3 and update["device"].startswith("cpu (")
    assert update["inputs"] == {
        "policy": "iterations/1/policy-update",
        "rewards": "iterations/2/reward",
    }


def find_verdict(page: str) -> str:
    """Find the sentence that is there without any script, and that the script shows."""
    (said,) = re.findall(r"<main.*?</h1><p>(.*?)</p>", page)
    (about,) = (each for each in read_answers(page).values() if "verdict" in each)
    assert about["verdict"] == html.unescape(said)
    return html.unescape(said)


def commit_evaluation(
    run: Path, name: str, scores: list[float], completion: str = "x", started: float = 0.0
) -> None:
    """Commit an evaluation of as many prompts as there are scores."""
    rows = [
        {"id": f"p{i}", "prompt": "?", "completion": completion, "answer": "", "score": s}
        for i, s in enumerate(scores)
    ]
    draft = Draft(f"{run}/{name}")
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.parquet.ParquetWriter(draft.path / "samples.parquet", table.schema) as file:
        file.write_table(table)
    results, outcomes = {"mean_reward": sum(scores) / len(scores)}, {"score": len(scores)}
    about = {"facts": {"outcomes": outcomes, "version": 1}, "provenance": {"started": started}}
    draft.commit(stage="evaluate", role="evaluator", results=results, **about)


def test_the_first_sentence_says_how_the_run_went(text: str) -> None:
    said = "The run went without a change that is more than chance: mean reward 0.500 → 1.000 "
    few = "Only 4 held-out completions were scored: a mean of so few says little; "
    assert find_verdict(text) == (
        f"{said}(greedy, held-out prompts, 4 completions; policy version 1 → 3). "
        f"{few}hold out at least 20 prompts (data.eval)."
    ), "of 4 each"


@pytest.mark.parametrize(
    ("before", "after", "times", "well"),
    [
        ([0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0], 16, "well"),
        ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], 16, "badly"),
        (
            [0.0, 0.0, 0.0, 1.0],
            [1.0, 1.0, 0.0, 0.0],
            2,
            "without a change that is more than chance",
        ),
    ],
)
def test_a_run_went_well_if_its_reward_rose_by_more_than_chance(
    tmp_path: Path, before: list[float], after: list[float], times: int, well: str
) -> None:
    commit_evaluation(tmp_path / "r", "before", times * before, started=1.0)
    commit_evaluation(tmp_path / "r", "after", times * after, started=2.0)
    told = f"mean reward {sum(before) / 4:.3f} → {sum(after) / 4:.3f} "
    assert find_verdict(report.render_page(Run.open("r", str(tmp_path)))).startswith(
        f"The run went {well}: {told}"
    )


def test_without_rewards_a_run_is_judged_by_its_loss(tmp_path: Path) -> None:
    toy.sft(out=f"{tmp_path}/s/sft")
    assert (
        find_verdict(report.render_page(Run.open("s", str(tmp_path))))
        == "The run went well: loss 3 → 1."
    )


def test_a_run_that_failed_says_so_first_and_how_far_it_had_come(tmp_path: Path) -> None:
    record = Record(run="r", pipeline="toy", path="toy.py", config={}, store=f"file://{tmp_path}")
    run = Run.create(record, "spec: {templates: []}")
    Journal(tmp_path / "r").write(Workflow("toy", phase="Failed", started=1.0, finished=9.0))
    assert find_verdict(report.render_page(run)).endswith(
        "whether the run goes well: nothing was measured twice."
    )
    commit_evaluation(tmp_path / "r", "before", [0.0] * 8, started=1.0)
    commit_evaluation(tmp_path / "r", "after", [1.0] * 8, started=2.0)
    text = report.render_page(Run.open("r", str(tmp_path)))
    assert find_verdict(text).startswith(
        "The run failed, having gone well: mean reward 0.000 → 1.000"
    )


def test_long_completions_are_cut(tmp_path: Path) -> None:
    """Every character takes six bytes."""
    commit_evaluation(tmp_path / "r", "before", [0.0] * 20, "<" * 60_000, started=1.0)
    commit_evaluation(tmp_path / "r", "after", [1.0] * 20, "<" * 60_000, started=2.0)
    text = report.render_page(Run.open("r", str(tmp_path)))
    shown = read_answers(text)["/runs/r/samples/after"]
    assert (shown["held"], shown["total"], len(shown["rows"])) == (6, 20, 6)
    assert {row["completion"] for row in shown["rows"]} == {f"{'<' * CHARACTERS} … (cut)"}
    assert len(text.encode()) < 300_000


def test_of_tokens_there_are_the_first_with_their_pieces(tmp_path: Path) -> None:
    policy = commit_policy(tmp_path / "r/base-model")
    commit_scored_rollouts(
        tmp_path / "r", 1, ["long"] * 20, [[5] * 9 + [6] * 900] * 20, policy, prompt=EVIL
    )
    text = report.render_page(Run.open("r", str(tmp_path)))
    shown = read_answers(text)["/runs/r/samples/1"]
    row = shown["rows"][0]
    assert len(shown["rows"]) == ROWS and len(row["completion_ids"]) == len(row["logprobs"]) == IDS
    assert (
        row["length"] == 909 and {*shown["pieces"]} == {"5", "6"} and all(shown["pieces"].values())
    )


def test_a_long_run_has_its_last_artifacts_and_thinned_curves(tmp_path: Path) -> None:
    metrics = "".join(
        f'{{"step": {i}, "loss": {1.0 if i == 70_001 else 0.5}}}\n' for i in range(100_000)
    )
    draft = Draft(f"{tmp_path}/r/sft")
    (draft.path / "metrics.jsonl").write_text(metrics)
    draft.commit(stage="sft", role="trainer")
    for i in range(report.ARTIFACTS + 5):
        Draft(f"{tmp_path}/r/iterations/{i + 1}/reward").commit(
            stage="reward", provenance={"started": i + 1.0}
        )
    about = read_answers(report.render_page(Run.open("r", str(tmp_path))))["/runs/r"]
    kept = [each["key"] for each in about["artifacts"]]
    assert about["left_out"] == 5 and len(kept) == report.ARTIFACTS + 1
    assert (kept[:2], kept[-1]) == (
        ["sft", "iterations/6/reward"],
        f"iterations/{report.ARTIFACTS + 5}/reward",
    )
    assert {each["stage"]: each["times"] for each in about["phases"]} == {
        "sft": 1,
        "reward": report.ARTIFACTS + 5,
    }
    (curve,) = about["curves"]
    assert (
        len(curve["x"]) < 500
        and max(curve["y"]) == 1.0
        and (curve["x"][0], curve["x"][-1]) == (0, 99_999)
    )


@given(st.lists(st.floats(width=32), max_size=300), st.integers(20, 60))
def test_of_many_points_the_ends_the_least_and_the_greatest_stay(
    heights: list[float], most: int
) -> None:
    finite = [(float(x), y) for x, y in enumerate(heights) if math.isfinite(y)]
    kept = report._thin_points([*enumerate(heights)], most)
    assert len(kept) <= most + 4 and [x for x, _ in kept] == sorted({x for x, _ in kept})
    if finite:
        assert (kept[0][0], kept[-1][0]) == (finite[0][0], finite[-1][0])
        for extreme in (min, max):
            want = extreme(y for _, y in finite)
            assert extreme(y for _, y in kept) == pytest.approx(want, rel=1e-5, abs=1e-44)
    else:
        assert kept == []


def test_however_many_curves_there_are_they_have_a_bound() -> None:
    rows = [{"step": step, **{f"q{i}": step / (i + 1) for i in range(400)}} for step in range(500)]
    (shown,) = read_answers(report.render_metrics("sft", rows, "step")).values()
    assert (
        len(shown["curves"]) == 400
        and sum(len(each["x"]) for each in shown["curves"]) < 1.25 * POINTS
    )


def test_the_same_run_gives_the_same_page(run: Run, text: str) -> None:
    assert report.render_page(Run.open(run.name, run.store_url)) == text


def test_text_of_a_policy_cannot_become_markup(tmp_path: Path) -> None:
    """Neither of a completion, nor of a name in a title; a browser tries it in tests/local/test_ui.py."""
    commit_evaluation(tmp_path / "r", "before", [0.0], f"{EVIL}</script><!--<script>", started=1.0)
    text = report.render_page(Run.open("r", str(tmp_path)))
    (row,) = read_answers(text)["/runs/r/samples/before"]["rows"]
    assert row["completion"] == f"{EVIL}</script><!--<script>"
    assert text.count("</script>") == 2 and "<img" not in text and "<!--" not in text
    assert "<b>" not in report.freeze_page("<b>", "/", {"<b>": "<b>"}, "<b>")


def test_a_run_without_any_artifact_has_a_page(tmp_path: Path) -> None:
    text = report.render_page(Run("empty", str(tmp_path)))
    answers = read_answers(text)
    assert find_verdict(text).endswith("nothing was measured twice.")
    assert answers["/runs/empty"]["artifacts"] == answers["/runs/empty"]["curves"] == []


def test_a_run_of_elsewhere_is_not_asked_for_its_record(tmp_path: Path) -> None:
    """On Kubeflow Pipelines a report is made of what the store has, whatever else lies there."""
    make_run(tmp_path, "r", 1)
    (tmp_path / "r/run.json").unlink()
    about = read_answers(report.render_page(Run("r", str(tmp_path))))["/runs/r"]
    assert about["record"] is None and about["templates"] == [] and len(about["artifacts"]) == 7


def test_what_was_changed_is_refused_by_name(tmp_path: Path) -> None:
    toy.make(f"{tmp_path}/r", 1)
    (samples,) = (tmp_path / "r/evaluate-after").rglob("samples.parquet")
    samples.write_bytes(samples.read_bytes()[:-1] + b"X")
    with pytest.raises(Corrupt, match="differs from its manifest"):
        report.render_page(Run.open("r", str(tmp_path)))


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    @toy.component("checkpoint", role="trainer", results={"loss": float, "version": int})
    def sft(stage: toy.Stage) -> toy.Results:
        """Diverge."""
        stage.metric(1, loss=float("nan"))
        stage.metric(2, loss=float("inf"))
        stage.metric(3, loss=1.0)
        return {"loss": 1.0, "version": 1}

    sft(out=f"{tmp_path}/d/sft")
    text = report.render_page(Run.open("d", str(tmp_path)))
    (curve,) = read_answers(text)["/runs/d"]["curves"]
    assert (curve["x"], curve["y"]) == ([3.0], [1.0])
    assert find_verdict(text) == "The run went badly: loss nan → 1."


def test_published_versions_are_in_it(tmp_path: Path) -> None:
    policy = commit_policy(tmp_path / "r/sft")
    publish_version(f"{tmp_path}/r/weights", 0, policy.part("model"), source=policy.manifest.digest)
    found = read_answers(report.render_page(Run.open("r", str(tmp_path))))["/runs/r/weights"]
    assert [(each["version"], each["encoding"]) for each in found["published"]] == [(0, None)]
    assert found["served"] == {}, "who serves a version is asked of a server alone"


def test_what_stages_that_train_made_of_their_devices(tmp_path: Path) -> None:
    measured = {"flops_per_s": 2e12, "mfu": None, "peak_memory_bytes": 3e9}
    draft = Draft(f"{tmp_path}/r/sft")
    about: dict[str, Any] = {"notes": {"efficiency": measured}, "timings": {"tokens_per_s": 100.0}}
    draft.commit(stage="sft", facts={"version": 1}, **about)
    (made,) = read_answers(report.render_page(Run.open("r", str(tmp_path))))["/runs/r"]["artifacts"]
    assert (made["efficiency"], made["tokens_per_s"]) == (measured, 100.0)
