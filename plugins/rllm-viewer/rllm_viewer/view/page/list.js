// A long table of which only the rows in sight exist, so that ten thousand rows scroll like ten.

import { h, replace } from "./dom.js";

const AROUND = 12;

export class List {
  // columns: [{ name, label, sort, class }]; draw(item, position): an array of cells; href(item): where a row leads.
  constructor({ label, columns, draw, href, height = 40, tall = 92, onsort = null, sort = "", empty = "nothing to show" }) {
    Object.assign(this, { columns, draw, href, onsort, empty });
    this.heights = [height, tall];
    this.items = [];
    this.cursor = -1;
    this._drawn = [0, 0];
    this._rows = new Map();
    this.body = h("div", { class: "rows", role: "rowgroup" });
    const head = columns.map((column) => {
      const order = sort.replace(/^-/, "") === column.sort ? (sort.startsWith("-") ? "descending" : "ascending") : null;
      const cell = { role: "columnheader", class: column.class, "aria-sort": column.sort && onsort ? order || "none" : null };
      if (!column.sort || !onsort) return h("span", cell, column.label);
      const next = order === "descending" ? column.sort : `-${column.sort}`;
      const arrow = order === "ascending" ? " ▲" : order === "descending" ? " ▼" : "";
      return h("span", cell, h("button", { type: "button", class: "sort", "data-sort": column.sort, onclick: () => onsort(next) }, `${column.label}${arrow}`));
    });
    this.element = h("div", { class: "list", role: "table", "aria-label": label }, h("div", { role: "rowgroup" }, h("div", { class: "row head", role: "row", "aria-rowindex": "1" }, head)), this.body);
    this.note = h("p", { class: "empty" });
    this.box = h("div", {}, this.element, this.note);
    this._scrolled = () => {
      if (!this._waiting) this._waiting = requestAnimationFrame(() => {
        this._waiting = null;
        this._show();
      });
    };
    addEventListener("scroll", this._scrolled, { passive: true });
    addEventListener("resize", this._scrolled, { passive: true });
  }

  close() {
    removeEventListener("scroll", this._scrolled);
    removeEventListener("resize", this._scrolled);
    cancelAnimationFrame(this._waiting);
  }

  get rowHeight() {
    return this.heights[matchMedia("(max-width: 640px)").matches ? 1 : 0];
  }

  set(items) {
    const focused = [...this._rows].find(([, row]) => row.contains(document.activeElement))?.[0];
    this.items = items;
    this.cursor = Math.min(this.cursor, items.length - 1);
    this.element.setAttribute("aria-rowcount", String(items.length + 1));
    this._rows.clear();
    this.body.replaceChildren();
    replace(this.note, items.length ? null : this.empty);
    this.element.hidden = items.length === 0;
    this._show();
    this._rows.get(focused)?.querySelector("a, button")?.focus({ preventScroll: true });
  }

  _show() {
    const height = this.rowHeight;
    this.body.style.height = `${this.items.length * height}px`;
    if (!this.body.isConnected || !this.items.length) return;
    const top = this.body.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(-top / height) - AROUND);
    const last = Math.min(this.items.length, Math.max(first, Math.ceil((innerHeight - top) / height)) + AROUND);
    for (const [at, row] of this._rows)
      if ((at < first || at >= last) && !row.contains(document.activeElement)) {
        row.remove();
        this._rows.delete(at);
      }
    for (let at = first; at < last; at++) if (!this._rows.has(at)) this._insert(at, height);
  }

  _insert(at, height) {
    const item = this.items[at];
    const href = this.href ? this.href(item) : null;
    const cells = this.draw(item, at).map((cell, place) => {
      const column = this.columns[place];
      const isLink = place === 0 && href;
      return h("span", { role: "cell", class: column.class, "data-label": column.label }, isLink ? h("a", { href }, cell) : cell);
    });
    const row = h("div", { class: at === this.cursor ? "row current" : "row", role: "row", "aria-rowindex": String(at + 2) }, cells);
    if (href) row.addEventListener("click", (event) => {
      if (!event.target.closest("a, button") && !getSelection().toString()) location.hash = href;
    });
    row.style.top = `${at * height}px`;
    row.style.height = `${height}px`;
    this._rows.set(at, row);
    const next = [...this._rows.keys()].filter((key) => key > at);
    this.body.insertBefore(row, next.length ? this._rows.get(Math.min(...next)) : null);
  }

  // Moves the cursor, which is where the keyboard is.
  move(by) {
    if (!this.items.length) return;
    this.go(Math.max(0, Math.min(this.items.length - 1, this.cursor + by)));
  }

  go(at, focus = true) {
    this._rows.get(this.cursor)?.classList.remove("current");
    this.cursor = at;
    const height = this.rowHeight;
    const top = this.body.getBoundingClientRect().top + at * height;
    if (top < 80) scrollBy({ top: top - 80 - height, behavior: "instant" });
    else if (top + height > innerHeight - 20) scrollBy({ top: top + 2 * height - innerHeight, behavior: "instant" });
    this._show();
    const row = this._rows.get(at);
    row?.classList.add("current");
    if (focus) row?.querySelector("a, button")?.focus({ preventScroll: true });
  }

  open() {
    const item = this.items[this.cursor];
    if (item && this.href) location.hash = this.href(item);
  }
}
