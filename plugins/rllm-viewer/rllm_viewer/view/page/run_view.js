// Views of all runs, of one run, and of one of its steps.

import { became, nameOf, pairs, rewardRange, squares } from "./blocks.js";
import { chart } from "./chart.js";
import { add, folded, h, renew, replace } from "./dom.js";
import { FilterBar } from "./filter_bar.js";
import { filterOf, rolloutsOf, select } from "./filters.js";
import { List } from "./list.js";
import { link } from "./route.js";
import { SLOW } from "./store.js";
import { byGroup, findings, placeName } from "./suspects.js";
import { counted, mean, number, seconds, share, spread } from "./text.js";

export async function runsView(place, app) {
  if (app.runs.length === 1) {
    app.go({ view: "run", run: 0 }, {}, true);
    return { element: h("p", {}, "one run") };
  }
  const list = new List({
    label: "Runs",
    columns: [{ label: "run" }, { label: "workflow" }, { label: "status" }, { label: "steps", class: "num" }, { label: "result", class: "num" }],
    draw: (run) => {
      const { name, workflow, backend, status, steps, planned_steps: planned, measure, first, last } = run.summary;
      const form = measure === "solved" ? share : number;
      return [name, `${workflow ?? ""}${backend ? ` (${backend})` : ""}`, status, `${steps ?? "–"}${planned ? `/${planned}` : ""}`, measure ? `${form(first)} → ${form(last)}` : "–"];
    },
    href: (run) => link({ run: run.number, view: "run" }), tall: 60,
  });
  const compare = link({ view: "compare" }, { runs: app.runs.slice(0, 8).map((run) => run.number).join(",") });
  const element = h("section", {}, h("h1", {}, counted(app.runs.length, "run")), h("p", {}, h("a", { href: compare }, "compare them")), list.box);
  const following = setInterval(() => document.hidden || app.refresh().then(() => list.set(app.runs)), SLOW);
  const close = () => {
    clearInterval(following);
    list.close();
  };
  return { element, title: "runs", list, mounted: () => list.set(app.runs), close };
}

// The list of groups or rollouts with its filter; `only` restricts it to a step.
class Groups {
  constructor(app, run, place, only = null) {
    Object.assign(this, { app, run, place, only });
    this.filter = filterOf(place.params);
    this.bar = h("div", {});
    this.count = h("p", { class: "dim", role: "status" });
    this.holder = h("div", {});
    this.element = h("section", { "aria-label": "Recorded groups" }, h("h2", {}, "Recorded groups"), this.bar, this.count, this.holder);
    this._unlisten = run.listen(() => { this._filterBar.refresh(); this.update(); });
    this._build();
  }

  _build() {
    const focused = document.activeElement?.id;
    this._filterBar?.close();
    this.list?.close();
    this._filterBar = new FilterBar(this.run, this.filter, {
      changed: (filter) => this.apply(filter),
      found: (hits) => { this.app.found(this.run, this.filter, hits); this.update(); },
    });
    replace(this.bar, this._filterBar.element);
    if (focused && focused !== "main") document.getElementById(focused)?.focus();
    if (focused === "query") this._filterBar.query.setSelectionRange(this.filter.q?.length ?? 0, this.filter.q?.length ?? 0);
    const single = this.filter.by === "rollouts";
    const range = () => rewardRange(this.run.rows);
    let rewards = range();
    this._colors = () => { rewards = range(); };
    const columns = [
      { label: single ? "rollout" : "group", sort: "group" }, { label: "step", sort: "step", class: "num" }, { label: "task", sort: "task", class: "wide" },
      { label: "outcome", sort: "outcome" }, { label: single ? "solved" : "rollouts", sort: "solved", class: "wide" }, { label: "mean", sort: "mean", class: "num" },
      { label: single ? "advantage" : "spread", sort: single ? "advantage" : "spread", class: "num" }, { label: "tokens", sort: "tokens", class: "num" },
    ];
    this.list = new List({
      label: single ? "Rollouts" : "Groups", columns, sort: this.filter.sort || "", empty: this._empty(),
      onsort: (sort) => this.apply({ ...this.filter, sort }),
      href: ({ row, positions }) => link({ run: this.run.number, view: single ? "episode" : "group", group: row.id, rollout: single ? positions[0] : undefined }, this.filter),
      draw: ({ row, positions }) => {
        const rollouts = rolloutsOf(row);
        const chosen = positions.map((at) => rollouts[at]);
        const isBroken = this.run.broken.has(row.id);
        const name = single ? `${nameOf(row)}, rollout ${chosen[0].index}` : nameOf(row);
        const values = chosen.map((one) => one.reward);
        const tokens = mean(chosen.map((one) => one.tokens));
        return [name, String(row.step), row.task, isBroken ? "cannot be read" : became(row),
          squares(single ? chosen : rollouts, rewards, single ? null : positions), number(mean(values)),
          single ? number(chosen[0].advantage ?? null) : spread(values), tokens === null ? "…" : number(Math.round(tokens))];
      },
    });
    replace(this.holder, this.list.box);
  }

