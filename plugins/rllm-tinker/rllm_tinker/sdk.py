"""Wrapper around the tinker SDK: version differences, deadlines and error classification.

The SDK has no timeout for futures: while a server is down or returns 5xx, it retries forever. Every call here therefore
has a deadline. Differences between 0.24 and 0.38:

* ``create_*`` and ``save_weights_and_get_sampling_client`` block and return the object in 0.24. In 0.38, they return a
  future of it, and names that end in ``_async`` emit a warning. `made` calls the plain names in a thread.
* Futures of requests are the SDK's own type or `concurrent.futures.Future` (`answer`).
* Server capabilities come from the service client in 0.24, from a separate client in 0.38 (`capabilities`).
* Closing a client is new in 0.38 (`disconnect`); loading a state into an existing model is deprecated (`load_state`).
* ``compute_logprobs`` of N tokens returns N values, the first None, or N - 1 (`prompt_logprobs`).

The SDK is imported on first use.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rllm_core.errors import ConfigError, RunError, UserError
from rllm_core.types import Floats
from rllm_tinker.config import KEY_VARIABLE

MAX_MESSAGE_CHARACTERS = 500
# Error texts of servers that have lost a request's model, session or sampler in a restart.
FORGOTTEN = ("not loaded", "not found", "expired", "unknown session", "no such model")


class Lost(Exception):
    """The server did not respond, or no longer knows the model: reconnecting may help."""


class Busy(Lost):
    """The server responds, but is busy."""


async def made(seconds: float, what: str, make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Runs a blocking call of the SDK without blocking the event loop, and returns its result.

    A thread still in the call at the deadline is abandoned; it does not keep the process alive.

    Raises:
        Lost: If the server does not respond in time.
        UserError: If the server rejects the request.
    """
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # prevents cancellation, so that a late result can still be set

    def call() -> None:
        try:
            found = make(*arguments, **named)
            done.set_result(found.result() if hasattr(found, "result") else found)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=call, name=f"tinker-{what}", daemon=True).start()
    return await answer(seconds, what, done)


async def answer(seconds: float, what: str, future: Any) -> Any:
    """Waits for the result of an SDK future.

    Raises:
        Lost: If the result does not arrive in time.
        UserError: If the server rejected the request.
    """
    try:
        async with asyncio.timeout(seconds):
            if hasattr(future, "result_async"):
                return await future.result_async()
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise Lost(f"{what} was not answered within {seconds:g} s") from None
    except asyncio.CancelledError:
        raise
    except Exception as error:
        # Drop the cause, because it contains the request and thus the key.
        raise meaning(what, error) from None


def meaning(what: str, error: Exception) -> Exception:
    """Converts an SDK error to one of this framework's, without the key in its text."""
    import tinker

    said = f"{what}: {type(error).__name__}: {shown(error)}"
    if isinstance(error, UserError | Lost):
        return error
    if isinstance(error, tinker.AuthenticationError | tinker.PermissionDeniedError):
        return ConfigError(f"the server rejects the key: set {KEY_VARIABLE} to a key that is valid there ({said})")
    if isinstance(error, tinker.TinkerError) and "api_key" in str(error):
        return ConfigError(f"set {KEY_VARIABLE} to your key ({said})")
    if isinstance(error, tinker.ConflictError):
        return RunError(f"{said}; that name is already in use")
    if isinstance(error, tinker.RateLimitError | tinker.InternalServerError):
        return Busy(said)
    if isinstance(error, tinker.APIConnectionError):
        return Lost(said)
    if isinstance(error, tinker.RequestFailedError):
        is_users = getattr(error.category, "value", "") == "user"
        return RunError(said) if is_users and not _is_forgotten(said) else Lost(said)
    if isinstance(error, tinker.APIStatusError | ValueError):
        return Lost(said) if _is_forgotten(said) else RunError(said)
    # Transport errors, expired promises and ended threads do not mean that the request was wrong.
    return Lost(said)


def _is_forgotten(said: str) -> bool:
    return any(words in said.lower() for words in FORGOTTEN)


def shown(error: object) -> str:
    """Returns an error's text on one line, without the key."""
    text = " ".join(str(error).split())
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key:
        text = text.replace(key, f"<{KEY_VARIABLE}>")
    return text[:MAX_MESSAGE_CHARACTERS]


def service_client(base_url: str, key: str) -> Any:
    """Creates a client, for the hosted service if there is no URL; it connects on first use."""
    import tinker

    return tinker.ServiceClient(api_key=key, **({"base_url": base_url} if base_url else {}))


def capabilities(service: Any, base_url: str, key: str) -> Any:
    """Returns the server's capabilities; SDK 0.38 needs a separate client."""
    import tinker

    if not hasattr(tinker, "RestClient"):
        return service.get_server_capabilities()
    client = tinker.RestClient(api_key=key, **({"base_url": base_url} if base_url else {}))
    return client.get_server_capabilities().result()


def disconnect(service: Any) -> None:
    """Ends the session, whose heartbeat keeps its models on the server; closing is new in 0.38."""
    (getattr(service, "close", None) or service.holder.close)()


def load_state(trainer: Any, path: str) -> Any:
    """Loads a state into an existing model, and returns the future.

    0.38 warns that later versions will create a new model instead, which would use up one of the server's adapters each
    time.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DEPRECATED: TrainingClient.load_state", category=FutureWarning)
        return trainer.load_state(path)


def adam(learning_rate: float, **settings: float) -> Any:
    """Returns the Adam settings of one optimizer step."""
    from tinker import types

    return types.AdamParams(learning_rate=learning_rate, **settings)


def prompt(ids: Sequence[int]) -> Any:
    """Returns token ids in the SDK's type."""
    from tinker import types

    return types.ModelInput.from_ints(list(ids))


def datum(inputs: Sequence[int], targets: Sequence[int], arrays: dict[str, Floats]) -> Any:
    """Returns a training example: input tokens ``(positions,)``, the token after each, and named arrays."""
    from tinker import types

    tensors = {"target_tokens": types.TensorData(data=list(targets), dtype="int64", shape=[len(targets)])}
    for name, array in arrays.items():
        tensors[name] = types.TensorData(data=array.tolist(), dtype="float32", shape=[len(array)])
    return types.Datum(model_input=prompt(inputs), loss_fn_inputs=tensors)


def sampling_params(
    *, max_tokens: int, seed: int, stop: Sequence[int], temperature: float, top_p: float, top_k: int
) -> Any:
    """Returns sampling parameters; ``top_k`` of 0 disables the limit."""
    from tinker import types

    return types.SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        stop=list(stop) or None,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k or -1,
    )


def prompt_logprobs(given: Sequence[float | None], tokens: int) -> Floats:
    """Returns ``(tokens - 1,)`` log-probabilities of all tokens but the first, which has none.

    Raises:
        RunError: If the server returned another number of values.
    """
    values = list(given)[1:] if len(given) == tokens else list(given)
    if len(values) != tokens - 1:
        raise RunError(f"the server returned {len(given)} log-probabilities for {tokens} tokens")
    return np.array([np.nan if value is None else value for value in values], np.float32)
