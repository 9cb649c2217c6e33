// The page of a run: how it stands, its graph, the curves that matter first, the seconds by phase.
import { ask, bytes, duration, fold, h, label, leaves, link, number, quantity, show, since, svg, table } from "./dom.js";
import { chart } from "./chart.js";

/** Of each kind of quantity the first that a run has comes first. */
const FIRST = [["mean_reward"], ["mean_length"], ["entropy"], ["kl", "logprob_gap"], ["clip_fraction"]];
const WORDS = {
  committed: "committed",
  running: "runs",
  admitted: "admitted, starts",
  waiting: "waits",
  failed: "failed",
  retried: "runs again",
  serving: "serves",
  interrupted: "interrupted",
  skipped: "left out",
  next: "has not begun",
};
let run = null;

export async function showRun(name, now, more) {
  if (more || !run) run = await ask(link(name));
  const going = now.phase === "running";
  show(
    h("h1", null, name, " ", h("span", { class: `state ${now.phase}` }, now.phase)),
    run.verdict && h("p", { class: "verdict" }, run.verdict),
    run.note && h("p", { class: "alarm", role: "status" }, run.note),
    run.alarms.map((alarm) => h("p", { class: "alarm" }, h("strong", null, "Alarm: "), alarm)),
    Object.entries(run.failures).map(([task, message]) =>
      h("p", { class: "alarm" }, h("strong", null, `${task} failed: `), message),
    ),
    showFacts(now),
    h("h2", null, "Graph"),
    ...showGraph(now, going),
    h("h2", null, "Curves"),
    ...showCurves(run.curves),
    h("h2", null, "Seconds by phase"),
    showPhases(run),
    showEfficiency(run.artifacts),
    run.packages.length > 0 && fold("packages", "Packages", false, () => table(["package", "version"], run.packages)),
    run.record && fold("settings", "Settings", false, () => table(["setting", "value"], leaves(run.record.config))),
  );
}

function showFacts(now) {
  const seconds = run.phases.reduce((sum, each) => sum + each.seconds, 0);
  const facts = {
    state: now.phase === "elsewhere" ? ["as its artifacts tell; its executor is elsewhere", now.message].filter(Boolean).join("; ") : now.message || now.phase,
    data: now.data,
    rows: now.rows,
    "mean reward": now.reward,
    "held-out loss": now.held_out_loss,
    iterations: now.iterations,
    "loop ends": now.loop_end && `about ${since(now.loop_end)}`,
    pipeline: now.record?.pipeline,
    started: since(now.record?.created ?? run.artifacts[0]?.started),
    committed: `${now.committed} artifacts, ${bytes(run.bytes)}, ${duration(seconds)} of work`,
    "ran on": run.devices.join(", "),
    artifacts: run.url.replace("file://", ""),
  };
  return h(
    "dl",
    { class: "facts" },
    Object.entries(facts)
      .filter(([, value]) => value)
      .map(([key, value]) => h("div", null, h("dt", null, key), h("dd", null, value))),
  );
}

/** What a stage does now, in a word of WORDS. */
function stateOf(stage) {
  if (!stage) return "next";
  const { phase, message, done, cause, iteration } = stage;
  if (["Failed", "Error"].includes(phase)) return "failed";
  if (phase === "Pending") return /admitted|starting/.test(message) ? "admitted" : "waiting";
  if (phase === "Running")
    return cause && (!done || cause.includes(` of iteration ${iteration + 1} `)) ? "retried" : "running";
  return { Ready: "serving", Interrupted: "interrupted", Omitted: "skipped", Skipped: "skipped" }[phase] ?? "committed";
}

function showGraph(now, going) {
  const stages = new Map(now.stages.map((stage) => [stage.stage, stage]));
  const edges = findEdges(run);
  const names = [...new Set([...stages.keys(), ...(going ? edges.keys() : [])])];
  const rows = names.map((name) => {
    const stage = stages.get(name),
      state = stateOf(stage);
    const told = [stage?.progress, stage?.message, stage?.cause].filter(Boolean).join("; ");
    const results = Object.entries(stage?.results ?? {}).map(
      ([key, value]) => `${label(key)} ${typeof value === "number" ? number(value) : value}`,
    );
    const result = stage?.summary || results.join(", ");
    return [
      name,
      h("span", { class: `state ${state}` }, WORDS[state]),
      stage?.done || "",
      stage?.done ? duration(stage.seconds) : "",
      stage?.retries ? `${stage.retries} (${duration(stage.lost_seconds)} lost)` : "",
      told,
      result,
    ];
  });
  return [
    drawGraph(names, edges, stages),
    table(["stage", "state", "committed", "seconds", "tried again", "now, and why", "newest result"], rows, {
      "aria-label": "Stages",
    }),
  ];
}

