"""Speed of the viewer on a long run: 10,000 episodes of 4 turns and 1,500 tokens, in the format of today.

The server runs as users start it, and the page in Chromium (`benchmarks.viewer_page`, in the environment of ``make
test-viewer``). Each trial of the index runs in a new process, once without and once with the index of an earlier one.
Recording is measured as `benchmarks.recording` does it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import recording
from benchmarks.peer_environments import ROOT
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run
from rllm_core.config import RunConfig, to_toml
from rllm_core.run_folder.groups import RecordedGroup, RecordedRollout
from rllm_core.run_folder.recorded import IndexedGroup
from rllm_core.types import Episode, Step, Task, Trajectory

ROLLOUTS, TURNS = 8, 4
PROMPT_TOKENS, SAMPLED_TOKENS, TOOL_TOKENS = 200, 275, 66
DISTINCT_GROUPS = 20
LONG_TOKENS = 32_000
VOCABULARY = 150_000
NEEDLE = "a needle in the haystack"
WAIT_SECONDS = 300
INDEX = """
import sys, time
from pathlib import Path
from rllm_viewer.view.index import RunIndex
index = RunIndex(Path(sys.argv[1]), Path(sys.argv[2]))
before, spent = time.perf_counter(), time.process_time()
index.update()
print(time.perf_counter() - before, time.process_time() - spent, len(index))
"""


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Writes the run, and measures the index, the server, the page and recording."""
    with TemporaryDirectory() as folder:
        base = Path(folder)
        run_folder = write_run(base / "run", options.episodes)
        size = (run_folder / "groups.jsonl").stat().st_size
        trials.add({"kind": "run", "episodes": options.episodes, "megabytes": size / 1e6})
        for trial in range(options.trials):
            _index(trials, run_folder, base / f"cache-{trial}")
        trials.add({"kind": "weight", "page_kb": page_bytes() / 1e3})
        with served(run_folder, base / "cache-page") as (process, address):
            _page(trials, address)
            for text in (NEEDLE, "word7"):
                _search(trials, address, text)
            trials.add({"kind": "memory", "server_mb": memory_mb(process.pid)})
    if options.steps:
        recording.measure(argparse.Namespace(steps=options.steps), trials)


