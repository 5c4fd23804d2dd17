// Draws the training curves. A step that the reader points at is marked on every chart, with its time and its values.

import { at, element, figure, place, say, whole } from "./elements.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300; // of a drawing, in its own units; it is stretched to its place
const HEIGHT = 120;

const charts = new Map(); // by title, so that a chart keeps the focus when new steps arrive
let times = []; // pairs (step, Unix seconds)
let stepsPerPoint = 1; // at most so many, of which a point is the mean
let chosen = null; // the step pointed at

export function showCurves(curves) {
  at("curves-section").hidden = false;
  stepsPerPoint = curves.steps_per_point;
  const smoothed = stepsPerPoint > 1 ? `each point is the mean of up to ${stepsPerPoint} steps` : "";
  say("curves-note", curves.error || (curves.panels.length ? smoothed : "no step has been logged yet"));
  times = curves.times;
  if (chosen > times.at(-1)?.[0]) chosen = null; // the run was resumed from an earlier step
  const histogram = curves.staleness ? [drawHistogram(curves.staleness)] : [];
  const titles = curves.panels.map((panel) => panel.title);
  for (const title of charts.keys()) if (!titles.includes(title)) charts.delete(title);
  for (const panel of curves.panels) {
    if (!charts.has(panel.title)) charts.set(panel.title, makeChart(panel));
    draw(charts.get(panel.title), panel);
  }
  place(at("curves"), [...titles.map((title) => charts.get(title).box), ...histogram]);
  mark();
}

// --- one chart ------------------------------------------------------------------------------------------------------

function makeChart(panel) {
  const box = element("figure", "", { class: "card" });
  const plot = element("div", "", { class: "plot", role: "slider", tabindex: "0" });
  const chart = { box, plot, legend: element("div", "", { class: "legend" }), when: element("p", "", { class: "muted" }) };
  box.append(element("h3", panel.title), element("figcaption", panel.caption, { class: "muted" }), chart.legend, plot, chart.when);
  plot.addEventListener("pointermove", (event) => point(chart, event));
  plot.addEventListener("pointerdown", (event) => point(chart, event));
  plot.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && choose(null));
  plot.addEventListener("blur", (event) => event.relatedTarget?.closest(".plot") || choose(null));
  plot.addEventListener("keydown", (event) => turn(chart, event));
  return chart;
}

function turn({ steps }, event) {
  const last = steps.length - 1;
  const now = chosen === null ? last : nearest(steps, chosen);
  const next = { ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1, Home: 0, End: last }[event.key];
  if (next !== undefined) {
    event.preventDefault();
    choose(steps[Math.min(Math.max(next, 0), last)]);
  } else if (event.key === "Escape") choose(null);
}

function point(chart, event) {
  const box = chart.svg.getBoundingClientRect();
  const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
  choose(chart.steps[nearest(chart.steps, chart.left + share * (chart.right - chart.left))]);
}

function choose(step) {
  chosen = step;
  mark();
}

/** Index of the number closest to `wanted`; the numbers ascend. */
function nearest(numbers, wanted) {
  let index = numbers.findIndex((number) => number >= wanted);
  if (index === -1) index = numbers.length - 1;
  return index > 0 && wanted - numbers[index - 1] < numbers[index] - wanted ? index - 1 : index;
}

function draw(chart, panel) {
  const points = panel.lines.flatMap((line) => line.points);
  const steps = [...new Set(points.map((each) => each[0]))].sort((a, b) => a - b);
  const [left, right] = [steps[0], steps.at(-1)];
  const [low, high] = rangeOf(points.map((each) => each[1]));
  const size = roundSize(low, high);
  const x = (step) => (right > left ? ((step - left) / (right - left)) * WIDTH : WIDTH / 2);
  const y = (value) => HEIGHT - ((value - low) / (high - low)) * HEIGHT;
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  Object.assign(chart, { panel, steps, left, right, x, svg, text: (value) => figure(value, size / 10) });
  const rows = drawRows(svg, multiples(size, low, high).map((value) => [y(value), figure(value, size)]));
  const columns = drawColumns(svg, multiples(Math.max(roundSize(left, right), 1), left, right).map((step) => [x(step), whole(step), ...clock(step)]));
  panel.lines.forEach((line, index) => {
    const places = line.points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
    const single = places.length === 1;
    svg.append(shape(single ? "path" : "polyline", { class: `s${index}`, [single ? "d" : "points"]: single ? `M${places[0]}h0` : places.join(" ") }));
  });
  chart.cursor = svg.appendChild(shape("path", { class: "cursor", d: "" }));
  chart.plot.replaceChildren(element("span", panel.unit, { class: "unit" }), rows, svg, columns, element("span", times.length ? "step, time" : "step", { class: "across" }));
  const widest = Math.max(...[...rows.children].map((label) => label.textContent.length));
  chart.plot.style.gridTemplateColumns = `${Math.max(widest, 4) + 1}ch 1fr`;
  const spoken = panel.lines.map((line) => `${line.label} from ${chart.text(line.points[0][1])} to ${chart.text(line.newest[1])}`);
  chart.plot.setAttribute("aria-label", `${panel.title}: ${spoken.join("; ")}`);
  chart.plot.setAttribute("aria-valuemin", left);
  chart.plot.setAttribute("aria-valuemax", right);
}

