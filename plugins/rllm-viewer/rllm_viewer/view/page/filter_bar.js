// The controls of the filter. What is chosen is in the address, so that a link shows the same rows.

import { folded, h, replace } from "./dom.js";
import { FIELDS, choices, range } from "./filters.js";
import { Failed, search } from "./store.js";

const TYPED = 250;

export class FilterBar {
  // changed(filter) is called when the user has changed the filter, hits(map) when a search has found more.
  constructor(run, filter, { changed, found }) {
    this.run = run;
    this.filter = filter;
    this.changed = changed;
    this.found = found;
    this.hits = null;
    this.said = h("p", { class: "dim", role: "status" });
    this.chips = h("p", { class: "chips" });
    this.query = h("input", { type: "search", id: "query", value: filter.q || "", placeholder: "text of prompts, answers, tools", autocomplete: "off", oninput: () => this._typed() });
    const check = (name, label) => h("label", { class: "check" }, h("input", { type: "checkbox", checked: filter[name] === "1", onchange: (event) => this._set(name, event.target.checked ? "1" : "") }), label);
    const by = h("select", { id: "by", onchange: (event) => this._set("by", event.target.value) }, ["groups", "rollouts"].map((one) => option(one, filter.by || "groups")));
    this.fields = h("div", { class: "fields" });
    const count = Object.keys(filter).filter((name) => name in FIELDS).length;
    this.more = folded("Filters", this.fields, count > 0);
    this.element = h("form", { class: "filters", role: "search", onsubmit: (event) => { event.preventDefault(); this._typed(0); } },
      h("div", { class: "line" },
        h("label", { for: "query" }, "Search"), this.query, check("regex", "regular expression"), check("exact", "match case"),
        h("span", { class: "check" }, h("label", { for: "by" }, "List"), by)),
      this.more, this.chips, this.said);
    this._fill();
    this._chips();
    this._search();
  }

  close() {
    this._abort?.abort();
    clearTimeout(this._timer);
  }

  // The choices depend on the rows, which may grow.
  refresh() {
    if (!this.fields.contains(document.activeElement)) this._fill();
  }

  _fill() {
    replace(this.fields, Object.entries(FIELDS).map(([name, field]) => {
      const id = `filter-${name}`;
      const value = this.filter[name] || "";
      const change = (event) => this._set(name, event.target.value.trim());
      const offered = field.kind === "choice" ? choices(this.run.rows, name) : [];
      if (field.kind === "choice" && !offered.length && !value) return null;
      const control = field.kind === "choice"
        ? h("select", { id, onchange: change }, option("", value, "any"), [...new Set([...offered, value])].filter(Boolean).map((one) => option(one, value)))
        : h("input", { id, type: "text", value, placeholder: field.hint || "", onchange: change, autocomplete: "off", "aria-invalid": field.kind === "range" && value !== "" && !range(value) ? "true" : null });
      return h("div", { class: "field" }, h("label", { for: id }, field.label), control);
    }));
  }

  _chips() {
    const names = Object.keys(this.filter).filter((name) => name in FIELDS || name === "q");
    replace(this.chips, names.map((name) => h("button", { type: "button", class: "chip", "aria-label": `remove the filter ${name} ${this.filter[name]}`, onclick: () => this._set(name, "") }, `${FIELDS[name]?.label || "Search"}: ${this.filter[name]} ×`)),
      names.length > 1 && h("button", { type: "button", class: "chip", onclick: () => this.changed(Object.fromEntries(Object.entries(this.filter).filter(([name]) => ["sort", "by"].includes(name)))) }, "remove all"));
    this.chips.hidden = names.length === 0;
  }

  _set(name, value) {
    const filter = { ...this.filter, [name]: value };
    if (!value || (name === "by" && value === "groups")) delete filter[name];
    this.changed(filter);
  }

  _typed(wait = TYPED) {
    clearTimeout(this._timer);
    this._timer = setTimeout(() => this.query.value !== (this.filter.q || "") && this._set("q", this.query.value), wait);
  }

  async _search() {
    if (!this.filter.q) return;
    this._abort = new AbortController();
    this.hits = new Map();
    const cancel = h("button", { type: "button", class: "chip", onclick: () => this._abort.abort() }, "stop");
    replace(this.said, "searching… ", cancel);
    try {
      await search(this.run, this.filter, this._abort.signal, (hits, searched, isDone) => {
        this.hits = hits;
        const share = this.run.size && searched !== null ? Math.round((searched / this.run.size) * 100) : 0;
        replace(this.said, `found in ${hits.size.toLocaleString("en-US")} rollouts`, isDone ? "" : `, ${share}% searched `, isDone ? null : cancel);
        this.found(hits);
      });
    } catch (error) {
      if (error.name !== "AbortError" && !(error instanceof Failed)) throw error;
      replace(this.said, error.name === "AbortError" ? `stopped; found in ${this.hits.size.toLocaleString("en-US")} rollouts so far` : error.message);
    }
  }
}

function option(value, chosen, label = value) {
  const element = h("option", { value }, label);
  element.selected = value === chosen;
  return element;
}
