"""Merging and queueing of engine requests: equal prompts of one tick become one n-sample call."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rllm_core.config import RolloutConfig
from rllm_core.engine import EngineError, RolloutEngine, TokenSource
from rllm_core.limits.request_retries import retried, unanswered
from rllm_core.limits.shared_timer import SharedTimer
from rllm_core.limits.slices import Slices
from rllm_core.limits.slots import Slots
from rllm_core.limits.timeouts import contained, stop
from rllm_core.training.garbage import YoungGarbage
from rllm_core.types import SamplingParams, TokenInput, TokenOutput

# Answers that arrive together are handed to their rollouts in slices: each rollout then runs until its next request,
# which takes about 0.1 ms and blocks everything else on the event loop.
ANSWERS_PER_ROUND = 128
# How long a lockstep batch waits for rollouts that wait for something unknown, and for those that start or call a tool.
LOCKSTEP_GRACE_SECONDS = 0.02
LOCKSTEP_OUTSIDE_SECONDS = 2.0
# Rounds of the event loop that the batch waits besides: on a busy machine, the time may pass while a rollout that waits
# for nothing got no turn.
LOCKSTEP_GRACE_ROUNDS = 100


@types.coroutine
def _rest_of_tick() -> Generator[None, None, None]:
    """Lets all other ready callbacks run."""
    yield


@dataclass(eq=False, slots=True)
class _Merged:
    token_input: TokenInput
    sampling_params: SamplingParams
    is_validation: bool
    seeds: list[int] = field(default_factory=list)
    futures: list[asyncio.Future[TokenOutput]] = field(default_factory=list)
    call: asyncio.Task[None] | None = None

    def sort(self) -> None:
        """Sorts the requests by seed."""
        pairs = sorted(zip(self.seeds, self.futures, strict=True), key=lambda pair: pair[0])
        self.seeds, self.futures = [seed for seed, _ in pairs], [future for _, future in pairs]

    async def output(self, future: asyncio.Future[TokenOutput]) -> TokenOutput:
        """Awaits the output for ``future``; cancels the call when no request waits for any of its outputs."""
        try:
            return await future
        except asyncio.CancelledError:
            if self.call is not None and all(asked.cancelled() for asked in self.futures):
                self.call.cancel()
            raise


class _Asker:
    """Token source of one rollout; counts the rollout's waiting requests."""

    __slots__ = ("_merger", "waiting")

    def __init__(self, merger: RequestMerger) -> None:
        self._merger = merger
        self.waiting = 0

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        """Samples one completion; see `RolloutEngine.get_token_output_from_token_input`."""
        self._merger.count(self, 1)
        try:
            return await self._merger.get_token_output_from_token_input(
                token_input, sampling_params=sampling_params, seed=seed, is_validation=is_validation
            )
        finally:
            self._merger.count(self, -1)


class _Unmerged:
    """Sends every request as a call of its own, in the task that makes the request."""

    __slots__ = ("_merger",)

    def __init__(self, merger: RequestMerger) -> None:
        self._merger = merger

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        """Samples one completion; see `RolloutEngine.get_token_output_from_token_input`."""
        self._merger.requests += 1
        [output] = await self._merger.outputs(token_input, sampling_params, [seed], is_validation)
        return output