  _empty() {
    return h("span", {}, "No recorded group fits the filter. ", h("button", { type: "button", onclick: () => this.apply({}) }, "remove the filter"));
  }

  apply(filter) {
    this.filter = filter;
    this.app.keep(this.only === null ? { run: this.run.number, view: "run" } : { run: this.run.number, view: "step", step: this.only }, filter);
    this._build();
    this.update();
  }

  update() {
    const rows = this.only === null ? this.run.rows : this.run.rows.filter((row) => row.step === this.only);
    const hits = this.filter.q ? this._filterBar.hits || new Map() : null;
    const found = select(rows, this.filter, hits);
    this._colors();
    this.list.set(found);
    const reading = this.run.read < this.run.size ? `, ${Math.round((this.run.read / Math.max(1, this.run.size)) * 100)}% of their rollouts read` : "";
    const rollouts = found.reduce((sum, item) => sum + item.positions.length, 0);
    replace(this.count, rows.length ? `${counted(found.length, this.filter.by === "rollouts" ? "rollout" : "group")} of ${counted(rows.length, "group")}${this.filter.by === "rollouts" ? "" : `, ${counted(rollouts, "rollout")}`}${reading}` : "");
    if (!rows.length) replace(this.list.note, this.run.about?.empty || (this.only === null ? "The run has recorded no group." : "No group of this step was recorded."));
  }

  focusSearch() {
    this._filterBar.query.focus();
  }

  openFilter() {
    this._filterBar.more.open = true;
    this._filterBar.more.querySelector("summary").focus();
  }

  close() {
    this._unlisten();
    this._filterBar.close();
    this.list.close();
  }
}

const CHARTS = ["solved", "response_tokens_mean", "staleness_mean", "truncated_share", "sampled_entropy", "loss", "grad_norm", "segment_breaks"];

export async function runView(place, app) {
  const run = await app.run(place);
  const groups = new Groups(app, run, place);
  const isWide = !matchMedia("(max-width: 640px)").matches;
  const about = h("div", {});
  const file = h("div", {});
  const kinds = h("span", { class: "dim" });
  const places = h("dl", { class: "pairs suspects" });
  const worth = h("details", { class: "worth", open: isWide }, h("summary", {}, h("b", {}, "Worth a look"), kinds), places);
  const charts = h("div", { class: "charts" });
  const chosen = h("select", { id: "metric", onchange: () => draw() });
  let drawn = "";
  const draw = () => {
    renew(about, aboutOf(run));
    if (run.about?.settings && !file.firstChild) add(file, [folded("Run file", () => pairs(flat(run.about.settings)))]);
    const found = findings(run);
    worth.hidden = !found.length;
    renew(kinds, `: ${found.map(({ what }) => what.toLowerCase()).join("; ")}`);
    renew(places, found.map((one) => worthALook(run, one)));
    const names = [...new Set(run.steps.metrics.flatMap((row) => Object.keys(row)))].filter((name) => !["step", "epoch", "weight_version"].includes(name)).sort();
    const value = chosen.value || names.find((name) => CHARTS.slice(1).includes(name)) || names[0];
    if (names.join() !== [...chosen.options].map((one) => one.value).join()) replace(chosen, names.map((name) => h("option", { value: name }, name)));
    chosen.value = value;
    const key = `${run.steps.metrics.length}.${run.steps.validations.length}.${value}`;
    if (key === drawn || charts.contains(document.activeElement)) return;
    drawn = key;
    replace(charts, chartsOf(run, value, (step) => app.go({ run: run.number, view: "step", step }, groups.filter)));
  };
  const unlisten = run.listen(draw);
  draw();
  const metrics = h("details", { class: "metrics", open: isWide }, h("summary", {}, h("b", {}, "Curves")), h("p", {}, h("label", { for: "metric" }, "Metric "), chosen), charts);
  const compared = app.runs.length > 1 && h("p", {}, h("a", { href: link({ view: "compare" }, { runs: app.runs.slice(0, 8).map((one) => one.number).join(",") }) }, "compare with the other runs"));
  return {
    element: h("div", {}, h("h1", {}, run.summary.name), about, file, compared, worth, run.steps.metrics.length > 0 && metrics, groups.element),
    title: run.summary.name, list: groups.list, get current() { return groups.list; },
    mounted: () => groups.update(), search: () => groups.focusSearch(), filter: () => groups.openFilter(),
    close: () => { unlisten(); groups.close(); },
  };
}

