"""Milliseconds that the pages of `tuneloop ui` take, in Chromium, on runs of 1,000 iterations and 100,000 rollouts.

Of each page: its first paint, and its last change. Of each interaction: from the event until what it asks for is
painted, on a page that was opened anew. The first of either, when files are read and proved, is told by itself.

    PYTHONPATH=. python benchmarks/pages.py [--iterations 1000] [--rollouts 100000] [--characters 400] [--times 7]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.browser import Page, open_browser, serve
from tests.policies import commit_policy
from tests.rollouts import commit_scored_rollouts
from tests.unit import toy
from tuneloop.formats.tokens import load_tokenizer
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run

WORKFLOW = (
    "spec: {templates: [{name: main, dag: {tasks: [{name: sft, template: sft}]}}, {name: sft}]}"
)
WATCH = """
new MutationObserver(() => { window.changed = performance.now(); })
  .observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
"""
LOADED = "[performance.getEntriesByName('first-contentful-paint')[0].startTime, window.changed]"
MEASURE = """
new Promise((resolve) => {
  const get = (id) => document.getElementById(id), all = (path) => [...document.querySelectorAll(path)];
  const set = (path, value, event) => { all(path)[0].value = value; all(path)[0].dispatchEvent(new Event(event)); };
  const began = performance.now();
  ACT;
  const look = () => requestAnimationFrame(() => SHOWN
    ? requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - began)))
    : look());
  look();
})
"""
FOUND = 'get("status").textContent === "4 of ROLLOUTS completions"'
PAGES = {
    "runs": ("/", "large"),
    "comparison": ("/compare?run=large&run=other", "Settings that differ"),
    "run": ("/runs/large", "Seconds by phase"),
    "samples": ("/runs/large/samples/LAST", "ROLLOUTS of ROLLOUTS completions"),
    "weights": ("/runs/large/weights", "Checkpoints"),
    "lineage": ("/runs/large/lineage", "Lineage of"),
}
INTERACTIONS = {
    "search runs": (
        "runs",
        'set("[type=search]", "oth", "input")',
        'all("tbody tr:not([hidden])").length === 1',
    ),
    "compare over time": (
        "comparison",
        'set("#x", "time", "change")',
        'get("x").value === "time" && all("svg").length',
    ),
    "unfold curves": (
        "run",
        'all("details[id^=more-]")[0].open = true',
        'all("details[open] svg").length',
    ),
    "unfold weights": (
        "weights",
        'all("details[id^=more]")[0].open = true',
        'all("details[open] td").length',
    ),
    "unfold lineage": ("lineage", 'get("earlier").open = true', 'all("#earlier td").length'),
    "search samples": ("samples", 'set("#search", "answer PROMPT", "input")', FOUND),
    "order samples": (
        "samples",
        'set("#sort", "-advantage", "change")',
        'location.search && !get("id-1")',
    ),
    "one prompt": ("samples", 'get("id-0").click()', FOUND),
    "next page": ("samples", 'get("next page").click()', 'get("id-50")'),
    "colour by mask": ("samples", 'set("#colour", "mask", "change")', 'all(".token.blue").length'),
}
"""Name → page, what is done, and what is so once it is shown."""


def make_store(store: Path, iterations: int, rollouts: int, characters: int) -> None:
    """Make two runs of so many iterations, and in one of them another one of so many completions."""
    for name in ("large", "other"):
        about = {"run": name, "pipeline": "toy", "path": "toy.py", "store": f"file://{store}"}
        Run.create(Record(config={"seed": len(name)}, **about), WORKFLOW)
        toy.make(f"{store}/{name}", iterations, whole=False)
    policy = commit_policy(store / "large/base-model")
    words = load_tokenizer(policy.path / "model")
    texts = [(f"{place:06d} " * characters)[:characters] for place in range(rollouts)]
    ids = [words.encode(text[:100]) for text in texts]
    commit_scored_rollouts(
        store / "large", iterations + 1, texts, ids, policy, prompt="reverse ", group=1024
    )


def tell(what: str, taken: Sequence[float]) -> None:
    """Print the first, the median of the others and the longest of them."""
    print(
        f"{what:<28} {taken[0]:>7.0f} {statistics.median(taken[1:]):>7.0f} {max(taken[1:]):>7.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument(
        "--characters", type=int, default=400, help="of a completion; its first 100 are tokens"
    )
    parser.add_argument("--times", type=int, default=7)
    given = parser.parse_args()
    names = {
        "LAST": given.iterations + 1,
        "ROLLOUTS": given.rollouts,
        "PROMPT": given.rollouts // 4 - 1,
    }

    def name(text: str) -> str:
        for word, value in names.items():
            text = text.replace(word, str(value))
        return text

    def load(page: Page, which: str) -> list[float]:
        path, shown = PAGES[which]
        page.open("about:blank", "^$")
        page.open(f"{site}{name(path)}", name(shown))
        page.evaluate("new Promise((resume) => requestIdleCallback(resume))")
        return list(page.evaluate(LOADED))

    with tempfile.TemporaryDirectory() as folder:
        make_store(Path(folder), given.iterations, given.rollouts, given.characters)
        with serve(Path(folder)) as site, open_browser() as page:
            page.resize(1280)
            page.ask("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
            print(f"{'milliseconds':<28} {'first':>7} {'median':>7} {'most':>7}")
            for which in PAGES:
                painted, drawn = zip(*(load(page, which) for _ in range(given.times)))
                tell(f"{which}: first paint", painted)
                tell(f"{which}: all shown", drawn)
            for what, (which, act, shown) in INTERACTIONS.items():
                script, taken = name(MEASURE.replace("ACT", act).replace("SHOWN", shown)), []
                for _ in range(given.times):
                    load(page, which)
                    taken.append(float(page.evaluate(script)))
                tell(what, taken)


if __name__ == "__main__":
    main()