/** Finds stage → the stages that it comes after: by what it has read, and by the workflow where nothing is read yet. */
function findEdges({ artifacts, templates }) {
  const graph = Object.fromEntries(templates.map(({ name, dag }) => [name, dag.tasks]));
  const stageOf = new Map(artifacts.map((each) => [each.key, each.stage]));
  const edges = new Map();
  for (const each of artifacts) {
    if (!edges.has(each.stage)) edges.set(each.stage, new Set());
    for (const input of Object.values(each.inputs))
      if (stageOf.has(input)) edges.get(each.stage).add(stageOf.get(input));
  }
  const inside = new Map(); // task of a graph of its own → the stages in that
  const visit = (tasks, before, within) => {
    const leaves = [];
    for (const { name, template, depends = "" } of tasks) {
      const named = (depends.match(/[a-z][\w-]*/g) ?? []).flatMap((each) => inside.get(each) ?? each);
      const after = named.length ? named : before;
      if (!graph[template]) edges.has(name) || edges.set(name, new Set(after));
      else if (!within.includes(template)) inside.set(name, visit(graph[template], after, [...within, template]));
      leaves.push(...(graph[template] ? (inside.get(name) ?? []) : [name]));
    }
    return leaves;
  };
  const called = new Set(
    Object.values(graph)
      .flat()
      .map((task) => task.template),
  );
  for (const [template, tasks] of Object.entries(graph)) if (!called.has(template)) visit(tasks, [], [template]);
  return edges;
}

/** Draws stages in columns, each behind those that it comes after; what leads back, as to the next iteration, bows below. */
function drawGraph(names, edges, stages) {
  const column = new Map();
  for (const name of names)
    column.set(name, Math.max(-1, ...[...(edges.get(name) ?? [])].map((from) => column.get(from) ?? -1)) + 1);
  const columns = [];
  for (const name of names) (columns[column.get(name)] ??= []).push(name);
  const at = new Map(columns.flatMap((each, x) => each.map((name, y) => [name, [x * 178 + 6, y * 58 + 6]])));
  const depth = Math.max(1, ...columns.map((each) => each.length));
  const lines = names.flatMap((name) =>
    [...(edges.get(name) ?? [])]
      .filter((from) => at.has(from) && from !== name)
      .map((from) => {
        const [x1, y1] = at.get(from),
          [x2, y2] = at.get(name);
        const back = x2 <= x1,
          low = depth * 58 + 18;
        return svg("path", {
          class: back ? "edge back" : "edge",
          d: back
            ? `M${x1 + 70} ${y1 + 42}C${x1 + 70} ${low},${x2 + 70} ${low},${x2 + 70} ${y2 + 42}`
            : `M${x1 + 142} ${y1 + 21}C${x1 + 162} ${y1 + 21},${x2 - 20} ${y2 + 21},${x2} ${y2 + 21}`,
        });
      }),
  );
  const boxes = names.map((name) => {
    const [x, y] = at.get(name),
      stage = stages.get(name),
      state = stateOf(stage);
    const told = [WORDS[state], stage?.progress || (stage?.done > 1 && `${stage.done}×`)].filter(Boolean).join(" ");
    return svg(
      "g",
      { class: `box ${state}` },
      svg("rect", { x, y, width: 142, height: 42, rx: 6 }),
      svg("text", { x: x + 8, y: y + 17, class: "name" }, name),
      svg("text", { x: x + 8, y: y + 34 }, told),
    );
  });
  const words = `Graph of ${names.length} stages; the table below has each with its state.`;
  const [width, height] = [columns.length * 178, depth * 58 + 18];
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Graph" },
    svg(
      "svg",
      { class: "graph", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words },
      lines,
      boxes,
    ),
  );
}

/** Parts quantities into the five that matter first, and the others by stage; constant ones come apart. */
export function groupCurves(quantities) {
  const looped = (each) => each.axis === "iteration";
  const varied = quantities.filter((each) => !isConstant(each));
  const first = FIRST.flatMap(
    (names) =>
      names.map((name) => varied.filter((each) => each.name === name && looped(each))).find((found) => found.length) ??
      [],
  );
  const groups = Map.groupBy(
    varied.filter((each) => !first.includes(each)),
    (each) => each.stage,
  );
  return { first, groups: [...groups], constant: quantities.filter(isConstant) };
}