function aboutOf(run) {
  const { summary, about } = run;
  const planned = summary.planned_steps ? ` of ${summary.planned_steps}` : "";
  const form = summary.measure === "solved" ? share : number;
  return [
    run.problem && h("p", { class: "problem", role: "alert" }, run.problem),
    h("p", {}, summary.status === "imported" ? "imported rollouts" : [summary.workflow, summary.backend && `backend ${summary.backend}`, summary.status, summary.steps !== null && `${summary.steps}${planned} steps`].filter(Boolean).join(", "),
      summary.measure && [", ", h("b", {}, `${NAMES[summary.measure] ?? summary.measure} in ${summary.source} ${form(summary.first)} → ${form(summary.last)}`)]),
    summary.status === "interrupted" && h("p", { class: "problem" }, "The run was killed: it has no summary. What it wrote before is shown."),
    summary.error && h("p", { class: "problem" }, summary.status === "damaged" ? `A file of the run is damaged; the others are shown: ${summary.error}` : `${summary.status}: ${summary.error}`),
    about?.where && h("p", {}, about.where),
    (about?.problems || []).map((problem) => h("p", { class: "problem" }, problem)),
    run.broken.size > 0 && h("p", { class: "problem" }, `${counted(run.broken.size, "group")} cannot be read: the file is damaged at byte ${[...run.broken].slice(0, 3).join(", ")}`),
    Object.entries(run.brokenLines).map(([file, lines]) => lines > 0 && !summary.error?.startsWith(`${file}.jsonl`) && h("p", { class: "problem" }, `${counted(lines, "line")} of ${file}.jsonl cannot be read`)),
    (about?.findings || []).map((finding) => h("div", { class: "finding" }, h("b", {}, finding.name.replaceAll("-", " ")), `: ${finding.seen}`, finding.since_step !== null && ` (since step ${finding.since_step})`,
      h("p", {}, `Cause: ${finding.causes.join("; or ")}`), finding.decides && h("p", {}, "To decide: ", h("code", {}, finding.decides)))),
  ];
}

const NAMES = { solved: "solve rate", reward_mean: "mean reward" };
const SHOWN = 5;

function worthALook(run, { what, why, filter, places }) {
  const joined = byGroup(places);
  const to = ({ row, at }) => link({ run: run.number, view: at === null ? "group" : "episode", group: row.id, rollout: at ?? undefined }, filter || {});
  const rest = filter && places.length > 1 ? h("a", { href: link({ run: run.number, view: "run" }, filter) }, `all ${places.length}`) : joined.length > SHOWN && `and ${joined.length - SHOWN} more`;
  return [h("dt", {}, what), h("dd", {}, h("p", { class: "dim" }, why), h("ul", {}, joined.slice(0, SHOWN).map((place) => h("li", {}, h("a", { href: to(place) }, placeName(place)), `: ${place.note}`)), rest && h("li", {}, rest)))];
}

export function flat(tables, prefix = "") {
  return Object.entries(tables).reduce((found, [name, value]) => (value !== null && typeof value === "object" && !Array.isArray(value) ? { ...found, ...flat(value, `${prefix}${name}.`) } : { ...found, [`${prefix}${name}`]: value }), {});
}

