"""Judge models: behind an OpenAI-compatible endpoint, in one of the run's engines, or the policy itself."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from rllm_core.algorithms.group_scorer import ScorerServices
from rllm_core.engine import Terminated
from rllm_core.errors import ConfigError
from rllm_core.types import MessageLike
from rllm_judge.options import ENDPOINT, POLICY, JudgeOptions
from rllm_judge.requests import BrokenOff, end_long_waits_async, metered, note_async, reply_in

NO_KEY = "none"
MAX_RETRIES = 6  # of a request, by the SDK, over some 20 s; all attempts thus last while a server restarts
MAX_PAUSES_SECONDS = 90.0  # that an endpoint may ask for, within the default of algorithm.group_scorer_timeout_seconds
DEADLINE = "deadline"  # of a request, on the event loop's clock
TOO_LONG = (400, 413, 422)
"""Status codes with which endpoints reject a question, most often because it is too long."""


class RejectedQuestion(Exception):
    """The judge rejects a question, most often because it is too long; a shorter one may succeed."""


class Judge(ABC):
    """A model that answers questions about rollouts."""

    name: str
    """Everything besides the question that its replies depend on, as a key of the cache; "" disables the cache."""

    @abstractmethod
    async def ask(self, messages: Sequence[MessageLike], *, seed: int) -> str:
        """Returns the text of a reply.

        Raises:
            ConfigError: If only the user can fix the problem, such as a rejected key.
            RejectedQuestion: If the question cannot be asked as it is.
        """

    async def close(self) -> None:  # noqa: B027 - optional
        """Closes connections."""


class Endpoint(Judge):
    """A judge behind an OpenAI-compatible endpoint. The SDK retries transient errors, such as busy servers."""

    def __init__(self, options: JudgeOptions, services: ScorerServices) -> None:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        class Timed(DefaultAsyncHttpxClient):
            async def send(self, request: Any, **how: Any) -> Any:
                deadline = asyncio.get_running_loop().time() + options.request_timeout_seconds
                request.extensions[DEADLINE] = deadline
                async with asyncio.timeout_at(deadline):
                    return await super().send(request, **how)

        self._client = AsyncOpenAI(
            http_client=Timed(
                event_hooks={
                    "request": [note_async],
                    "response": [partial(end_long_waits_async, max_seconds=MAX_PAUSES_SECONDS)],
                }
            ),
            base_url=options.base_url,
            api_key=api_key(options.api_key_variable),
            max_retries=MAX_RETRIES,
            timeout=None,  # would begin again with every byte
        )
        self._options = options
        self._services = services
        self._places = asyncio.Semaphore(options.max_concurrent_requests)
        self.name = f"{self._client.base_url} {options.model}"

    async def ask(self, messages: Sequence[MessageLike], *, seed: int) -> str:
        """See `Judge.ask`."""
        import openai

        options = self._options
        sent: Any = [{"role": one["role"], "content": one["content"]} for one in messages]
        try:
            async with self._places:
                with metered() as answered:
                    async with self._client.chat.completions.with_streaming_response.create(
                        model=options.model,
                        messages=sent,
                        temperature=options.temperature,
                        max_completion_tokens=options.max_response_tokens,
                        seed=seed % 2**31,
                    ) as answer:
                        async with asyncio.timeout_at(answer.http_request.extensions[DEADLINE]):
                            reply = await reply_in(answer.iter_bytes())
                    if reply.usage is not None:
                        answered.append(reply.usage)
                        self._services.count(prompt_tokens=reply.usage[0], completion_tokens=reply.usage[1])
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise ConfigError(
                f"the judge at {self._client.base_url} rejected the key of variable {options.api_key_variable}: "
                f"{said(error)}"
            ) from error
        except openai.NotFoundError as error:
            raise ConfigError(
                f"the judge at {self._client.base_url} has no model {options.model!r}: {said(error)}"
            ) from error
        except openai.APIStatusError as error:
            why = failure(self._client.base_url, error)
            raise RejectedQuestion(why) if error.status_code in TOO_LONG else ConnectionError(why) from error
        except (openai.APIConnectionError, BrokenOff, TimeoutError) as error:
            if isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError):
                raise ConnectionError(
                    f"no reply from the judge at {self._client.base_url} within "
                    f"request_timeout_seconds = {options.request_timeout_seconds:g}"
                ) from error
            raise ConnectionError(failure(self._client.base_url, error)) from error
        return reply.text

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()


class Sampled(Judge):
    """A judge sampled by one of the run's engines: a separate model, or the policy."""

    def __init__(self, options: JudgeOptions, services: ScorerServices) -> None:
        self._options = options
        self._services = services
        changes = options.engine == POLICY and options.frozen_version is None
        self.name = "" if changes else f"{options.engine} {options.model}"

    async def ask(self, messages: Sequence[MessageLike], *, seed: int) -> str:
        """See `Judge.ask`."""
        try:
            step = await self._services.complete(
                messages,
                seed=seed,
                max_response_tokens=self._options.max_response_tokens,
                temperature=self._options.temperature,
            )
        except Terminated as error:
            raise RejectedQuestion(str(error)) from error
        return step.text


def api_key(variable: str) -> str:
    """Returns the API key in a variable, without white space around it; a placeholder if the variable is unset.

    Raises:
        ConfigError: If no header can have it. HTTP libraries would quote it in their errors, and so in the run folder.
    """
    key = os.environ.get(variable, "").strip() or NO_KEY
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"variable {variable} holds no API key: it must have one line of ASCII characters")
    return key


def judge_of(options: JudgeOptions, services: ScorerServices) -> Judge:
    """Returns the judge that the options name."""
    return Endpoint(options, services) if options.engine == ENDPOINT else Sampled(options, services)


def failure(url: object, error: Exception) -> str:
    """Returns the message for an endpoint that failed: its address, and its answer or the cause below the SDK."""
    if hasattr(error, "status_code"):
        return f"the judge at {url} failed: {said(error)}"
    return f"no reply from the judge at {url}: {said(error)} ({said(error.__cause__ or error)})"


def said(error: BaseException) -> str:
    """Returns the message of an SDK error as one line; its class if it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__