def write_run(path: Path, episodes: int) -> Path:
    """Writes a run folder; its last group has a rollout of 32,000 tokens, and one in the middle the needle."""
    path.mkdir()
    tables = RunConfig(workflow="sort", backend="local").to_tables()
    (path / "run.toml").write_text(to_toml(tables), encoding="utf-8")
    random = np.random.default_rng(0)
    words = np.array([f"word{number}" for number in range(2000)])
    distinct = [_group(random, words) for _ in range(DISTINCT_GROUPS)]
    count, offset = episodes // ROLLOUTS, 0
    with (
        (path / "groups.jsonl").open("wb") as lines,
        (path / "groups_index.jsonl").open("w") as index,
        (path / "metrics.jsonl").open("w") as metrics,
        (path / "group_timings.jsonl").open("w") as timings,
    ):
        for number in range(count):
            one = replace(distinct[number % DISTINCT_GROUPS], step=1 + number // 4, group=number)
            if number == count // 2:
                one = replace(one, task=Task(task_id=one.task.task_id, data={"question": NEEDLE}))
            if number == count - 1:
                one = replace(one, rollouts=[_long(random), *one.rollouts[1:]])
            line = one.to_json().encode()
            lines.write(line + b"\n")
            index.write(json.dumps(IndexedGroup.of(one, offset, len(line)).to_json()) + "\n")
            offset += len(line) + 1
            if number % 4 == 0:
                metrics.write(json.dumps({"step": one.step, "reward_mean": float(random.random())}) + "\n")
            calls = [{"kind": "model", "start": turn, "seconds": 0.5} for turn in range(TURNS)]
            for rollout in one.rollouts:
                timings.write(json.dumps({"rollout": rollout.episode.rollout_id, "seconds": 4, "calls": calls}) + "\n")
    with (path / "tokens.jsonl").open("w") as texts:
        texts.writelines(json.dumps({"id": number, "text": f"t{number} "}) + "\n" for number in range(VOCABULARY))
    return path


def _group(random: np.random.Generator, words: Any) -> RecordedGroup:
    prompt = random.integers(0, VOCABULARY, PROMPT_TOKENS)
    question = _text(random, words, PROMPT_TOKENS)
    rollouts = []
    for index in range(ROLLOUTS):
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        ids, steps = prompt, []
        for turn in range(TURNS):
            completion = random.integers(0, VOCABULARY, SAMPLED_TOKENS)
            call = {"id": str(turn), "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
            answer = {"role": "assistant", "content": _text(random, words, SAMPLED_TOKENS), "tool_calls": [call]}
            logprobs = -random.random(SAMPLED_TOKENS)
            steps.append(
                Step(
                    messages=messages,
                    response=answer,
                    prompt_ids=ids,
                    completion_ids=completion,
                    logprobs=logprobs,
                    weight_version=3,
                )
            )
            found = {"role": "tool", "tool_call_id": str(turn), "content": _text(random, words, TOOL_TOKENS)}
            messages = [*messages, answer, found]
            ids = np.concatenate((ids, completion, random.integers(0, VOCABULARY, TOOL_TOKENS)))
        episode = Episode(
            task_id="task", rollout_id=f"r{random.integers(1 << 60)}", rollout_index=index, is_correct=index % 2 == 0,
            trajectories=[Trajectory(steps=steps, reward=index / ROLLOUTS)],
        )  # fmt: skip
        numbers = [random.standard_normal(SAMPLED_TOKENS).astype(np.float32) for _ in steps]
        rollouts.append(RecordedRollout(episode, "trained", "trained", [numbers]))
    return RecordedGroup(
        1, 0, Task(task_id="task", data={"answer": "word7"}), "best", "trained", "trained", 3, rollouts
    )


def _long(random: np.random.Generator) -> RecordedRollout:
    ids = random.integers(0, VOCABULARY, LONG_TOKENS)
    logprobs = -random.random(LONG_TOKENS)
    asked = [{"role": "user", "content": "long"}]
    step = Step(messages=asked, prompt_ids=[1], completion_ids=ids, logprobs=logprobs, weight_version=3)
    episode = Episode(task_id="task", rollout_id="long", trajectories=[Trajectory(steps=[step], reward=1.0)])
    return RecordedRollout(episode, "trained", "trained", [[random.standard_normal(LONG_TOKENS).astype(np.float32)]])


def _text(random: np.random.Generator, words: Any, tokens: int) -> str:
    return " ".join(random.choice(words, tokens * 2 // 3))


def _index(trials: RawTrials, run_folder: Path, cache: Path) -> None:
    """Adds a row without a saved index, and one with it."""
    for kind in ("index", "second"):
        said = subprocess.run(
            [sys.executable, "-c", INDEX, str(run_folder), str(cache)], check=True, capture_output=True, text=True
        ).stdout.split()
        trials.add({"kind": kind, "seconds": float(said[0]), "cpu_seconds": float(said[1]), "groups": int(said[2])})


def page_bytes() -> int:
    """Returns the bytes of script and style, each file compressed."""
    from rllm_viewer.view import assets

    return sum(
        len(gzip.compress(file.content)) for path, file in assets.FILES.items() if path.endswith((".js", ".css"))
    )


@contextmanager
def served(run_folder: Path, cache: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts the viewer as a user does, without a saved index."""
    with subprocess.Popen(
        [sys.executable, "-c", "from rllm_core.cli import main; main()", "view", str(run_folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RLLM_CACHE_DIR": str(cache)},
    ) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        try:
            yield process, found[0]
        finally:
            process.terminate()  # a shell that starts this in the background ignores SIGINT
            process.wait(WAIT_SECONDS)


def _page(trials: RawTrials, address: str) -> None:
    python = ROOT / ".venv-viewer" / "bin" / "python"
    if not python.is_file():
        sys.exit("there is no .venv-viewer; run: make test-viewer")
    said = subprocess.run(
        [str(python), str(ROOT / "benchmarks" / "viewer_page.py"), address],
        check=True, stdout=subprocess.PIPE, text=True, timeout=WAIT_SECONDS,
    ).stdout  # fmt: skip
    for line in said.splitlines():
        trials.add(json.loads(line))


def _search(trials: RawTrials, address: str, text: str) -> None:
    before, first, hits = time.perf_counter(), None, 0
    query = urllib.parse.urlencode({"q": text})
    with urllib.request.urlopen(f"{address}api/run/0/search?{query}", timeout=WAIT_SECONDS) as answer:
        for line in answer:
            if b'"where"' in line:
                hits += 1
                first = first or time.perf_counter() - before
    seconds = time.perf_counter() - before
    trials.add({"kind": "search", "text": text, "first_hit_seconds": first, "seconds": seconds, "rollouts": hits})


def memory_mb(process: int) -> float:
    """Returns the peak memory of a process."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    [found] = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(found) / 1e3


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures."""

    def median(kind: str, name: str) -> float:
        return round(statistics.median(row[name] for row in of_kind(rows, kind)), 3)

    searches = of_kind(rows, "search")
    result: Figures = {
        "megabytes": median("run", "megabytes"),
        "first_rows_seconds": median("first_rows", "seconds"),
        "index_seconds": median("index", "seconds"),
        "index_cpu_seconds": median("index", "cpu_seconds"),
        "second_open_seconds": median("second", "seconds"),
        "episode_ms": median("episode", "ms"),
        "tokens_32k_ms": median("tokens", "ms"),
        "tokens_32k_cpu_ms": median("tokens", "cpu_ms"),
        "worst_frame_ms": median("frames", "worst_ms"),
        "frames_over_50": median("frames", "over_50"),
        "frame_cpu_ms": median("frames", "cpu_ms"),
        "filter_ms": median("filter", "ms"),
        # A frequent word has its first hit at once; the time of all hits is that of the slower search.
        "search_first_hit_seconds": round(min(row["first_hit_seconds"] for row in searches), 3),
        "search_all_seconds": round(max(row["seconds"] for row in searches), 3),
        "server_mb": median("memory", "server_mb"),
        "page_kb": median("weight", "page_kb"),
    }
    if of_kind(rows, "step"):
        shares = recording.figures(rows)
        result["training_overhead"] = max(value for name, value in shares.items() if name.endswith("_cpu_share"))
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.viewer", description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000, help="episodes of the run (default 10,000)")
    parser.add_argument("--trials", type=int, default=3, help="trials of the index (default 3)")
    parser.add_argument("--steps", type=int, default=6, help="steps that measure recording; 0 for none (default 6)")
    run("viewer", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()
