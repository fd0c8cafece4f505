// Colors are 16 classes from orange (s0) to blue (s15), which most people with a color vision deficiency tell apart.

export const STEPS = 16;

export function classOf(place) {
  return `s${Math.max(0, Math.min(STEPS - 1, Math.floor(place * STEPS)))}`;
}

// Low to high, such as rewards.
export function between(value, low, high) {
  if (value === null || value === undefined) return "none";
  return classOf(high > low ? (value - low) / (high - low) : 0.99);
}

// Around a neutral number: orange below, blue above, no color at it.
export function around(value, neutral, reach) {
  if (value === null || value === undefined) return "none";
  if (Math.abs(value - neutral) < 1e-12) return "zero";
  return classOf(0.5 + Math.max(-0.5, Math.min(0.499, (value - neutral) / (2 * reach))));
}

// Only the orange half: 0 has no color, and `most` is strong.
export function upTo(value, most) {
  if (value === null || value === undefined) return "none";
  if (value <= most * 0.02) return "zero";
  return classOf(0.499 * (1 - Math.min(1, value / most)));
}

// What can be shown of each token: where its number is, how it is colored, and what the colors mean.
export const TOKEN_MEASURES = {
  advantage: {
    label: "advantage",
    color: (value, { reach }) => around(value, 0, reach || 1),
    legend: [["s0", "orange, below 0: made less likely"], ["s15", "blue, above 0: made more likely"], ["zero", "no color: 0, or not trained"]],
  },
  logprob: {
    label: "log-probability",
    color: (value) => upTo(value === null ? null : 1 - Math.exp(value), 1),
    legend: [["s0", "orange: the policy that sampled found it unlikely"]],
  },
  trainer: {
    label: "trainer's log-probability",
    color: (value) => upTo(value === null ? null : 1 - Math.exp(value), 1),
    legend: [["s0", "orange: unlikely under the weights before the step"]],
  },
  ratio: {
    label: "ratio",
    color: (value) => around(value === null ? null : Math.log2(Math.max(value, 1e-6)), 0, 1),
    legend: [["s0", "orange: the trainer finds it half as likely as sampling did, or less"], ["s15", "blue: twice as likely, or more"], ["zero", "no color: the same"]],
  },
  correction: {
    label: "correction",
    color: (value) => around(value === null ? null : Math.log2(Math.max(value, 1e-6)), 0, 1),
    legend: [["s0", "orange: weight of the off-policy correction of 0.5 or less"], ["s15", "blue: of 2 or more"], ["zero", "no color: 1"]],
  },
  mask: {
    label: "mask",
    color: (value) => (value === 2 ? "s14" : value === 1 ? "s3" : "none"),
    legend: [["s14", "blue: trained"], ["s3", "orange: sampled, but not trained"], ["zero", "no color: prompt, tool result or template"]],
  },
  entropy: {
    label: "entropy",
    color: (value, { reach }) => upTo(value, reach || 1),
    legend: [["s0", "orange: the policy was undecided"]],
  },
  version: {
    label: "weight version",
    color: (value, { low, high }) => between(value, low, high),
    legend: [["s0", "orange: the oldest weights of the rollout"], ["s15", "blue: the latest"]],
  },
  reward: {
    label: "token reward",
    color: (value, { reach }) => around(value, 0, reach || 1),
    legend: [["s0", "orange: below 0"], ["s15", "blue: above 0"]],
  },
};
