// Views of a group and of one of its rollouts.

import { EXPECTED, became, badge, breakMeaning, common, headOf, limit, messages, nameOf, pairs, rangeOf, ratio, rewardRange, setting, square } from "./blocks.js";
import { folded, h, long } from "./dom.js";
import { link } from "./route.js";
import { kept } from "./store.js";
import { hints } from "./suspects.js";
import { counted, number, seconds, signed, spread } from "./text.js";

const FOLDED_CALLS = 40;

export function read(place) {
  return kept(`/api/run/${place.run}/group/${place.group}`);
}

// Links to the groups before and after a group, in the order of the list.
export function around(app, run, place) {
  const order = app.order(run, place.params);
  const at = order.findIndex(({ row }) => row.id === place.group);
  const to = (item) => item && link({ run: run.number, view: "group", group: item.row.id }, app.filter(place));
  return { previous: at > 0 ? to(order[at - 1]) : null, next: at >= 0 ? to(order[at + 1]) : null, at, count: order.length };
}

export async function groupView(place, app) {
  const run = await app.run(place);
  const group = await read(place);
  const range = rewardRange(run.rows);
  const filter = app.filter(place);
  const { previous, next, at, count } = around(app, run, place);
  const rewards = group.rollouts.map((one) => one.reward);
  const [best, worst] = group.extremes;
  const answers = group.rollouts.map(lastAnswer);
  const facts = run.rowOf(group.id)?.rollouts || [];
  const age = staleness(run, group);
  const shared = worst === undefined ? 0 : common(answers[best] ?? "", answers[worst] ?? "");
  const cards = group.rollouts.map((rollout, position) => {
    const href = link({ run: run.number, view: "episode", group: group.id, rollout: position }, filter);
    const rank = position === best && worst !== undefined ? "best" : position === worst ? "worst" : null;
    const tokens = link({ run: run.number, view: "tokens", group: group.id, rollout: position }, filter);
    const isExtreme = rank !== null && worst !== undefined && group.differs;
    const mark = isExtreme ? h("p", { class: "parts" }, `↓ from here, best and worst differ`) : null;
    return h("article", { class: "card", "data-position": position },
      h("h3", {}, h("a", { href }, square(rollout, range), ` rollout ${rollout.index}`), rank && badge(rank, rank === "best" ? "good" : "bad")),
      headOf(rollout, run), answered(facts[position]), pairs(rollout.parts), rollout.error && h("p", { class: "problem" }, rollout.error),
      answers[position] !== null && h("div", { class: "answer" }, messages([{ role: "assistant", content: answers[position], tool_calls: lastCalls(rollout) }], { prefix: isExtreme ? shared : 0, mark })),
      h("p", {}, h("a", { href: tokens }, `tokens of rollout ${rollout.index}`)));
  });
  const differs = group.differs && h("p", { class: "parts" }, differenceText(group),
    " ", h("a", { href: link({ run: run.number, view: "tokens", group: group.id, rollout: worst }, filter) }, "show it in the tokens"),
    " · ", h("a", { href: link({ view: "compare" }, { left: `${run.number}.${group.id}.${best}`, right: `${run.number}.${group.id}.${worst}` }) }, "compare their texts"));
  const others = run.rows.filter((row) => row.task === group.task.task_id && row.id !== group.id);
  return {
    element: h("div", {},
      h("h1", {}, `${capital(nameOf(group))}: `, h("span", { class: "task" }, group.task.task_id)),
      h("p", { class: "facts" }, h("a", { href: link({ run: run.number, view: "step", step: group.step }, filter) }, `step ${group.step}`), badge(became(group), EXPECTED.has(group.outcome) ? "" : "bad"), badge(`recorded as ${group.kept}`),
        badge(counted(group.rollouts.length, "rollout")), badge(`reward ${spread(rewards)}`), badge(`solved ${ratio(group.rollouts.map((one) => one.solved))}`), group.weight_version !== null && badge(`version ${group.weight_version}`),
        badgeOfAge(run, age)),
      age > 0 && whyStale(group.waited), whyNoLearning(group), hints(run, group.id),
      near(previous, next, at, count),
      h("section", {}, h("h2", {}, "Task"), pairs(group.task.data) || h("p", { class: "dim" }, "The task has no data.")),
      group.openings.map((opening) => opening && h("section", {}, h("h2", {}, `Prompt of all rollouts${group.openings.length > 1 ? `, role ${opening.role}` : ""}`), messages(opening.messages))),
      h("section", {}, h("h2", {}, "Rollouts"), differs, h("div", { class: "cards" }, cards)),
      others.length > 0 && h("section", {}, h("h2", {}, "The same task at other steps"), h("ul", {}, others.slice(0, 50).map((row) => h("li", {}, h("a", { href: link({ run: run.number, view: "group", group: row.id }, filter) }, `step ${row.step}, ${nameOf(row)}`), ` reward ${spread(row.rewards)} `,
        row.rewards.length > 0 && group.rollouts.length > 0 && h("a", { href: link({ view: "compare" }, { left: `${run.number}.${group.id}.0`, right: `${run.number}.${row.id}.0` }) }, "compare"))))),
      folded("Reward and advantage of each rollout", () => table(group))),
    title: `${nameOf(group)}, step ${group.step}`, previous, next,
    cards: () => [...document.querySelectorAll(".card h3 a")],
  };
}