function chartsOf(run, metric, onstep) {
  const { metrics, validations } = run.steps;
  const points = (name, rows = metrics) => rows.filter((row) => typeof row[name] === "number").map((row) => [row.step, row[name]]);
  const band = metrics.filter((row) => typeof row.trajectory_reward_min === "number").map((row) => [row.step, row.trajectory_reward_min, row.trajectory_reward_max]);
  const groups = ["none", "some", "all"].map((name) => ({ label: `solved by ${name}`, points: points(`groups_solved_by_${name}`) }));
  return [
    chart({ title: "reward", note: "mean, range, validations", band, onstep, lines: [{ label: "reward_mean", points: points("reward_mean") }, { label: "validation", points: points("reward_mean", validations), dots: true }] }),
    chart({ title: "solve rate", note: "share of the rollouts", low: 0, high: 1, onstep, lines: [{ label: "solved", points: points("solved") }, { label: "validation", points: points("solved", validations), dots: true }] }),
    chart({ title: "groups", note: "share solved by none, some, all", low: 0, high: 1, onstep, lines: groups }),
    metric && chart({ title: metric, note: "the metric chosen above", onstep, lines: [{ label: metric, points: points(metric) }] }),
  ];
}

const SECONDS = ["generation_wait_seconds", "training_seconds", "drain_seconds", "sync_seconds", "between_steps_seconds"];

export async function stepView(place, app) {
  const run = await app.run(place);
  const groups = new Groups(app, run, place, place.step);
  const metrics = run.steps.metrics.find((row) => row.step === place.step);
  const timings = run.steps.timings.find((row) => row.step === place.step);
  const validation = run.steps.validations.find((row) => row.step === place.step);
  const steps = [...new Set([...run.steps.metrics, ...run.rows].map((row) => row.step))].sort((a, b) => a - b);
  const at = steps.indexOf(place.step);
  const to = (step) => step !== undefined && link({ run: run.number, view: "step", step }, groups.filter);
  const near = h("p", { class: "near" }, to(steps[at - 1]) && h("a", { href: to(steps[at - 1]) }, `← step ${steps[at - 1]}`), " ", to(steps[at + 1]) && h("a", { href: to(steps[at + 1]) }, `step ${steps[at + 1]} →`), " ",
    h("a", { href: link({ run: run.number, view: "timing", step: place.step }) }, "times of its rollouts"));
  return {
    element: h("div", {}, h("h1", {}, `Step ${place.step}`), near,
      metrics ? h("section", {}, h("h2", {}, "Metrics"), metricsTable(metrics, timings)) : h("p", { class: "dim" }, at < 0 ? `The run has nothing of step ${place.step}.` : "No metrics: the run starts here, or the step is not finished."),
      validation && h("section", {}, h("h2", {}, "Validation after this step"), pairs(Object.fromEntries(Object.entries(validation).filter(([name, value]) => name !== "event" && value !== null)))),
      groups.element),
    title: `step ${place.step}`, get current() { return groups.list; }, mounted: () => groups.update(), search: () => groups.focusSearch(), filter: () => groups.openFilter(),
    previous: to(steps[at - 1]), next: to(steps[at + 1]), close: () => groups.close(),
  };
}

function metricsTable(metrics, timings) {
  const first = ["reward_mean", "solved", "trajectory_reward_min", "trajectory_reward_max", "turns_mean", "response_tokens_mean", "truncated_share", "staleness_mean", "staleness_max", "loss", "grad_norm", "sampled_entropy"];
  const names = [...first.filter((name) => name in metrics), ...Object.keys(metrics).filter((name) => !first.includes(name) && name !== "step").sort()];
  const shown = (list) => h("dl", { class: "grid" }, list.map((name) => h("div", {}, h("dt", {}, name), h("dd", {}, number(metrics[name])))));
  return [shown(names.slice(0, 12)), names.length > 12 && folded(`${names.length - 12} more`, () => shown(names.slice(12))),
    timings && h("p", {}, `${seconds(timings.step_seconds)}: ${SECONDS.filter((name) => timings[name]).map((name) => `${name.replace("_seconds", "").replaceAll("_", " ")} ${seconds(timings[name])}`).join(", ")}`)];
}