/** The lowest and the highest value, or the surroundings of a value that never changes. */
function rangeOf(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const scale = Math.max(Math.abs(low), Math.abs(high));
  if (scale < 1e-100) return [0, 1];
  return high - low > 1e-9 * scale ? [low, high] : [low - scale / 10, high + scale / 10];
}

/** Grid lines at these heights, and the labels beside them. */
function drawRows(svg, ticks) {
  const rows = element("div", "", { class: "rows" });
  for (const [y, text] of ticks) {
    svg.append(shape("path", { class: "grid", d: `M0 ${y}H${WIDTH}` }));
    rows.appendChild(element("span", text)).style.top = `${(100 * y) / HEIGHT}%`;
  }
  return rows;
}

/** Grid lines at these places, and the labels below them, each of some lines of text; every second one if they are long. */
function drawColumns(svg, ticks) {
  const columns = element("div", "", { class: "columns" });
  const longest = Math.max(...ticks.flatMap(([, ...lines]) => lines.map((line) => line.length)));
  const every = ticks.length * longest > 22 ? 2 : 1; // more characters would not fit on a phone
  for (const [x, ...lines] of ticks.filter((_, index) => index % every === 0)) {
    svg.append(shape("path", { class: "grid", d: `M${x} 0V${HEIGHT}` }));
    const label = columns.appendChild(element("span", "", x > 0.95 * WIDTH ? { class: "last" } : {}));
    label.append(...lines.map((line) => element("b", line)));
    label.style.left = `${(100 * x) / WIDTH}%`;
    columns.style.height = `calc(10px + ${1.3 * lines.length}em)`;
  }
  return columns;
}

/** Shows the values at the chosen step, or the newest ones. */
function mark() {
  for (const { panel, steps, plot, legend, when, cursor, x, text } of charts.values()) {
    const step = chosen ?? Math.max(...panel.lines.map((line) => line.newest[0]));
    const texts = panel.lines.map(({ label, points, newest }) => {
      const last = chosen === null ? newest : points.findLast((each) => each[0] <= step);
      if (!last) return `${label} –`;
      return `${label} ${text(last[1])}${step - last[0] >= stepsPerPoint ? ` at step ${whole(Math.round(last[0]))}` : ""}`;
    });
    place(legend, texts.map((_, number) => legend.children[number] ?? element("span", "", { class: `s${number}` })));
    texts.forEach((each, number) => say(legend.children[number], each));
    const time = timeOf(step);
    say(when, `${chosen === null ? "last: " : ""}step ${whole(Math.round(step))}${time === null ? "" : ` · ${moment(time)}`}`);
    cursor.setAttribute("d", chosen === null ? "" : `M${x(steps[nearest(steps, step)])} 0V${HEIGHT}`);
    plot.setAttribute("aria-valuenow", step);
    plot.setAttribute("aria-valuetext", `${when.textContent}: ${texts.join("; ")}`);
  }
}

// --- small things ---------------------------------------------------------------------------------------------------

function shape(name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

/** The distance between grid lines: 1, 2 or 5 times a power of ten. Two to five of them are then in the range. */
function roundSize(low, high) {
  if (high <= low) return 0;
  const power = 10 ** Math.floor(Math.log10((high - low) / 2));
  return [5, 2, 1].map((factor) => factor * power).find((size) => size <= (high - low) / 2) ?? power;
}

function multiples(size, low, high) {
  const found = [];
  for (let number = Math.ceil(low / size - 1e-9) + 0; number * size <= high + size * 1e-9; number++) found.push(number * size);
  return found;
}

const percent = (share) => (share > 0 && share < 0.01 ? "<1 %" : `${Math.round(100 * share)} %`);

/** When the step was logged, in Unix seconds; null if that is not known. */
function timeOf(step) {
  return times.length ? times[nearest(times.map((each) => each[0]), step)][1] : null;
}

/** Lines of text that say when the step was logged: the time of day, and the day where the run needs it. */
function clock(step) {
  const time = timeOf(step);
  if (time === null) return [];
  const hours = (times.at(-1)[1] - times[0][1]) / 3600;
  const day = dated(time, { day: "numeric", month: "short" });
  if (hours > 240) return [day];
  const minute = dated(time, { hour: "2-digit", minute: "2-digit" });
  return hours > 20 ? [minute, day] : [minute];
}

const dated = (time, parts) => new Date(1000 * time).toLocaleString("en-GB", parts);
const moment = (time) => dated(time, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" });

function drawHistogram(histogram) {
  const box = element("figure", "", { class: "card" });
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  const labels = element("div", "", { class: "bins" });
  const width = WIDTH / histogram.bars.length;
  const highest = Math.max(...histogram.bars.map(([, share]) => share));
  const spoken = histogram.bars.map(([label, share], index) => {
    const height = (share / highest) * (HEIGHT - 2);
    svg.append(shape("rect", { x: (index + 0.1) * width, y: HEIGHT - height, width: 0.8 * width, height }));
    const bin = element("span", label);
    bin.append(element("b", percent(share)));
    labels.append(bin);
    return `${percent(share)} at ${label}`;
  });
  svg.setAttribute("aria-label", `${histogram.title}: ${spoken.join("; ")}`);
  box.append(element("h3", histogram.title), element("figcaption", histogram.caption, { class: "muted" }), svg, labels);
  return box;
}
