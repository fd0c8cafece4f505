"""Conversations that teach a model the format of ``solver_judge`` from scratch, for workflow ``sft``.

    python -m rllm_workflows.solver_judge_warm_start --out rows.jsonl

They teach the format only. A solver answers with a random letter from its view, and a judge with the number of a random
answer, whatever the answers are. A model that has learned them perfectly solves and judges at the level of chance.
Held-out words never occur.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rllm_workflows.solver_judge import HIDDEN, SolverJudgeConfig, is_held_out, judge_prompt, prompt, run_file


def conversations(rng: random.Random, config: SolverJudgeConfig) -> Iterator[list[dict[str, Any]]]:
    """Yields endless random conversations, alternately of a solver and a judge; the assistant messages are the targets.

    Args:
        rng: Source of all random choices; equal states give equal conversations.
        config: Words, the maximum number of letters hidden from a solver and of answers shown to a judge.
    """
    while True:
        word = _word(rng, config)
        seen = rng.sample(word, config.length - rng.randint(0, config.hidden_letters))
        view = "".join(letter if letter in seen else HIDDEN for letter in word)
        yield _conversation(prompt(view), rng.choice(seen))
        shown = rng.randint(1, config.solvers)
        word = _word(rng, config)
        answers = [rng.choice(word) for _ in range(shown)]
        yield _conversation(judge_prompt(word, answers), str(rng.randint(1, shown)))


def _word(rng: random.Random, config: SolverJudgeConfig) -> str:
    while is_held_out(word := "".join(rng.sample(config.letters, config.length))):
        pass
    return word


def _conversation(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def main() -> None:
    """Write conversations for workflow ``sft`` to a file."""
    parser = argparse.ArgumentParser(prog="python -m rllm_workflows.solver_judge_warm_start", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--rows", type=int, default=6400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    made = conversations(random.Random(arguments.seed), SolverJudgeConfig.model_validate(run_file()["solver_judge"]))
    with arguments.out.open("w", encoding="utf-8") as file:
        for _ in range(arguments.rows):
            file.write(json.dumps({"messages": next(made)}) + "\n")


if __name__ == "__main__":
    main()
