// Opens the view that the address names, and keeps what all views share: header, keys, theme, copying.

import { nameOf } from "./blocks.js";
import { breakView, compareView } from "./compare_view.js";
import { copy, ways } from "./copy.js";
import { announce, h, replace } from "./dom.js";
import { filterOf, select } from "./filters.js";
import { episodeView, groupView } from "./group_view.js";
import { help, listen } from "./keys.js";
import { link, parse } from "./route.js";
import { runView, runsView, stepView } from "./run_view.js";
import { Failed, Run, get } from "./store.js";
import { plain } from "./text.js";
import { timingView } from "./timing_view.js";
import { tokensView } from "./token_view.js";

const VIEWS = { runs: runsView, run: runView, step: stepView, group: groupView, episode: episodeView, tokens: tokensView, timing: timingView, compare: compareView, break: breakView };
const THEMES = ["", "light", "dark"];

class App {
  constructor() {
    this.hasKeys = true;
    this.runs = [];
    this.view = null;
    this.place = null;
    this._found = new Map();
    this._scrolled = new Map();
    this._opened = 0;
    this.crumbs = h("nav", { "aria-label": "Where you are" });
    this.main = h("main", { id: "main", tabindex: "-1" });
    this.copyMenu = h("div", { class: "menu", hidden: true, id: "copies" });
    this.copyButton = button("copy", "Copy as link, JSON, Python or command (c)", () => this.openCopy());
    this.copyButton.setAttribute("aria-expanded", "false");
    this.copyButton.setAttribute("aria-controls", "copies");
    replace(document.getElementById("app"),
      h("button", { type: "button", class: "skip", onclick: () => this.main.focus() }, "Skip to the content"),
      h("header", {}, this.crumbs, h("div", { class: "tools" }, button("search", "Search texts (/)", () => this.search()), h("span", { class: "copy" }, this.copyButton, this.copyMenu), button("theme", "Light or dark (l)", () => this.theme()), button("help", "Help: where to look, words and keys (?)", () => this.help()))),
      this.main);
  }

  async start() {
    replace(this.main, loading());
    try {
      this.runs = (await get("/api/runs")).map((summary, number) => new Run(number, summary));
    } catch (error) {
      this._failed(error);
      return;
    }
    addEventListener("hashchange", () => this.open(true));
    await this.open(false);
  }

  // Gets the status and the result of every run again, unless the server does not answer.
  async refresh() {
    try {
      const found = await get("/api/runs");
      for (const run of this.runs) run.summary = found[run.number];
    } catch (error) {
      if (!(error instanceof Failed)) throw error;
    }
  }

  // Returns the run of a place, with its groups and steps.
  async run(place) {
    const run = this.runs[place.run];
    if (!run) throw new Failed(`there is no run ${place.run}; ${this.runs.length} are shown`);
    await run.ready();
    return run;
  }

  filter(place) {
    return filterOf(place.params);
  }

  // Remembers what a search has found, for the order of the list.
  found(run, filter, hits) {
    this._found.set(run.number, { key: [filter.q, filter.regex, filter.exact].join("\n"), hits });
  }

  // Returns the groups of the list that the user came from.
  order(run, params) {
    const filter = filterOf(params);
    const found = this._found.get(run.number);
    const isSame = found && found.key === [filter.q, filter.regex, filter.exact].join("\n");
    return select(run.rows, { ...filter, by: "groups" }, filter.q && isSame ? found.hits : null);
  }

  go(place, params = {}, replaces = false) {
    const address = link(place, params);
    if (replaces) location.replace(address);
    else location.hash = address;
  }

  // Changes the address without opening the view anew.
  keep(place, params) {
    history.replaceState(null, "", link(place, params));
    this.place = parse(location.hash);
    this._crumbs();
  }

  async open(isMove) {
    const opened = ++this._opened;
    if (this.place) this._scrolled.set(this._address, scrollY);
    this._address = location.hash;
    const place = parse(location.hash);
    this.copyMenu.hidden = true;
    const waiting = setTimeout(() => opened === this._opened && replace(this.main, loading()), 150);
    let view;
    try {
      const make = VIEWS[place.view];
      if (!make) throw new Failed("there is no such page");
      view = await make(place, this);
    } catch (error) {
      clearTimeout(waiting);
      if (opened === this._opened) this._failed(error, place);
      return;
    }
    clearTimeout(waiting);
    if (opened !== this._opened) {
      view.close?.();
      return;
    }
    this.view?.close?.();
    this.view = view;
    this.place = place;
    replace(this.main, view.element);
    document.title = plain(`${view.title || "rllm-core"} · rllm-core view`);
    this._crumbs();
    view.mounted?.();
    scrollTo({ top: this._scrolled.get(this._address) || 0, behavior: "instant" });
    if (isMove) this.main.focus({ preventScroll: true });
    document.body.dataset.opened = this._address || "#/";
  }

  _failed(error, place = null) {
    this.view?.close?.();
    this.view = null;
    this.place = place;
    replace(this.main, h("section", { class: "failed", role: "alert" }, h("h1", {}, "This cannot be shown"), h("p", {}, error.message),
      h("p", {}, h("button", { type: "button", onclick: () => location.reload() }, "try again"), " ", h("a", { href: "#/" }, "back to the start"))));
    if (place) this._crumbs();
    document.body.dataset.opened = location.hash || "#/";
    if (!(error instanceof Failed)) console.error(error);
  }

