// Views that compare: runs with each other, two rollouts, and the prompts before and after a break.

import { breakMeaning, headOf, messages, nameOf } from "./blocks.js";
import { chart } from "./chart.js";
import { differences, dropped } from "./differences.js";
import { h } from "./dom.js";
import { lastAnswer, read } from "./group_view.js";
import { link } from "./route.js";
import { get, kept } from "./store.js";
import { counted, number, share } from "./text.js";
import { Sequence } from "./tokens.js";

const CONTEXT = 60;
const SAID_TOKENS = 12;

export async function compareView(place, app) {
  if (place.params.left && place.params.right) return rolloutsView(place, app);
  const numbers = (place.params.runs || app.runs.map((run) => run.number).join(",")).split(",").map(Number).filter((one) => app.runs[one]);
  const runs = numbers.map((one) => app.runs[one]);
  const choose = h("fieldset", { class: "line" }, h("legend", {}, "Runs"), app.runs.map((run) => h("label", { class: "check" }, h("input", {
    type: "checkbox", checked: numbers.includes(run.number), onchange: (event) => app.go({ view: "compare" }, { runs: (event.target.checked ? [...numbers, run.number].sort((a, b) => a - b) : numbers.filter((one) => one !== run.number)).join(",") }),
  }), run.summary.name)));
  if (runs.length < 2) return { element: h("div", {}, h("h1", {}, "Compare runs"), choose, h("p", { class: "empty" }, app.runs.length < 2 ? "Only one run is open. Start the viewer with several: rllm-core view RUN RUN" : "Choose at least two runs.")), title: "compare" };
  const found = await get(`/api/compare?runs=${numbers.join(",")}`);
  const names = runs.map((run, at) => `${String.fromCharCode(65 + at)}: ${run.summary.name}`);
  const section = (title, rows, form = text) => Object.keys(rows).length > 0 ? h("section", {}, h("h2", {}, title), table(title, names, rows, form)) : h("section", {}, h("h2", {}, title), h("p", { class: "dim" }, "the same"));
  return {
    element: h("div", {}, h("h1", {}, "Compare runs"), choose,
      found.curve && chart({ title: found.curve, lines: found.curves.map((points, at) => ({ label: names[at], points: points.filter(([, value]) => typeof value === "number") })) }),
      section("Settings that differ", found.settings), section("Versions that differ", found.versions),
      Object.entries(found.validations).map(([measure, rows]) => section(`Validation: ${measure}`, Object.fromEntries(rows.map(([step, values]) => [`step ${step}`, values])), measure === "solved" ? share : number)),
      section("Metrics of the last step", found.metrics, number), h("p", {}, runs.map((run) => [h("a", { href: link({ run: run.number, view: "run" }) }, `open ${run.summary.name}`), " "]))),
    title: "compare runs",
  };
}

function text(value) {
  return value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value);
}

function table(title, names, rows, form) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, h("table", {}, h("thead", {}, h("tr", {}, h("td", {}), names.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, Object.entries(rows).map(([name, values]) => h("tr", {}, h("th", { scope: "row" }, name), values.map((value) => h("td", {}, form(value))))))));
}

function placeOf(written) {
  const [run, group, rollout] = (written || "").split(".").map(Number);
  return { run, group, rollout };
}

async function rolloutsView(place, app) {
  const sides = [placeOf(place.params.left), placeOf(place.params.right)];
  const runs = await Promise.all(sides.map((side) => app.run(side)));
  const groups = await Promise.all(sides.map(read));
  const rollouts = groups.map((group, at) => group.rollouts[sides[at].rollout]);
  if (rollouts.some((one) => !one)) throw new Error("there is no such rollout");
  const other = (at, position) => link({ view: "compare" }, { left: place.params.left, right: place.params.right, [at ? "right" : "left"]: `${sides[at].run}.${groups[at].id}.${position}` });
  const head = (at) => h("div", { class: "card" }, h("h2", {}, h("a", { href: link({ run: sides[at].run, view: "episode", group: groups[at].id, rollout: sides[at].rollout }) }, `${at ? "Right" : "Left"}: rollout ${rollouts[at].index}, ${nameOf(groups[at])}, step ${groups[at].step}`)), h("p", { class: "task" }, groups[at].task.task_id), headOf(rollouts[at], runs[at]),
    h("p", { class: "near" }, groups[at].rollouts.map((one, position) => [position === sides[at].rollout ? h("b", {}, String(one.index)) : h("a", { href: other(at, position), "aria-label": `rollout ${one.index} on the ${at ? "right" : "left"}` }, String(one.index)), " "])));
  const texts = rollouts.map((one, at) => textOf(one, groups[at]));
  return {
    element: h("div", {}, h("h1", {}, "Compare two rollouts"), h("div", { class: "cards two" }, head(0), head(1)),
      h("section", {}, h("h2", {}, "Conversations"), shown(differences(texts[0], texts[1]))),
      h("section", {}, h("h2", {}, "Last answers"), h("div", { class: "cards two" }, rollouts.map((one) => h("div", { class: "card" }, messages([{ role: "assistant", content: lastAnswer(one) ?? "(no model call)" }])))))),
    title: "compare two rollouts",
  };
}

