"""The live page in a real browser: every page of a finished, a running, a failed and a damaged run."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from axe_playwright_python.base import AXE_SCRIPT

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
from tuneloop.ui.samples import MOST_TOKENS

pytestmark = [pytest.mark.slow, needs_chromium]
HIGH_CONTRAST = """
(() => {
  const read = (text) => text.match(/[\\d.]+(e-?\\d+)?/g)
    .map((each, i) => each * (i < 3 && text.startsWith("color(srgb ") ? 255 : 1));
  const light = (text) => read(text).slice(0, 3).map((each) => each / 255)
    .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
    .reduce((sum, each, i) => sum + each * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      const parts = read(colour);
      if (/^(rgb|color.srgb )/.test(colour) && (parts.length === 3 || parts[3] === 1)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const poor = [];
  for (const each of document.querySelectorAll("body *")) {
    const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || each.closest("option, :disabled, svg") || !each.checkVisibility()) continue;
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
UNFOLD = """
(async () => {
  for (let shut; (shut = [...document.querySelectorAll("details:not([open])")]).length; )
    await Promise.all(shut.map((each) => new Promise((resume) => {
      each.addEventListener("toggle", resume, {once: true});
      each.open = true;
    })));
})()
"""
FAULTS = """
axe.run({resultTypes: ["violations"], preload: false, rules: {"target-size": {enabled: true}}}).then(({violations}) =>
  violations.flatMap(({id, impact, nodes}) =>
    nodes.map(({html, failureSummary}) => `${impact} ${id}: ${html.slice(0, 200)} ${failureSummary}`)))
"""
"""What axe finds: also what is good practice only, and what is too small to be pressed (WCAG 2.2, 2.5.8)."""
SEARCH = "document.getElementById('search')"
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def fail_run(store: Path, name: str) -> None:
    """Let a run end with a stage that was killed."""
    journal = Journal(store / name)
    journal.write(Workflow("toy", started=1.0))
    killed = Node(
        "a",
        "toy.export(0)",
        "export(0)",
        "export",
        "Pod",
        "Failed",
        message="out of memory",
        exit_code=137,
    )
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
    "/runs/finished/samples/evaluate-after?id=p2&with=evaluate-before": (
        "Completions of evaluate-after",
        "wrong",
    ),
    "/runs/tokens/samples/2?colour=mask&search=answer 7": ("4 of 120 completions", "learnt from"),
    "/compare?run=finished&run=failed": ("Settings that differ", "seed"),
    "/compare": ("choose two to 6 runs", "tuneloop"),
}


def find_faults(page: Page) -> list[str]:
    if not page.evaluate("'axe' in window"):
        page.evaluate(f"{AXE_SCRIPT}; true")
    return list(page.evaluate(FAULTS))


def check_for_all(page: Page) -> None:
    page.evaluate(UNFOLD)
    for width, dark in ((390, True), (1280, False)):
        page.resize(width, dark=dark)
        assert page.evaluate(HIGH_CONTRAST) == []
        assert page.evaluate(WIDE) <= 0
        assert find_faults(page) == []
    assert page.evaluate(UNNAMED) == [] and page.evaluate(DUPLICATES) == []
    assert page.evaluate("document.querySelectorAll('h1').length") == 1
    assert page.evaluate("document.documentElement.lang") == "en"


@pytest.mark.parametrize("path", PAGES)
def test_every_page_shows_and_can_be_used_by_all(site: str, page: Page, path: str) -> None:
    """Light and dark, on a screen and on a phone: contrast, names, one heading, nothing wider than the window."""
    shown, also = PAGES[path]
    page.open(f"{site}{path}", shown)
    assert also in page.wait(also)
    check_for_all(page)


def test_axe_and_the_contrast_find_what_is_wrong(site: str, page: Page) -> None:
    """Otherwise that they find nothing says nothing."""
    page.open(f"{site}/runs/tokens/samples/2", "120 of 120")
    page.evaluate("document.querySelector('.token.red').style.color = '#f99'")
    assert len(page.evaluate(HIGH_CONTRAST)) == 1
    page.evaluate("document.getElementById('main').append(document.createElement('button'))")
    assert {fault.partition(":")[0] for fault in find_faults(page)} >= {"critical button-name"}


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
    ids = [words.encode(text)[:MOST_TOKENS] for text in texts]
    commit_scored_rollouts(tmp_path / "run", 1, texts, ids, policy)
    with serve(tmp_path) as site:
        page.open(f"{site}/runs/run/samples/1", "40 of 40")
        said = page.evaluate(
            "[...document.querySelectorAll('.samples > li')].map((each) => each.textContent)"
        )
        read = [words.decode(each[2:]).rstrip("\ufffd") for each in ids]
        assert all(
            len(text) > 100 and text in shown for text, shown in zip(read, said, strict=True)
        )
        counted = "document.querySelectorAll('.samples > li:{}-child .token').length"
        assert page.evaluate(counted.format("first")) == MOST_TOKENS - 1, (
            "all but the one that is a tool's"
        )
        assert page.evaluate(counted.format("last")) == 0
        page.evaluate("document.querySelector('.samples > li:last-child').scrollIntoView()")
        until(lambda: page.evaluate(counted.format("last")) == MOST_TOKENS - 1)
        assert read[-1] in page.evaluate(
            "document.querySelector('.samples > li:last-child').textContent"
        )


def test_what_is_typed_fast_is_asked_for_once_an_answer_is_there(site: str, page: Page) -> None:
    """Of what was typed while an answer was under way only the last is asked for, and nothing typed is lost."""
    page.open(f"{site}/runs/tokens/samples/2", "120 of 120")
    page.evaluate("performance.clearResourceTimings()")
    typing = "e.value = text; e.dispatchEvent(new Event('input'))"
    page.evaluate(
        f"((e) => {{ for (const text of ['a', 'an', 'answer 7']) {{ {typing}; }} }})({SEARCH})"
    )
    page.wait("4 of 120")
    asked = "performance.getEntriesByType('resource').map((each) => new URL(each.name).search)"
    assert page.evaluate(asked) == ["?search=a", "?search=answer+7"]
    assert page.evaluate(f"{SEARCH}.value") == "answer 7"
    composing = "new InputEvent('input', {isComposing: true})"
    page.evaluate(f"((e) => {{ e.value = 'に'; e.dispatchEvent({composing}); }})({SEARCH})")
    assert page.evaluate("location.search") == "?search=answer+7", (
        "half a word of several keys is not asked for"
    )
    page.evaluate(f"{SEARCH}.dispatchEvent(new CompositionEvent('compositionend'))")
    page.wait("0 of 120")


def test_the_keyboard_is_enough(site: str, page: Page) -> None:
    page.open(f"{site}/", "finished")
    page.press("/")
    for key in "fin":
        page.press(key)
    until(
        lambda: (
            page.evaluate("[...document.querySelectorAll('tbody tr:not([hidden])')].length") == 1
        )
    )
    page.evaluate("document.activeElement.blur()")
    page.press("j")
    assert page.evaluate("document.activeElement.textContent") == "finished"
    page.open(f"{site}/runs/finished/samples/evaluate-after", "4 of 4 completions")
    button = (
        "[...document.querySelectorAll('button')].find((each) => each.textContent.startsWith('{}'))"
    )
    for words, shown, active in (
        ("prompt p2", "1 of 4 completions", "p2"),
        ("only prompt p2", "4 of 4 completions", "main"),  # it is gone
    ):
        page.evaluate(f"((e) => {{ e.focus(); e.click(); }})({button.format(words)})")
        until(
            lambda shown=shown: (
                page.evaluate("document.getElementById('status').textContent") == shown
            )
        )
        assert active in page.evaluate(
            "((e) => e.id === 'main' ? e.id : e.textContent)(document.activeElement)"
        )
    page.open(f"{site}/runs/finished/samples/3", "Completions of iteration 3")
    page.press("ArrowRight")
    page.wait("Completions of iteration 4")
    turn = "document.getElementById('keys').click()"
    page.evaluate(turn)
    page.open("about:blank", "^$")
    page.open(f"{site}/runs/finished/samples/4", "Completions of iteration 4")
    page.press("/")
    assert page.evaluate("document.activeElement.id") != "search", (
        "keys are off, also on the next page"
    )
    page.evaluate(turn)
    page.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.evaluate("document.activeElement.blur()")
    page.press("g")
    page.wait("below ")


def test_a_page_shows_what_a_run_commits_while_it_is_open(tmp_path: Path, page: Page) -> None:
    make_run(tmp_path, "live", 2, whole=False)
    journal = Journal(tmp_path / "live")
    journal.write(Workflow("toy", started=1.0, parameters={"iterations": "9"}))
    journal.write(
        Node(
            "b", "toy.rollout", "rollout", "rollout", "Pod", "Running", progress="3/9", started=4.0
        )
    )
    with serve(tmp_path) as site, lock_workdir(tmp_path / "live"):  # as its executor would
        page.open(f"{site}/", "live")
        make_run(tmp_path, "begun-since", 1)
        page.wait("begun-since")
        page.open(f"{site}/runs/live", "2 of at most 9")
        assert "runs" in page.wait("3/9")
        assert "has not begun" in page.wait("export"), "what the workflow has still to do"
        check_for_all(page)
        page.evaluate("document.getElementById('settings').open = true")
        toy.make(f"{tmp_path}/live", 3, whole=False)
        page.wait("3 of at most 9")
        assert page.evaluate("document.getElementById('settings').open"), (
            "what was unfolded stays so"
        )
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
        page.open(
            f"{site}/runs/large/samples/1001?search=answer 24999&sort=-advantage",
            "4 of 100000 completions",
        )
        page.open(f"{site}/runs/large/samples/1001?page=2000", "page 2000 of 2000")
        assert "answer 24999" in page.wait("completion 100000")
    report = write_report(Run.open("large", str(tmp_path)))
    assert report.stat().st_size < 1_000_000
    with unplugged(page):
        page.open(report.as_uri(), "The run went .*: mean reward 0.500 → 0.600")
        assert page.wait("Seconds by phase") and page.evaluate(counted) < 1500
        follow(page, "samples", "12 of 100000 completions")
        follow(page, "lineage", "2762 artifacts of earlier iterations are not in this file")
        page.wait(
            "that are in this file, and earlier ones that are not. Its digest covers all of them"
        )


@contextmanager
def unplugged(page: Page) -> Iterator[None]:
    """Take the network away; at the end nothing was asked for but the file itself."""
    speed = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.ask("Network.enable")
    page.ask("Network.emulateNetworkConditions", offline=True, **speed)
    try:
        yield
        assert (
            page.evaluate("performance.getEntriesByType('resource').map((each) => each.name)") == []
        )
    finally:
        page.ask("Network.emulateNetworkConditions", offline=False, **speed)
        page.ask("Network.disable")


def follow(page: Page, words: str, shown: str) -> str:
    """Click on a link, and wait until `shown` is there."""
    page.evaluate(
        f"[...document.querySelectorAll('a')].find((each) => each.textContent === '{words}').click()"
    )
    return page.wait(shown)


def test_a_report_is_the_page_in_one_file(store: Path, tmp_path: Path, page: Page) -> None:
    """From disk, without a network: first how the run went, then all that the live page has, and its links."""
    report = write_report(Run.open("finished", str(store)), tmp_path / "report.html")
    live = write_report(Run.open("tokens", str(store)), tmp_path / "tokens.html")
    with unplugged(page):
        page.open(report.as_uri(), "The run went .*: mean reward 0.500 → 1.000")
        text = page.wait("Seconds by phase")
        assert (
            page.evaluate("document.querySelector('.verdict').getBoundingClientRect().bottom") < 300
        )
        assert {"Graph", "Curves", "Settings", "Packages"} <= {*re.split(r"\n+", text)}
        assert page.evaluate("document.querySelectorAll('.figures figure polyline').length") >= 5
        assert page.evaluate("document.querySelectorAll('.box.committed').length") == 7
        check_for_all(page)
        follow(page, "samples", "Completions of iteration 12")
        check_for_all(page)
        assert "right" in follow(page, "evaluate-after", "Completions of evaluate-after")
        assert page.evaluate("location.hash") == "#/runs/finished/samples/evaluate-after"
        follow(page, "completion 3", "1 of 4 completions")
        page.evaluate("history.back()")
        page.wait("4 of 4 completions")
        page.evaluate(
            "[...document.querySelectorAll('button')].find((e) => e.textContent === 'prompt p2').click()"
        )
        choose = "e.value = 'evaluate-before'; e.dispatchEvent(new Event('change'));"
        page.evaluate(f"((e) => {{ {choose} }})(document.getElementById('with'))")
        assert "wrong" in page.wait(r"version 1 \(evaluate-before\)")
        follow(page, "weights", "iterations/12/policy-update")
        follow(page, "lineage", "Lineage of export")
        check_for_all(page)
        follow(page, "run", "Seconds by phase")
        page.open("about:blank", "^$")
        page.open(f"{report.as_uri()}#/runs/finished/weights", "Checkpoints")
        page.open("about:blank", "^$")
        page.open(f"{live.as_uri()}#/runs/tokens/samples/2?colour=mask", "This file has 12 of them")
        assert f"{EVIL}0" in page.wait("learnt from")
        assert page.evaluate("document.querySelectorAll('main script, main img').length") == 0
        assert page.evaluate("document.querySelectorAll('.token.blue').length") > 12
        page.evaluate(
            f"((e) => {{ e.value = 'answer 2'; e.dispatchEvent(new Event('input')); }})({SEARCH})"
        )
        page.wait("4 of 120 completions")
        broken = "try { document.body.innerHTML = '<b>x</b>'; 'made' } catch (error) { error.name }"
        assert page.evaluate(broken) == "TypeError", "the browser makes no markup of text"
        page.errors.clear()


def test_a_report_works_in_a_frame_without_an_origin(
    store: Path, tmp_path: Path, page: Page
) -> None:
    """As Kubeflow Pipelines show it: the frame has no address, and its links stay inside."""
    report = write_report(Run.open("finished", str(store)), tmp_path / "report.html")
    attributes = f'sandbox="allow-scripts" srcdoc="{html.escape(report.read_text())}" style="width:99vw;height:99vh"'
    (tmp_path / "frame.html").write_text(
        f"<!doctype html><meta charset=utf-8>around<iframe {attributes}></iframe>"
    )
    page.open((tmp_path / "frame.html").as_uri(), "around")
    until(lambda: page.evaluate("document.readyState") == "complete")
    frame = page.enter_frame()
    until(lambda: "Seconds by phase" in page.evaluate("document.body.innerText", **frame))
    assert "The run went" in page.evaluate(
        "document.querySelector('.verdict').textContent", **frame
    )
    for words, shown in (
        ("samples", "Completions of iteration 12"),
        ("weights", "Checkpoints"),
        ("run", "Graph"),
    ):
        link = f"[...document.querySelectorAll('nav a')].find((each) => each.textContent === '{words}')"
        page.evaluate(f"{link}.click()", **frame)
        until(lambda shown=shown: shown in page.evaluate("document.body.innerText", **frame))
    page.evaluate("document.querySelector('.skip').click()", **frame)
    assert page.evaluate("document.activeElement.id", **frame) == "main"