  _crumbs() {
    const { place } = this;
    const filter = filterOf(place.params);
    const found = [h("a", { href: "#/" }, "rllm-core")];
    const run = this.runs[place.run];
    const add = (to, text) => found.push(h("span", { "aria-hidden": "true" }, " › "), h("a", { href: link(to, to.view === "timing" ? {} : filter) }, text));
    if (place.view === "compare") found.push(h("span", { "aria-hidden": "true" }, " › "), h("a", { href: location.hash }, "compare"));
    if (run) {
      add({ run: run.number, view: "run" }, run.summary.name);
      const row = run.rowOf(place.group);
      const step = row ? row.step : place.step;
      if (step !== undefined) add({ run: run.number, view: "step", step }, `step ${step}`);
      if (place.view === "timing") add({ run: run.number, view: "timing", step }, "times");
      if (row) add({ run: run.number, view: "group", group: row.id }, row.group === null ? `${nameOf(row)} ${row.task}` : nameOf(row));
      if (place.rollout !== undefined) add({ run: run.number, view: "episode", group: place.group, rollout: place.rollout }, `rollout ${row?.rollouts?.[place.rollout]?.index ?? place.rollout}`);
      if (place.view === "tokens") add({ ...place, view: "tokens" }, "tokens");
      if (place.view === "break") found.push(h("span", { "aria-hidden": "true" }, " › "), h("a", { href: location.hash }, "break"));
    }
    found.at(-1).setAttribute("aria-current", "page");
    replace(this.crumbs, found);
  }

  next() {
    this._step(1, this.view?.next);
  }

  previous() {
    this._step(-1, this.view?.previous);
  }

  _step(by, href) {
    const list = this.view?.current || this.view?.list;
    if (list && !["step"].includes(this.place.view)) list.move(by);
    else if (list && list.items.length) list.move(by);
    else if (href) location.hash = href;
    else announce(by > 0 ? "this is the last one" : "this is the first one");
  }

  sibling(by) {
    const { siblings, position, cards } = this.view || {};
    if (siblings) {
      if (siblings[position + by]) location.hash = siblings[position + by];
      else announce(by > 0 ? "this is the last rollout" : "this is the first rollout");
    } else if (cards) {
      const links = cards();
      const at = links.indexOf(document.activeElement);
      links[Math.max(0, Math.min(links.length - 1, at + by))]?.focus();
    }
  }

  // Opens another view of the same place.
  to(view) {
    const { place } = this;
    const run = this.runs[place?.run];
    if (!run) return;
    const filter = filterOf(place.params);
    const step = run.rowOf(place.group)?.step ?? place.step;
    const rollout = place.rollout ?? 0;
    if (view === "run") this.go({ run: run.number, view }, filter);
    else if (view === "step" || view === "timing") step === undefined ? announce("choose a group or a step first") : this.go({ run: run.number, view, step }, view === "step" ? filter : {});
    else if (place.group === undefined) announce("choose a group first");
    else if (view === "group") this.go({ run: run.number, view, group: place.group }, filter);
    else this.go({ run: run.number, view, group: place.group, rollout }, filter);
  }

  up() {
    const { place } = this;
    if (!place) return;
    const up = { tokens: "episode", break: "episode", episode: "group", group: "step", timing: "step", step: "run" }[place.view];
    if (up) this.to(up);
    else this.go({ view: "runs" });
  }

  compare() {
    this.go({ view: "compare" }, this.runs.length > 1 ? { runs: this.runs.slice(0, 8).map((run) => run.number).join(",") } : {});
  }

  search() {
    if (this.view?.search) this.view.search();
    else {
      this.to("run");
      addEventListener("hashchange", () => setTimeout(() => this.view?.search?.(), 300), { once: true });
    }
  }

  help() {
    help(this);
  }

  openCopy() {
    const opens = this.copyMenu.hidden;
    this.copyMenu.hidden = !opens;
    this.copyButton.setAttribute("aria-expanded", String(opens));
    if (!opens) return;
    replace(this.copyMenu, ways(this.place || { params: {} }, this.runs).map(([name, make]) => h("button", { type: "button", onclick: () => this._copy(name, make) }, name)));
    this.copyMenu.querySelector("button").focus();
  }

  async _copy(name, make) {
    this.copyMenu.hidden = true;
    this.copyButton.setAttribute("aria-expanded", "false");
    this.copyButton.focus();
    try {
      await copy(name, make);
    } catch (error) {
      if (!(error instanceof Failed)) throw error;
      announce(error.message);
    }
  }

  theme() {
    const root = document.documentElement;
    const isDark = (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    root.dataset.theme = isDark ? THEMES[1] : THEMES[2];
    announce(isDark ? "light" : "dark");
  }
}

function button(text, label, act) {
  return h("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
}

function loading() {
  return h("p", { class: "loading", role: "status" }, "loading…");
}

const app = new App();
listen(app);
document.addEventListener("click", (event) => {
  if (!event.target.closest?.(".copy")) app.copyMenu.hidden = true;
});
app.start();
