"""Rows that teach a model from scratch the format of ``solver_judge``, for workflow ``sft``.

    python -m rllm_workflows.solver_judge_warm_start --out rows.jsonl

They teach form only: a solver answers with a letter of the word, drawn uniformly, and a judge with one of the numbers
it was shown, drawn uniformly, whatever the answers are. A model that has learnt them perfectly solves as well as chance
and judges as well as chance. Held-out words never occur.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rllm_workflows.solver_judge import HIDDEN, SolverJudgeConfig, is_held_out, judge_prompt, prompt


def conversations(rng: random.Random, config: SolverJudgeConfig) -> Iterator[list[dict[str, Any]]]:
    """Endless random conversations, of a solver and of a judge by turns; the assistant's messages are to be learnt.

    Args:
        rng: Decides everything; equal states give equal conversations.
        config: The words, and the most answers that a judge is shown.
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
    """Write rows for workflow ``sft``."""
    parser = argparse.ArgumentParser(prog="python -m rllm_workflows.solver_judge_warm_start", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines to write")
    parser.add_argument("--rows", type=int, default=6400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    made = conversations(random.Random(arguments.seed), SolverJudgeConfig())
    with arguments.out.open("w", encoding="utf-8") as file:
        for _ in range(arguments.rows):
            file.write(json.dumps({"messages": next(made)}) + "\n")


if __name__ == "__main__":
    main()
