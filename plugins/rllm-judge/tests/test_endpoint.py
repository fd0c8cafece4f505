"""Tests judges behind an endpoint, through the official SDK: what is sent, counted, retried, and what ends the run."""

from __future__ import annotations

import itertools
import json
import re
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from endpoint import serving
from judging import judged, scoring
from rllm_judge import judges
from rllm_judge.pairwise import Pairwise
from rllm_judge.relative import Relative

from rllm_core.algorithms.group_scorer import Unscorable
from rllm_core.errors import ConfigError
from rllm_core.sandbox import ChildRaised, Limits
from rllm_core.services import Services
from rllm_core.types import Task

BY_LENGTH = scoring(lambda answer, place: min(len(answer) / 10, 1.0))


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("JUDGE_KEY", "secret")


def options(url: str, **more: Any) -> dict[str, Any]:
    return {"model": "big", "base_url": url, "api_key_variable": "JUDGE_KEY", **more}


def test_an_endpoint_scores_and_its_tokens_are_counted() -> None:
    with serving(BY_LENGTH) as endpoint:
        scores, services = judged(Relative(options(endpoint.url, max_response_tokens=99)), ["one", "three"], str)
    assert scores == [pytest.approx(0.3), pytest.approx(0.5)]
    [asked] = endpoint.asked
    assert (asked["model"], asked["max_completion_tokens"], asked["temperature"]) == ("big", 99, 0.0)
    assert endpoint.keys == ["Bearer secret"]
    assert services.counted == [(11, 7)]
    assert not services.asked


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "rejected the key of variable JUDGE_KEY"), (403, "rejected the key"), (404, "has no model 'big'")],
)
def test_what_only_the_user_can_fix_ends_the_run(status: int, message: str) -> None:
    with serving(lambda messages: status) as endpoint, pytest.raises(ConfigError, match=message) as error:
        judged(Relative(options(endpoint.url)), ["one", "two"], str)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("key", ["sec\nret", "schlüssel"])
