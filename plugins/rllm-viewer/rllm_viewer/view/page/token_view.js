// The view of every token of a rollout: as running text in the colors of one measure, or as a table.

import { square, nameOf, rewardRange } from "./blocks.js";
import { add, h, replace } from "./dom.js";
import { rolloutsOf } from "./filters.js";
import { around } from "./group_view.js";
import { List } from "./list.js";
import { link } from "./route.js";
import { TOKEN_MEASURES } from "./scales.js";
import { Failed, kept } from "./store.js";
import { counted, number, signed } from "./text.js";
import { Sequence, rangeOf, recorded } from "./tokens.js";

const CHUNK = 200;
const PIXELS_A_FRAME = 120;
const ABOUT_ID = 6;
const ABOVE = 240;
const ABOUT_CHARACTER = 8.5;
const LINE = 26;

export async function tokensView(place, app) {
  const run = await app.run(place);
  const answer = await kept(`/api/run/${place.run}/tokens/${place.group}/${place.rollout}`);
  // The row of the list has everything that this view shows of the group; reading the group itself takes much longer.
  const group = run.rowOf(place.group);
  if (!group) throw new Failed("the group is not in the list yet; try again");
  const rollouts = rolloutsOf(group);
  const rollout = rollouts[place.rollout];
  const filter = app.filter(place);
  const measures = recorded(answer);
  const view = new Tokens(answer, measures, place, (params) => app.keep({ ...place, view: "tokens" }, { ...filter, ...params }));
  const to = (position) => link({ run: run.number, view: "tokens", group: group.id, rollout: position }, { ...filter, measure: view.measure, form: view.form });
  const { previous, next } = around(app, run, place);
  const range = rewardRange(run.rows);
  return {
    element: h("div", {},
      h("h1", {}, `Tokens of rollout ${rollout.index}, ${nameOf(group)}`),
      h("nav", { class: "siblings", "aria-label": "Rollouts of the group" }, rollouts.map((one, position) => h("a", { href: to(position), "aria-current": position === place.rollout ? "page" : null, "aria-label": `rollout ${one.index}, reward ${number(one.reward)}` }, square(one, range), String(one.index)))),
      h("p", { class: "near" }, h("a", { href: link({ run: run.number, view: "episode", group: group.id, rollout: place.rollout }, filter) }, "conversation (e)"), " ", h("a", { href: link({ run: run.number, view: "group", group: group.id }, filter) }, "group (g)")),
      view.element),
    title: `tokens of rollout ${rollout.index}, ${nameOf(group)}`, previous, next,
    siblings: rollouts.map((_, position) => link({ run: run.number, view: "tokens", group: group.id, rollout: position }, { ...filter, measure: place.params.measure || "", form: place.params.form || "" })), position: place.rollout,
    get current() { return view.list; }, measure: (at) => view.choose(Object.keys(TOKEN_MEASURES)[at]), difference: () => view.toDifference(), toggle: () => view.toggle(),
    mounted: () => view.mounted(), close: () => view.close(),
  };
}

class Tokens {
  constructor(answer, measures, place, keep) {
    Object.assign(this, { answer, measures, keep });
    const wanted = place.params.measure;
    this.measure = measures.includes(wanted) ? wanted : measures[0];
    this.form = place.params.form === "table" ? "table" : "text";
    this.sequences = answer.sequences.map((_, at) => new Sequence(answer, at));
    this.selected = null;
    const options = Object.entries(TOKEN_MEASURES).map(([name, { label }], at) => {
      const option = h("option", { value: name, disabled: !measures.includes(name) }, `${at + 1} ${label}${measures.includes(name) ? "" : " (not recorded)"}`);
      option.selected = name === this.measure;
      return option;
    });
    this.select = h("select", { id: "measure", onchange: () => this.choose(this.select.value) }, options);
    this.legend = h("p", { class: "dim legend" });
    this.ids = h("input", { type: "checkbox", onchange: () => this.flow.classList.toggle("with-ids", this.ids.checked) });
    this.toggleButton = h("button", { type: "button", onclick: () => this.toggle() }, "");
    const difference = answer.differs && h("button", { type: "button", onclick: () => this.toDifference() }, `first difference from rollout ${answer.differs.other} (d)`);
    this.detail = h("div", { class: "detail", role: "status", "aria-live": "polite" }, h("span", { class: "dim" }, "Choose a token with the pointer, or with the arrow keys."));
    this.flow = h("div", { class: "flow", tabindex: "0", role: "group", "aria-label": "Tokens; the arrow keys move from one to the next", onkeydown: (event) => this._key(event), onclick: (event) => this._point(event), onpointerover: (event) => this._point(event, false) });
    this.holder = h("div", {});
    this.element = h("section", { "aria-label": "Tokens" }, h("div", { class: "line controls" }, h("label", { for: "measure" }, "Color"), this.select, h("label", { class: "check" }, this.ids, "ids"), this.toggleButton, difference), this.legend, this.holder, this.detail);
    this.chunks = new Map();
    this._queue = [];
  }

