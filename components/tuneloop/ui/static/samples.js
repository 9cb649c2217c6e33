// The completions of an iteration or an evaluation: searched, ordered, token by token, and beside another version's.
import { FROZEN, listPaths } from "./frozen.js";
import { ask, fold, h, link, number, query, remember, say, show } from "./dom.js";

const COLOURS = { logprob: "log-probability", advantage: "advantage", version: "version", mask: "mask" };
const SORTS = {
  "": "as sampled",
  score: "reward, least first",
  "-score": "reward, greatest first",
  advantage: "advantage, least first",
  "-advantage": "advantage, greatest first",
};
const MEANS = {
  logprob: "The darker a token, the less probable the engine found it (5 nats: darkest).",
  advantage: "Blue is made likelier, orange less likely: the reward less the mean of its group's, before it is scaled.",
  version: "Each version of the weights has a colour; most completions are of one.",
  mask: "Marked tokens are learnt from; the others came from a tool or the environment.",
};
const BLOCK = 200;
const AT_ONCE = 1600;
/** What colours a block of tokens when it comes near the window: thousands of elements take longer than all else. */
const colourers = new WeakMap();
const near = new IntersectionObserver(
  (seen) => {
    for (const { isIntersecting, target } of seen)
      if (isIntersecting) {
        near.unobserve(target);
        target.replaceWith(...colourers.get(target)());
      }
  },
  { rootMargin: "100% 0px" },
);

export async function showSamples(name, at) {
  let shown = {},
    asking = false;
  await draw();

  /** Shows what the address asks for; of what is chosen while an answer is under way only the last is asked for. */
  async function draw() {
    if (asking) return;
    asking = true;
    try {
      while (shown.address !== address()) shown = await load(address());
    } finally {
      asking = false;
    }
    const { page, other } = shown;
    const wanted = query();
    const colour = COLOURS[wanted.get("colour")] ? wanted.get("colour") : "logprob";
    const id = wanted.get("id");
    near.disconnect();
    let left = AT_ONCE;
    const pages = Math.max(1, Math.ceil(page.found / page.size));
    const current = Math.min(Number(wanted.get("page")) || 1, pages);
    show(
      h("h1", null, /^\d+$/.test(at) ? `Completions of iteration ${at}` : `Completions of ${at}`),
      h(
        "p",
        null,
        `${page.found} of ${page.total} completions, by version ${number(page.version)}. `,
        page.held < page.total && `This file has ${page.held} of them; tuneloop ui shows all. `,
        moveLinks(name, at, page),
      ),
      page.note && h("p", { class: "alarm", role: "status" }, page.note),
      controls(page, colour, wanted, choose),
      page.rows.some((row) => row.logprobs) && h("p", { class: "key" }, MEANS[colour]),
      id && compare(page, other, wanted, choose),
      h(
        "ol",
        { class: "samples", start: 1 },
        page.rows.map((row) => {
          const now = Math.max(0, left);
          left -= row.completion_ids?.length ?? 0;
          return showRow(page, row, colour, choose, now);
        }),
      ),
      pages > 1 &&
        h(
          "nav",
          { "aria-label": "Pages of completions" },
          turn(current - 1, "page before"),
          ` page ${current} of ${pages} `,
          turn(current + 1, "next page"),
        ),
    );

    function turn(to, words) {
      return h(
        "button",
        { type: "button", id: words, disabled: to < 1 || to > pages, onclick: () => choose({ page: to > 1 && to }) },
        words,
      );
    }
  }

  /** What is asked for, as it stands in the address: not the colour. */
  function address() {
    const wanted = query();
    wanted.delete("colour");
    return `${wanted}`;
  }

  async function load(wanted) {
    const [id, place] = ["id", "with"].map((key) => query().get(key));
    const refuse = (error) => ({ error: error.message });
    const there = id && place && `${link(name, "samples", place)}?id=${encodeURIComponent(id)}`;
    const [page, other] = await Promise.all([
      ask(`${link(name, "samples", at)}?${wanted}`),
      there && ask(there).catch(refuse),
    ]);
    return { address: wanted, page, other };
  }

  function choose(changes) {
    remember("page" in changes ? changes : { page: "", place: "", ...changes });
    return draw().then(
      () => say(`${shown.page.found} of ${shown.page.total} completions`), // The list changes away from the focused control.
      (error) => show(h("p", { class: "alarm", role: "alert" }, error.message)),
    );
  }
}