// Says whether the last text has the task's answer, in color if the solved rollouts should have it, and this one differs.
function answered(facts) {
  if (typeof facts?.answered !== "boolean") return null;
  const isOdd = facts.solved !== null && facts.solved !== facts.answered;
  return h("p", { class: "facts" }, badge(facts.answered ? "has the task's answer" : "without the task's answer", isOdd ? "bad" : ""));
}

export function near(previous, next, at, count) {
  return h("p", { class: "near" }, previous && h("a", { href: previous }, "← previous group (k)"), " ", next && h("a", { href: next }, "next group (j) →"), " ", at >= 0 && h("span", { class: "dim" }, `${at + 1} of ${count} in the list`));
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function staleness(run, group) {
  const metrics = run.steps.metrics.find((row) => row.step === group.step);
  if (!metrics || group.outcome !== "trained" || group.weight_version === null) return null;
  const before = run.steps.metrics.filter((row) => row.step < group.step).at(-1)?.weight_version ?? 0;
  return Math.max(0, before - group.weight_version);
}

function badgeOfAge(run, age) {
  const threshold = setting(run, "training", "staleness_threshold");
  return age !== null && badge(`staleness ${age}${threshold === undefined ? "" : ` (training.staleness_threshold = ${threshold})`}`, age > 0 ? "bad" : "", "weight versions between sampling and training");
}

// Says where a group spent the weight versions between its start and its training.
function whyStale(waited) {
  if (!waited || waited.complete === null || waited.trained === null) return null;
  const { started, complete, trained } = waited;
  return h("p", {}, `Started under version ${started}, complete under version ${complete}, trained under version ${trained}: its rollouts ran during ${counted(complete - started, "weight sync")}, then it waited for training during ${trained - complete}.`);
}

// Says why nothing is learned from a group.
function whyNoLearning(group) {
  const known = group.rollouts.map((one) => one.reward).filter((one) => one !== null);
  if (known.length > 1 && known.every((one) => one === known[0]) && group.outcome !== "validation") return h("p", { class: "problem" }, `All rewards are ${number(known[0])}: nothing is learned by comparing these rollouts.`);
  return null;
}

function differenceText(group) {
  const [trajectory, call, token] = group.differs;
  const where = token < 0 ? `in the prompt of call ${call + 1}` : `at token ${token} of call ${call + 1}`;
  const role = group.rollouts[group.extremes[0]].trajectories.length > 1 ? ` of trajectory ${trajectory + 1}` : "";
  return `Rollout ${group.rollouts[group.extremes[0]].index} (best) and rollout ${group.rollouts[group.extremes[1]].index} (worst) first differ ${where}${role}.`;
}

export function lastAnswer(rollout) {
  const steps = rollout.trajectories.flatMap((one) => one.steps);
  if (!steps.length) return null;
  const last = steps.at(-1);
  return last.response ? (typeof last.response.content === "string" ? last.response.content : "") : last.sampled;
}

function lastCalls(rollout) {
  return rollout.trajectories.flatMap((one) => one.steps).at(-1)?.response?.tool_calls || [];
}

function table(group) {
  const row = (one) => h("tr", {}, h("th", { scope: "row" }, `rollout ${one.index}`), h("td", {}, number(one.reward)), h("td", {}, signed(meanOf(one))), h("td", {}, String(one.trajectories.flatMap((t) => t.steps).reduce((sum, step) => sum + step.tokens, 0))), h("td", {}, one.end));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rewards and advantages" }, h("table", {}, h("thead", {}, h("tr", {}, ["rollout", "reward", "mean advantage", "tokens", "ending"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, group.rollouts.map(row))));
}

function meanOf(rollout) {
  let [total, count] = [0, 0];
  for (const step of rollout.trajectories.flatMap((one) => one.steps)) if (step.advantage) [total, count] = [total + step.advantage[1] * step.tokens, count + step.tokens];
  return count ? total / count : null;
}

export async function episodeView(place, app) {
  const run = await app.run(place);
  const group = await read(place);
  const rollout = group.rollouts[place.rollout];
  if (!rollout) throw new Error(`the group has ${counted(group.rollouts.length, "rollout")}`);
  const filter = app.filter(place);
  const range = rewardRange(run.rows);
  const to = (position, view = "episode") => link({ run: run.number, view, group: group.id, rollout: position }, filter);
  const { previous, next, at, count } = around(app, run, place);
  const several = rollout.trajectories.length > 1;
  const breaks = rollout.trajectories.flatMap((trajectory, number_) => trajectory.steps.flatMap((step, call) => (step.break_reason !== null && call > 0 ? [[number_, call]] : [])));
  return {
    element: h("div", {},
      h("h1", {}, `Rollout ${rollout.index} of ${nameOf(group)}`),
      h("nav", { class: "siblings", "aria-label": "Rollouts of the group" }, group.rollouts.map((one, position) => h("a", { href: to(position), "aria-current": position === place.rollout ? "page" : null, "aria-label": `rollout ${one.index}, reward ${number(one.reward)}` }, square(one, range), String(one.index)))),
      headOf(rollout, run),
      h("p", { class: "near" }, h("a", { href: to(place.rollout, "tokens") }, "tokens (t)"), " ", h("a", { href: link({ run: run.number, view: "group", group: group.id }, filter) }, "group (g)"), " ", h("a", { href: link({ run: run.number, view: "timing", step: group.step }) }, "times of the step (i)")),
      near(previous, next, at, count),
      rollout.error && h("p", { class: "problem" }, rollout.error), hints(run, group.id, place.rollout),
      breaks.length > 0 && h("p", { class: "near" }, breaks.slice(0, 5).map(([number_, call]) => [h("a", { href: breakLink(run, group, place, filter, number_, call) }, `break before call ${call + 1}: its two prompts`), " "])),
      h("section", {}, h("h2", {}, "Why this reward"), pairs({ ...group.task.data, ...rollout.parts }) || h("p", { class: "dim" }, "The task and the reward function give no details.")),
      Object.keys(rollout.metadata).length > 0 && folded("Metadata", () => pairs(rollout.metadata)),
      rollout.trajectories.map((trajectory, number_) => h("section", { class: "trajectory" },
        h("h2", {}, several ? `Role ${trajectory.role}` : "Conversation", several && trajectory.reward !== null && badge(`reward ${number(trajectory.reward)}`, "strong"), !trajectory.trainable && badge("not trainable")),
        conversation(trajectory, group.openings[number_], { run, group, place, filter, number: number_ }))),
      rollout.trajectories.length === 0 && h("p", { class: "dim" }, "The rollout made no model call."),
      rollout.calls && h("section", {}, h("h2", {}, "Times"), waterfall(rollout))),
    title: `rollout ${rollout.index}, ${nameOf(group)}`, previous, next,
    siblings: group.rollouts.map((_, position) => to(position)), position: place.rollout,
  };
}

function conversation(trajectory, opening, where) {
  const calls = trajectory.steps.map((step, at) => () => [
    step.break_reason !== null && breakLine(step, at, where),
    step.edited && h("p", { class: "problem" }, "The workflow changed earlier messages before this call."),
    messages(step.messages),
    step.media.map((media) => h("p", { class: "dim" }, `${media.kind} of ${counted(media.tokens, "token")} at position ${media.start}; the run folder does not have its content`)),
    h("div", { class: "turn" }, factsOf(step, at, trajectory, where.run), answerOf(step)),
  ]);
  const shown = calls.length > FOLDED_CALLS ? [...calls.slice(0, 20).map((make) => make()), folded(`${calls.length - FOLDED_CALLS} calls in between`, () => calls.slice(20, -20).map((make) => h("div", {}, make()))), ...calls.slice(-20).map((make) => make())] : calls.map((make) => make());
  return h("div", { class: "conversation" }, opening && messages(opening.messages), shown);
}

function breakLine(step, at, { run, group, place, filter, number: trajectory }) {
  const isFirst = at === 0;
  return h("div", { class: "break" }, h("span", {}, `segment break: ${step.break_reason}${breakMeaning(step.break_reason)}`),
    !isFirst && h("a", { href: breakLink(run, group, place, filter, trajectory, at) }, "compare the two prompts"));
}

function breakLink(run, group, place, filter, trajectory, call) {
  return link({ run: run.number, view: "break", group: group.id, rollout: place.rollout, call }, { ...filter, trajectory: String(trajectory) });
}

function factsOf(step, at, trajectory, run) {
  const advantage = step.advantage;
  return h("p", { class: "facts small" }, trajectory.steps.length > 1 && badge(`call ${at + 1}`),
    advantage && badge(`advantage ${rangeOf([advantage[0], advantage[2]], signed)}`, advantage[1] > 0 ? "good" : advantage[1] < 0 ? "bad" : ""),
    step.reward !== null && badge(`reward ${number(step.reward)}`), step.token_rewards !== null && badge(`token rewards ${number(step.token_rewards)}`),
    step.weight_version === null ? badge("not sampled by the policy") : badge(`version ${step.weight_version}`),
    step.prompt_tokens + step.tokens > 0 && badge(`${counted(step.prompt_tokens, "token")} in, ${counted(step.tokens, "token")} out`),
    step.finish_reason === "length" && badge(`truncated after ${counted(step.tokens, "token")}${limit(run)}`, "bad"),
    step.control_tokens > 0 && badge(`new text spells ${counted(step.control_tokens, "control token")}`, "bad"),
    step.logprob !== null && badge(`mean log-probability ${number(step.logprob)}`));
}

function answerOf(step) {
  if (step.response) return messages([{ role: "assistant", ...step.response }]);
  return h("article", { class: "message role-assistant" }, h("p", { class: "role" }, "sampled"), step.sampled ? long(step.sampled) : h("p", { class: "dim" }, `${counted(step.tokens, "token")} without text`));
}

// The calls of a rollout as bars on a line of time.
export function waterfall(rollout) {
  const calls = rollout.calls || [];
  const end = Math.max(rollout.seconds || 0, ...calls.map((one) => (one.start || 0) + (one.seconds || 0)), 1e-9);
  return h("div", { class: "bars" }, calls.map((one) => bar([one], end, `${one.kind}${one.name ? ` ${one.name}` : ""}`, one.seconds)));
}

export function bar(calls, end, label, total, href = null) {
  const track = h("span", { class: "track", "aria-hidden": "true" }, calls.map((one) => {
    const piece = h("i", { class: `kind-${["model", "tool", "reward"].includes(one.kind) ? one.kind : "other"}`, title: `${one.kind}${one.name ? ` ${one.name}` : ""}: ${number(one.seconds)} s from ${number(one.start ?? 0)} s on` });
    piece.style.left = `${((one.start || 0) / end) * 100}%`;
    piece.style.width = `${Math.max(0.2, ((one.seconds || 0) / end) * 100)}%`;
    return piece;
  }));
  return h("div", { class: "bar" }, h("span", { class: "label" }, href ? h("a", { href }, label) : label), track, h("span", { class: "num" }, seconds(total)));
}