// Everything that was said in a rollout, as one text.
function textOf(rollout, group) {
  const lines = [];
  rollout.trajectories.forEach((trajectory, number_) => {
    const opening = group.openings[number_]?.messages || [];
    for (const message of [...opening, ...trajectory.steps.flatMap((step) => [...step.messages, step.response || { role: "sampled", content: step.sampled }])]) {
      const content = typeof message.content === "string" ? message.content : JSON.stringify(message.content ?? "");
      const calls = (message.tool_calls || []).map((one) => `${one.function?.name}(${one.function?.arguments})`);
      lines.push(`[${message.role ?? "assistant"}] ${[content, ...calls].filter(Boolean).join("\n")}`);
    }
  });
  return lines.join("\n");
}

function shown(found) {
  if (found.every(([kind]) => kind === "same")) return h("p", { class: "dim" }, "They are the same.");
  return h("pre", { class: "text diff" }, found.map(([kind, part]) => (kind === "same" ? part : h(kind === "removed" ? "del" : "ins", { "aria-label": kind === "removed" ? "only on the left" : "only on the right" }, part))));
}

// Shows where the prompt of a call does not continue the tokens before it.
export async function breakView(place, app) {
  const run = await app.run(place);
  const group = await read(place);
  const answer = await kept(`/api/run/${place.run}/tokens/${place.group}/${place.rollout}`);
  const trajectory = Number(place.params.trajectory || 0);
  const sequences = answer.sequences.map((_, at) => new Sequence(answer, at)).filter((one) => one.trajectory === trajectory);
  const at = sequences.findIndex((one) => one.spans[0]?.call === place.call);
  if (at < 1) throw new Error(`no segment begins at call ${place.call + 1}`);
  const [before, after] = [sequences[at - 1], sequences[at]];
  const stop = after.spans[0].start;
  let same = 0;
  while (same < Math.min(before.length, stop) && before.ids[same] === after.ids[same]) same += 1;
  let end = 0;
  while (end < Math.min(before.length, stop) - same && before.ids[before.length - 1 - end] === after.ids[stop - 1 - end]) end += 1;
  const lost = dropped(before.ids.slice(same, before.length), after.ids.slice(same, stop));
  const isDrop = lost > 0 && same + lost < before.length;
  const side = (title, sequence, length, until) => h("section", { class: "card" }, h("h2", {}, title), h("p", { class: "dim" }, counted(length, "token")),
    h("div", { class: "flow" }, h("p", { class: "dim" }, `${counted(same, "token")} are the same`), tokens(sequence, Math.max(0, same - CONTEXT), Math.min(length, same + 2 * CONTEXT), same, until, isDrop)));
  const back = link({ run: run.number, view: "episode", group: group.id, rollout: place.rollout }, app.filter(place));
  return {
    element: h("div", {}, h("h1", {}, `Break before call ${place.call + 1} of rollout ${group.rollouts[place.rollout].index}`),
      h("p", {}, "reason ", h("code", {}, after.breakReason ?? "unknown"), `${breakMeaning(after.breakReason)}. The prompt of call ${place.call + 1} should begin with the prompt and the answer of call ${place.call}, token for token. `, h("a", { href: back }, "conversation (e)")),
      h("p", { class: "parts" }, same === before.length ? "The new prompt begins with all of them, but a new segment was started anyway." : same === stop ? "The new prompt ends before these tokens do." : `They first differ at token ${same}: `, same < before.length && h("code", {}, beginning(before, same, before.length)), same < before.length && same < stop && " became ", same < stop && h("code", {}, beginning(after, same, stop)),
        isDrop && `. The new prompt lacks ${counted(lost, "token")}, which are struck out below, and continues with those after them.`),
      h("div", { class: "cards two" }, side(`Prompt and answer of call ${place.call}`, before, before.length, isDrop ? same + lost : before.length - end), side(`Prompt of call ${place.call + 1}`, after, stop, isDrop ? same : stop - end))),
    title: `break before call ${place.call + 1}`,
  };
}

// The text of the first tokens of a place, to tell it from others.
function beginning(sequence, start, stop) {
  const end = Math.min(stop, start + SAID_TOKENS);
  const text = Array.from({ length: end - start }, (_, place) => sequence.shown(start + place)).join("");
  return `${text.replaceAll("\n", "↵")}${end < stop ? "…" : ""}`;
}

// Shows tokens, with those in [from, until) marked, as struck out if they were dropped.
function tokens(sequence, start, stop, from, until, isDrop) {
  return h("div", { class: "chunk" }, Array.from({ length: stop - start }, (_, place) => {
    const at = start + place;
    const isMarked = at >= from && at < until;
    return h(isMarked && isDrop ? "del" : "span", { class: `tok ${isMarked ? "s3" : "none"}${sequence.isControl(at) ? " control" : ""}${at === from ? " differs" : ""}`, "data-id": String(sequence.ids[at]) }, sequence.shown(at).replaceAll("\n", "↵\n"));
  }));
}
