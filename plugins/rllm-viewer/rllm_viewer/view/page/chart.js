// A curve over the steps of a run; with the pointer or the arrow keys it names a step, and it leads to that step.

import { h, replace } from "./dom.js";
import { extremes, number } from "./text.js";

const WIDTH = 300;
const HEIGHT = 120;
const LEFT = 44;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;
const MOST_POINTS = 800;

// lines: [{ name, label, points: [[step, value]], class, dots }]; band: [[step, low, high]]
export function chart({ title, lines, band = [], low = null, high = null, onstep = null, note = "" }) {
  const shown = lines.filter((line) => line.points.length);
  const steps = extremes([...shown.flatMap((line) => line.points.map(([step]) => step)), ...band.map(([step]) => step)]);
  if (!shown.length) return null;
  const values = extremes([...shown.flatMap((line) => line.points.map(([, value]) => value)), ...band.flatMap(([, a, b]) => [a, b])]);
  let [least, most] = [low ?? values[0], high ?? values[1]];
  if (most <= least) [least, most] = [least - 0.5, least + 0.5];
  const x = (step) => LEFT + ((step - steps[0]) / Math.max(1, steps[1] - steps[0])) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - least) / (most - least)) * (HEIGHT - TOP - BOTTOM);
  const at = (points) => points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
  const drawn = [0, 0.5, 1].map((place) => {
    const value = least + place * (most - least);
    return [h("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }), h("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, number(value))];
  });
  const svg = h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" }, drawn,
    h("text", { x: LEFT, y: HEIGHT - 4 }, `step ${steps[0]}`),
    steps[1] > steps[0] && h("text", { x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, String(steps[1])),
    band.length > 1 && h("polygon", { class: "band", points: [...at(thin(band.map(([step, a]) => [step, a]))), ...at(thin(band.map(([step, , b]) => [step, b]))).reverse()].join(" ") }),
    shown.map((line, place) => line.dots
      ? line.points.map((point) => h("circle", { class: line.class || `line${place}`, cx: x(point[0]), cy: y(point[1]), r: 3.5 }))
      : h("path", { class: line.class || `line${place}`, d: `M${at(thin(line.points)).join("L")}` })));
  const cursor = h("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
  svg.append(cursor);
  const all = [...new Set(shown.flatMap((line) => line.points.map(([step]) => step)))].sort((a, b) => a - b);
  const byStep = shown.map((line) => new Map(line.points));
  const legend = h("p", { class: "legend" });
  let place = all.length - 1;
  const said = () => shown.map((line, number_) => [line, byStep[number_].get(all[place])]).filter(([, value]) => value !== undefined).map(([line, value]) => `${line.label} ${number(value)}`).join(", ");
  const show = () => {
    cursor.setAttribute("x1", x(all[place]));
    cursor.setAttribute("x2", x(all[place]));
    box.setAttribute("aria-valuenow", all[place]);
    box.setAttribute("aria-valuetext", `step ${all[place]}: ${said()}`);
    replace(legend, h("b", {}, `step ${all[place]}`), ...shown.map((line, number_) => {
      const value = byStep[number_].get(all[place]);
      return h("span", {}, h("i", { class: `key ${line.class || `line${number_}`}${line.dots ? " dots" : ""}`, "aria-hidden": "true" }), `${line.label} ${number(value ?? null)}`);
    }));
  };
  const to = (event) => {
    const box_ = svg.getBoundingClientRect();
    const step = steps[0] + (((event.clientX - box_.left) / box_.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (steps[1] - steps[0]);
    place = nearest(all, step);
    show();
  };
  const box = h("div", {
    class: "plot", role: "slider", tabindex: "0", "aria-label": `${title} over steps${onstep ? "; Enter opens the step" : ""}`,
    "aria-valuemin": all[0], "aria-valuemax": all.at(-1), onpointermove: to,
    onclick: (event) => { to(event); onstep?.(all[place]); },
    onkeydown: (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -all.length, End: all.length }[event.key];
      if (event.key === "Enter") onstep?.(all[place]);
      else if (by) place = Math.max(0, Math.min(all.length - 1, place + by));
      else return;
      event.preventDefault();
      show();
    },
  }, svg);
  show();
  return h("figure", { class: "chart" }, h("figcaption", {}, title, note && h("span", { class: "dim" }, ` ${note}`)), box, legend);
}

function thin(points) {
  if (points.length <= MOST_POINTS) return points;
  const every = points.length / MOST_POINTS;
  return Array.from({ length: MOST_POINTS }, (_, at) => points[at === MOST_POINTS - 1 ? points.length - 1 : Math.floor(at * every)]);
}

function nearest(steps, step) {
  let best = 0;
  for (let at = 1; at < steps.length; at++) if (Math.abs(steps[at] - step) < Math.abs(steps[best] - step)) best = at;
  return best;
}
