// Where a page has its data and its address: a server's, or its own where it is frozen into one file (a report).

/** Of a frozen page all that it can ask for, {start: address, answers: {path: answer}}; null where a server answers. */
export const FROZEN = JSON.parse(document.getElementById("frozen")?.textContent ?? "null");

/** The address of a frozen page, which stands behind "#"; a frame of another site has none, and it is known here alone. */
let place = FROZEN && readHash();

function readHash() {
  return location.hash.startsWith("#/") ? location.hash.slice(1) : FROZEN.start;
}

/** The address of what is shown, with `pathname` and `search`. */
export const here = () => (FROZEN ? new URL(place, "http://report") : location);

/** What a link leads to: an address as the live page has it, from "/" on or only what follows "?". */
export const linkTo = (to) =>
  !FROZEN || !/^[/?]/.test(to) ? to : to.startsWith("/") ? `#${to}` : `#${here().pathname}${to}`;

/** Goes to an address, without drawing what is there; `how` is "pushState" or "replaceState". */
export function move(to, how) {
  if (!FROZEN) return history[how](null, "", to);
  place = to;
  try {
    history[how](null, "", `#${to}`);
  } catch {
    // a frame of another site has no address
  }
}

/** Whether a page of completions, or whatever else `path` asks for, is there. */
export const has = (path) => !FROZEN || Object.hasOwn(FROZEN.answers, path);

/** The paths of a frozen page that begin so; none of a live page, which has all. */
export const listPaths = (start) => Object.keys(FROZEN?.answers ?? {}).filter((path) => path.startsWith(start));

/** Answers as the server would, of what is in the file. */
export function find(path) {
  const [place, search] = path.split("?");
  if (!has(place)) throw new Error(`${place} is not in this file; tuneloop ui shows it`);
  const found = FROZEN.answers[place];
  return found.rows ? chooseRows(found, new URLSearchParams(search)) : found;
}

/** Chooses and orders completions as `tuneloop.ui.samples` does. */
function chooseRows(page, wanted) {
  const text = wanted.get("search")?.toLowerCase();
  const rows = page.rows.filter(
    (row) =>
      ["place", "id", "group", "outcome"].every((key) => !wanted.get(key) || String(row[key]) === wanted.get(key)) &&
      (!text || ["prompt", "completion", "answer"].some((key) => row[key]?.toLowerCase().includes(text))),
  );
  const [, down, by] = /^(-?)(score|advantage)$/.exec(wanted.get("sort") ?? "") ?? [];
  const none = (row) => row[by] === null || row[by] === undefined;
  if (by) rows.sort((a, b) => none(a) - none(b) || (down ? b[by] - a[by] : a[by] - b[by]) || 0);
  return { ...page, rows, found: rows.length };
}

/** Draws again, in a frozen page, whenever a link or the browser's history leads elsewhere. */
export function followLinks(draw) {
  if (!FROZEN) return;
  addEventListener("click", (event) => {
    const to = event.target.closest?.("a[href^='#']")?.getAttribute("href");
    if (!to || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault(); // in a frame it would lead to the page around
    if (to.startsWith("#/")) {
      move(to.slice(1), "pushState");
      draw();
      scrollTo(0, 0);
    }
    document.getElementById("main").focus({ preventScroll: true });
  });
  addEventListener("hashchange", () => {
    place = readHash();
    draw();
  });
}
