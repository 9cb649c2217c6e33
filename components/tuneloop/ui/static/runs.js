// The list of runs, and two to six of them beside one another.
import { ask, eachOf, fold, h, label, leaves, link, quantity, query, remember, say, show, since, table } from "./dom.js";
import { chart, sparkline } from "./chart.js";
import { groupCurves } from "./run.js";

const MOST = 6;
const LOOK_AT_RUNS_MS = 5000;
const OVER = ["succeeded", "damaged"]; // one that failed may be resumed

export async function showRuns() {
  const { store, runs } = await ask("/runs");
  const chosen = new Set(query().getAll("run"));
  const rows = new Map();
  const filter = h("input", {
    type: "search",
    id: "q",
    value: query().get("q") ?? "",
    oninput: () => {
      remember({ q: filter.value });
      select();
      say(`${[...rows.values()].filter((each) => !each.hidden).length} of ${rows.size} runs`);
    },
  });
  const button = h("button", { type: "submit" }, "Compare");
  const heads = ["compare", "run", "pipeline", "state", "iterations", "reward", "mean reward", "now", "started"];
  const body = table(heads, [], { "aria-label": "Runs" });
  const form = h("form", { action: "/compare" }, body, button);
  const none = h("p", null, "No run has been started here.");

  function select() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const each of rows.values())
      each.hidden = !words.every((word) => each.textContent.toLowerCase().includes(word));
  }
  function compare() {
    const boxes = [...body.querySelectorAll("input")];
    const count = boxes.filter((box) => box.checked).length;
    button.disabled = count < 2;
    for (const box of boxes) box.disabled = !box.checked && count >= MOST;
  }
  function add(names) {
    for (const [name, row] of rows) {
      if (names.includes(name)) continue;
      row.remove();
      rows.delete(name);
    }
    for (const name of names.filter((each) => !rows.has(each))) {
      rows.set(name, makeRow(name, chosen, compare));
      body.querySelector("tbody").append(rows.get(name));
    }
    form.hidden = !rows.size;
    none.hidden = rows.size > 0;
    compare();
  }
  async function read(name) {
    const now = await ask(link(name, "now")).catch(({ status, message }) => ({
      phase: { 404: "deleted", 422: "damaged" }[status] ?? "unreachable",
      reward: message,
    }));
    fillRow(rows.get(name), now);
    select();
    return !OVER.includes(now.phase) && name;
  }

  show(
    h("h1", null, "Runs"),
    h("p", null, `below ${store}`),
    h(
      "form",
      { role: "search", onsubmit: (event) => event.preventDefault() },
      h("label", null, "Filter by name, pipeline or state ", filter),
    ),
    form,
    none,
  );
  add(runs);
  const over = new Set();
  for (let names = runs; ; ) {
    const began = performance.now();
    await eachOf(
      names.filter((name) => !over.has(name)),
      async (name) => (await read(name)) || over.add(name),
    );
    await new Promise((resume) => setTimeout(resume, Math.max(LOOK_AT_RUNS_MS, 10 * (performance.now() - began))));
    names = await ask("/runs").then((now) => now.runs, () => names); // of a server that is away all stays as it was
    add(names);
  }
}

function makeRow(name, chosen, onchange) {
  const box = h("input", {
    type: "checkbox",
    name: "run",
    value: name,
    checked: chosen.has(name),
    "aria-label": `compare ${name}`,
    onchange,
  });
  const cells = ["", "…", "", "", "", "", ""].map((words) => h("td", null, words));
  return h("tr", { "data-row": true }, h("td", null, box), h("td", null, h("a", { href: link(name) }, name)), cells);
}

function fillRow(row, now) {
  const busy = (now.stages ?? []).filter((stage) => ["Running", "Pending"].includes(stage.phase));
  const doing = busy
    .map((stage) => `${stage.stage} ${stage.progress || stage.message || stage.phase.toLowerCase()}`)
    .join("; ");
  const cells = [
    now.record?.pipeline ?? "",
    h("span", { class: `state ${now.phase}` }, now.phase),
    now.iterations ?? "",
    sparkline(now.rewards ?? []) ?? "",
    now.reward ?? "",
    doing || now.message || "",
    since(now.record?.created),
  ];
  [...row.children].slice(2).forEach((cell, i) => cell.replaceChildren(cells[i]));
}

export async function showComparison() {
  const names = query().getAll("run").slice(0, MOST);
  if (names.length < 2) throw new Error(`choose two to ${MOST} runs to compare`);
  const runs = await Promise.all(names.map((name) => ask(link(name))));
  const axis = h(
    "select",
    {
      id: "x",
      onchange: () => {
        remember({ x: axis.value });
        draw();
      },
    },
    ["iteration", "time"].map((name) => h("option", { selected: query().get("x") === name }, name)),
  );
  draw();

  function draw() {
    const quantities = new Map();
    for (const run of runs) {
      const start = Math.min(...run.artifacts.map((each) => each.started || Infinity));
      for (const curve of run.curves) {
        const key = `${curve.name} ${curve.axis} ${curve.stage}`;
        const points = curve.y.map((y, i) => [axis.value === "time" ? curve.at[i] - start : curve.x[i], y]);
        if (!quantities.has(key)) quantities.set(key, { ...curve, series: [] });
        quantities.get(key).series.push({ name: run.name, points, dots: curve.role === "evaluator" });
      }
    }
    const { first, groups } = groupCurves([...quantities.values()]);
    const picture = (each) =>
      chart(`${quantity(each.name)} (${each.stage})`, each.series, axis.value === "time" ? "time" : each.axis);
    show(
      h("h1", null, "Comparison"),
      h(
        "p",
        null,
        names.map((name, i) => [i ? ", " : "", h("a", { href: link(name) }, name)]),
      ),
      h("p", null, h("label", null, "Over ", axis)),
      h("div", { class: "figures" }, first.map(picture)),
      groups.map(([stage, curves]) =>
        fold(`more-${stage}`, `More of ${stage} (${curves.length})`, false, () =>
          h("div", { class: "figures" }, curves.map(picture)),
        ),
      ),
      h("h2", null, "Settings that differ"),
      compareSettings(runs),
    );
  }
}

function compareSettings(runs) {
  const settings = runs.map((run) => new Map(run.record ? leaves(run.record.config) : []));
  const keys = [...new Set(settings.flatMap((each) => [...each.keys()]))].sort();
  const differing = keys.filter((key) => new Set(settings.map((each) => each.get(key))).size > 1);
  const unknown = runs.filter((run) => !run.record).map((run) => run.name);
  const about = unknown.length
    ? h("p", null, `The settings of ${unknown.join(", ")} are not known here: started elsewhere.`)
    : null;
  if (!differing.length) return [about, h("p", null, "None.")];
  return [
    about,
    table(
      ["setting", ...runs.map((run) => run.name)],
      differing.map((key) => [key, ...settings.map((each) => each.get(key) ?? "–")]),
    ),
  ];
}
