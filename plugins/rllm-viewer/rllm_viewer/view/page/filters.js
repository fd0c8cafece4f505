// Filters of groups and rollouts, as they are in the address. A group is shown if one of its rollouts fits.

import { mean } from "./text.js";

export const FIELDS = {
  steps: { label: "Steps", hint: "5, 3..9 or 3..", kind: "range" },
  outcome: { label: "Outcome", kind: "choice" },
  reason: { label: "Reason or ending", kind: "choice" },
  solved: { label: "Solved", kind: "choice" },
  reward: { label: "Reward", hint: "1, 0..0.5 or 2..", kind: "range" },
  tokens: { label: "Sampled tokens", hint: "100.. or ..50", kind: "range" },
  version: { label: "Weight version", hint: "3, 3.. or ..9", kind: "range" },
  role: { label: "Role", kind: "choice" },
  tool: { label: "Tool called", kind: "choice" },
  break: { label: "Segment break", kind: "choice" },
  cut: { label: "Truncated", kind: "choice" },
  kept: { label: "Recorded as", kind: "choice" },
  task: { label: "Task contains", kind: "text" },
};
export const OTHERS = ["q", "regex", "exact", "sort", "by"];

export function filterOf(params) {
  const names = [...Object.keys(FIELDS), ...OTHERS];
  return Object.fromEntries(Object.entries(params).filter(([name, value]) => names.includes(name) && value !== ""));
}

// Returns [low, high] of a text such as "3..9"; null if it is none.
export function range(text) {
  const match = /^\s*(-?[\d.]*?\d?)\s*(?:(\.\.)\s*(-?[\d.]*))?\s*$/.exec(text);
  if (!match || (match[1] === "" && !match[3])) return null;
  const low = match[1] === "" ? -Infinity : Number(match[1]);
  const high = !match[2] ? low : match[3] === "" ? Infinity : Number(match[3]);
  return Number.isNaN(low) || Number.isNaN(high) ? null : [low, high];
}

const ANY = () => true;

// Returns a function of a group, its rollout and the rollout's position.
export function test(filter, hits = null) {
  const tests = [];
  const within = (name, low, high = low) => {
    const bounds = filter[name] === undefined ? null : range(filter[name]);
    if (bounds) tests.push((group, rollout) => {
      const [least, most] = [low(group, rollout), high(group, rollout)];
      return least !== null && least !== undefined && most >= bounds[0] && least <= bounds[1];
    });
  };
  const has = (name, holds) => filter[name] !== undefined && tests.push((group, rollout) => holds(filter[name], group, rollout));
  within("steps", (group) => group.step);
  within("reward", (group, rollout) => rollout.reward);
  within("tokens", (group, rollout) => rollout.tokens);
  within("version", (group, rollout) => rollout.versions?.[0], (group, rollout) => rollout.versions?.[1]);
  has("outcome", (value, group, rollout) => (rollout.outcome || group.outcome) === value);
  has("reason", (value, group, rollout) => group.reason === value || rollout.reason === value || rollout.end === value);
  has("solved", (value, group, rollout) => rollout.solved === { yes: true, no: false, unknown: null }[value]);
  has("role", (value, group, rollout) => Boolean(rollout.roles?.includes(value)));
  has("tool", (value, group, rollout) => Boolean(value === "any" ? rollout.tools?.length : rollout.tools?.includes(value)));
  has("break", (value, group, rollout) => {
    const breaks = rollout.breaks || [];
    return value === "none" ? !breaks.length : value === "any" ? breaks.length > 0 : breaks.includes(value);
  });
  has("cut", (value, group, rollout) => Boolean(rollout.cut) === (value === "yes"));
  has("kept", (value, group) => group.kept === value);
  has("task", (value, group) => group.task.toLowerCase().includes(value.toLowerCase()));
  if (hits) tests.push((group, rollout, position) => hits.has(`${group.id}.${position}`));
  if (!tests.length) return ANY;
  return (group, rollout, position) => tests.every((holds) => holds(group, rollout, position));
}

// Returns the rollouts of a row, also while only its entry in the index is known.
export function rolloutsOf(row) {
  return row.rollouts || row.rewards.map((reward, at) => ({ index: at, reward, solved: row.solved[at], outcome: row.outcome, reason: row.reason }));
}

const MEASURES = {
  step: (row) => row.step,
  group: (row) => row.group ?? -1,
  task: (row) => row.task,
  outcome: (row) => row.outcome,
  mean: (row, chosen) => mean(chosen.map((one) => one.reward)),
  spread: (row, chosen) => deviation(chosen.map((one) => one.reward)),
  solved: (row, chosen) => mean(chosen.map((one) => (one.solved === null || one.solved === undefined ? null : Number(one.solved)))),
  tokens: (row, chosen) => mean(chosen.map((one) => one.tokens)),
  turns: (row, chosen) => mean(chosen.map((one) => one.turns)),
  advantage: (row, chosen) => mean(chosen.map((one) => one.advantage)),
};
export const SORTS = Object.keys(MEASURES);

function deviation(values) {
  const known = values.filter((value) => typeof value === "number");
  if (!known.length) return null;
  const center = mean(known);
  return Math.sqrt(mean(known.map((value) => (value - center) ** 2)));
}

// Returns what to list: groups with the positions of their fitting rollouts, or single rollouts; sorted.
export function select(rows, filter, hits = null) {
  const fits = test(filter, hits);
  const found = [];
  const single = filter.by === "rollouts";
  for (const row of rows) {
    const rollouts = rolloutsOf(row);
    const positions = [];
    for (let at = 0; at < rollouts.length; at++) if (fits(row, rollouts[at], at)) positions.push(at);
    if (!positions.length && !(rollouts.length === 0 && fits === ANY)) continue;
    if (single) for (const at of positions) found.push({ row, positions: [at] });
    else found.push({ row, positions });
  }
  const name = (filter.sort || "").replace(/^-/, "");
  if (!Object.hasOwn(MEASURES, name)) return found;
  const sign = filter.sort.startsWith("-") ? -1 : 1;
  const keyed = found.map((item) => {
    const rollouts = rolloutsOf(item.row);
    return [MEASURES[name](item.row, item.positions.map((at) => rollouts[at])), item];
  });
  const isKnown = (value) => value !== null && value !== undefined;
  keyed.sort(([a], [b]) => {
    if (!isKnown(a) || !isKnown(b)) return isKnown(a) ? -1 : isKnown(b) ? 1 : 0;
    return (a < b ? -1 : a > b ? 1 : 0) * sign;
  });
  return keyed.map(([, item]) => item);
}

// Returns the values that a choice offers, the frequent ones first.
export function choices(rows, name) {
  const counts = new Map();
  const count = (value) => value !== null && value !== undefined && counts.set(value, (counts.get(value) || 0) + 1);
  for (const row of rows) {
    if (name === "kept") count(row.kept);
    for (const one of rolloutsOf(row)) {
      if (name === "outcome") count(one.outcome);
      else if (name === "reason") new Set([row.reason, one.reason, one.end]).forEach(count);
      else if (name === "role") one.roles?.forEach(count);
      else if (name === "tool") one.tools?.forEach(count);
      else if (name === "break") one.breaks?.forEach(count);
    }
  }
  const names = [...counts].sort((a, b) => b[1] - a[1]).map(([value]) => value);
  if (name === "solved") return ["yes", "no", "unknown"];
  if (name === "cut") return ["yes", "no"];
  if (name === "break") return names.length ? ["any", "none", ...names] : [];
  if (name === "tool") return names.length ? ["any", ...names] : [];
  return names;
}