function moveLinks(name, at, { iteration, evaluations }) {
  const chosen = query();
  for (const key of ["page", "place", "group"]) chosen.delete(key); // they mean rows of this iteration
  const kept = chosen.size ? `?${chosen}` : "";
  const to = (place, words, rel) => h("a", { href: `${link(name, "samples", place)}${kept}`, rel }, words);
  const i = /^\d+$/.test(at) ? Number(at) : 0;
  const held = listPaths(link(name, "samples", "")).map((path) => path.slice(link(name, "samples", "").length));
  const named = (key) => (/^\d+$/.test(key) ? `iteration ${key}` : key);
  const live = [
    i > 1 && to(i - 1, "iteration before", "prev"),
    i > 0 && i < iteration && to(i + 1, "next iteration", "next"),
    !i && iteration > 0 && to(iteration, named(`${iteration}`), "next"),
    ...evaluations.filter((key) => key !== at).map((key) => to(key, key)),
  ];
  const links = FROZEN ? held.filter((key) => key !== at).map((key) => to(key, named(key))) : live;
  return links.filter(Boolean).map((each, n) => [n ? " · " : "", each]);
}

function controls(page, colour, wanted, choose) {
  const find = (event) => event.isComposing || choose({ search: search.value });
  const search = h("input", {
    type: "search",
    id: "search",
    value: wanted.get("search") ?? "",
    oninput: find,
    oncompositionend: find, // until then a word of several keys is not yet one
  });
  const pick = (id, words, options, value) => {
    const select = h(
      "select",
      { id, onchange: () => choose({ [id]: select.value }) },
      Object.entries(options).map(([key, said]) => h("option", { value: key, selected: key === value }, said)),
    );
    return h("label", null, `${words} `, select);
  };
  const outcomes = Object.fromEntries([
    ["", "any"],
    ...page.outcomes.map(({ values, counts }) => [values ?? "", `${values ?? "none"} (${counts})`]),
  ]);
  const only = ["id", "group"].filter((key) => wanted.get(key));
  return h(
    "form",
    { class: "controls", role: "search", onsubmit: (event) => event.preventDefault() },
    h("label", null, "Search ", search),
    pick("colour", "Colour by", COLOURS, colour),
    pick("sort", "Order", SORTS, wanted.get("sort") ?? ""),
    page.outcomes.length > 1 && pick("outcome", "Outcome", outcomes, wanted.get("outcome") ?? ""),
    only.map((key) =>
      h(
        "button",
        { type: "button", onclick: () => choose({ [key]: "", with: "" }) },
        `only ${key === "id" ? "prompt" : key} ${wanted.get(key)} ✕`,
      ),
    ),
  );
}

/** Shows a completion, its first `atOnce` tokens in colour, the others when they are near. */
function showRow(page, row, colour, choose, atOnce) {
  const words = [
    row.score === null || row.score === undefined ? row.outcome || "not scored yet" : `reward ${number(row.score)}`,
    row.advantage !== null && `advantage ${row.advantage > 0 ? "+" : ""}${number(row.advantage, 3)}`,
    row.length > 0 && `${row.length} tokens`,
    row.finish_reason,
  ].filter(Boolean);
  const pick = (key) =>
    row[key] &&
    h(
      "button",
      { type: "button", id: `${key}-${row.place}`, onclick: () => choose({ [key]: row[key] }) },
      `${key === "id" ? "prompt" : key} ${row[key]}`,
    );
  const said = row.completion_ids ? showTokens(page, row, colour, atOnce) : [row.completion];
  const cut = row.completion_ids && row.length > row.completion_ids.length;
  const more = FROZEN
    ? ` … of ${row.length} tokens`
    : h("a", { href: `?place=${row.place}` }, ` … all ${row.length} tokens`);
  return h(
    "li",
    null,
    h(
      "p",
      { class: "about" },
      h("a", { href: `?place=${row.place}`, "data-row": true }, `completion ${row.place + 1}`),
      ` · ${words.join(" · ")} `,
      pick("id"),
      " ",
      pick("group"),
    ),
    h(
      "div",
      { class: "pair" },
      h("div", null, h("h2", null, "prompt"), h("p", { class: "text" }, row.prompt)),
      h(
        "div",
        null,
        h("h2", null, "completion"),
        h("div", { class: "text" }, said, cut && more), // A <p> may not contain the <details> of replies.
      ),
      row.answer && h("div", null, h("h2", null, "answer"), h("p", { class: "text" }, row.answer)),
    ),
    explainReward(row),
    showEnvironment(row),
  );
}

