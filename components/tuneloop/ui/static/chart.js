// Line charts as SVG, whose words say what the lines do; their values unfold as a table.
import { duration, fold, h, number, svg, table } from "./dom.js";

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [460, 200, 52, 24, 8, 22];

/**
 * Draws lines over one axis.
 * @param series [{name, points: [[x, y], …], dots}], y null where it was not finite; `dots` are not joined.
 * @param axis "iteration", "step" or "time", whose unit is seconds.
 */
export function chart(title, series, axis) {
  const drawn = series
    .map((each) => ({ ...each, points: each.points.filter(([x, y]) => x !== null && y !== null) }))
    .filter((each) => each.points.length);
  if (!drawn.length) return null;
  const write = axis === "time" ? duration : number;
  const all = drawn.flatMap((each) => each.points);
  const [x0, x1] = extent(all.map(([x]) => x));
  const ticks = chooseTicks(...extent([0, ...all.map(([, y]) => y)]));
  const [y0, y1] = [ticks[0], ticks.at(-1)];
  const atX = (x) => LEFT + ((x - x0) / (x1 - x0 || 1)) * (WIDTH - LEFT - RIGHT);
  const atY = (y) => TOP + (1 - (y - y0) / (y1 - y0 || 1)) * (HEIGHT - TOP - BOTTOM);
  const words = drawn
    .map(({ name, points }) => `${name}: ${number(points[0][1])} → ${number(points.at(-1)[1])}`)
    .join("; ");
  const readout = h("output", null, words);
  const cursor = svg("path", { class: "cursor" });
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title} by ${axis}. ${words}` },
    ticks.map((y) => [
      svg("path", { class: "grid", d: `M${LEFT} ${atY(y)}H${WIDTH - RIGHT}` }),
      caption(number(y), LEFT - 5, atY(y) + 4, "end"),
    ]),
    (axis === "time" ? [x0, x1] : chooseTicks(x0, x1))
      .filter((x) => x >= x0 && x <= x1)
      .map((x) => caption(write(x), atX(x), HEIGHT - 5, "middle")),
    drawn.map((each, i) => line(each, i, atX, atY)),
    cursor,
  );
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const x = x0 + ((((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT)) * (x1 - x0);
    const near = drawn.map((each) => [each.name, nearest(each.points, x)]);
    cursor.setAttribute("d", `M${atX(near[0][1][0])} ${TOP}V${HEIGHT - BOTTOM}`);
    readout.textContent = `${axis} ${write(near[0][1][0])}: ${near.map(([name, [, y]]) => `${name} ${number(y)}`).join("; ")}`;
  });
  picture.addEventListener("pointerleave", () => {
    cursor.removeAttribute("d");
    readout.textContent = words;
  });
  const legend = h(
    "ul",
    { class: "legend" },
    drawn.map((each, i) => h("li", { class: `c${i % 6}` }, each.name)),
  );
  const values = fold(`values-${title}`, "values", false, () =>
    drawn.map(({ name, points }) =>
      table(
        [axis, name],
        points.map(([x, y]) => [write(x), number(y)]),
        { "aria-label": `${title}: ${name}` },
      ),
    ),
  );
  return h("figure", null, h("figcaption", null, title), picture, drawn.length > 1 && legend, readout, values);
}

/** Draws a line without axes; its words say where it begins and ends. */
export function sparkline(values) {
  const points = values.map((y, x) => [x, y]).filter(([, y]) => y !== null);
  if (points.length < 2) return null;
  const [low, high] = extent(points.map(([, y]) => y));
  const at = points.map(
    ([x, y]) => `${(x / (values.length - 1)) * 118 + 1},${25 - ((y - low) / (high - low || 1)) * 22}`,
  );
  const words = `mean reward ${number(points[0][1], 3)} → ${number(points.at(-1)[1], 3)}, between ${number(low, 3)} and ${number(high, 3)}`;
  return svg(
    "svg",
    { class: "spark", viewBox: "0 0 120 28", role: "img", "aria-label": words },
    svg("polyline", { class: "c0", points: at.join(" ") }),
  );
}

function line({ points, dots }, i, atX, atY) {
  const at = thin(points).map(([x, y]) => [atX(x).toFixed(1), atY(y).toFixed(1)]);
  const marks =
    dots || at.length <= 20 ? at.map(([cx, cy]) => svg("circle", { class: `c${i % 6}`, cx, cy, r: dots ? 4 : 2 })) : [];
  return [!dots && svg("polyline", { class: `c${i % 6}`, points: at.join(" ") }), marks];
}

/** Leaves of many points the least and the greatest of each two pixels. */
function thin(points) {
  if (points.length <= WIDTH) return points;
  const size = Math.ceil(points.length / (WIDTH / 2));
  return Array.from({ length: Math.ceil(points.length / size) }, (_, i) => {
    const part = points.slice(i * size, (i + 1) * size);
    const byHeight = part.toSorted((a, b) => a[1] - b[1]);
    return [byHeight[0], byHeight.at(-1)].sort((a, b) => a[0] - b[0]);
  }).flat();
}

/** Round numbers from at most the least to at least the greatest: multiples of 1, 2 or 5 times a power of ten. */
function chooseTicks(low, high) {
  if (high <= low) return [low, low + 1];
  const raw = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => power * factor).find((each) => each >= raw * 0.999);
  const first = Math.floor(low / step + 1e-9);
  return Array.from({ length: Math.ceil(high / step - 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}

const extent = (values) =>
  values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
const nearest = (points, x) =>
  points.reduce((best, each) => (Math.abs(each[0] - x) < Math.abs(best[0] - x) ? each : best));
const caption = (said, x, y, anchor) => svg("text", { x, y, "text-anchor": anchor }, said);
