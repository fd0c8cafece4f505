"""Classification of SDK errors; none of them shows the key."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import traceback

import httpx
import pytest
import tinker
from rllm_tinker import sdk
from rllm_tinker.sdk import Busy, Lost

from rllm_core.errors import ConfigError, RunError

pytestmark = pytest.mark.every_sdk
KEY = "tml-a-key-that-must-not-show-anywhere-4f1c"


def answered(kind: type[tinker.APIStatusError], status: int, said: str) -> tinker.APIStatusError:
    request = httpx.Request("POST", "http://server/api/v1/asample", headers={"X-API-Key": KEY})
    return kind(said, response=httpx.Response(status, request=request), body=None)


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (answered(tinker.RateLimitError, 429, "slow down"), Busy),
        (answered(tinker.InternalServerError, 503, "no capacity"), Busy),
        (tinker.APIConnectionError(request=httpx.Request("POST", "http://server")), Lost),
        (answered(tinker.BadRequestError, 400, "Model model_1 not loaded"), Lost),
        (ValueError("Error retrieving result: Model model_1 not loaded"), Lost),
        (answered(tinker.NotFoundError, 404, "Sampling session not found"), Lost),
        (OSError("connection reset"), Lost),
        (answered(tinker.BadRequestError, 400, "max_tokens is required"), RunError),
        (answered(tinker.UnprocessableEntityError, 422, "unknown loss"), RunError),
        (answered(tinker.ConflictError, 409, "exists already"), RunError),
        (answered(tinker.AuthenticationError, 401, f"bad key {KEY}"), ConfigError),
        (answered(tinker.PermissionDeniedError, 403, "not yours"), ConfigError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value)[:30],
)
async def test_an_error_says_whether_to_wait_to_reconnect_or_to_end(
    error: Exception, meaning: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    failed: concurrent.futures.Future[None] = concurrent.futures.Future()
    failed.set_exception(error)
    with pytest.raises(meaning) as caught:
        await sdk.answer(1, "sample", failed)
    assert type(caught.value) is meaning
    assert str(error).replace(KEY, "<TINKER_API_KEY>")[:40] in str(caught.value)
    assert KEY not in "".join(traceback.format_exception(caught.value))


async def test_a_call_that_blocks_blocks_nothing_else_and_is_left_at_its_deadline() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    may_end = threading.Event()
    with pytest.raises(Lost, match=r"making it was not answered within 0.3 s"):
        await sdk.made(0.3, "making it", may_end.wait, 600)
    ticking.cancel()
    assert ticks
    [left_behind] = [thread for thread in threading.enumerate() if thread.name == "tinker-making it"]
    may_end.set()
    left_behind.join(60)  # its late result must be harmless: an exception in a thread would fail this test
    assert not left_behind.is_alive()


async def test_an_answer_that_does_not_come_is_given_up() -> None:
    never: concurrent.futures.Future[None] = concurrent.futures.Future()
    with pytest.raises(Lost, match=r"sample was not answered within 0.1 s"):
        await sdk.answer(0.1, "sample", never)
    assert never.cancelled()