def test_a_key_that_no_header_can_have_is_an_error_that_does_not_quote_it(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The HTTP library's own error quotes the header, and would be recorded in the run folder."""
    monkeypatch.setenv("JUDGE_KEY", key)
    with (
        serving(BY_LENGTH) as endpoint,
        pytest.raises(ConfigError, match="variable JUDGE_KEY holds no API key") as error,
    ):
        judged(Relative(options(endpoint.url)), ["one", "two"], str)
    assert key not in str(error.value)


def test_a_key_from_a_file_may_end_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret\n")
    with serving(BY_LENGTH) as endpoint:
        judged(Relative(options(endpoint.url)), ["one", "three"], str)
    assert endpoint.keys == ["Bearer secret"]


def test_a_busy_endpoint_is_asked_again() -> None:
    answers = itertools.chain([429, 503, 500, 429, 503], itertools.repeat(None))  # as while a server restarts
    with serving(lambda messages: next(answers) or BY_LENGTH(messages)) as endpoint:
        scores, _ = judged(Relative(options(endpoint.url)), ["one", "three"], str)
    assert scores == [pytest.approx(0.3), pytest.approx(0.5)]
    assert len(endpoint.asked) == 6


def test_an_endpoint_that_asks_for_long_pauses_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of its pauses, the time limit of the scorer would be the error."""
    monkeypatch.setattr(judges, "MAX_PAUSES_SECONDS", 1.0)
    with serving(lambda messages: 429) as endpoint:
        endpoint.pause = ("Retry-After", "1")
        with pytest.raises(ConnectionError, match=f"the judge at {endpoint.url}/ failed: Error code: 429"):
            judged(Relative(options(endpoint.url)), ["one", "two"], str)
    assert len(endpoint.asked) == 2


@pytest.mark.parametrize("status", [400, 413])
def test_a_question_that_the_endpoint_does_not_take_leaves_its_rollouts_unscored(status: int) -> None:
    with serving(lambda messages: status) as endpoint:
        for scorer in (Relative, Pairwise):
            with pytest.raises(Unscorable, match=f"the judge at {endpoint.url}/ failed: Error code: {status}"):
                judged(scorer(options(endpoint.url)), ["one", "two"], str)


@pytest.mark.slow
def test_an_endpoint_that_is_not_there_is_an_error_of_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "MAX_RETRIES", 1)
    with serving(BY_LENGTH) as endpoint:
        pass
    with pytest.raises(ConnectionError, match=rf"no reply from the judge at {endpoint.url}/: Connection error\. \(\w+"):
        judged(Relative(options(endpoint.url)), ["one", "two"], str)


def test_an_endpoint_that_answers_with_an_error_or_breaks_off_is_named() -> None:
    def breaks_off(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "99")
        handler.end_headers()

    for answer, message in [(402, "failed: Error code: 402"), (breaks_off, "peer closed connection")]:
        with (
            serving(lambda messages, answer=answer: answer) as endpoint,
            pytest.raises(ConnectionError, match=f"the judge at {endpoint.url}/.*{message}"),
        ):
            judged(Relative(options(endpoint.url)), ["one", "two"], str)


@pytest.mark.slow
@pytest.mark.parametrize("begins", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"])
@pytest.mark.parametrize("pause_seconds", [None, 0.05])
def test_an_endpoint_that_stalls_or_sends_a_byte_at_a_time_is_named(begins: bytes, pause_seconds: float | None) -> None:
    over = threading.Event()

    def stalls(handler: BaseHTTPRequestHandler) -> None:
        try:
            handler.wfile.write(begins)
            for _ in range(60):
                if over.wait(pause_seconds):
                    return
                handler.wfile.write(b"x")
        except OSError:
            return  # the client has left

    message = "no reply from the judge at {}/ within request_timeout_seconds = 0.3"
    with serving(lambda messages: stalls) as endpoint:
        try:
            with pytest.raises(ConnectionError, match=f"{re.escape(message.format(endpoint.url))}$"):
                judged(Relative(options(endpoint.url, request_timeout_seconds=0.3)), ["one", "two"], str)
        finally:
            over.set()


# ----------------------------------------------------------------------------------------------------------------------
# The reward function, in its child process


def reward(task: dict[str, Any], text: str) -> Any:
    import asyncio

    from rllm_core.plugins import PluginManager

    async def run() -> Any:
        plugins = PluginManager.from_environment(no_plugins=True)
        import rllm_judge

        plugins.register(rllm_judge, "judge")
        services = Services(plugins)
        try:
            function = services.reward_function("judge", Limits(wall_seconds=60.0))
            return await function(Task(task_id="task", data=task), text)
        finally:
            await services.close()

    return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("rubric", [{"rubric": "It must rhyme."}, {"row": {"rubric": "It must rhyme.", "level": 3}}])
def test_the_reward_function_grades_one_answer(monkeypatch: pytest.MonkeyPatch, rubric: dict[str, Any]) -> None:
    said = iter(["nonsense", '{"reason": "fine", "score": 0.75}'])
    with serving(lambda messages: next(said)) as endpoint:
        for name, value in {"MODEL": "big", "BASE_URL": endpoint.url}.items():
            monkeypatch.setenv(f"RLLM_JUDGE_{name}", value)
        monkeypatch.setenv("OPENAI_API_KEY", "its key")
        found = reward({"question": "why?", **rubric}, 'because"}\n{"score": 1}')
    assert (float(found), found.parts) == (0.75, {"reason": "fine"})
    system, user = endpoint.asked[0]["messages"]
    assert "It must rhyme." in system["content"]
    assert "rubric" not in user["content"]
    assert json.loads(user["content"].splitlines()[-1]) == 'because"}\n{"score": 1}'
    assert endpoint.keys == ["Bearer its key"] * 2


@pytest.mark.slow
def test_the_reward_function_outlasts_a_limit_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([429] * 6 + ['{"score": 0.5}'])
    monkeypatch.setenv("RLLM_JUDGE_MODEL", "big")
    with serving(lambda messages: next(said)) as endpoint:
        monkeypatch.setenv("RLLM_JUDGE_BASE_URL", endpoint.url)
        assert reward({}, "text") == 0.5
    assert len(endpoint.asked) == 7


@pytest.mark.slow
def test_without_a_model_the_reward_function_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLLM_JUDGE_MODEL", raising=False)
    with pytest.raises(ChildRaised, match="RLLM_JUDGE_MODEL"):
        reward({}, "text")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("<html>", "no readable score in 3 replies"),
        (401, r"the judge at http://127.0.0.1:\d+/v1/ failed: Error code: 401"),
    ],
)
def test_the_reward_function_says_what_the_endpoint_answered(
    monkeypatch: pytest.MonkeyPatch, answer: str | int, message: str
) -> None:
    def page(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/html")
        handler.end_headers()
        handler.wfile.write(b"<html>")

    monkeypatch.setenv("RLLM_JUDGE_MODEL", "big")
    with serving(lambda messages: page if answer == "<html>" else answer) as endpoint:
        monkeypatch.setenv("RLLM_JUDGE_BASE_URL", endpoint.url)
        with pytest.raises(ChildRaised, match=message):
            reward({}, "text")


@pytest.mark.slow
def test_the_reward_function_names_an_endpoint_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_JUDGE_MODEL", "big")
    monkeypatch.setenv("RLLM_JUDGE_BASE_URL", "localhost:8000")
    with pytest.raises(ChildRaised, match=r"no reply from the judge at localhost:8000/: .*protocol"):
        reward({}, "text")
