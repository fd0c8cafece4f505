// Text of models, tasks and tools may contain anything: what is invisible or reorders text is shown as an escape.

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0]/u;
const PARTS = new RegExp(`(${HIDDEN.source})`, "gu");
const JOINS = /^[\u200d\ufe0f]$/;

// Splits a text into parts [text, isEscape].
export function parts(text) {
  const value = String(text);
  if (!HIDDEN.test(value)) return value === "" ? [] : [[value, false]];
  const found = [];
  let plain = "";
  for (const part of value.split(PARTS)) {
    const isShown = part.length > 2 || !HIDDEN.test(part) || part === "\n" || part === "\t" || (JOINS.test(part) && isPicture(plain));
    if (isShown) {
      plain += part;
      continue;
    }
    if (plain) found.push([plain, false]);
    plain = "";
    found.push([escaped(part), true]);
  }
  if (plain) found.push([plain, false]);
  return found;
}

// Returns a text with escapes, for attributes, titles and file names.
export function plain(text) {
  return parts(text).map(([part]) => part).join("");
}

function isPicture(text) {
  // Not one class: some releases of V8 do not find a character of two units in a class before the end.
  return /(?:\p{Extended_Pictographic}|\p{Emoji_Modifier}|\ufe0f)$/u.test(text);
}

function escaped(part) {
  const code = part.codePointAt(0);
  if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\u{${code.toString(16)}}`;
}

export function number(value, absent = "–") {
  if (value === null || value === undefined) return absent;
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 100) return value.toFixed(3).replace("-", "−");
  return (size >= 100 && size < 1e7 ? value.toPrecision(5) : value.toExponential(1)).replace("-", "−");
}

export function signed(value) {
  return value === null || value === undefined ? "–" : value > 0 ? `+${number(value)}` : number(value).replace("-", "−");
}

export function share(value) {
  if (value === null || value === undefined) return "–";
  const percent = Math.round(value * 100);
  return percent === 0 && value > 0 ? "<1%" : percent === 100 && value < 1 ? ">99%" : `${percent}%`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 90) return `${(value / 60).toFixed(1)} min`;
  if (value >= 1 || value === 0) return `${value === 0 ? 0 : value.toFixed(2)} s`;
  return value >= 1e-3 ? `${(value * 1000).toFixed(0)} ms` : `${(value * 1e6).toFixed(0)} µs`;
}

export function counted(count, noun) {
  return `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
}

export function spread(values) {
  const known = values.filter((value) => typeof value === "number");
  if (!known.length) return "–";
  const [low, high] = extremes(known);
  return low === high ? number(low) : `${number(low)} to ${number(high)}`;
}

// Spreading a long array into Math.min overflows the stack.
export function extremes(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

// Moves a position out of the middle of a character of two units.
export function outOfCharacter(text, at) {
  return /[\ud800-\udbff]/.test(text[at - 1] ?? "") && /[\udc00-\udfff]/.test(text[at] ?? "") ? at - 1 : at;
}

export function mean(values) {
  const known = values.filter((value) => typeof value === "number");
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

export function pretty(value) {
  return JSON.stringify(value, null, 2);
}

// Returns the data as indented JSON if the text is an object or a list of JSON, or null.
export function prettyText(text) {
  if (!/^\s*[[{]/.test(text) || text.length > 1e6) return null;
  try {
    return pretty(JSON.parse(text));
  } catch {
    return null;
  }
}

// Quotes an argument for a shell.
export function quoted(text) {
  return /^[\w./:@%+=-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
