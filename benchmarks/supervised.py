"""Supervised training compared with the entropy of its data, and solve rates of distilled students.

    python -m benchmarks.supervised
    python -m benchmarks.supervised --parts sft --seeds 0 1 2

The starter model learns conversations of a stochastic grammar, whose entropy per token is known exactly, with
``rllm-core train``. ``sft_over_entropy`` is the negative log-likelihood per token of held-out conversations divided by
that entropy, for the worst seed. Then a starter model trained on ``sort`` teaches an untrained one, synchronously and
asynchronously. ``distill_solved_min`` and ``distill_async_solved_min`` are the worst held-out solve rates.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning import measured
from benchmarks.peer_environments import SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run

CONVERSATIONS = 1000
HELD_OUT = 500
TURNS = 2
DIGITS = 8
STEPS = {1: 0.5, 3: 0.3, 4: 0.2}
"""Distances from one digit to the next, with their probabilities."""
STOP = 0.1
"""Probability that a walk ends after a digit."""

SFT = """
workflow = "sft"

[training]
steps = 280
seed = {seed}

[optimizer]
learning_rate = 3e-3

[local]
starter_seed = {seed}

[sft]
train = "{folder}/train.jsonl"
validation = "{folder}/test.jsonl"
"""

DISTILL = """
workflow = "sort"

[training]
steps = 120
seed = {seed}
groups_per_step = 32
rollouts_per_group = 4

[algorithm]
name = "distill"

[teacher]
engine = "local"
model = "{teacher}"

[local]
starter_seed = {seed}
"""

ASYNCHRONOUS = ("training.staleness_threshold=1", "local.generation=separated", "algorithm.loss=ppo_clip")


def walk(rng: random.Random, start: int) -> tuple[str, float]:
    """Draws a random walk; returns it with its log-probability."""
    digits, place, logprob = "", start, 0.0
    while True:
        [far] = rng.choices(list(STEPS), list(STEPS.values()))
        place, logprob = (place + far) % DIGITS, logprob + math.log(STEPS[far])
        digits += str(place)
        if rng.random() < STOP:
            return digits, logprob + math.log(STOP)
        logprob += math.log(1 - STOP)


def conversation(rng: random.Random) -> tuple[list[dict[str, str]], float, int]:
    """Draws messages; returns them with the assistant's log-probability and token count, including stop tokens."""
    messages, logprob, tokens = [], 0.0, 0
    for _ in range(TURNS):
        start = rng.randrange(DIGITS)
        digits, its_logprob = walk(rng, start)
        messages += [{"role": "user", "content": f"{start}"}, {"role": "assistant", "content": digits}]
        logprob, tokens = logprob + its_logprob, tokens + len(digits) + 1
    return messages, logprob, tokens


def entropy_per_token() -> float:
    """Returns the exact nats per token: those of the first digit, then of 1 / STOP later tokens on average."""
    step = -sum(p * math.log(p) for p in STEPS.values())
    later = -STOP * math.log(STOP) - (1 - STOP) * math.log(1 - STOP) + (1 - STOP) * step
    return (step + later / STOP) / (1 + 1 / STOP)


def write_rows(path: Path, count: int, seed: int) -> float:
    """Writes conversations to a file; returns their negative log-likelihood per token under the grammar."""
    rng, logprob, tokens = random.Random(seed), 0.0, 0
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages, its_logprob, its_tokens = conversation(rng)
            file.write(json.dumps({"messages": messages}) + "\n")
            logprob, tokens = logprob + its_logprob, tokens + its_tokens
    return -logprob / tokens


def train(run_file: str | None, folder: Path, name: str, *overrides: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Trains in a separate process; returns summary and seconds. Without a run file, trains workflow ``sort``."""
    target = "sort"
    if run_file is not None:
        path = folder / f"{name}.toml"
        path.write_text(run_file, encoding="utf-8")
        target = str(path)
    run_dir = folder / name
    command = [sys.executable, "-m", "rllm_core", "train", target, "--backend", "local", "--run-dir", str(run_dir)]
    for override in overrides:
        command += ["-o", override]
    seconds = measured(command, {**os.environ, **SETTINGS})
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return summary, seconds


def learn_grammar(seed: int, folder: Path) -> Row:
    """Runs supervised training on one seed."""
    write_rows(folder / "train.jsonl", CONVERSATIONS, 2 * seed)
    of_grammar = write_rows(folder / "test.jsonl", HELD_OUT, 2 * seed + 1)
    summary, seconds = train(SFT.format(seed=seed, folder=folder), folder, "sft")
    before, after = (summary["validation"][at]["nll_per_token"] for at in (0, -1))
    return {
        "kind": "sft",
        "seed": seed,
        "nll_before": before,
        "nll_after": after,
        "nll_of_grammar": of_grammar,
        "entropy": entropy_per_token(),
        **seconds,
    }


def newest_model(run_dir: Path) -> Path:
    """Returns the model folder in a run's latest checkpoint."""
    return max((run_dir / "checkpoints").iterdir()) / "backend"


def distil(seed: int, folder: Path) -> list[Row]:
    """Trains a teacher, then its students."""
    own = (f"training.seed={seed}", f"local.starter_seed={seed}")
    summary, seconds = train(None, folder, "teacher", *own)
    rows = [{"kind": "teacher", "seed": seed, "solved": summary["validation"][-1]["solved"], **seconds}]
    text = DISTILL.format(seed=seed, teacher=newest_model(folder / "teacher"))
    for mode, overrides in (("synchronous", ()), ("asynchronous", ASYNCHRONOUS)):
        summary, seconds = train(text, folder, mode, *overrides)
        before, after = (summary["validation"][at]["solved"] for at in (0, -1))
        rows.append(
            {"kind": "distill", "mode": mode, "seed": seed, "solved_before": before, "solved": after, **seconds}
        )
    return rows


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Measures the selected parts on every seed."""
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as temporary:
            rows: list[Row] = []
            if "sft" in options.parts:
                rows.append(learn_grammar(seed, Path(temporary)))
            if "distill" in options.parts:
                rows += distil(seed, Path(temporary))
        for row in rows:
            trials.add(row)
            print(json.dumps(row), file=sys.stderr, flush=True)


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures of the worst seeds."""
    found: Figures = {}
    learned, taught = of_kind(rows, "sft"), of_kind(rows, "distill")
    if learned:
        found["sft_over_entropy"] = round(max(row["nll_after"] / row["entropy"] for row in learned), 4)
        found["sft_over_grammar"] = round(max(row["nll_after"] / row["nll_of_grammar"] for row in learned), 4)
        found["sft_entropy_per_token"] = round(entropy_per_token(), 4)
        found["sft_cpu_seconds_max"] = max(row["cpu_seconds"] for row in learned)
    for mode, prefix in (("synchronous", "distill"), ("asynchronous", "distill_async")):
        of_mode = [row for row in taught if row["mode"] == mode]
        if of_mode:
            found[f"{prefix}_solved_min"] = round(min(row["solved"] for row in of_mode), 4)
            found[f"{prefix}_cpu_seconds_max"] = max(row["cpu_seconds"] for row in of_mode)
    if taught:
        found["distill_solved_before_max"] = round(max(row["solved_before"] for row in taught), 4)
        found["teacher_solved_min"] = round(min(row["solved"] for row in of_kind(rows, "teacher")), 4)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.supervised", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=["sft", "distill"], default=["sft", "distill"])
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", default=[0, 1, 2])
    run("supervised", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()
