"""Solve rates of ``sort`` when a judge gives the rewards: one that is often wrong, and one that is biased.

    python -m benchmarks.judged
    python -m benchmarks.judged --seeds 1000 --judges wrong

Each trial trains workflow ``sort`` with its own settings on one seed, from a starter model of that seed. The judge of
group scorer ``relative`` is a server on this machine that speaks the OpenAI protocol, asked through the official SDK:

- ``none``: no judge; the workflow's own rewards.
- ``wrong``: scores like the workflow, but 15 % of the answers get 1 minus their score, at random.
- ``wrong_twice``: the same judge, asked again in the opposite order (``passes = 2``).
- ``first``: what stands first in the question gets 1, the others 0.6 times their score. Asked once.
- ``first_twice``: the same judge, asked again in the opposite order.

The figures ``JUDGE_solved_share_min`` are the share of validation tasks solved at the end, over that of ``none`` with
the same seed, of the worst seed (goals: 0.95 for ``wrong``, 0.9 for ``first_twice``). ``JUDGE_agreement_mean`` and
``JUDGE_order_effect_mean`` are the means over all steps of the metrics that should name a preference for places: both
judges who are asked twice contradict themselves, but only a preference has an effect of the order.

The rows have the solve rate of every step; ``docs/judged_curves.py`` draws them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.learning import measured, outcome, read_lines
from benchmarks.peer_environments import ROOT, SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run

SEEDS = range(1000, 1003)
WRONG_SHARE = 0.15
ROLLOUT = re.compile(r"^([A-Z]{4}): (\[.*\])$", re.M)
QUESTION = re.compile(r"sort: (\w+)")
Judge = Callable[[list[tuple[str, float]], str], list[tuple[str, float]]]


def wrong(scores: list[tuple[str, float]], question: str) -> list[tuple[str, float]]:
    """Flips some scores, drawn from the whole question."""
    found = []
    for one, score in scores:
        drawn = int.from_bytes(hashlib.sha256(f"{one} {question}".encode()).digest()[:8], "big") / 2**64
        found.append((one, 1.0 - score if drawn < WRONG_SHARE else score))
    return found


def first(scores: list[tuple[str, float]], question: str) -> list[tuple[str, float]]:
    """Prefers the first place."""
    return [(one, 1.0 if place == 0 else 0.6 * score) for place, (one, score) in enumerate(scores)]


METRICS = ("agreement", "order_effect")
"""Metrics of the scorer, from episodes that were judged twice."""
JUDGES: dict[str, tuple[Judge | None, dict[str, Any]]] = {
    "none": (None, {}),
    "wrong": (wrong, {}),
    "wrong_twice": (wrong, {"passes": 2}),
    "first": (first, {}),
    "first_twice": (first, {"passes": 2}),
}


def reply(question: str, judge: Judge) -> str:
    """Returns the judge's reply to a question of `rllm_judge.relative`."""
    from rllm_workflows.sort import score

    found = QUESTION.search(question)
    assert found is not None, question
    answer = "".join(sorted(found[1]))
    truth = [
        (one, score(str(json.loads(told)[-1]["content"]).strip(), answer)) for one, told in ROLLOUT.findall(question)
    ]
    return json.dumps({"scores": [{"id": one, "score": value} for one, value in judge(truth, question)]})


@contextmanager
def serving(judge: Judge) -> Iterator[str]:
    """Serves a judge on this machine; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = {"role": "assistant", "content": reply(asked["messages"][-1]["content"], judge)}
            body = json.dumps(
                {
                    "id": "reply",
                    "object": "chat.completion",
                    "created": 0,
                    "model": asked["model"],
                    "choices": [{"index": 0, "finish_reason": "stop", "message": said}],
                    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
                }
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Writes nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Trains with every judge on every seed, alternating."""
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for name in options.judges:
                judge, own = JUDGES[name]
                if judge is None:
                    row = trained(name, seed, Path(folder), [])
                else:
                    with serving(judge) as address:
                        row = trained(name, seed, Path(folder), settings(address, own))
                trials.add(row)
                print(json.dumps(row), file=sys.stderr, flush=True)


def settings(address: str, own: dict[str, Any]) -> list[str]:
    """Returns the settings that select the judge."""
    judged = {"model": "scripted", "base_url": address, "rollouts_per_question": 16, **own}
    options = ", ".join(f"{key} = {json.dumps(value)}" for key, value in judged.items())
    return ["-o", "algorithm.group_scorer=relative", "-o", f"algorithm.group_scorer_options={{{options}}}"]


def trained(name: str, seed: int, folder: Path, judged: Sequence[str]) -> Row:
    """Trains ``sort`` and returns the results."""
    run_dir = folder / f"{name}-{seed}"
    command = [sys.executable, "-m", "rllm_core", "train", "sort", "--backend", "local", "-o", f"training.seed={seed}"]
    command += ["-o", f"local.starter_seed={seed}", *judged, "--run-dir", str(run_dir)]
    # One starter model for all judges of a seed; making it is no part of a trial.
    environment = {**os.environ, **SETTINGS, "NO_PROXY": "127.0.0.1", "RLLM_CACHE_DIR": str(folder / "cache")}
    measured([sys.executable, "-m", "rllm_local.starter", "--seed", str(seed)], environment)
    seconds = measured(command, environment)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    steps = read_lines(run_dir / "metrics.jsonl")
    about = {"kind": "training", "judge": name, "seed": seed, **{metric: mean(steps, metric) for metric in METRICS}}
    curve = [round(step["solved"], 4) for step in steps]
    return {**about, **seconds, **outcome(summary), "books": summary["books_by_reason"], "solved": curve}


def mean(steps: Sequence[Row], metric: str) -> float | None:
    """Returns the mean of a metric of the scorer over the steps that have it; None without any."""
    values = [step[f"workflow/relative/{metric}"] for step in steps if f"workflow/relative/{metric}" in step]
    return fmean(values) if values else None


def figures(rows: Sequence[Row]) -> Figures:
    """Compares every judge with the workflow's own rewards, seed by seed."""
    found: Figures = {}
    own = {row["seed"]: row["solved_after"] for row in of_kind(rows, "training", judge="none")}
    if own:
        found["none_solved_after_min"] = round(min(own.values()), 4)
    for name in JUDGES:
        runs = [row for row in of_kind(rows, "training", judge=name) if row["seed"] in own]
        if name == "none" or not runs:
            continue
        found[f"{name}_solved_share_min"] = round(min(row["solved_after"] / own[row["seed"]] for row in runs), 4)
        found[f"{name}_cpu_seconds_max"] = max(row["cpu_seconds"] for row in runs)
        for metric in METRICS:
            values = [row[metric] for row in runs if row[metric] is not None]
            if values:
                found[f"{name}_{metric}_mean"] = round(fmean(values), 4)
        found[f"{name}_seeds"] = len(runs)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judged", description=__doc__)
    parser.add_argument("--judges", nargs="+", choices=list(JUDGES), default=list(JUDGES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="SEED")
    os.chdir(ROOT)
    run("judged", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()
