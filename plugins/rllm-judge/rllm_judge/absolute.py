"""Reward function ``judge``: a model grades one answer from 0 to 1 by a rubric.

It runs in a child process, which gets only these variables: RLLM_JUDGE_MODEL, RLLM_JUDGE_BASE_URL (or OPENAI_BASE_URL),
OPENAI_API_KEY and RLLM_JUDGE_RUBRIC. A rubric in the task's data, or in the row columns that workflow ``dataset``
passes on, takes precedence over the variable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from rllm_core.costs import JUDGE, spend
from rllm_core.types import Task
from rllm_judge.judges import MAX_RETRIES, api_key, failure
from rllm_judge.options import RUBRIC
from rllm_judge.prompts import score_question
from rllm_judge.reading import Unreadable, score_in
from rllm_judge.requests import end_long_waits, metered, note, reply_of

REPLIES = 3
MAX_ANSWER_CHARACTERS = 100_000
MAX_PAUSES_SECONDS = 45.0  # that an endpoint may ask for, within the reward_timeout_seconds of our example


def judge(task: Task, text: str) -> tuple[float, dict[str, Any]]:
    """Returns the score of an answer, with the judge's reason.

    Raises:
        ConnectionError: If nothing answers at the endpoint, or it answers with an error.
        ValueError: If a variable is missing, or none of three replies can be read. The rollout then fails; it never
            gets an invented reward.
    """
    from openai import APIError

    model = os.environ.get("RLLM_JUDGE_MODEL")
    if not model:
        raise ValueError("reward function 'judge' needs the variable RLLM_JUDGE_MODEL: the model at the endpoint")
    own, data = _without_rubric(task.data)
    rubric = own or os.environ.get("RLLM_JUDGE_RUBRIC") or RUBRIC
    shown = text if len(text) <= MAX_ANSWER_CHARACTERS else text[:MAX_ANSWER_CHARACTERS] + " [cut here]"
    messages: Any = score_question(str(rubric), json.dumps(data, default=str), json.dumps(shown))
    problem = ""
    for number in range(REPLIES):
        with metered() as answered:
            try:
                answer = _client().chat.completions.with_raw_response.create(
                    model=model, messages=messages, temperature=0.0, seed=number
                )
            except APIError as error:
                raise ConnectionError(failure(_client().base_url, error)) from error
            reply = reply_of(answer.content)
            if reply.usage is not None:
                answered.append(reply.usage)
                spend(JUDGE, prompt_tokens=reply.usage[0], completion_tokens=reply.usage[1])
        try:
            graded = score_in(reply.text)
        except Unreadable as error:
            problem = str(error)
            continue
        return graded.score, {"reason": graded.reason}
    raise ValueError(f"the judge gave no readable score in {REPLIES} replies; in the last one, {problem}")


def _without_rubric(data: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the task's rubric, which may be a column of its row, and the rest of the task's data."""
    rest = {name: value for name, value in data.items() if name != "rubric"}
    row = rest.get("row")
    if not isinstance(row, Mapping) or "rubric" not in row:
        return data.get("rubric"), rest
    left = {name: value for name, value in row.items() if name != "rubric"}
    return data.get("rubric") or row["rubric"], {name: value for name, value in rest.items() if name != "row"} | (
        {"row": left} if left else {}
    )


@cache
def _client() -> Any:
    from openai import DefaultHttpxClient, OpenAI

    return OpenAI(
        http_client=DefaultHttpxClient(
            event_hooks={"request": [note], "response": [partial(end_long_waits, max_seconds=MAX_PAUSES_SECONDS)]}
        ),
        base_url=os.environ.get("RLLM_JUDGE_BASE_URL") or None,
        api_key=api_key("OPENAI_API_KEY"),
        max_retries=MAX_RETRIES,
    )
