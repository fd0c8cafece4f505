"""The tinker SDK behind one face: what its versions do differently, deadlines, and what its errors mean.

Nothing in the SDK bounds the wait for a future: while a server is away or answers 5xx, it asks again for ever. So
everything here has a deadline. What differs between 0.24 and 0.38:

* ``create_*`` and ``save_weights_and_get_sampling_client`` block and return the object in 0.24, and return a future of
  it in 0.38, which warns about the names ending in ``_async``. Here the plain names are called in a thread (`made`).
* Futures of requests are the SDK's own or `concurrent.futures.Future` (`answer`).
* What the server has is asked by the service client in 0.24, by one of its own in 0.38 (`capabilities`).
* Closing a client is new in 0.38 (`disconnect`); loading a state into an existing model is deprecated (`load_state`).
* ``compute_logprobs`` of N tokens returns N values, the first None, or N - 1 (`prompt_logprobs`).

The SDK is imported when it is first used.
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
# How servers say that a restart has cost them the model, the session or the sampler that a request is for.
FORGOTTEN = ("not loaded", "not found", "expired", "unknown session", "no such model")


class Lost(Exception):
    """The server did not answer, or no longer knows the model: reconnecting may help."""


class Busy(Lost):
    """The server answers, but not now."""


async def made(seconds: float, what: str, make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a blocking call of the SDK makes, without blocking the event loop.

    A thread that is still in the call at the deadline is left behind; it does not keep the process from ending.

    Raises:
        Lost: If the server does not answer in time.
        UserError: If it refuses.
    """
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # so that an answer after the deadline finds a future that takes it

    def call() -> None:
        try:
            found = make(*arguments, **named)
            done.set_result(found.result() if hasattr(found, "result") else found)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=call, name=f"tinker-{what}", daemon=True).start()
    return await answer(seconds, what, done)


async def answer(seconds: float, what: str, future: Any) -> Any:
    """The result of a future of the SDK.

    Raises:
        Lost: If it is not there in time.
        UserError: If the server refused the request.
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
        # The cause is left out: it holds the request, and so the key.
        raise meaning(what, error) from None


def meaning(what: str, error: Exception) -> Exception:
    """An error of the SDK as one of ours; its text has no key in it."""
    import tinker

    said = f"{what}: {type(error).__name__}: {shown(error)}"
    if isinstance(error, UserError | Lost):
        return error
    if isinstance(error, tinker.AuthenticationError | tinker.PermissionDeniedError):
        return ConfigError(f"the server refuses the key: set {KEY_VARIABLE} to one that is valid there ({said})")
    if isinstance(error, tinker.TinkerError) and "api_key" in str(error):
        return ConfigError(f"set {KEY_VARIABLE} to your key ({said})")
    if isinstance(error, tinker.ConflictError):
        return RunError(f"{said}; that name is in use already")
    if isinstance(error, tinker.RateLimitError | tinker.InternalServerError):
        return Busy(said)
    if isinstance(error, tinker.APIConnectionError):
        return Lost(said)
    if isinstance(error, tinker.RequestFailedError):
        is_users = getattr(error.category, "value", "") == "user"
        return RunError(said) if is_users and not _is_forgotten(said) else Lost(said)
    if isinstance(error, tinker.APIStatusError | ValueError):
        return Lost(said) if _is_forgotten(said) else RunError(said)
    # Transports, promises that expired, threads that ended: none of it says that the request was wrong.
    return Lost(said)


def _is_forgotten(said: str) -> bool:
    return any(words in said.lower() for words in FORGOTTEN)


def shown(error: object) -> str:
    """An error's text in one line, without the key."""
    text = " ".join(str(error).split())
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key:
        text = text.replace(key, f"<{KEY_VARIABLE}>")
    return text[:MAX_MESSAGE_CHARACTERS]


def service_client(base_url: str, key: str) -> Any:
    """A client of a server, hosted if there is no URL; it connects when first used."""
    import tinker

    return tinker.ServiceClient(api_key=key, **({"base_url": base_url} if base_url else {}))


def capabilities(service: Any, base_url: str, key: str) -> Any:
    """What the server has; in 0.38 a client of its own asks."""
    import tinker

    if not hasattr(tinker, "RestClient"):
        return service.get_server_capabilities()
    client = tinker.RestClient(api_key=key, **({"base_url": base_url} if base_url else {}))
    return client.get_server_capabilities().result()


def disconnect(service: Any) -> None:
    """End the session, whose heartbeat keeps its models on the server; closing is new in 0.38."""
    (getattr(service, "close", None) or service.holder.close)()


def load_state(trainer: Any, path: str) -> Any:
    """The future of a state loaded into a model that is there already.

    0.38 warns that later versions will make a new model instead; that takes one of the server's adapters each time.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DEPRECATED: TrainingClient.load_state", category=FutureWarning)
        return trainer.load_state(path)


def adam(learning_rate: float, **settings: float) -> Any:
    """Settings of one optimizer step."""
    from tinker import types

    return types.AdamParams(learning_rate=learning_rate, **settings)


def prompt(ids: Sequence[int]) -> Any:
    """Token ids as a server takes them."""
    from tinker import types

    return types.ModelInput.from_ints(list(ids))


def datum(inputs: Sequence[int], targets: Sequence[int], arrays: dict[str, Floats]) -> Any:
    """A training example: ``(positions,)`` tokens in, the tokens that follow, and an array of each name."""
    from tinker import types

    tensors = {"target_tokens": types.TensorData(data=list(targets), dtype="int64", shape=[len(targets)])}
    for name, array in arrays.items():
        tensors[name] = types.TensorData(data=array.tolist(), dtype="float32", shape=[len(array)])
    return types.Datum(model_input=prompt(inputs), loss_fn_inputs=tensors)


def sampling_params(
    *, max_tokens: int, seed: int, stop: Sequence[int], temperature: float, top_p: float, top_k: int
) -> Any:
    """How to sample; ``top_k`` of 0 keeps all."""
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
    """``(tokens - 1,)`` of every token but the first, of which there is none.

    Raises:
        RunError: If they are not as many.
    """
    values = list(given)[1:] if len(given) == tokens else list(given)
    if len(values) != tokens - 1:
        raise RunError(f"the server gave {len(given)} log-probabilities for {tokens} tokens")
    return np.array([np.nan if value is None else value for value in values], np.float32)
