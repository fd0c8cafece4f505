// The tokens of a rollout with their numbers: pure functions of what the run has recorded.

import { plain } from "./text.js";
import { TOKEN_MEASURES } from "./scales.js";
import { extremes } from "./text.js";

// One sequence of tokens, as it was trained.
export class Sequence {
  constructor(answer, number) {
    const read = answer.sequences[number];
    Object.assign(this, { answer, number, ids: read.ids, spans: read.spans, media: read.media, role: read.role, trainable: read.trainable, breakReason: read.break_reason, trajectory: read.trajectory });
    this.length = read.ids.length;
    this._shown = new Map();
    this._control = new Set(answer.control);
  }

  // Returns the completion that a token belongs to, or null if it was not sampled.
  span(at) {
    let [low, high] = [0, this.spans.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.spans[middle].stop <= at) low = middle + 1;
      else high = middle;
    }
    const found = this.spans[low];
    return found && found.start <= at ? found : null;
  }

  isControl(at) {
    return this._control.has(this.ids[at]);
  }

  // Returns the text of a token as it is shown: line breaks, tabs and what is invisible as signs.
  shown(at) {
    const id = this.ids[at];
    let text = this._shown.get(id);
    if (text === undefined) {
      const bytes = this.answer.bytes[id];
      const known = this.answer.texts[id];
      text = bytes !== undefined ? bytes.replace(/../g, "\\x$&") : known === undefined ? `⟨${id}⟩` : known === "" ? "⟨empty⟩" : plain(known);
      this._shown.set(id, text);
    }
    return text;
  }

  value(measure, at) {
    const span = this.span(at);
    if (measure === "mask") return span === null ? 0 : isTrained(span) ? 2 : 1;
    if (span === null) return null;
    if (measure === "version") return span.version;
    if (measure === "ratio") {
      const [trainer, sampled] = [of(span.trainer, at - span.start), of(span.logprob, at - span.start)];
      return trainer === null || sampled === null ? null : Math.exp(trainer - sampled);
    }
    return of(span[measure], at - span.start);
  }
}

function isTrained(span) {
  return span.advantage !== null && span.advantage !== undefined;
}

function of(numbers, at) {
  if (numbers === null || numbers === undefined) return null;
  return typeof numbers === "number" ? numbers : numbers[at];
}

// Returns the measures that the run has recorded for some token.
export function recorded(answer) {
  const spans = answer.sequences.flatMap((sequence) => sequence.spans);
  const has = (name) => spans.some((span) => span[name] !== null && span[name] !== undefined);
  return Object.keys(TOKEN_MEASURES).filter((name) => name === "mask" || (name === "ratio" ? has("trainer") && has("logprob") : has(name)));
}

// Returns the range that the colors of a measure cover.
export function rangeOf(answer, measure) {
  const values = [];
  for (const span of answer.sequences.flatMap((sequence) => sequence.spans)) {
    const numbers = span[measure];
    if (typeof numbers === "number") values.push(numbers);
    else if (Array.isArray(numbers)) for (const one of numbers) if (one !== null) values.push(one);
  }
  if (!values.length) return { low: 0, high: 0, reach: 1 };
  const [low, high] = extremes(values);
  return { low, high, reach: Math.max(Math.abs(low), Math.abs(high)) };
}
