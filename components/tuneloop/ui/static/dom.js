// Elements are made of names and text, never of markup: whatever a policy wrote, it stays text.
import { FROZEN, find, here, linkTo, move } from "./frozen.js";

const SVG = "http://www.w3.org/2000/svg";

/** Makes an HTML element; a property that begins with "on" is a listener. Of children, null and false are left out. */
export const h = (name, properties, ...children) => fill(document.createElement(name), properties, children);
export const svg = (name, properties, ...children) => fill(document.createElementNS(SVG, name), properties, children);

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined)
      element.setAttribute(name, value === true ? "" : name === "href" ? linkTo(value) : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/**
 * Replaces the content of the page; unfolded details and the focus are restored by id.
 * If the focused element is gone or has no id, the content is focused, so that Tab does not start at the top of the page.
 */
export function show(...children) {
  const main = document.getElementById("main");
  const open = [...main.querySelectorAll("details[id]")].map((each) => [each.id, each.open]);
  const { id, selectionStart } = document.activeElement ?? {};
  const inside = main.contains(document.activeElement);
  main.replaceChildren(...children.flat(Infinity).filter(Boolean));
  for (const [name, was] of open) document.getElementById(name)?.toggleAttribute("open", was);
  const focused = id && document.getElementById(id);
  if (focused && main.contains(focused)) {
    focused.focus({ preventScroll: true });
    if (selectionStart != null) focused.setSelectionRange?.(selectionStart, selectionStart);
  } else if (inside) main.focus({ preventScroll: true });
}

export const say = (text) => (document.getElementById("status").textContent = text);

/** Asks the server, or the file of a frozen page; throws an Error with its one line, and the status, where it refuses. */
export async function ask(path) {
  if (FROZEN) return find(path);
  const answer = await fetch(`/api${path}`);
  const found = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(found.error), { status: answer.status });
  return found;
}

/** Does `work` for each, a few at a time. */
export async function eachOf(values, work, width = 4) {
  const left = [...values];
  const next = async () => {
    while (left.length) await work(left.shift());
  };
  await Promise.all(Array.from({ length: width }, next));
}

export const link = (run, ...rest) =>
  ["/runs", run, ...rest]
    .map((part, i) => (i ? String(part).split("/").map(encodeURIComponent).join("/") : part))
    .join("/");
export const query = () => new URLSearchParams(here().search);

/** Keeps what is chosen on a page in its address, so that the link shows the same. */
export function remember(changes) {
  const now = query();
  for (const [name, value] of Object.entries(changes)) value ? now.set(name, value) : now.delete(name);
  move(`${here().pathname}${now.size ? `?${now}` : ""}`, "replaceState");
}

export const table = (head, rows, properties) =>
  h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": properties?.["aria-label"] ?? head.join(", ") },
    h(
      "table",
      properties,
      h(
        "thead",
        null,
        h(
          "tr",
          null,
          head.map((name) => h("th", { scope: "col" }, name)),
        ),
      ),
      h("tbody", null, rows.map(row)),
    ),
  );

export const row = (cells) =>
  cells instanceof Node
    ? cells
    : h(
        "tr",
        null,
        cells.map((cell) => h("td", null, cell)),
      );

/** A part that unfolds; a function in place of its contents makes them when it first does. */
export function fold(id, title, open, contents) {
  const later = typeof contents === "function";
  const details = h("details", { id, open }, h("summary", null, title), !later && contents);
  if (later)
    details.addEventListener("toggle", () => details.append(...[contents()].flat(Infinity).filter(Boolean)), {
      once: true,
    });
  return details;
}

/** A table whose rows beyond the first fifty unfold; `rows` are made by `make`, one of each value. */
export function longTable(name, head, values, make, most = 50) {
  const part = (some, words) => table(head, some.map(make), { "aria-label": words });
  const rest = values.slice(most);
  return [
    part(values.slice(0, most), name),
    rest.length > 0 && fold(`more ${name}`, `${rest.length} more`, false, () => part(rest, `More ${name}`)),
  ];
}

export const number = (value, digits = 4) =>
  value === null || value === undefined
    ? "–"
    : String(Number.isInteger(value) ? value : Number(Number(value).toPrecision(digits)));

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; count >= 1000 && at < units.length - 1; at++) count /= 1000;
  return `${number(count, 3)} ${units[at]}`;
}

export function duration(seconds) {
  if (seconds < 60) return `${number(seconds, 3)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export const since = (unix) =>
  unix ? new Date(unix * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC" : "";
export const label = (name) => name.replaceAll("_", " ");

/** What a recorded quantity is, where its name alone does not say it. */
const QUANTITIES = {
  clip_fraction: "clipped tokens, share",
  cut: "completions cut off at max_tokens, share",
  kl: "distance from the reference model (KL), nats",
  logprob_gap: "log-probabilities of engine and trainer apart, mean, nats",
  logprob_gap_max: "log-probabilities of engine and trainer apart, largest, nats",
  mean_length: "mean length of a completion, tokens",
  zero_variance: "groups whose rewards are all equal, share",
  mean_abs_diff: "check of the weights: log-probabilities apart, mean, nats",
  max_abs_diff: "check of the weights: log-probabilities apart, largest, nats",
  tolerance: "check of the weights: apart at most, nats",
  noise: "check of the weights: apart by rounding alone, nats",
  separation: "check of the weights: two versions apart, standard deviations",
};

/** The title of a curve. */
export const quantity = (name) => QUANTITIES[name] ?? label(name);

/** What is not text is shown as JSON. */
export const text = (value) => (typeof value === "string" ? value : (JSON.stringify(value) ?? "–"));

/** The settings of a configuration by their dotted keys. */
export function leaves(value, prefix = "") {
  const inner = value && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length;
  return inner
    ? Object.entries(value).flatMap(([key, each]) => leaves(each, prefix ? `${prefix}.${key}` : key))
    : [[prefix, text(value)]];
}