function isConstant({ series }) {
  const values = new Set(series.flatMap((each) => each.points.map(([, y]) => y)));
  return values.size === 1 && series.every((each) => each.points.length > 1 && !each.dots);
}

/** Shows the curves that one stage recorded, by themselves. */
export function showRecorded({ title, curves }) {
  show(h("h1", null, title), ...showCurves(curves));
}

/** Says that a frozen page has not all artifacts of a run. */
export const showLeftOut = (count) =>
  count > 0 && h("p", null, `${count} artifacts of earlier iterations are not in this file; tuneloop ui shows all.`);

function showCurves(curves) {
  const quantities = new Map();
  for (const each of curves) {
    // rewards of batches and of held-out prompts share a chart
    const key = each.name === "mean_reward" ? each.name : `${each.name} ${each.axis} ${each.stage}`;
    if (!quantities.has(key)) quantities.set(key, { ...each, series: [] });
    quantities.get(key).series.push({
      name: `${each.stage}: ${each.method}`,
      points: each.x.map((x, i) => [x, each.y[i]]),
      dots: each.role === "evaluator",
    });
  }
  const { first, groups, constant } = groupCurves([...quantities.values()]);
  const draw = (each) =>
    chart(each.name === "mean_reward" ? "mean reward" : `${quantity(each.name)} (${each.stage})`, each.series, each.axis);
  return [
    curves.length ? h("div", { class: "figures" }, first.map(draw)) : h("p", null, "No stage has recorded any yet."),
    groups.map(([stage, each]) =>
      fold(`more-${stage}`, `More of ${stage} (${each.length})`, !first.length, () =>
        h("div", { class: "figures" }, each.map(draw)),
      ),
    ),
    constant.length > 0 &&
      fold(
        "constant",
        `The same throughout (${constant.length})`,
        false,
        h(
          "ul",
          null,
          constant.map((each) => h("li", null, `${quantity(each.name)} (${each.stage}): ${number(each.y[0])}`)),
        ),
      ),
  ];
}

const median = (values) => values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)];

function showPhases({ phases, medians }) {
  const total = phases.reduce((sum, each) => sum + each.seconds, 0);
  const rows = phases.map(({ stage, points, times, seconds }) => {
    const each = points.map(([, value]) => value);
    return [
      stage,
      times,
      duration(seconds),
      `${((100 * seconds) / (total || 1)).toFixed(1)} %`,
      duration(medians[stage] ?? median(each)),
      duration(Math.max(...each)),
    ];
  });
  const inside = phases.map(({ stage, points }) => ({ name: stage, points: points.filter(([iteration]) => iteration) }));
  return h(
    "div",
    { class: "figures" },
    chart("seconds by phase", inside, "iteration"),
    table(["stage", "times", "in all", "share", "median", "longest"], rows, { "aria-label": "Seconds by phase" }),
  );
}

/** Shows how well the stages that train used their devices: medians over what a stage made, and the most memory. */
function showEfficiency(artifacts) {
  const share = (part) => `${(100 * part).toFixed(1)} %`;
  const measured = artifacts.filter((each) => each.efficiency && each.tokens_per_s !== null);
  const rows = [...Map.groupBy(measured, (each) => each.stage)].map(([stage, made]) => {
    const figures = made.map((each) => each.efficiency);
    const used = figures.map((each) => each.mfu).filter((each) => each !== null);
    const waited = figures.filter((each) => each.step_s).map((each) => each.communication_s / each.step_s);
    return [
      stage,
      made.length,
      number(median(made.map((each) => each.tokens_per_s))),
      number(median(figures.map((each) => each.flops_per_s)) / 1e12, 3),
      used.length ? share(median(used)) : "the device's peak is not known",
      bytes(Math.max(...figures.map((each) => each.peak_memory_bytes))),
      waited.length ? `${share(median(waited))} of a step` : "one process, or not measured",
    ];
  });
  const head = ["stage", "measured", "tokens/s", "TFLOP/s", "MFU", "peak memory of a rank", "in collectives"];
  return rows.length > 0 && [h("h2", null, "Efficiency"), table(head, rows, { "aria-label": "Efficiency" })];
}
