// The view of the times of a step: what it spent its seconds on, and each call of its recorded rollouts.

import { nameOf } from "./blocks.js";
import { h } from "./dom.js";
import { bar } from "./group_view.js";
import { link } from "./route.js";
import { get } from "./store.js";
import { counted, number, seconds } from "./text.js";

const PARTS = { generation_wait_seconds: "waiting for groups", training_seconds: "training", drain_seconds: "waiting for rollouts before the sync", sync_seconds: "sending weights", between_steps_seconds: "validation, checkpoint" };
const MOST_BARS = 400;

export async function timingView(place, app) {
  const run = await app.run(place);
  const timing = await get(`/api/run/${place.run}/timing/${place.step}`);
  const steps = [...new Set([...run.steps.timings, ...run.rows].map((row) => row.step))].sort((a, b) => a - b);
  const at = steps.indexOf(place.step);
  const to = (step) => step !== undefined && link({ run: run.number, view: "timing", step });
  const rollouts = timing.groups.flatMap((group) => group.rollouts.map((one, position) => ({ ...one, group, position })));
  const known = rollouts.filter((one) => one.calls);
  const end = Math.max(1e-9, ...known.map((one) => Math.max(one.seconds || 0, ...one.calls.map((call) => (call.start || 0) + (call.seconds || 0)))));
  const longest = [...known].sort((a, b) => (b.seconds || 0) - (a.seconds || 0));
  const kinds = new Map();
  for (const one of known) for (const call of one.calls) kinds.set(call.kind, (kinds.get(call.kind) || 0) + (call.seconds || 0));
  const step = timing.seconds;
  const whole = step ? (step.step_seconds || 0) + (step.between_steps_seconds || 0) : 0;
  const rest = step ? step.step_seconds - Object.keys(PARTS).slice(0, 4).reduce((sum, name) => sum + (step[name] || 0), 0) : 0;
  return {
    element: h("div", {}, h("h1", {}, `Times of step ${place.step}`),
      h("p", { class: "near" }, to(steps[at - 1]) && h("a", { href: to(steps[at - 1]) }, `← step ${steps[at - 1]}`), " ", to(steps[at + 1]) && h("a", { href: to(steps[at + 1]) }, `step ${steps[at + 1]} →`), " ", h("a", { href: link({ run: run.number, view: "step", step: place.step }) }, "metrics and groups (s)")),
      h("section", {}, h("h2", {}, "The step"), step ? h("div", { class: "bars" }, [...Object.entries(PARTS).map(([name, label]) => [label, step[name] || 0]), ["everything else", Math.max(0, rest)]].map(([label, value]) => bar([{ kind: "other", name: label, start: 0, seconds: value }], whole || 1, label, value))) : h("p", { class: "dim" }, "The run has no timings of this step."),
        step && h("p", { class: "dim" }, `${seconds(step.step_seconds)} in all${step.tokens_per_second ? `, ${number(Math.round(step.tokens_per_second))} tokens per second` : ""}${step.generation_idle_share !== null && step.generation_idle_share !== undefined ? `, slots free ${Math.round(step.generation_idle_share * 100)}% of the time` : ""}`)),
      h("section", {}, h("h2", {}, "Its recorded rollouts"), known.length
        ? [h("p", {}, `${counted(known.length, "rollout")}; the longest took ${seconds(longest[0].seconds)}. Together: ${[...kinds].map(([kind, value]) => `${kind} ${seconds(value)}`).join(", ")}. Times start with each rollout; the run does not record when that was.`),
          h("p", { class: "legend" }, ["model", "tool", "reward", "other"].map((kind) => h("span", {}, h("i", { class: `key kind-${kind}`, "aria-hidden": "true" }), kind))),
          h("div", { class: "bars" }, longest.slice(0, MOST_BARS).map((one) => bar(one.calls, end, `${nameOf(one.group)}, rollout ${one.position}`, one.seconds, link({ run: run.number, view: "episode", group: one.group.id, rollout: one.position })))),
          longest.length > MOST_BARS && h("p", { class: "dim" }, `${longest.length - MOST_BARS} shorter ones are not shown`)]
        : h("p", { class: "empty" }, "The run has no times of these rollouts: groups that waited in a checkpoint have none."))),
    title: `times of step ${place.step}`, previous: to(steps[at - 1]), next: to(steps[at + 1]),
  };
}
