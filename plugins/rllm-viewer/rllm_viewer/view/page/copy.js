// Copies what is shown as a link, as JSON, as Python or as a command of the terminal.

import { announce, h } from "./dom.js";
import { get, isFile } from "./store.js";
import { pretty, quoted } from "./text.js";

// Returns the ways to copy a place: [name, function that returns the text].
export function ways(place, runs) {
  const run = runs[place.run];
  const found = [["link", async () => location.href]];
  if (!run) return found;
  const path = run.summary.path;
  const row = place.group === undefined ? null : run.rowOf(place.group);
  found.push(["JSON", async () => pretty(await jsonOf(place, run))]);
  found.push(["Python", async () => pythonOf(place, path)]);
  found.push(["command", async () => commandOf(place, path, row)]);
  return found;
}

async function jsonOf(place, run) {
  if (place.rollout !== undefined && !isFile) return get(`/api/run/${place.run}/episode/${place.group}/${place.rollout}`);
  if (place.group !== undefined) return get(`/api/run/${place.run}/group/${place.group}`);
  if (place.step !== undefined) return { metrics: run.steps.metrics.find((row) => row.step === place.step) ?? null, groups: run.rows.filter((row) => row.step === place.step) };
  return { ...run.summary, groups: run.rows };
}

function pythonOf(place, path) {
  const lines = ["from pathlib import Path", ""];
  if (place.group === undefined) {
    lines.push("from rllm_core.run_folder.recorded import index_of", "", `run = Path(${JSON.stringify(path)})`);
    lines.push(place.step === undefined ? "entries = index_of(run)" : `entries = [entry for entry in index_of(run) if entry.step == ${place.step}]`);
  } else {
    lines.push("from rllm_core.run_folder.recorded import group_at, index_of", "", `run = Path(${JSON.stringify(path)})`);
    lines.push(`group = group_at(run, next(entry for entry in index_of(run) if entry.offset == ${place.group}))`);
    if (place.rollout !== undefined) lines.push(`episode = group.rollouts[${place.rollout}].episode`);
  }
  return `${lines.join("\n")}\n`;
}

function commandOf(place, path, row) {
  const words = ["rllm-core", "show", quoted(path)];
  if (row) {
    if (row.group === null) words.push("--step", row.step, "--task", quoted(row.task));
    else words.push("--group", row.group);
    if (place.rollout !== undefined) words.push("--rollout", row.rollouts?.[place.rollout]?.index ?? place.rollout);
    if (place.view === "tokens") words.push("--tokens");
  } else if (place.step !== undefined) words.push("--step", place.step);
  return words.join(" ");
}

export async function copy(name, make) {
  const text = await make();
  try {
    await navigator.clipboard.writeText(text);
    announce(`copied as ${name}`);
  } catch {
    const area = h("textarea", { rows: "12", readonly: true, "aria-label": `${name} to copy` });
    area.value = text;
    const dialog = h("dialog", { class: "dialog", "aria-label": "Copy" }, h("p", {}, "The browser does not let the page copy; copy this text:"), area, h("button", { type: "button", onclick: () => dialog.close() }, "Close"));
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
    area.select();
  }
}
