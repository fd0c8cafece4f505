// The differences of two texts, word by word.

const MOST_CELLS = 4e6;

// Returns parts [kind, text] with the kinds "same", "removed" and "added".
export function differences(left, right) {
  const [a, b] = [words(left), words(right)];
  let start = 0;
  while (start < Math.min(a.length, b.length) && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < Math.min(a.length, b.length) - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const middle = between(a.slice(start, a.length - end), b.slice(start, b.length - end));
  return joined([...a.slice(0, start).map((one) => ["same", one]), ...middle, ...a.slice(a.length - end).map((one) => ["same", one])]);
}

function words(text) {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];
}

function between(a, b) {
  const whole = () => [...a.map((one) => ["removed", one]), ...b.map((one) => ["added", one])];
  if (!a.length || !b.length || a.length * b.length > MOST_CELLS) return whole();
  const width = b.length + 1;
  const lengths = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      lengths[i * width + j] = a[i] === b[j] ? lengths[(i + 1) * width + j + 1] + 1 : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
  const found = [];
  let [i, j] = [0, 0];
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) {
      found.push(["same", a[i]]);
      i += 1;
      j += 1;
    } else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) found.push(["removed", a[i++]]);
    else found.push(["added", b[j++]]);
  }
  return [...found, ...a.slice(i).map((one) => ["removed", one]), ...b.slice(j).map((one) => ["added", one])];
}

// Returns how many items have to be dropped from the start of a list so that the rest of it begins another one; all of
// them if no rest does. Takes time in proportion to both lists (the prefix function of Knuth, Morris and Pratt).
export function dropped(before, after) {
  const fallback = new Uint32Array(after.length + 1);
  for (let at = 1, length = 0; at < after.length; at++) {
    while (length && after[at] !== after[length]) length = fallback[length];
    if (after[at] === after[length]) length += 1;
    fallback[at + 1] = length;
  }
  let length = 0;
  for (const one of before) {
    while (length && (length === after.length || one !== after[length])) length = fallback[length];
    if (after.length && one === after[length]) length += 1;
  }
  return before.length - length;
}

function joined(parts) {
  const found = [];
  for (const [kind, text] of parts) {
    if (found.at(-1)?.[0] === kind) found.at(-1)[1] += text;
    else found.push([kind, text]);
  }
  return found;
}
