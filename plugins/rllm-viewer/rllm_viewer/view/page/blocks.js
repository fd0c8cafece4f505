// Parts that several views share: rollouts as squares, facts, and messages of a conversation.

import { folded, h, long } from "./dom.js";
import { between } from "./scales.js";
import { counted, extremes, number, outOfCharacter, pretty, prettyText, share, signed } from "./text.js";

// Outcomes that need no explanation: imported rollouts are not trained here.
export const EXPECTED = new Set(["trained", "validation", "imported"]);
export const SOLVED = new Map([[true, "solved"], [false, "not solved"], [null, ""]]);

const BEYOND = 0.125;

// Range of the rewards of a run, for the color of squares: a reward far from all others must not make them one color.
export function rewardRange(rows) {
  const known = rows.flatMap((row) => row.rewards.filter((reward) => reward !== null)).sort((a, b) => a - b);
  if (!known.length) return [0, 1];
  const at = (share) => known[Math.floor((known.length - 1) * share)];
  const [low, high] = [at(0.1), at(0.9)];
  const more = high > low ? (high - low) * BEYOND : Infinity;
  return [Math.max(known[0], low - more), Math.min(known.at(-1), high + more)];
}

export function square(rollout, range, isDim = false) {
  const reward = rollout.reward;
  const failed = rollout.outcome === "failed";
  const kind = failed ? "failed" : between(reward, range[0], range[1]);
  return h("i", { class: `square ${kind}${isDim ? " dim" : ""}`, title: failed ? `failed: ${rollout.reason}` : `reward ${number(reward)}`, "aria-hidden": "true" }, failed ? "×" : rollout.solved ? "✓" : "");
}

export function squares(rollouts, range, positions = null) {
  const chosen = positions && positions.length < rollouts.length ? new Set(positions) : null;
  const label = `rewards: ${rollouts.slice(0, 64).map((one) => (one.outcome === "failed" ? "failed" : number(one.reward))).join(", ")}`;
  return h("span", { class: "squares", role: "img", "aria-label": label }, rollouts.slice(0, 64).map((one, at) => square(one, range, chosen && !chosen.has(at))), rollouts.length > 64 && `+${rollouts.length - 64}`);
}

export function nameOf(row) {
  if (row.group !== null && row.group !== undefined) return `group ${row.group}`;
  return row.outcome === "imported" ? "imported task" : "validation";
}

export function became(row) {
  return row.outcome === "filtered" || row.outcome === "failed" ? `${row.outcome} (${row.reason})` : row.outcome;
}

export function badge(text, kind = "", title = null) {
  return h("span", { class: `badge ${kind}`, title }, text);
}

// What a rollout is, in short.
export function headOf(rollout, run) {
  const steps = rollout.trajectories.flatMap((one) => one.steps);
  const advantages = steps.flatMap((step) => step.advantage || []);
  const corrections = steps.flatMap((step) => step.correction || []);
  const versions = steps.map((step) => step.weight_version).filter((one) => one !== null);
  const breaks = steps.filter((step) => step.break_reason !== null).length;
  const isCut = steps.some((step) => step.finish_reason === "length");
  const tokens = steps.reduce((sum, step) => sum + step.tokens, 0);
  const [low, high] = versions.length ? extremes(versions) : [null, null];
  return h("p", { class: "facts" },
    badge(`reward ${rollout.reward === null ? "none" : number(rollout.reward)}`, rollout.reward === null ? "" : "strong"),
    rollout.solved !== null && badge(SOLVED.get(rollout.solved), rollout.solved ? "good" : "bad"),
    advantages.length > 0 && badge(`advantage ${rangeOf(advantages, signed)}`, advantageKind(advantages)),
    corrections.length > 0 && badge(`correction ${rangeOf(corrections, number)}`),
    rollout.end !== "done" && badge(`ended with ${rollout.end}`, "bad"),
    !EXPECTED.has(rollout.outcome) && badge(`${rollout.outcome} (${rollout.reason})`, "bad"),
    isCut && badge(`truncated${limit(run)}`, "bad", "a completion reached the token limit"),
    breaks > 0 && badge(counted(breaks, "break"), "bad"),
    low !== null && badge(low === high ? `version ${low}` : `versions ${low} to ${high}`),
    badge(counted(steps.length, "call")),
    tokens > 0 && badge(counted(tokens, "token")),
    rollout.seconds !== null && badge(`${number(rollout.seconds)} s`));
}