/** Shows tokens in their colour, those that were not sampled folded: replies of tools and environments. */
function showTokens(page, row, colour, atOnce) {
  const ids = row.completion_ids;
  const parts = [];
  for (let from = 0; from < ids.length; ) {
    const sampled = row.loss_mask[from];
    let to = from + 1;
    // a block begins with a character, so that each can be read by itself
    while (to < ids.length && row.loss_mask[to] === sampled && (to - from < BLOCK || goesOn(page, ids[to]))) to++;
    if (!parts.length || parts.at(-1).sampled !== sampled) parts.push({ sampled, length: 0, blocks: [] });
    parts.at(-1).length += to - from;
    parts.at(-1).blocks.push(showBlock(page, row, colour, from, to, from < atOnce));
    from = to;
  }
  return parts.map(({ sampled, length, blocks }) =>
    sampled ? blocks : h("details", { class: "reply" }, h("summary", null, `reply of ${length} tokens`), blocks),
  );
}

/** Shows tokens in colour, or as plain text until they come near. */
function showBlock(page, row, colour, from, to, now) {
  const texts = readTokens(page, row.completion_ids.slice(from, to));
  const mark = (said, n) => {
    const [i, sampled] = [from + n, row.loss_mask[from]];
    const about = sampled ? `${number(row.logprobs[i])} nats, version ${row.policy_versions[i]}` : "not sampled";
    const made = h("span", { title: about }, said);
    const [logprob, version] = [row.logprobs[i], row.policy_versions[i]];
    paint(made, colour, { logprob, advantage: row.advantage, version, sampled });
    return made;
  };
  if (now) return texts.map(mark);
  const plain = h("span", null, texts.join(""));
  colourers.set(plain, () => texts.map(mark));
  near.observe(plain);
  return plain;
}

function paint(mark, colour, { logprob, advantage, version, sampled }) {
  if (!sampled) return;
  const alpha = {
    logprob: Math.min(1, Math.max(0, -logprob / 5)),
    advantage: Math.min(1, Math.abs(advantage ?? 0)),
    version: 1,
    mask: 1,
  }[colour];
  const hue = {
    logprob: "red",
    advantage: advantage > 0 ? "blue" : "orange",
    version: ["blue", "orange", "green", "purple"][version % 4],
    mask: "blue",
  }[colour];
  mark.style.setProperty("--shade", `${Math.round(alpha * 100)}%`);
  mark.className = `token ${hue}`;
}

/** Reads the texts of tokens; a character may be split over several, and is then the text of the last. */
function readTokens(page, ids) {
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  let split = false; // whether the decoder may hold the beginning of a character
  const texts = ids.map((id) => {
    const piece = readPiece(page, id);
    if (typeof piece !== "string") {
      split = true;
      return decoder.decode(piece, { stream: true });
    }
    const before = split ? decoder.decode() : "";
    split = false;
    return before + piece;
  });
  if (split) texts[texts.length - 1] += decoder.decode();
  return texts;
}

/** Reads a token by itself: its text, or bytes where these are no ASCII and so perhaps a part of a character. */
function readPiece(page, id) {
  page.texts ??= new Map();
  if (!page.texts.has(id)) page.texts.set(id, decodePiece(page.pieces[id], page.decoder, id));
  return page.texts.get(id);
}

/** Decodes a piece of a vocabulary: of byte-level tokenizers each character stands for a byte. */
function decodePiece(piece, kind, id) {
  if (piece === null || piece === undefined) return `⟨${id}⟩`;
  if (kind !== "bytes") return piece.replaceAll("▁", " ");
  const codes = [...piece].map((each) => BYTES.get(each));
  if (codes.includes(undefined)) return piece;
  return codes.every((code) => code < 128) ? String.fromCharCode(...codes) : Uint8Array.from(codes);
}

/** Whether a token begins amid a character of UTF-8. */
const goesOn = (page, id) => (readPiece(page, id)[0] & 0xc0) === 0x80;

