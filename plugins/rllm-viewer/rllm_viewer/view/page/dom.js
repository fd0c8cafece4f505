// Elements are made of text nodes only: no text of a run can become markup, an address or a style.

import { outOfCharacter, parts, plain } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "path", "circle", "line", "g", "text", "polygon", "rect", "title"]);

// Makes an element. Every text, also in attributes, has its invisible characters escaped.
export function h(tag, attributes, ...children) {
  const element = DRAWN.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "href" && !/^(#|data:,)/.test(value)) throw new Error(`no link to ${value}`);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : plain(value));
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) add(element, child);
    else if (child instanceof Node) element.append(child);
    else
      for (const [part, isEscape] of parts(child))
        element.append(isEscape ? h("span", { class: "esc", title: "a character that is not visible" }, part) : document.createTextNode(part));
  }
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren();
  return add(element, children);
}

// Replaces the content only by another one: what a reader has selected or focused stays while a run goes on.
export function renew(element, ...children) {
  const fresh = add(element.cloneNode(false), children);
  if (!fresh.isEqualNode(element)) element.replaceChildren(...fresh.childNodes);
}

// Shows a long text in part, with a button for the rest.
export function long(text, limit = 6000, kind = "pre") {
  const value = String(text);
  if (value.length <= limit) return h(kind, { class: "text" }, value);
  const first = outOfCharacter(value, limit);
  const box = h(kind, { class: "text" }, value.slice(0, first));
  const left = value.length - first;
  const more = h("button", { type: "button", class: "more", onclick: () => show() }, `show ${left.toLocaleString("en-US")} more characters`);
  const show = () => {
    const start = Number(box.dataset.shown || first);
    const stop = outOfCharacter(value, Math.min(value.length, start + 20 * limit));
    add(box, [value.slice(start, stop)]);
    box.dataset.shown = stop;
    if (stop === value.length) more.remove();
    else more.textContent = `show ${(value.length - stop).toLocaleString("en-US")} more characters`;
  };
  return h("div", { class: "long" }, box, more);
}

// A heading with its content, which can be folded.
export function folded(summary, content, isOpen = false) {
  const box = h("details", { open: isOpen }, h("summary", {}, summary));
  const fill = () => box.childElementCount === 1 && add(box, [typeof content === "function" ? content() : content]);
  if (isOpen) fill();
  else box.addEventListener("toggle", fill, { once: true });
  return box;
}

let live = null;

// Says something to people who use a screen reader, and shows it for a moment.
export function announce(text) {
  if (!live) {
    live = h("div", { class: "live", role: "status", "aria-live": "polite" });
    document.body.append(live);
  }
  live.textContent = plain(text);
  live.classList.add("shown");
  clearTimeout(announce.timer);
  announce.timer = setTimeout(() => live.classList.remove("shown"), 2500);
}
