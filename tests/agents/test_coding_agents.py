"""Command-line coding agents of npm train a step, unedited. ``make agents-cli`` installs and runs them, by hand."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

import coding
import pytest
from playing import check_exact
from rllm_local.starter import starter_model

from rllm_core import Run
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import resolve_run
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_viewer.verify import verify

PROGRAMS = Path(__file__).parents[2] / ".venv-agents-cli" / "node_modules" / ".bin"
# A home of its own for each rollout: such agents remember what they did.
BEGIN = 'cd "$1" && mkdir home && export HOME="$1/home" PATH="$3:$PATH" && exec '
OPENCODE = {
    "provider": {
        "policy": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {"policy": {}},
        }
    }
}


@dataclass
class Row:
    """An agent, and what must become of it.

    Attributes:
        command: What a shell runs; ``$2`` is the task.
        calls: Number of calls.
        roots: Number of conversations.
        rewritten: How often it sends an answer back in other words.
        environment: Environment variables.
        settings: Other settings of workflow ``agent``.
    """

    command: str
    calls: int = 3
    roots: int = 1
    rewritten: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


ROWS = {
    "claude": Row('claude -p "$2" --model policy --allowedTools Bash'),
    "codex": Row(
        'codex exec "$2" --model policy --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox '
        "-c model_provider=policy -c model_providers.policy.name=policy -c model_providers.policy.wire_api=responses "
        '-c model_providers.policy.base_url="$OPENAI_BASE_URL" -c model_providers.policy.env_key=OPENAI_API_KEY',
        settings={"unsupported_fields": "ignore"},  # OpenAI's search, and a namespace of tools
    ),
    "opencode": Row(
        'opencode run "$2" --model policy/policy --auto --title task',
        rewritten=2,
        environment={"OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE)},
    ),
    "opencode with titles": Row(
        'opencode run "$2" --model policy/policy --auto',
        calls=4,
        roots=2,
        rewritten=2,
        environment={"OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE)},
    ),
    "qwen": Row('qwen "$2" --auth-type openai --model policy --yolo', rewritten=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_coding_agent_trains_a_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[name]
    for variable, value in row.environment.items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "write hello.txt"}) + "\n")
    (tmp_path / "score.py").write_text(f"def score(task, text):\n    return float(text == {coding.WORDS[0]!r})\n")
    settings = {
        "model.path": str(starter_model()),
        "training": {"steps": 1, "groups_per_step": 1, "rollouts_per_group": 2, "validation_rollouts": 0},
        "rollout": {"max_response_tokens": 2000, "workers": 1, "rollout_timeout_seconds": 280},
        "agent": {
            "command": ["sh", "-c", BEGIN + row.command, "sh", "{folder}", "{question}", str(PROGRAMS)],
            "result_file": coding.FILE,
            "train_file": str(tmp_path / "rows.jsonl"),
            "held_out_share": 0,
            "reward": f"{tmp_path / 'score.py'}:score",
            **row.settings,
        },
    }
    plugins = PluginManager.from_environment()
    plugins.register(coding, "coding")
    parts = assemble(resolve_run("agent", plugins, settings=settings, backend="coding").config, plugins)
    folder = tmp_path / "run"
    asyncio.run(launch.train(parts, folder, resume=False, progress=Progress()))
    assert verify(folder).problems == []
    [written] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert (written["trajectories"], written["reward_mean"], written["segment_breaks"]) == (2, 0.5, 0)
    assert written["samples"] == 2 * row.roots
    episodes = list(Run(folder).episodes())
    for episode in episodes:
        metrics = [episode.metrics[f"gateway_{name}"] for name in ("calls", "roots", "rewritten_answers")]
        assert metrics == [row.calls, row.roots, row.rewritten]
    engine = parts.backend.rollout_engine
    assert isinstance(engine, coding.Coder)
    check_exact([step for episode in episodes for one in episode.trajectories for step in one.steps], engine)
    assert written["sampled_tokens"] == sum(len(given) for _, given, _ in engine.exchanges)
