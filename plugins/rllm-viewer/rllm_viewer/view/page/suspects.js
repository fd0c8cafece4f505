// Suspicious rollouts of a run: their numbers contradict each other, or differ much from those of other rollouts.

import { nameOf } from "./blocks.js";
import { h } from "./dom.js";
import { rolloutsOf } from "./filters.js";
import { counted, number, spread } from "./text.js";

const OLD = 3;
const FAR = 3;
const MOSTLY = 0.9;

const known = new WeakMap();

// Returns the findings of a run, once all its rollouts are read.
export function findings(run) {
  if (run.read < run.size) return [];
  let kept = known.get(run);
  if (kept?.version !== run.version) known.set(run, (kept = { version: run.version, found: suspects(run.rows) }));
  return kept.found;
}

// Returns [{ name, what, why, places, filter }]; a place is { row, at, note }. `at` is null for a whole group.
export function suspects(rows) {
  const all = rows.flatMap((row) => rolloutsOf(row).map((one, at) => ({ row, at, one })));
  const ended = all.filter(({ one }) => typeof one.reward === "number");
  const cut = all.filter(({ one }) => one.cut).map((place) => ({ ...place, note: `reward ${number(place.one.reward)}` }));
  const broken = all.filter(({ one }) => one.breaks?.length).map((place) => ({ ...place, note: [...new Set(place.one.breaks)].join(", ") }));
  return [
    { name: "Rewards that contradict the answers", why: "A rollout without the task's answer in its text has a higher reward than one with it. Compare both with the task, and look at the parts of their rewards: are the rewards swapped, or is the reward function wrong?", places: contrary(rows) },
    { name: "Solved without the answer", why: "The rollout counts as solved, but its text lacks the task's answer, which most solved rollouts contain. Read it: is the reward earned?", places: unearned(ended) },
    { name: "Reward outliers", why: "The reward is far above or below those of the other rollouts. Look at its parts, and read the answer: what earned it?", places: far(ended) },
    { name: "Solved with a lower reward than an unsolved rollout", why: "Reward and solved both come from the workflow: one of them is wrong, or they measure different things.", places: unequal(rows) },
    { name: "Truncated", what: `${counted(cut.length, "rollout")} truncated`, why: "A completion reached the token limit, so the answer may lack its end. Was it rewarded like a complete answer? Is the limit high enough?", filter: { by: "rollouts", cut: "yes" }, places: cut },
    { name: "Segment break", what: `${counted(broken.length, "rollout")} with a segment break`, why: "The prompt of a call did not continue the tokens before it. Often, the chat template changes or drops parts of earlier answers. The rollout shows the place, and compares the two prompts.", filter: { by: "rollouts", break: "any" }, places: broken },
    { name: "Stale groups", why: "These groups waited much longer than others between sampling and training, so an older policy sampled their answers.", places: old(rows) },
  ].filter(({ places }) => places.length).map((found) => ({ what: found.name, ...found }));
}

// Returns the groups in which a rollout that should have the higher reward has the lower one.
function reversed(rows, isKnown, isGood, words) {
  return rows.flatMap((row) => {
    const rollouts = rolloutsOf(row).filter((one) => typeof one.reward === "number" && isKnown(one));
    const by = (a, b) => a.reward - b.reward;
    const lowest = rollouts.filter(isGood).sort(by)[0];
    const highest = rollouts.filter((one) => !isGood(one)).sort(by).at(-1);
    if (!lowest || !highest || lowest.reward >= highest.reward) return [];
    return [{ row, at: null, note: `reward ${number(highest.reward)} of rollout ${highest.index}, ${words[0]}; ${number(lowest.reward)} of rollout ${lowest.index}, ${words[1]}` }];
  });
}

function contrary(rows) {
  return reversed(rows, (one) => typeof one.answered === "boolean", (one) => one.answered, ["without the answer", "with it"]);
}

function unearned(ended) {
  const solved = ended.filter(({ one }) => one.solved === true && typeof one.answered === "boolean");
  const without = solved.filter(({ one }) => !one.answered);
  return without.length > solved.length * (1 - MOSTLY) ? [] : without.map((place) => ({ ...place, note: `reward ${number(place.one.reward)}` }));
}

function unequal(rows) {
  const found = new Set(contrary(rows).map(({ row }) => row));
  const others = rows.filter((row) => !found.has(row));
  return reversed(others, (one) => typeof one.solved === "boolean", (one) => one.solved, ["not solved", "solved"]);
}

function far(ended) {
  const rewards = ended.map(({ one }) => one.reward).sort((a, b) => a - b);
  const at = (share) => rewards[Math.floor((rewards.length - 1) * share)];
  const width = at(0.9) - at(0.1);
  if (!(width > 0)) return [];
  return ended.filter(({ one }) => one.reward > at(0.9) + FAR * width || one.reward < at(0.1) - FAR * width).map((place) => ({ ...place, note: `reward ${number(place.one.reward)}` }));
}

// Versions grow with the steps: a group is old if its distance is far above the usual one.
function old(rows) {
  const aged = rows.filter((row) => row.outcome === "trained").map((row) => [row, Math.min(...rolloutsOf(row).map((one) => one.versions?.[0] ?? Infinity))]).filter(([, version]) => version !== Infinity);
  const distances = aged.map(([row, version]) => row.step - version).sort((a, b) => a - b);
  const usual = distances[Math.floor((distances.length - 1) / 2)];
  return aged.filter(([row, version]) => row.step - version >= usual + OLD).map(([row, version]) => ({ row, at: null, note: `step ${row.step} trained answers of version ${version}; version ${row.step - usual} is usual` }));
}

// Joins the places of each group into one.
export function byGroup(places) {
  const groups = new Map();
  for (const place of places) groups.set(place.row, [...(groups.get(place.row) || []), place]);
  return [...groups].map(([row, found]) => {
    if (found.length === 1) return found[0];
    return { row, at: null, note: `rollouts ${found.map(({ one }) => one.index).join(", ")}; reward ${spread(found.map(({ one }) => one.reward))}` };
  });
}

export function placeName({ row, at }) {
  return at === null ? nameOf(row) : `${nameOf(row)}, rollout ${rolloutsOf(row)[at].index}`;
}

// Returns the findings of a group, or of one of its rollouts.
export function hints(run, identity, position = null) {
  return findings(run).flatMap(({ name, why, places }) => {
    const here = places.filter(({ row, at }) => row.id === identity && (position === null || at === null || at === position));
    return byGroup(here).map((place) => h("div", { class: "finding" }, h("b", {}, name), `: ${position === null && place.at !== null ? `rollout ${rolloutsOf(place.row)[place.at].index}, ` : ""}${place.note}`, h("p", {}, why)));
  });
}
