// The weight versions of a run, and where an exported model came from.
import { has } from "./frozen.js";
import { ask, bytes, duration, fold, h, leaves, link, longTable, number, query, show, since, table } from "./dom.js";
import { chart } from "./chart.js";
import { showLeftOut } from "./run.js";

const TIMINGS = {
  encode_s: "encode",
  publish_s: "publish",
  materialize_s: "materialize",
  pause_s: "pause",
  converged_s: "converged",
  waited_s: "waited for",
};

export async function showWeights(name) {
  const [run, { published, deliveries, served }] = await Promise.all([ask(link(name)), ask(link(name, "weights"))]);
  const replicas = Map.groupBy(Object.entries(served), ([, version]) => version);
  const serving = (version) => (replicas.get(version) ?? []).map(([replica]) => replica).join(", ");
  const checkpoints = run.artifacts.filter((each) => each.kind === "checkpoint" && each.model_bytes);
  const lines = Object.entries(TIMINGS).map(([key, words]) => ({
    name: words,
    points: deliveries.map((each) => [each.version, each[key]]),
  }));
  show(
    h("h1", null, `Weights of ${name}`),
    showLeftOut(run.left_out),
    h("h2", null, "Published versions"),
    published.length
      ? longTable(
          "Published versions",
          ["version", "stored as", "stored", "of", "elements changed", "served by"],
          published.toReversed(),
          (each) => [
            `${each.version}${each.latest ? ", the latest" : ""}${each.held_by_readers ? ", held by readers" : ""}`,
            each.encoding === null ? "anchor: whole" : `delta to ${each.base_version} (${each.encoding})`,
            bytes(each.stored_bytes),
            bytes(each.full_bytes),
            each.density === null ? "–" : `${number(100 * each.density, 3)} %`,
            serving(each.version),
          ],
        )
      : h("p", null, "None: engines read checkpoints as they were committed."),
    deliveries.length > 0 && [
      h("h2", null, "From the trainer to the tokens"),
      h("div", { class: "figures" }, chart("seconds by version", lines, "version")),
      longTable(
        "Timings of each version",
        ["version", "way", "replicas", "sent", ...Object.values(TIMINGS), "versions behind", "read back"],
        deliveries.toReversed(),
        (each) => [
          each.version,
          each.way,
          each.replicas || "–",
          each.sent_bytes === null ? "–" : bytes(each.sent_bytes),
          ...Object.keys(TIMINGS).map((key) => (each[key] === null ? "–" : duration(each[key]))),
          number(each.behind),
          each.proved || "–",
        ],
      ),
    ],
    h("h2", null, "Checkpoints"),
    longTable(
      "Checkpoints",
      ["version", "made by", "digest", "model", "whole", "committed"],
      checkpoints.toReversed(),
      (each) => [
        number(each.version),
        each.key,
        short(each.digest),
        bytes(each.model_bytes),
        bytes(each.bytes),
        since(each.started + each.seconds),
      ],
    ),
  );
}

/** Shows from which artifacts a model was made, the nearest first, and those of all but the last iteration folded. */
export async function showLineage(name) {
  const { artifacts, left_out: leftOut } = await ask(link(name));
  const byKey = new Map(artifacts.map((each) => [each.key, each]));
  const last =
    artifacts.findLast((each) => each.kind === "model") ?? artifacts.findLast((each) => each.role === "trainer");
  const start = byKey.get(query().get("of")) ?? last;
  if (!start)
    return show(h("h1", null, `Lineage of ${name}`), h("p", null, "Nothing that was trained has been committed yet."));
  const found = new Set([start]); // a Set goes on through what is added while it is walked
  const outside = new Set();
  let cut = false;
  for (const each of found)
    for (const input of Object.values(each.inputs))
      if (byKey.has(input)) found.add(byKey.get(input));
      else if (input.includes("@")) outside.add(input);
      else cut = true; // the key of one that a report leaves out
  const newest = Math.max(0, ...[...found].map((each) => each.iteration ?? 0));
  const near = [...found].filter((each) => (each.iteration ?? newest) === newest);
  const far = [...found].filter((each) => !near.includes(each)).sort((a, b) => b.iteration - a.iteration);
  const ends = [...found].filter((each) => !Object.keys(each.inputs).length);
  const prompts = (cut ? artifacts : ends).find((each) => each.kind === "prompts");
  show(
    h("h1", null, `Lineage of ${start.key}`),
    h(
      "p",
      null,
      `${start.key} (${short(start.digest)}) was made from ${found.size - 1} artifacts of this run`,
      cut ? " that are in this file, and earlier ones that are not" : "",
      outside.size ? ` and ${outside.size} from outside it` : "",
      cut ? "" : `; it goes back to ${ends.map((each) => each.key).join(", ") || "what is outside"}`,
      ". Its digest covers all of them. ",
      newest > 0 &&
        has(link(name, "samples", newest)) &&
        h("a", { href: link(name, "samples", newest) }, `Its last completions, of iteration ${newest}`),
    ),
    showLeftOut(leftOut),
    listArtifacts("Artifacts", near),
    far.length > 0 &&
      fold("earlier", `Iterations before ${newest} (${far.length} artifacts)`, false, () =>
        listArtifacts("Earlier artifacts", far),
      ),
    outside.size > 0 && [
      h("h2", null, "From outside this run"),
      h(
        "ul",
        null,
        [...outside].map((each) => h("li", null, each)),
      ),
    ],
    prompts && [
      h("h2", null, `Prompts: ${prompts.key}`),
      table(["parameter", "value"], leaves(prompts.params)),
      table(["result", "value"], leaves(prompts.results)),
    ],
  );

  function listArtifacts(words, some) {
    const from = (each) =>
      Object.entries(each.inputs).map(([input, key], i) => [
        i ? ", " : "",
        `${input} `,
        byKey.has(key) ? h("a", { href: `?of=${encodeURIComponent(key)}` }, key) : key,
      ]);
    return longTable(
      words,
      ["artifact", "version", "digest", "from", "device", "code", "image", "size"],
      some,
      (each) => [
        each.key,
        number(each.version),
        short(each.digest),
        from(each),
        `${each.device ?? "not recorded"}${each.world_size > 1 ? `, ${each.world_size} ranks` : ""}`,
        each.code ?? "not recorded",
        each.image ?? "not recorded",
        bytes(each.bytes),
      ],
    );
  }
}

const short = (digest) => digest.split(":").at(-1).slice(0, 12);
