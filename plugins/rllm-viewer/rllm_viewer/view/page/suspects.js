// What is worth a look in a run: rollouts whose numbers do not fit each other, or those of the other rollouts.

import { rolloutsOf } from "./filters.js";
import { nameOf } from "./blocks.js";
import { counted, number } from "./text.js";

const OLD = 3;
const FAR = 3;
const MOSTLY = 0.9;

// Returns [{ what, why, filter } or { what, why, places }]; a place is { row, at, note }. `at` is null for a whole group.
export function suspects(rows) {
  const all = rows.flatMap((row) => rolloutsOf(row).map((one, at) => ({ row, at, one })));
  const ended = all.filter(({ one }) => typeof one.reward === "number");
  const cut = all.filter(({ one }) => one.cut);
  const broken = all.filter(({ one }) => one.breaks?.length);
  return [
    { what: "Rewards against the answers", why: "A rollout without the task's answer in its text has a higher reward than one with it. Compare both with the task, and look at the parts of the reward: whose rewards are they, and what for?", places: contrary(rows) },
    { what: "Rewards without the answer", why: "The reward says that it is solved, but its text is not the task's answer, which it is in most solved rollouts. Read it: is the reward earned?", places: unearned(ended) },
    { what: "Rewards far from all others", why: "Look at the parts of the reward, and read the answer: what was it paid for?", places: far(ended) },
    { what: "Solved, but with a lower reward than an unsolved one", why: "Both numbers come from the workflow: one of them is wrong, or they measure different things.", places: unequal(rows) },
    { what: `${counted(cut.length, "rollout")} cut off`, why: "A completion ended at the limit of tokens. Is its reward that of a complete answer?", filter: { by: "rollouts", cut: "yes" }, places: cut },
    { what: `${counted(broken.length, "rollout")} with a segment break`, why: "The prompt of a call did not continue the tokens before it. The rollout shows where, and compares the two prompts.", filter: { by: "rollouts", break: "any" }, places: broken },
    { what: "Groups of old weights", why: "They waited much longer than others between sampling and training.", places: old(rows) },
  ].filter(({ places }) => places.length);
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
  return without.length > solved.length * (1 - MOSTLY) ? [] : without;
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
  return ended.filter(({ one }) => one.reward > at(0.9) + FAR * width || one.reward < at(0.1) - FAR * width).map(({ row, at: position, one }) => ({ row, at: position, note: `reward ${number(one.reward)}` }));
}

// Versions grow with the steps: a group is old if its distance is far above the usual one.
function old(rows) {
  const aged = rows.filter((row) => row.outcome === "trained").map((row) => [row, Math.min(...rolloutsOf(row).map((one) => one.versions?.[0] ?? Infinity))]).filter(([, version]) => version !== Infinity);
  const distances = aged.map(([row, version]) => row.step - version).sort((a, b) => a - b);
  const usual = distances[Math.floor((distances.length - 1) / 2)];
  return aged.filter(([row, version]) => row.step - version >= usual + OLD).map(([row, version]) => ({ row, at: null, note: `step ${row.step} trained version ${version}, ${row.step - version - usual} older than usual` }));
}

export function placeName({ row, at }) {
  return at === null ? nameOf(row) : `${nameOf(row)}, rollout ${rolloutsOf(row)[at].index}`;
}
