"""An agent that imports nothing of ours and solves the starter task, as files of a user."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

AGENT = """\
import json
import urllib.request


def solve(question, base_url):
    messages = [{"role": "user", "content": question}]
    for _ in range(2):
        body = json.dumps({"model": "policy", "messages": messages, "temperature": 0}).encode()
        with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body)) as response:
            answer = json.load(response)["choices"][0]["message"]
        messages += [answer, {"role": "user", "content": question}]
    return answer["content"]
"""
REWARD = """\
def score(task, text):
    right = task.data["answer"]
    return sum(a == b for a, b in zip(right, text)) / max(len(right), len(text))
"""
RUN_FILE = """\
workflow = "agent"
backend = "{backend}"

[agent]
function = "./solver.py:solve"
reward = "./score.py:score"
train_file = "{rows}"

[rollout]
workers = 2
max_response_tokens = 16
"""


def written_agent(folder: Path, backend: str) -> Path:
    """Writes an agent that asks twice, its reward function and its rows; returns the run file."""
    words = ["".join(letters) for letters in itertools.permutations("abcdef", 4)]
    random.Random(0).shuffle(words)
    rows = [{"question": f"sort: {word}", "answer": "".join(sorted(word))} for word in words]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "solver.py").write_text(AGENT)
    (folder / "score.py").write_text(REWARD)
    file = folder / "agent.toml"
    file.write_text(RUN_FILE.format(backend=backend, rows=folder / "rows.jsonl"))
    return file


def check_agent(metrics: list[dict[str, float]]) -> None:
    """Checks what every step of this agent has: two exact turns, and a temperature that the run decides."""
    for line in metrics:
        assert line["workflow/gateway_calls"] == 2
        assert line["workflow/gateway_roots"] == 1
        assert line["workflow/gateway_ignored_temperature"] == 2
        assert line["segment_breaks"] == 0