class RequestMerger:
    """Merges and queues engine requests; sits between completers and an engine as a `rllm_core.engine.TokenSource`.

    Requests with the same prompt, parameters and purpose that arrive in one event-loop tick become one call, sent by
    its own task; a single request is sent by the task that makes it. Requests to `unmerged` do not wait for equal ones.
    Validation goes first when calls queue, and answers that arrive together are handed out in slices. With
    ``lockstep``, requests wait until every running or starting rollout has sent one and the engine is idle, and are
    sent in the order of their seeds, so batches do not depend on timing. A rollout that is computing in a worker delays
    the others until it is done. One that is starting or calls a tool or a reward function (`rllm_core.scope.timed`)
    delays them by at most 2 s, and one that waits for anything else by at most 20 ms.

    Args:
        limits: Maximum concurrent calls, their timeout, and maximum attempts.
        lockstep: Whether to synchronize batches, for engines whose results depend on the rest of the batch.
        is_settled: See `rllm_core.hosts.contract.RolloutHost`.
        outside: Function that returns the number of calls to tools and reward functions in progress.
        garbage: Garbage of the answers, if something else collects it, too.

    Attributes:
        unmerged: Source for prompts that no other request is likely to have, such as those of later turns.
        running_calls: Tasks that wait for the engine.
        is_starting: Function that returns whether rollouts are about to start.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        limits: RolloutConfig,
        *,
        lockstep: bool,
        is_settled: Callable[[], bool] = lambda: True,
        outside: Callable[[], int] = lambda: 0,
        garbage: YoungGarbage | None = None,
    ) -> None:
        self.engine = engine
        self._is_settled = is_settled
        self._outside = outside
        self._limits = limits
        self.lockstep = lockstep
        self.requests = 0
        self.calls = 0
        self._garbage = garbage or YoungGarbage()
        self._slots = Slots(limits.max_concurrent_requests)
        self._timer = SharedTimer(limits.request_timeout_seconds)
        self._slices = Slices(ANSWERS_PER_ROUND)
        self.unmerged: TokenSource = _Unmerged(self)
        self._pending: dict[bytes | tuple[object, ...], list[_Merged]] = {}
        self._waiting_rollouts = 0
        self._running_rollouts = 0
        self.is_starting: Callable[[], bool] = lambda: False
        self.running_calls: set[asyncio.Task[None]] = set()
        self._scheduled: asyncio.Handle | None = None
        self._grace: asyncio.Handle | None = None

    def source(self) -> TokenSource:
        """Returns the token source of one rollout."""
        return _Asker(self) if self.lockstep else self

    def count(self, asker: _Asker, change: int) -> None:
        """Counts a rollout's request that starts (1) or stops (-1) waiting."""
        before, asker.waiting = asker.waiting, asker.waiting + change
        self._waiting_rollouts += (asker.waiting > 0) - (before > 0)

    def settled(self) -> None:
        """Called when something that a lockstep batch waits for may be over."""
        if self._pending and self.lockstep and self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_soon(self._tick)

    def rollout_started(self) -> None:
        """Counts a running rollout, which may send requests."""
        self._running_rollouts += 1

    def rollout_ended(self) -> None:
        """Counts a rollout as ended."""
        self._running_rollouts -= 1
        self.settled()

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        """Samples one completion; see `RolloutEngine.get_token_output_from_token_input`."""
        prompt = token_input if isinstance(token_input, np.ndarray) else tuple(token_input)
        key = prompt.tobytes() if isinstance(prompt, np.ndarray) else prompt
        self.requests += 1
        pending = self._pending.setdefault(key, [])
        for merged in pending:
            if merged.is_validation == is_validation and merged.sampling_params == sampling_params:
                break
        else:
            merged = _Merged(prompt, sampling_params, is_validation)
            pending.append(merged)
            if not self.lockstep:
                merged.seeds.append(seed)
                try:
                    await _rest_of_tick()
                except asyncio.CancelledError:
                    merged.seeds.pop(0)  # only this request is cancelled: send those that joined it
                    if merged.futures:
                        self._start(merged)
                    raise
                finally:
                    pending.remove(merged)
                    if not pending:
                        del self._pending[key]
                if not merged.futures:
                    del key  # free memory: it is as long as the prompt, and the call may take long
                    [output] = await self.outputs(prompt, sampling_params, merged.seeds, is_validation)
                    return output
                merged.futures.insert(0, asyncio.get_running_loop().create_future())
                self._start(merged)
                return await merged.output(merged.futures[0])
        future: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        merged.seeds.append(seed)
        merged.futures.append(future)
        self.settled()
        return await merged.output(future)

    async def aclose(self) -> None:
        """Cancels merged calls that are still in the engine; single calls end with their requesting task."""
        for handle in (self._scheduled, self._grace):
            if handle is not None:
                handle.cancel()
        await stop(*self.running_calls)

    async def idle(self) -> None:
        """Waits until no merged call is in the engine."""
        while self.running_calls:
            await asyncio.wait(self.running_calls)

    def _tick(self) -> None:
        self._scheduled = None
        if not self._is_settled():
            return  # the host calls `settled` when it is
        if self._waiting_rollouts >= self._running_rollouts and not self.is_starting():
            if not self.running_calls:
                self._flush()
        elif self._grace is None:
            loop = asyncio.get_running_loop()
            until = loop.time() + LOCKSTEP_OUTSIDE_SECONDS
            self._grace = loop.call_later(LOCKSTEP_GRACE_SECONDS, self._grace_over, until)

    def _grace_over(self, until: float, rounds: int = LOCKSTEP_GRACE_ROUNDS) -> None:
        self._grace = None
        if not self._pending or self.running_calls or not self._is_settled():
            return
        loop = asyncio.get_running_loop()
        if (self._outside() or self.is_starting()) and loop.time() < until:
            self._grace = loop.call_later(LOCKSTEP_GRACE_SECONDS, self._grace_over, until)
        elif rounds:
            self._grace = loop.call_soon(self._grace_over, until, rounds - 1)
        else:
            self._flush()

    def _flush(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        pending, self._pending = self._pending, {}
        batch = [merged for equal_prompts in pending.values() for merged in equal_prompts]
        for merged in batch:
            merged.sort()
        for merged in sorted(batch, key=lambda merged: (merged.seeds[0], merged.is_validation)):
            self._start(merged)

    def _start(self, merged: _Merged) -> None:
        wanted = [index for index, future in enumerate(merged.futures) if not future.cancelled()]
        if not wanted:
            return  # all their rollouts have ended meanwhile
        merged.seeds = [merged.seeds[index] for index in wanted]
        merged.futures = [merged.futures[index] for index in wanted]
        merged.call = asyncio.create_task(self._call(merged), name=f"request to engine {self.engine.name!r}")
        self.running_calls.add(merged.call)

    def outputs(
        self, token_input: TokenInput, sampling_params: SamplingParams, seeds: list[int], is_validation: bool
    ) -> Awaitable[list[TokenOutput]]:
        """Calls the engine, and retries after a pause while it is busy."""
        request = token_input, sampling_params, seeds, is_validation
        return retried(self._attempt, *request, attempts=self._limits.max_request_attempts, seed=seeds[0])

    async def _attempt(
        self, token_input: TokenInput, sampling_params: SamplingParams, seeds: list[int], is_validation: bool
    ) -> list[TokenOutput]:
        if not self._slots.take_free():
            await self._slots.take(priority=is_validation)
        deadline = self._timer.deadline()
        try:
            self.calls += 1
            outputs = await deadline.limit(
                self.engine.get_token_outputs_from_token_input(
                    token_input, sampling_params=sampling_params, seeds=seeds, is_validation=is_validation
                )
            )
        except TimeoutError as error:
            if not deadline.expired:
                raise
            raise unanswered(f"engine {self.engine.name!r}", self._timer.seconds) from error
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise EngineError(f"engine {self.engine.name!r} cancelled the call itself") from error
        finally:
            self._slots.give_back()
        # Without a wait, the answer came from the task that continues now, so no other answers arrive with it.
        if deadline.begun and (next_round := self._slices.wait()) is not None:
            await next_round
        if not isinstance(outputs, Sequence) or len(outputs) != len(seeds):
            found = len(outputs) if isinstance(outputs, Sequence) else type(outputs).__name__
            raise EngineError(f"engine {self.engine.name!r} returned {found} instead of {len(seeds)} completions")
        self._garbage.answered(len(outputs))
        return outputs

    async def _call(self, merged: _Merged) -> None:
        try:
            outputs = await contained(
                self.outputs(merged.token_input, merged.sampling_params, merged.seeds, merged.is_validation)
            )
        except asyncio.CancelledError:
            for future in merged.futures:
                future.cancel()
            raise
        except Exception as error:
            for future in merged.futures:
                if not future.done():
                    future.set_exception(error)
        else:
            for future, output in zip(merged.futures, outputs, strict=True):
                if not future.done():  # the rollout may have timed out
                    future.set_result(output)
        finally:
            task = asyncio.current_task()
            assert task is not None
            self.running_calls.discard(task)
            self.settled()
