"""The live page in a real browser: every page of a finished, a running, a failed and a damaged run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Page, needs_chromium, open_browser, serve
from tests.policies import commit_policy
from tests.rollouts import commit_scored_rollouts
from tests.unit import toy
from tests.unit.ui.test_app import EVIL, commit_rollouts, make_run
from tests.waiting import until
from tuneloop.cli.show import write_report
from tuneloop.core.artifacts import MANIFEST
from tuneloop.formats.tokens import load_tokenizer
from tuneloop.local.journal import Journal, Node, Workflow, lock_workdir
from tuneloop.runs.run_record import Run
from tuneloop.ui.samples import MOST

pytestmark = [pytest.mark.slow, needs_chromium]
HIGH_CONTRAST = """
(() => {
  const read = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => read(text).slice(0, 3).map((each) => each / 255)
    .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
    .reduce((sum, each, i) => sum + each * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      const parts = read(colour);
      if (colour.startsWith("rgb") && (parts.length === 3 || parts[3] === 1)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const poor = [];
  for (const each of document.querySelectorAll("body *")) {
    const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || each.closest("option, :disabled, svg, .token") || !each.checkVisibility()) continue;
    const [a, b] = [light(getComputedStyle(each).color), light(paper(each))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(`${each.tagName} ${each.textContent.slice(0, 30)}`);
  }
  return poor;
})()
"""
"""Texts whose contrast is less than 4.5 to 1, as WCAG 2.2 computes it (1.4.3)."""
UNNAMED = """
[...document.querySelectorAll("a, button, input, select, svg[role=img], table, [role=region], summary")]
  .filter((each) => each.checkVisibility())
  .filter((each) => !(each.getAttribute("aria-label") || each.textContent.trim() || each.labels?.length || each.title))
  .map((each) => each.outerHTML.slice(0, 80))
"""
"""What people work with or look at that has no name for a screen reader."""
DUPLICATES = "(() => { const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);"
DUPLICATES += " return ids.filter((id, i) => ids.indexOf(id) !== i); })()"
SEARCH = "document.getElementById('search')"
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def fail_run(store: Path, name: str) -> None:
    """Let a run end with a stage that was killed."""
    journal = Journal(store / name)
    journal.write(Workflow("toy", started=1.0))
    killed = Node("a", "toy.export(0)", "export(0)", "export", "Pod", "Failed", message="out of memory", exit_code=137)
    killed.started, killed.finished = 1.0, 3.0
    journal.write(killed)
    journal.write(Workflow("toy", phase="Failed", started=1.0, finished=9.0))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, one that failed, one that is damaged, and one with the tokens of its completions."""
    at = tmp_path_factory.mktemp("store")
    make_run(at, "finished", 12, seed=1)
    Journal(at / "finished").write(Workflow("toy", phase="Succeeded", started=1.0, finished=9.0))
    make_run(at, "failed", 3, whole=False, seed=2)
    fail_run(at, "failed")
    make_run(at, "damaged", 1)
    manifest = at / "damaged/sft" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"loss": 1.0', '"loss": 0.5'))
    make_run(at, "tokens", 1)
    commit_rollouts(at / "tokens", 120, iteration=2)
    return at


@pytest.fixture(scope="module")
def site(store: Path) -> Iterator[str]:
    with serve(store) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with open_browser() as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    browser.resize(1280)
    browser.open("about:blank", "^$")
    browser.errors.clear()
    yield browser
    failed = [error for error in browser.errors if not error.startswith("Failed to load resource")]
    assert failed == [], "no script failed, no policy was broken"


PAGES = {
    "/": ("finished", "was changed since it was written"),
    "/runs/finished": ("Curves", "mean reward"),
    "/runs/failed": ("Graph", "out of memory"),
    "/runs/damaged": ("was changed since it was written", "restore it"),
    "/runs/finished/weights": ("Checkpoints", "iterations/12/policy-update"),
    "/runs/finished/lineage": ("Lineage of export", "it goes back to sft"),
    "/runs/tokens/samples/2": ("120 of 120 completions", "reward 1 · advantage"),
    "/runs/finished/samples/evaluate-after?id=p2&with=evaluate-before": ("Completions of evaluate-after", "wrong"),
    "/compare?run=finished&run=failed": ("Settings that differ", "seed"),
}


@pytest.mark.parametrize("path", PAGES)
def test_every_page_shows_and_can_be_used_by_all(site: str, page: Page, path: str) -> None:
    """Light and dark, on a screen and on a phone: contrast, names, one heading, nothing wider than the window."""
    shown, also = PAGES[path]
    page.open(f"{site}{path}", shown)
    assert also in page.wait(also)
    for width, dark in ((1280, False), (390, True)):
        page.resize(width, dark=dark)
        assert page.evaluate(HIGH_CONTRAST) == []
        assert page.evaluate(WIDE) <= 0
    assert page.evaluate(UNNAMED) == [] and page.evaluate(DUPLICATES) == []
    assert page.evaluate("document.querySelectorAll('h1').length") == 1
    assert page.evaluate("document.documentElement.lang") == "en"
    if axe := os.environ.get("AXE"):  # the source of axe-core, which is on no index of Python packages
        page.evaluate(f"{Path(axe).read_text()}; true")
        words = "(v) => `${v.impact} ${v.id}: ${v.nodes[0].html}`"
        found = page.evaluate(f"axe.run().then((r) => r.violations.map({words}))")
        assert [each for each in found if each.startswith(("serious", "critical"))] == []


def test_text_of_a_policy_stays_text(site: str, page: Page) -> None:
    page.open(f"{site}/runs/tokens/samples/2", "120 of 120")
    assert f"{EVIL}0" in page.wait("alert")
    assert page.evaluate("document.querySelectorAll('main script, main img').length") == 0
    broken = "try { document.body.innerHTML = '<b>x</b>'; 'made' } catch (error) { error.name }"
    assert page.evaluate(broken) == "TypeError", "the browser makes no markup of text"
    page.errors.clear()


def test_what_is_chosen_is_in_the_link(site: str, page: Page) -> None:
    page.open(f"{site}/runs/tokens/samples/2", "120 of 120")
    for element, value, event, shown in (
        ("search", "answer 7", "input", "4 of 120"),
        ("colour", "mask", "change", "learnt from"),
        ("sort", "-score", "change", "4 of 120"),
    ):
        change = f"e.value = '{value}'; e.dispatchEvent(new Event('{event}'));"
        page.evaluate(f"((e) => {{ {change} }})(document.getElementById('{element}'))")
        page.wait(shown)
    link = page.evaluate("location.href")
    assert {"search=answer+7", "colour=mask", "sort=-score"} <= {*link.partition("?")[2].split("&")}
    page.open("about:blank", "^$")
    page.open(link, "4 of 120")
    assert page.evaluate("document.querySelectorAll('.token.blue').length") > 0
    assert page.evaluate("document.getElementById('search').value") == "answer 7"


def test_tokens_are_coloured_when_they_come_near(tmp_path: Path, page: Page) -> None:
    """The text of all is there at once, also of characters that are split over tokens."""
    policy = commit_policy(tmp_path / "run/base-model")
    texts = [f"ab{'äö€ 漢字 word ' * 60}{number}" for number in range(40)]
    words = load_tokenizer(policy.path / "model")
    ids = [words.encode(text)[:MOST] for text in texts]
    commit_scored_rollouts(tmp_path / "run", 1, texts, ids, policy)
    with serve(tmp_path) as site:
        page.open(f"{site}/runs/run/samples/1", "40 of 40")
        said = page.evaluate("[...document.querySelectorAll('.samples > li')].map((each) => each.textContent)")
        read = [words.decode(each[2:]).rstrip("\ufffd") for each in ids]
        assert all(len(text) > 100 and text in shown for text, shown in zip(read, said, strict=True))
        counted = "document.querySelectorAll('.samples > li:{}-child .token').length"
        assert page.evaluate(counted.format("first")) == MOST - 1, "all but the one that is a tool's"
        assert page.evaluate(counted.format("last")) == 0
        page.evaluate("document.querySelector('.samples > li:last-child').scrollIntoView()")
        until(lambda: page.evaluate(counted.format("last")) == MOST - 1)
        assert read[-1] in page.evaluate("document.querySelector('.samples > li:last-child').textContent")


def test_what_is_typed_fast_is_asked_for_once_an_answer_is_there(site: str, page: Page) -> None:
    """Of what was typed while an answer was under way only the last is asked for, and nothing typed is lost."""
    page.open(f"{site}/runs/tokens/samples/2", "120 of 120")
    page.evaluate("performance.clearResourceTimings()")
    typing = "e.value = text; e.dispatchEvent(new Event('input'))"
    page.evaluate(f"((e) => {{ for (const text of ['a', 'an', 'answer 7']) {{ {typing}; }} }})({SEARCH})")
    page.wait("4 of 120")
    asked = "performance.getEntriesByType('resource').map((each) => new URL(each.name).search)"
    assert page.evaluate(asked) == ["?search=a", "?search=answer+7"]
    assert page.evaluate(f"{SEARCH}.value") == "answer 7"
    composing = "new InputEvent('input', {isComposing: true})"
    page.evaluate(f"((e) => {{ e.value = 'に'; e.dispatchEvent({composing}); }})({SEARCH})")
    assert page.evaluate("location.search") == "?search=answer+7", "half a word of several keys is not asked for"
    page.evaluate(f"{SEARCH}.dispatchEvent(new CompositionEvent('compositionend'))")
    page.wait("0 of 120")


def test_the_keyboard_is_enough(site: str, page: Page) -> None:
    page.open(f"{site}/", "finished")
    page.press("/")
    for key in "fin":
        page.press(key)
    until(lambda: page.evaluate("[...document.querySelectorAll('tbody tr:not([hidden])')].length") == 1)
    page.evaluate("document.activeElement.blur()")
    page.press("j")
    assert page.evaluate("document.activeElement.textContent") == "finished"
    page.open(f"{site}/runs/finished/samples/3", "Completions of iteration 3")
    page.press("ArrowRight")
    page.wait("Completions of iteration 4")
    page.press("g")
    page.wait("below ")


def test_a_page_shows_what_a_run_commits_while_it_is_open(tmp_path: Path, page: Page) -> None:
    make_run(tmp_path, "live", 2, whole=False)
    journal = Journal(tmp_path / "live")
    journal.write(Workflow("toy", started=1.0, parameters={"iterations": "9"}))
    journal.write(Node("b", "toy.rollout", "rollout", "rollout", "Pod", "Running", progress="3/9", started=4.0))
    with serve(tmp_path) as site, lock_workdir(tmp_path / "live"):  # as its executor would
        page.open(f"{site}/", "live")
        make_run(tmp_path, "begun-since", 1)
        page.wait("begun-since")
        page.open(f"{site}/runs/live", "2 of at most 9")
        assert "runs" in page.wait("3/9")
        assert "has not begun" in page.wait("export"), "what the workflow has still to do"
        page.evaluate("document.getElementById('settings').open = true")
        toy.make(f"{tmp_path}/live", 3, whole=False)
        page.wait("3 of at most 9")
        assert page.evaluate("document.getElementById('settings').open"), "what was unfolded stays so"
    page.wait("not up to date")


def test_a_run_that_failed_is_seen_to_be_resumed(tmp_path: Path, page: Page) -> None:
    """In the list and on its own page, which stay open."""
    make_run(tmp_path, "again", 2, whole=False)
    with serve(tmp_path) as site:
        for place in ("/", "/runs/again"):
            fail_run(tmp_path, "again")
            page.open(f"{site}{place}", "failed")
            with lock_workdir(tmp_path / "again"):  # as its executor would
                Journal(tmp_path / "again").write(Workflow("toy", started=10.0))
                page.wait("running")


def test_a_large_run_is_shown_at_once(tmp_path: Path, page: Page) -> None:
    """1,000 iterations, and an iteration of 100,000 rollouts; what a page has is bounded, whatever the run has.

    So is its report, which opens without a network and says first how the run went.
    """
    make_run(tmp_path, "large", 1000, whole=False)
    commit_rollouts(tmp_path / "large", 100_000, group=1024, iteration=1001)
    counted = "document.querySelectorAll('*').length"
    with serve(tmp_path) as site:
        page.open(f"{site}/runs/large", "3003|Seconds by phase")
        assert page.evaluate(counted) < 1500
        page.open(f"{site}/runs/large/lineage", "Lineage of")
        assert page.evaluate(counted) < 1500
        page.open(f"{site}/runs/large/weights", "951 more")
        page.open(f"{site}/runs/large/samples/1001?search=answer 24999&sort=-advantage", "4 of 100000 completions")
        page.open(f"{site}/runs/large/samples/1001?page=2000", "page 2000 of 2000")
        assert "answer 24999" in page.wait("completion 100000")
    report = write_report(Run.open("large", str(tmp_path)))
    assert report.stat().st_size < 1_000_000
    page.ask("Network.enable")
    page.ask("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    try:
        page.open(report.as_uri(), "The run went .*: mean reward 0.500 → 0.600")
        assert page.evaluate("document.querySelector('.verdict').getBoundingClientRect().bottom") < 300
        assert "902 rows before these are left out" in page.wait("Where every version came from")
        assert page.evaluate("performance.getEntriesByType('resource').length") == 0
    finally:
        page.ask("Network.disable")
