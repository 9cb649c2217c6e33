import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.unit import toy
from tuneloop.core.artifacts import Draft
from tuneloop.local.journal import Journal, Workflow
from tuneloop.runs import report
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run


class Page(HTMLParser):
    """Text of tables' cells and of scripts by id, and every address that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.scripts: dict[str, str] = {}
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        self.open.append(tag)
        self.ids += [about["id"] or ""] if "id" in about else []
        self.fetched += [about[name] or "" for name in ("src", "href") if name in about]
        if tag in ("td", "th"):
            self.cells.append("")
        if tag == "script":
            self.script = about.get("id") or "boot"

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data
        if self.open and self.open[-1] == "script":
            self.scripts[self.script] = self.scripts.get(self.script, "") + data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    store = tmp_path_factory.mktemp("store")
    toy.make(f"{store}/demo")
    return Run.open("demo", str(store))


@pytest.fixture(scope="module")
def text(run: Run) -> str:
    return report.render_page(run)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_nothing_is_fetched_or_run_and_the_page_is_small(page: Page, text: str) -> None:
    assert page.fetched == [] and "<script" not in text
    assert len(text) < 50_000


def test_every_curve_is_there_with_its_numbers(text: str) -> None:
    assert re.findall(r'font-size="13">(.*?)</text>', text) == [
        "mean reward (reward and evaluate)", "kl (policy_update)", "entropy (policy_update)", "loss (policy_update)",
        "loss (sft)", "mean length (rollout)", "seconds by phase",
    ]  # fmt: skip
    rewards = "reward: temperature 1, training prompts: 0.5 → 0.75; evaluate: greedy, held-out prompts: 0.5 → 1"
    assert f"<title>{rewards}</title>" in text
    assert re.findall(r"— ([a-z-]+)</text>", text)[-3:] == ["rollout", "reward", "policy-update"]


def test_samples_of_before_and_after_stand_side_by_side(page: Page) -> None:
    at = page.cells.index("reverse 3<b>")
    assert page.cells[at : at + 6] == ["reverse 3<b>", "wrong", "0.00", "right", "1.00", "right"]


def test_provenance_says_which_rollouts_made_which_version(page: Page, run: Run) -> None:
    digest = {e.key: e.manifest.digest.rpartition(":")[2][:12] for e in run.entries}
    at = page.cells.index("iterations/2/policy-update")
    assert page.cells[at - 1] == "3"
    assert page.cells[at + 2] == (
        f"policy iterations/1/policy-update {digest['iterations/1/policy-update']}; rewards iterations/2/reward"
        f" {digest['iterations/2/reward']} (rollouts iterations/2/rollout {digest['iterations/2/rollout']})"
    )
    assert page.cells[at + 3].startswith("cpu ("), "what it ran on is said"


def find_verdict(text: str) -> str:
    return html.unescape(re.findall(r'<p class="verdict">(.*?)</p>', text)[0])


def commit_evaluation(run: Path, name: str, scores: list[float], completion: str = "x", started: float = 0.0) -> None:
    """Commit an evaluation of as many prompts as there are scores."""
    rows = [
        {"id": f"p{i}", "prompt": "?", "completion": completion, "answer": "", "score": s} for i, s in enumerate(scores)
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
    assert find_verdict(text) == f"{said}(greedy, held-out prompts, 4 completions; policy version 1 → 3).", "of 4 each"
    assert text.index('verdict">') < text.index("<table")


@pytest.mark.parametrize(
    ("before", "after", "times", "well"),
    [
        ([0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0], 16, "well"),
        ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], 16, "badly"),
        ([0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0], 2, "without a change that is more than chance"),
    ],
)
def test_a_run_went_well_if_its_reward_rose_by_more_than_chance(
    tmp_path: Path, before: list[float], after: list[float], times: int, well: str
) -> None:
    commit_evaluation(tmp_path / "r", "before", times * before, started=1.0)
    commit_evaluation(tmp_path / "r", "after", times * after, started=2.0)
    told = f"mean reward {sum(before) / 4:.3f} → {sum(after) / 4:.3f} "
    assert find_verdict(report.render_page(Run.open("r", str(tmp_path)))).startswith(f"The run went {well}: {told}")


def test_without_rewards_a_run_is_judged_by_its_loss(tmp_path: Path) -> None:
    toy.sft(out=f"{tmp_path}/s/sft")
    assert find_verdict(report.render_page(Run.open("s", str(tmp_path)))) == "The run went well: loss 3 → 1."


def test_a_run_that_failed_says_so_first_and_how_far_it_had_come(tmp_path: Path) -> None:
    record = Record(run="r", pipeline="toy", path="toy.py", config={}, store=f"file://{tmp_path}")
    run = Run.create(record, "spec: {}")
    Journal(tmp_path / "r").write(Workflow("toy", phase="Failed", started=1.0, finished=9.0))
    assert find_verdict(report.render_page(run)).endswith("cannot be said: nothing was measured twice.")
    commit_evaluation(tmp_path / "r", "before", [0.0] * 8, started=1.0)
    commit_evaluation(tmp_path / "r", "after", [1.0] * 8, started=2.0)
    text = report.render_page(Run.open("r", str(tmp_path)))
    assert find_verdict(text).startswith("The run failed, having gone well: mean reward 0.000 → 1.000")


def test_long_completions_are_cut(tmp_path: Path) -> None:
    """Each of 12 prompts has two, in which every character takes five bytes."""
    commit_evaluation(tmp_path / "r", "before", [0.0] * 20, "&" * 60_000, started=1.0)
    commit_evaluation(tmp_path / "r", "after", [1.0] * 20, "&" * 60_000, started=2.0)
    text = report.render_page(Run.open("r", str(tmp_path)))
    assert Page(text).cells.count(f"{'&' * report.CHARACTERS} … (cut)") == 2 * report.SAMPLES
    assert len(text.encode()) < 1e6


def test_the_same_run_gives_the_same_page(run: Run, text: str) -> None:
    assert report.render_page(run) == text


def test_text_of_a_model_cannot_become_markup(text: str) -> None:
    assert "reverse 3<b>" not in text


def test_a_run_without_any_artifact_has_a_page(tmp_path: Path) -> None:
    page = Page(report.render_page(Run("empty", str(tmp_path))))
    assert "no stage has committed anything yet" in page.cells
    assert "<svg" not in report.render_page(Run("empty", str(tmp_path)))


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
    assert re.search(r"<title>[^<]*: 1 → 1</title>", text)
    assert find_verdict(text) == "The run went badly: loss nan → 1." and "nan " not in text.partition("<table")[2]


def test_what_stages_that_train_made_of_their_devices(tmp_path: Path) -> None:
    measured = {"flops_per_s": 2e12, "mfu": None, "peak_memory_bytes": 3e9}
    for i, (speed, more) in enumerate([(100.0, {"communication_s": 0.5, "step_s": 2.0}), (300.0, {}), (200.0, {})]):
        draft = Draft(f"{tmp_path}/r/iterations/{i + 1}/policy-update")
        notes = {"efficiency": {**measured, "peak_memory_bytes": (i + 1) * 1e9, **more}}
        draft.commit(
            stage="policy_update", facts={"version": i}, notes=notes, timings={"tokens_per_s": speed, "train": 1.0}
        )
    cells = Page(report.render_page(Run.open("r", str(tmp_path)))).cells
    at = cells.index("policy_update, 3 times")
    unknown = "the device's peak is not known"
    assert cells[at + 1 : at + 6] == ["200", "2", unknown, "3 GB", "25.0% of a step"]
