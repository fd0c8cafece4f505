// The data of the page: asked of the server, or part of the file if the page was written to one.

const KEPT = 24;
const embedded = document.getElementById("data");
export const isFile = embedded !== null;

let content = null;
const answers = new Map();

async function contentOfFile() {
  const bytes = Uint8Array.from(atob(embedded.textContent.trim()), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

export class Failed extends Error {}

// Returns the answer to a path.
export async function get(path) {
  if (isFile) {
    content = content || contentOfFile();
    const found = (await content)[path];
    if (found === undefined) throw new Failed("This file does not have that part of the run. Open the run with: rllm-core view RUN");
    return found;
  }
  let response;
  try {
    response = await fetch(path);
  } catch {
    throw new Failed("The viewer no longer answers. Start it again in the terminal with rllm-core view, and open the address that it prints.");
  }
  const answer = await response.json();
  if (!response.ok) throw new Failed(answer.error);
  return answer;
}

// Like `get`, for answers that do not change; keeps the latest ones.
export function kept(path) {
  const known = answers.get(path);
  answers.delete(path);
  const answer = known || get(path);
  answers.set(path, answer);
  if (!known) answer.catch(() => answers.delete(path));
  while (answers.size > KEPT) answers.delete(answers.keys().next().value);
  return answer;
}

const FAST = 300;
export const SLOW = 2000;
const IDLE = 15000;

// One run: its groups and steps, which grow as long as it is running.
export class Run {
  constructor(number, summary) {
    this.number = number;
    this.summary = summary;
    this.about = null;
    this.rows = [];
    this.steps = { metrics: [], timings: [], validations: [] };
    this.brokenLines = {};
    this.broken = new Set();
    this.read = 0;
    this.size = 0;
    this.isListed = false;
    this.version = 0;
    this.listeners = new Set();
    this._known = new Map();
    this._epoch = 0;
    this._since = 0;
    this._places = { metrics: 0, timings: 0, events: 0 };
    this._followed = false;
  }

  // Calls a function whenever the run has something new; returns a function that ends this.
  listen(listener) {
    this.listeners.add(listener);
    this.follow();
    return () => this.listeners.delete(listener);
  }

  async ready() {
    if (!this.isListed) await this._update();
    this.follow();
  }

  follow() {
    if (this._followed || isFile) return;
    this._followed = true;
    const again = async () => {
      if (!document.hidden) {
        try {
          await this._update();
          this.problem = null;
        } catch (error) {
          if (!(error instanceof Failed)) throw error;
          this.problem = error.message;
          this._tell();
        }
      }
      setTimeout(again, this.problem ? SLOW : this.read < this.size ? FAST : this.summary.status === "running" ? SLOW : IDLE);
    };
    setTimeout(again, this.read < this.size ? FAST : SLOW);
  }

  async _update() {
    const groups = await get(isFile ? `/api/run/${this.number}/groups` : `/api/run/${this.number}/groups?epoch=${this._epoch}&since=${this._since}`);
    if (groups.epoch !== this._epoch) {
      // A resumed run has been cut back to its checkpoint: what was read of the lost steps and groups is wrong.
      this._known.clear();
      this.rows = [];
      this.steps = { metrics: [], timings: [], validations: [] };
      this.brokenLines = {};
      this._places = { metrics: 0, timings: 0, events: 0 };
      answers.clear();
    }
    let isNew = groups.rows.length > 0 || groups.epoch !== this._epoch || !this.isListed || groups.read !== this.read;
    this._epoch = groups.epoch;
    this._since = groups.next;
    this.read = groups.read;
    this.size = groups.size;
    this.broken = new Set(groups.broken);
    for (const row of groups.rows) this._known.set(row.id, row);
    if (groups.rows.length) this.rows = [...this._known.values()].sort((a, b) => a.id - b.id);
    const { metrics, timings, events } = this._places;
    const query = isFile ? "" : `?metrics=${metrics}&timings=${timings}&events=${events}`;
    const steps = await get(`/api/run/${this.number}/steps${query}`);
    for (const name of ["metrics", "timings", "validations"]) {
      const found = steps[name];
      if (found.is_new) this.steps[name] = [];
      this.steps[name].push(...found.rows);
      const file = name === "validations" ? "events" : name;
      this.brokenLines[file] = (found.is_new ? 0 : this.brokenLines[file] || 0) + found.broken;
      this._places[file] = found.next;
      isNew = isNew || found.rows.length > 0 || found.is_new;
    }
    if (!this.about || (isNew && this.isListed)) {
      this.about = await get(`/api/run/${this.number}`);
      if (!isFile && this.isListed) this.summary = (await get("/api/runs"))[this.number];
    }
    this.isListed = true;
    if (isNew) this._tell();
  }

  _tell() {
    this.version += 1;
    for (const listener of this.listeners) listener(this);
  }

  rowOf(identity) {
    return this._known.get(identity);
  }
}

// Searches the texts of a run; calls back with the hits so far. Returns when it is done or aborted.
export async function search(run, filter, signal, found) {
  const hits = new Map();
  if (isFile) return searchFile(run, filter, hits, found);
  const query = new URLSearchParams({ q: filter.q, regex: filter.regex || "0", exact: filter.exact || "0" });
  const response = await fetch(`/api/run/${run.number}/search?${query}`, { signal });
  if (!response.ok) throw new Failed((await response.json()).error);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return hits;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    let searched = null;
    for (const line of lines) {
      const one = JSON.parse(line);
      if (one.error) throw new Failed(one.error);
      if (one.id !== undefined) hits.set(`${one.id}.${one.rollout}`, one);
      else searched = one;
    }
    if (searched || hits.size) found(hits, searched?.searched ?? null, Boolean(searched?.done));
  }
}

// The server compiles a regular expression of Python; this one is of JavaScript.
async function searchFile(run, filter, hits, found) {
  const flags = filter.exact === "1" ? "u" : "iu";
  let pattern;
  try {
    pattern = new RegExp(filter.regex === "1" ? filter.q : filter.q.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), flags);
  } catch (error) {
    throw new Failed(error.message);
  }
  for (const row of run.rows) {
    const group = await get(`/api/run/${run.number}/group/${row.id}`);
    const shared = [...textsIn(group.task), ...group.openings.flatMap((one) => (one ? ofMessages(one.messages) : []))];
    group.rollouts.forEach((rollout, at) => {
      const steps = rollout.trajectories.flatMap((one) => one.steps);
      const own = steps.flatMap((step) => [...ofMessages(step.messages), ...ofMessages([step.response]), ...textsIn(step.sampled)]);
      let match = null;
      for (const text of [...own, ...textsIn(rollout.error), ...shared]) match = match || pattern.exec(text);
      if (match) hits.set(`${row.id}.${at}`, { id: row.id, rollout: at, where: "", before: "", found: match[0], after: "", places: 1 });
    });
  }
  found(hits, run.size, true);
  return hits;
}

function ofMessages(messages) {
  return messages.flatMap((message) => textsIn({ ...message, role: null }));
}

// Returns the texts in JSON data, without the names of its fields.
function textsIn(value) {
  if (value === null || value === undefined) return [];
  return typeof value === "object" ? Object.values(value).flatMap(textsIn) : [String(value)];
}