  mounted() {
    this._observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) isIntersecting ? this._fill(target) : this._empty(target);
    }, { rootMargin: "900px 0px" });
    this._build();
  }

  close() {
    this._observer?.disconnect();
    this.list?.close();
    cancelAnimationFrame(this._frame);
  }

  choose(measure) {
    if (!this.measures.includes(measure)) return;
    this.measure = measure;
    this.select.value = measure;
    this.keep({ measure, form: this.form === "table" ? "table" : "" });
    this._build();
  }

  toggle() {
    this.form = this.form === "table" ? "text" : "table";
    this.keep({ measure: this.measure, form: this.form === "table" ? "table" : "" });
    this._build();
  }

  _build() {
    this._range = rangeOf(this.answer, this.measure);
    replace(this.legend, TOKEN_MEASURES[this.measure].legend.map(([kind, meaning]) => h("span", {}, h("i", { class: `square ${kind}`, "aria-hidden": "true" }), ` ${meaning}`)));
    this.toggleButton.textContent = this.form === "table" ? "as text (v)" : "as a table (v)";
    this._observer.disconnect();
    this.list?.close();
    this.list = null;
    this.chunks.clear();
    this._queue = [];
    if (this.form === "table") this._table();
    else this._text();
  }

  _color(sequence, at) {
    return TOKEN_MEASURES[this.measure].color(sequence.value(this.measure, at), this._range);
  }

  _text() {
    const width = Math.min(innerWidth, 1200) - 40;
    this.flow.replaceChildren();
    for (const sequence of this.sequences) {
      add(this.flow, [h("p", { class: "sequence" }, sequenceTitle(sequence, this.sequences.length))]);
      for (let start = 0; start < sequence.length; start += CHUNK) {
        const chunk = h("div", { class: "chunk" });
        let pixels = 0;
        const stop = Math.min(sequence.length, start + CHUNK);
        for (let at = start; at < stop; at++) pixels += (this.answer.texts[sequence.ids[at]]?.length ?? ABOUT_ID) * ABOUT_CHARACTER + 2;
        chunk.style.minHeight = `${Math.ceil(pixels / width) * LINE}px`;
        this.chunks.set(chunk, { sequence, start, stop });
        this.flow.append(chunk);
      }
    }
    replace(this.holder, this.flow);
    if (this.sequences.every((sequence) => sequence.length === 0)) add(this.flow, [h("p", {}, `This rollout has no token ids: ${this.sequences.length ? "it was imported from a format that does not have them, and text is never tokenized again" : "no model call of it is recorded, as of a rollout that failed"}.`)]);
    let left = innerHeight - ABOVE;
    for (const chunk of this.chunks.keys()) {
      if (left <= 0) break;
      left -= Number.parseFloat(chunk.style.minHeight);
      this._fillNow(chunk);
    }
    for (const chunk of this.chunks.keys()) this._observer.observe(chunk);
  }

  _fill(chunk) {
    if (chunk.childElementCount || this._queue.includes(chunk)) return;
    this._queue.push(chunk);
    // As much in a frame as a reader scrolls in one, so that scrolling stays smooth, and nothing is blank.
    const work = () => {
      for (let left = PIXELS_A_FRAME; left > 0 && this._queue.length; ) {
        const next = this._queue.shift();
        if (!next.isConnected) continue;
        left -= Number.parseFloat(next.style.minHeight);
        this._fillNow(next);
      }
      this._frame = this._queue.length ? requestAnimationFrame(work) : null;
    };
    this._frame = this._frame || requestAnimationFrame(work);
  }

  _fillNow(chunk) {
    if (chunk.childElementCount) return;
    const { sequence, start, stop } = this.chunks.get(chunk);
    const { differs } = this.answer;
    const fragment = document.createDocumentFragment();
    for (let at = start; at < stop; at++) {
      const token = document.createElement("span");
      const isDifference = differs && differs.sequence === sequence.number && differs.position === at;
      token.className = `tok ${this._color(sequence, at)}${sequence.isControl(at) ? " control" : ""}${isDifference ? " differs" : ""}`;
      token.dataset.id = sequence.ids[at];
      token.textContent = sequence.shown(at).replaceAll("\n", "↵\n").replaceAll("\t", "→\t");
      fragment.append(token);
    }
    chunk.append(fragment);
    // A chunk out of sight is not laid out: it keeps the height it had, so that those around it do not move.
    chunk.style.containIntrinsicHeight = `auto ${chunk.style.minHeight}`;
    chunk.style.minHeight = "";
  }

  _empty(chunk) {
    const at = this._queue.indexOf(chunk);
    if (at >= 0) this._queue.splice(at, 1);
    if (!chunk.childElementCount || chunk.contains(this._current)) return;
    chunk.style.minHeight = `${chunk.offsetHeight}px`;
    chunk.replaceChildren();
  }

  _table() {
    const columns = [{ label: "#", class: "num" }, { label: "id", class: "num" }, { label: "text", class: "wide" }, ...this.measures.map((name) => ({ label: TOKEN_MEASURES[name].label, class: "num" }))];
    const items = this.sequences.flatMap((sequence) => Array.from({ length: sequence.length }, (_, at) => [sequence, at]));
    const { differs } = this.answer;
    this.list = new List({
      label: "Tokens", columns, height: 30, tall: 30 + 22 * Math.ceil(this.measures.length / 2),
      draw: ([sequence, at]) => {
        const isDifference = differs && differs.sequence === sequence.number && differs.position === at;
        const text = h("span", { class: `tok ${this._color(sequence, at)}${sequence.isControl(at) ? " control" : ""}${isDifference ? " differs" : ""}` }, sequence.shown(at).replaceAll("\n", "↵").replaceAll("\t", "→"));
        return [`${this.sequences.length > 1 ? `${sequence.number + 1}.` : ""}${at}`, String(sequence.ids[at]), text, ...this.measures.map((name) => valueText(name, sequence.value(name, at)))];
      },
    });
    replace(this.holder, this.list.box);
    this.list.set(items);
  }

  _key(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!by) return;
    event.preventDefault();
    const from = this.selected || { sequence: this.sequences[0], at: -1 };
    let { sequence, at } = { sequence: from.sequence, at: from.at + by };
    if (at >= sequence.length && this.sequences[sequence.number + 1]) [sequence, at] = [this.sequences[sequence.number + 1], 0];
    if (at < 0 && this.sequences[sequence.number - 1]) [sequence, at] = [this.sequences[sequence.number - 1], this.sequences[sequence.number - 1].length - 1];
    this.go(sequence, Math.max(0, Math.min(sequence.length - 1, at)));
  }

  _point(event, isClick = true) {
    const token = event.target.closest(".tok");
    const chunk = token?.parentElement;
    const found = chunk && this.chunks.get(chunk);
    if (!found) return;
    const at = found.start + [...chunk.children].indexOf(token);
    if (isClick) this.go(found.sequence, at, false);
    else if (!this.selected) this._describe(found.sequence, at);
  }

  go(sequence, at, scrolls = true) {
    this.selected = { sequence, at };
    this._describe(sequence, at);
    if (this.form === "table") {
      this.list.go(this.sequences.slice(0, sequence.number).reduce((sum, one) => sum + one.length, 0) + at, false);
      return;
    }
    const [chunk, { start }] = [...this.chunks].find(([, one]) => one.sequence === sequence && one.start <= at && at < one.stop);
    this._fillNow(chunk);
    this._current?.classList.remove("current");
    this._current = chunk.children[at - start];
    this._current.classList.add("current");
    if (scrolls) this._current.scrollIntoView({ block: "center", behavior: "instant" });
  }

  toDifference() {
    const { differs } = this.answer;
    if (!differs) return;
    const sequence = this.sequences[differs.sequence];
    this.go(sequence, Math.min(differs.position, sequence.length - 1));
  }

  _describe(sequence, at) {
    const span = sequence.span(at);
    const facts = this.measures.map((name) => [TOKEN_MEASURES[name].label, valueText(name, sequence.value(name, at))]);
    const logprob = sequence.value("logprob", at);
    replace(this.detail, h("code", { class: `tok ${this._color(sequence, at)}` }, sequence.shown(at).replaceAll("\n", "↵").replaceAll("\t", "→").replaceAll(" ", "␣")),
      ` id ${sequence.ids[at]}, position ${at}${span ? `, token ${at - span.start} of call ${span.call + 1}` : ", not sampled"}${sequence.isControl(at) ? ", control token" : ""}; `,
      facts.filter(([, value]) => value !== "–").map(([name, value]) => `${name} ${value}`).join(", "), logprob !== null && `, probability ${number(Math.exp(logprob))}`);
  }
}

function valueText(name, value) {
  if (name === "mask") return ["prompt", "not trained", "trained"][value];
  if (name === "advantage" || name === "reward") return signed(value);
  return number(value);
}

export function sequenceTitle(sequence, count) {
  const sampled = sequence.spans.reduce((sum, span) => sum + span.stop - span.start, 0);
  const name = count > 1 ? `Sequence ${sequence.number + 1}, role ${sequence.role}: ` : "";
  const reason = sequence.breakReason ? `, begins after a break (${sequence.breakReason})` : "";
  return `${name}${counted(sequence.length, "token")}, ${sampled.toLocaleString("en-US")} sampled in ${counted(sequence.spans.length, "call")}${sequence.trainable ? "" : ", not trainable"}${reason}`;
}