/** GPT-2's alphabet: bytes that print are themselves, the others follow from 256 on. */
const BYTES = (() => {
  const prints = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte !== 173);
  let next = 256;
  return new Map(Array.from({ length: 256 }, (_, byte) => [String.fromCodePoint(prints(byte) ? byte : next++), byte]));
})();

/** Parses JSON; what is none, as Python's NaN, is shown as it stands. */
function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return { "": text };
  }
}

/** What each reward said of a completion, and why where it said so. */
function explainReward(row) {
  const said = row.breakdown ? Object.entries(parse(row.breakdown)) : [];
  return (
    said.length > 0 &&
    fold(
      `why-${row.place}`,
      `what each reward said (${said.length})`,
      false,
      h(
        "ul",
        null,
        said.map(([name, value]) => h("li", null, `${name}: ${typeof value === "number" ? number(value) : value}`)),
      ),
    )
  );
}

function showEnvironment(row) {
  const about = row.metadata ? parse(row.metadata) : {};
  return (
    Object.keys(about).length > 0 &&
    fold(
      `about-${row.place}`,
      about.environment ? `metadata, and ${about.environment.turns} turns` : "metadata",
      false,
      h("pre", null, JSON.stringify(about, null, 1)),
    )
  );
}

/** Shows the answers of two versions to one prompt, and in what words they differ. */
function compare(page, other, wanted, choose) {
  const input = h("input", {
    id: "with",
    list: "places",
    value: wanted.get("with") ?? "",
    onchange: () => choose({ with: input.value }),
  });
  const choice = h(
    "p",
    null,
    h("label", null, "Compare with the answers of iteration or evaluation ", input),
    h(
      "datalist",
      { id: "places" },
      page.evaluations.map((value) => h("option", { value })),
    ),
  );
  if (!other) return choice;
  if (other.error) return [choice, h("p", { class: "alarm", role: "alert" }, other.error)];
  if (!other.rows.length) return [choice, h("p", null, `${wanted.get("with")} has no completion of this prompt.`)];
  const [a, b] = [other.rows[0], page.rows[0] ?? { completion: "" }];
  const [before, after] = diff(a.completion, b.completion);
  return [
    choice,
    h(
      "section",
      { class: "pair diff", "aria-label": "Two versions' answers" },
      h(
        "div",
        null,
        h("h2", null, `version ${number(other.version)} (${other.key}), reward ${number(a.score)}`),
        h("p", { class: "text" }, before),
      ),
      h(
        "div",
        null,
        h("h2", null, `version ${number(page.version)} (${page.key}), reward ${number(b.score)}`),
        h("p", { class: "text" }, after),
      ),
    ),
  ];
}

/** Marks the words of two texts that are not in their longest common subsequence; long texts are marked from their first to their last difference. */
function diff(before, after) {
  const [a, b] = [before, after].map((each) => each.match(/\s+|[\p{L}\p{N}_]+|[^\s]/gu) ?? []);
  let head = 0,
    tail = 0;
  while (head < Math.min(a.length, b.length) && a[head] === b[head]) head++;
  while (tail < Math.min(a.length, b.length) - head && a.at(-1 - tail) === b.at(-1 - tail)) tail++;
  const [x, y] = [a, b].map((each) => each.slice(head, each.length - tail));
  const [keptX, keptY] = x.length * y.length > 4e6 ? [new Set(), new Set()] : common(x, y);
  const paintAll = (words, kept, name, all) => [
    all.slice(0, head).join(""),
    words.map((word, i) => (kept.has(i) ? word : h(name, null, word))),
    all.slice(all.length - tail).join(""),
  ];
  return [paintAll(x, keptX, "del", a), paintAll(y, keptY, "ins", b)];
}

function common(x, y) {
  const lengths = Array.from({ length: x.length + 1 }, () => new Uint32Array(y.length + 1));
  for (let i = x.length - 1; i >= 0; i--)
    for (let j = y.length - 1; j >= 0; j--)
      lengths[i][j] = x[i] === y[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
  const [keptX, keptY] = [new Set(), new Set()];
  for (let i = 0, j = 0; i < x.length && j < y.length;) {
    if (x[i] === y[j]) {
      keptX.add(i++);
      keptY.add(j++);
    } else lengths[i + 1][j] >= lengths[i][j + 1] ? i++ : j++;
  }
  return [keptX, keptY];
}
