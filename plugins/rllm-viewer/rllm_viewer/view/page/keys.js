// The keys of each view. The help is made of the same table.

import { h } from "./dom.js";

export const KEYS = [
  ["j", "next row, group or step", (app) => app.next()],
  ["k", "previous row, group or step", (app) => app.previous()],
  ["Enter", "open the chosen row", null],
  ["n", "next rollout of the group", (app) => app.sibling(1)],
  ["p", "previous rollout of the group", (app) => app.sibling(-1)],
  ["r", "the run", (app) => app.to("run")],
  ["s", "the step", (app) => app.to("step")],
  ["g", "the group", (app) => app.to("group")],
  ["e", "the conversation of the rollout", (app) => app.to("episode")],
  ["t", "the tokens of the rollout", (app) => app.to("tokens")],
  ["i", "the times of the step", (app) => app.to("timing")],
  ["x", "compare", (app) => app.compare()],
  ["u", "up: from a rollout to its group, its step, its run", (app) => app.up()],
  ["1 to 9", "tokens: the measure that colors them", null],
  ["d", "tokens: the first token in which best and worst rollout differ", (app) => app.view?.difference?.()],
  ["v", "tokens: as text or as a table", (app) => app.view?.toggle?.()],
  ["/", "search texts", (app) => app.search()],
  ["f", "filters", (app) => app.view?.filter?.()],
  ["c", "copy as link, JSON, Python or command", (app) => app.openCopy()],
  ["l", "light or dark", (app) => app.theme()],
  ["?", "this help", (app) => app.help()],
  ["Esc", "close a dialog, leave a field", null],
];

// Returns whether a key is typed into something.
function isTyping(target) {
  return Boolean(target.closest?.("input, select, textarea, [contenteditable]"));
}

export function listen(app) {
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && isTyping(event.target)) event.target.blur();
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || !app.hasKeys || document.querySelector("dialog[open]")) return;
    if (/^[1-9]$/.test(event.key) && app.view?.measure) {
      app.view.measure(Number(event.key) - 1);
      return;
    }
    const found = KEYS.find(([key, , act]) => key === event.key && act);
    if (!found) return;
    event.preventDefault();
    found[2](app);
  });
}

export function help(app) {
  const off = h("input", { type: "checkbox", checked: app.hasKeys, onchange: () => { app.hasKeys = off.checked; } });
  const rows = KEYS.map(([key, what]) => h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, key)), h("td", {}, what)));
  const words = [
    ["group", "the rollouts of one task; an advantage compares them with each other"],
    ["rollout", "one run of the workflow on a task, with a reward"],
    ["step", "an optimizer step, in which the groups of a batch are trained"],
    ["advantage", "how much better a rollout did than the others of its group: above 0, its tokens become more likely"],
    ["staleness", "weight versions between sampling and training; 0 on policy"],
    ["segment break", "the prompt of a call did not continue the tokens before it; the tokens after it are a training sample of their own"],
    ["correction", "weight of a token that corrects for the difference between the sampling policy and the policy in training"],
    ["recorded as", "why the run kept the group: the first, best, worst or most divided of its step, an example of a reason, or a validation"],
  ];
  const faults = [
    ["a reward that contradicts the answer", "In the group, each card says whether its text contains the task's answer. If the best rollout lacks it, or the worst has it, the rewards are swapped, or the reward function is wrong."],
    ["a reward that is too high", "Sort the list by mean, or filter by a reward above that of a correct answer. Look at the parts of the reward, and read the answer."],
    ["a template that changes earlier answers", "Filter by segment break. A dashed line in the rollout marks the break, with a link that compares the two prompts token by token."],
    ["truncated answers", "Filter by truncated, and look at the curve of truncated_share."],
    ["stale groups", "Look at the curve of staleness_max. Each group shows its weight version and its staleness."],
    ["training on the wrong tokens", "Open the tokens, and color them by mask or advantage: control tokens have a frame, and tokens that are not trained have no color."],
  ];
  const dialog = h("dialog", { class: "dialog", "aria-labelledby": "help-title" },
    h("p", { class: "top" }, h("button", { type: "button", autofocus: true, onclick: () => dialog.close() }, "Close")), h("h2", { id: "help-title" }, "Help"),
    h("p", {}, "A run leads to its steps, a step to its groups, a group to its rollouts, and a rollout to its tokens. Start with the view of the run: it lists the problems that its metrics show, with their causes. Worth a look lists rollouts and groups whose numbers contradict each other; each entry is a link, and is repeated where it leads. These are hints: read the answers to find the cause."),
    h("p", {}, "Click a curve to open its step. In the list of groups, click a column to sort by it. The address keeps the filters and the search."),
    h("h2", {}, "Possible faults, and where to look"), h("dl", { class: "pairs" }, faults.map(([what, where]) => [h("dt", {}, what), h("dd", {}, where)])),
    h("h2", {}, "Words"), h("dl", { class: "pairs" }, words.map(([word, meaning]) => [h("dt", {}, word), h("dd", {}, meaning)])),
    h("h2", {}, "Signs"), h("p", {}, "A square is a rollout: orange for low rewards of the run, blue for high ones, ✓ if it solved the task, × if it failed. Characters that cannot be seen are shown as ", h("span", { class: "esc" }, "\\u202e"), "; in tokens, ↵ is a line break and → a tab."),
    h("h2", {}, "Keys"), h("label", { class: "check" }, off, "these keys are on"), h("table", { class: "keys" }, h("tbody", {}, rows)));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
