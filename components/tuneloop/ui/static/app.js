// Which page an address is, how it looks again, and its keys.
import { FROZEN, followLinks, has, here, listPaths } from "./frozen.js";
import { ask, h, link, say, show } from "./dom.js";
import { showComparison, showRuns } from "./runs.js";
import { showRecorded, showRun } from "./run.js";
import { showLineage, showWeights } from "./weights.js";
import { showSamples } from "./samples.js";

const LOOK_MS = 3000;

let first, name, page, at;

async function open() {
  [first, name, page, ...at] = here().pathname.split("/").slice(1).map(decodeURIComponent);
  document.title = [page && [page, ...at].join(" "), name ?? first, "tuneloop"].filter(Boolean).join(" · ");
  if (first === "runs") {
    addLinks(await ask(link(name, "now")));
    if (page === "samples") return showSamples(name, at.join("/"));
    return follow({ weights: showWeights, lineage: showLineage }[page] ?? showRun);
  }
  if (first === "curves") return showRecorded(await ask("/curves"));
  return first === "compare" ? showComparison() : showRuns();
}

/** Shows a page of a run, and again whenever the run has committed more or stands otherwise. */
async function follow(draw) {
  let committed = null,
    now = null,
    mark = "",
    drawn = "",
    pause = LOOK_MS;
  do {
    if (now) await new Promise((resume) => setTimeout(resume, pause));
    try {
      now = await ask(link(name, "now"));
      mark = JSON.stringify(now);
      if (mark === drawn) {
        say("");
        continue;
      }
      const began = performance.now();
      await draw(name, now, committed !== now.committed);
      pause = Math.max(LOOK_MS, 10 * (performance.now() - began)); // a large run is not read all the time
      say(committed === null ? "" : `${now.phase}, iteration ${now.iteration}, ${now.committed} artifacts committed`);
      [committed, drawn] = [now.committed, mark];
      addLinks(now);
    } catch (error) {
      if (!drawn) throw error;
      say(`not up to date: ${error.message}`); // a server that is away is asked again
    }
  } while (!FROZEN && (mark !== drawn || now.phase !== "succeeded")); // one that failed may be resumed
}

function addLinks({ iteration, evaluation }) {
  const places = [iteration, evaluation].filter(Boolean).map((each) => link(name, "samples", each));
  const pages = {
    run: link(name),
    samples: places.find(has) ?? listPaths(link(name, "samples", ""))[0],
    weights: link(name, "weights"),
    lineage: link(name, "lineage"),
  };
  const entries = Object.entries(pages).filter(([, place]) => place);
  const nav = document.getElementById("nav");
  nav.replaceChildren(
    ...(FROZEN ? [] : [nav.firstElementChild]),
    ...entries.map(([words, href]) => h("a", { href, "aria-current": (page ?? "run") === words && "page" }, words)),
  );
}

/** Shortcuts of one character can be turned off: speech input presses them by accident (WCAG 2.2, 2.1.4). */
const keys = document.getElementById("keys");
try {
  keys.checked = localStorage.getItem("keys") !== "off";
  keys.addEventListener("change", () => localStorage.setItem("keys", keys.checked ? "on" : "off"));
} catch {
  // Storage is blocked, as in a frame of another site: the choice holds for this page only.
}

addEventListener("keydown", (event) => {
  if (!keys.checked || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const step = { j: 1, k: -1 }[event.key];
  if (event.key === "g") document.querySelector("#nav a")?.click();
  else if (event.key === "/") document.querySelector("input[type=search]")?.focus();
  else if (step) {
    const rows = [...document.querySelectorAll("[data-row] a, a[data-row]")].filter((each) => each.checkVisibility());
    rows[Math.max(0, Math.min(rows.length - 1, rows.indexOf(document.activeElement) + step))]?.focus();
  } else if (event.key.startsWith("Arrow")) {
    const next = document.querySelector(`a[rel=${{ ArrowLeft: "prev", ArrowRight: "next" }[event.key] ?? "none"}]`);
    if (!next) return;
    next.click();
  } else return;
  event.preventDefault();
});

const start = () =>
  open().catch((error) =>
    show(h("h1", null, name ?? "tuneloop"), h("p", { class: "alarm", role: "alert" }, error.message)),
  );
if (FROZEN) {
  document.getElementById("nav").replaceChildren();
  const said = "A report, made once: tuneloop ui shows all of a run, and while it goes on.";
  document.querySelector("header").append(h("p", { class: "about" }, said));
  document.querySelector("footer span").textContent = ": / search, j and k down and up the list, g the run.";
}
followLinks(start);
start();