// The limit of tokens in the run file. A workflow can ask for a lower one.
export function limit(run) {
  const most = setting(run, "rollout", "max_response_tokens");
  return most === undefined ? "" : ` (rollout.max_response_tokens = ${most})`;
}

export function setting(run, table, key) {
  return run.about?.settings?.[table]?.[key];
}

const BREAKS = {
  history_edited: "an earlier message was changed, or nothing follows the answer",
  shrunk: "nothing was added, or messages were dropped",
  tools_changed: "the tools differ from those of the call before",
  assistant_inserted: "an assistant message was added that the model did not sample",
  tokens_after_stop: "the answer has tokens after its stop token",
  bridge_none: "the parser cannot continue the tokens with these messages, and rendering the conversation again gives other tokens",
  prefix_mismatch: "the prompt does not begin with the tokens so far: often a chat template that drops the reasoning of earlier answers, or writes them differently",
};

// What a reason for a segment break means; nothing for a reason that is not of the core.
export function breakMeaning(reason) {
  return Object.hasOwn(BREAKS, reason) ? `: ${BREAKS[reason]}` : "";
}

export function rangeOf(values, form) {
  const [low, high] = extremes(values).map(form);
  return low === high ? low : `${low} to ${high}`;
}

function advantageKind(values) {
  const sum = values.reduce((total, value) => total + value, 0);
  return sum > 0 ? "good" : sum < 0 ? "bad" : "";
}

// Names and values as a list; long values are folded.
export function pairs(values) {
  const names = Object.keys(values || {});
  if (!names.length) return null;
  return h("dl", { class: "pairs" }, names.map((name) => [h("dt", {}, name), h("dd", {}, valueOf(values[name]))]));
}

function valueOf(value) {
  if (typeof value === "number") return number(value);
  if (value === null || typeof value === "boolean") return String(value);
  const text = typeof value === "string" ? value : pretty(value);
  return text.length > 80 || text.includes("\n") ? long(text, 2000) : h("code", {}, text === "" ? '""' : text);
}

// Shows messages; `prefix` is how many characters of the last text are folded, because another rollout has them, too.
export function messages(list, { prefix = 0, mark = null } = {}) {
  return list.map((message) => {
    const { role = "message", content, tool_calls: calls, ...others } = message;
    delete others.tool_call_id;
    const rest = Object.entries(others).filter(([, value]) => value && (!Array.isArray(value) || value.length));
    const hasContent = content !== null && content !== undefined && content !== "";
    return h("article", { class: `message role-${/^(system|user|assistant|tool)$/.test(role) ? role : "other"}` },
      h("p", { class: "role" }, role),
      rest.map(([name, value]) => folded(name, () => long(typeof value === "string" ? value : pretty(value)), name.startsWith("reason"))),
      hasContent || !calls?.length ? contentOf(hasContent ? content : "", prefix, mark) : null,
      (calls || []).map(call));
  });
}

function contentOf(content, prefix, mark) {
  if (typeof content === "string") {
    if (content === "") return h("p", { class: "dim" }, "(empty)");
    if (prefix > 40) return [folded(`the first ${prefix} characters are the same`, () => long(content.slice(0, prefix))), mark, long(content.slice(prefix))];
    const json = prettyText(content);
    if (json && json !== content) return h("div", {}, long(content), folded("as JSON", () => long(json)));
    return long(content);
  }
  if (!Array.isArray(content)) return long(pretty(content));
  return content.map((part) => {
    if (typeof part?.text === "string") return long(part.text);
    return image(part) || h("p", { class: "dim" }, `[${part?.type || "part"}]`);
  });
}

// Only images that are part of the run are shown: nothing is loaded from elsewhere.
function image(part) {
  const source = [part?.image, part?.url, part?.image_url, part?.image_url?.url].find((one) => typeof one === "string");
  if (!source || !/^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/.test(source)) return null;
  const element = h("img", { alt: "image of the conversation", class: "image" });
  element.src = source;
  return element;
}

function call(one) {
  const made = one?.function || one || {};
  const written = typeof made.arguments === "string" ? made.arguments : pretty(made.arguments ?? "");
  return h("div", { class: "call" }, h("p", { class: "role" }, "calls ", h("code", {}, String(made.name ?? "?"))), long(prettyText(written) || written));
}

export function ratio(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? `${known.filter(Boolean).length}/${known.length} (${share(known.filter(Boolean).length / known.length)})` : "–";
}

// The number of characters with which both texts begin.
export function common(one, other) {
  const length = Math.min(one.length, other.length);
  let same = 0;
  while (same < length && one[same] === other[same]) same += 1;
  return outOfCharacter(one, same);
}
