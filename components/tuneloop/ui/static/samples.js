// The completions of an iteration or an evaluation: searched, ordered, token by token, and beside another version's.
import { ask, fold, h, link, number, query, remember, show } from "./dom.js";

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
let asked = 0; // of several answers that are under way only the last is shown

export async function showSamples(name, at) {
  let shown = {};
  await draw();

  async function draw() {
    const mine = ++asked;
    const wanted = query();
    const colour = COLOURS[wanted.get("colour")] ? wanted.get("colour") : "logprob";
    wanted.delete("colour"); // it changes nothing that is asked for
    const [id, place] = [wanted.get("id"), wanted.get("with")];
    if (shown.address !== `${wanted}`) {
      const refuse = (error) => ({ error: error.message });
      const page = await ask(`${link(name, "samples", at)}?${wanted}`);
      const there = place && link(name, "samples", place);
      const other = id && there && (await ask(`${there}?id=${encodeURIComponent(id)}`).catch(refuse));
      if (mine !== asked) return;
      shown = { address: `${wanted}`, page, other };
    }
    const { page, other } = shown;
    const pages = Math.max(1, Math.ceil(page.found / page.size));
    const current = Math.min(Number(wanted.get("page")) || 1, pages);
    show(
      h("h1", null, /^\d+$/.test(at) ? `Completions of iteration ${at}` : `Completions of ${at}`),
      h(
        "p",
        null,
        `${page.found} of ${page.total} completions, by version ${number(page.version)}. `,
        moveLinks(name, at, page),
      ),
      controls(page, colour, wanted, choose),
      page.rows.some((row) => row.logprobs) && h("p", { class: "key" }, MEANS[colour]),
      id && compare(page, other, wanted, choose),
      h(
        "ol",
        { class: "samples", start: 1 },
        page.rows.map((row) => showRow(page, row, colour, choose)),
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

  function choose(changes) {
    remember("page" in changes ? changes : { page: "", place: "", ...changes });
    return draw().catch((error) => show(h("p", { class: "alarm", role: "alert" }, error.message)));
  }
}

function moveLinks(name, at, { iteration, evaluations }) {
  const chosen = query();
  for (const key of ["page", "place", "group"]) chosen.delete(key); // they mean rows of this iteration
  const kept = chosen.size ? `?${chosen}` : "";
  const to = (place, words, rel) => h("a", { href: `${link(name, "samples", place)}${kept}`, rel }, words);
  const i = /^\d+$/.test(at) ? Number(at) : 0;
  const links = [
    i > 1 && to(i - 1, "iteration before", "prev"),
    i > 0 && i < iteration && to(i + 1, "next iteration", "next"),
    !i && iteration > 0 && to(iteration, `iteration ${iteration}`, "next"),
    ...evaluations.filter((key) => key !== at).map((key) => to(key, key)),
  ];
  return links.filter(Boolean).map((each, n) => [n ? " · " : "", each]);
}

function controls(page, colour, wanted, choose) {
  let timer = 0;
  const search = h("input", {
    type: "search",
    id: "search",
    value: wanted.get("search") ?? "",
    oninput: () => {
      clearTimeout(timer);
      asked++; // what is under way would put the older text back
      timer = setTimeout(() => choose({ search: search.value }), 150);
    },
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

function showRow(page, row, colour, choose) {
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
      { type: "button", onclick: () => choose({ [key]: row[key] }) },
      `${key === "id" ? "prompt" : key} ${row[key]}`,
    );
  const said = row.completion_ids ? showTokens(page, row, colour) : [row.completion];
  const cut = row.completion_ids && row.length > row.completion_ids.length;
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
        h("p", { class: "text" }, said, cut && h("a", { href: `?place=${row.place}` }, ` … all ${row.length} tokens`)),
      ),
      row.answer && h("div", null, h("h2", null, "answer"), h("p", { class: "text" }, row.answer)),
    ),
    explainReward(row),
    showEnvironment(row),
  );
}

/** Shows tokens in their colour, those that were not sampled folded: replies of tools and environments. */
function showTokens(page, row, colour) {
  const parts = [];
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true }); // a character may be split over tokens
  row.completion_ids.forEach((id, i) => {
    const sampled = row.loss_mask[i];
    if (!parts.length || parts.at(-1).sampled !== sampled) parts.push({ sampled, marks: [] });
    const about = sampled ? `${number(row.logprobs[i])} nats, version ${row.policy_versions[i]}` : "not sampled";
    const mark = h("span", { title: about }, read(page, id, decoder));
    paint(mark, colour, {
      logprob: row.logprobs[i],
      advantage: row.advantage,
      version: row.policy_versions[i],
      sampled,
    });
    parts.at(-1).marks.push(mark);
  });
  return parts.map(({ sampled, marks }) =>
    sampled ? marks : h("details", { class: "reply" }, h("summary", null, `reply of ${marks.length} tokens`), marks),
  );
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

/** Reads the text of a token: of byte-level tokenizers each character stands for a byte. */
function read({ pieces, decoder: kind }, id, decoder) {
  const piece = pieces[id];
  if (piece === null || piece === undefined) return `⟨${id}⟩`;
  if (kind !== "bytes") return piece.replaceAll("▁", " ");
  const codes = [...piece].map((each) => BYTES.get(each));
  return codes.includes(undefined) ? piece : decoder.decode(Uint8Array.from(codes), { stream: true });
}

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
