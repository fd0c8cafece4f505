"""The policy on the server: adapters, optimizer and samplers, and their recovery after a server restart.

A server that restarts forgets every model. This module therefore keeps the optimizer steps since the last saved state
(`_Step`). After a loss, it creates a new model from that state and trains these steps again. The result is the lost
weights, so weight versions keep their meaning. Recovery states are saved when a version goes live, so that its sampler
can be recreated.

**SkyRL's JAX engine has one set of adapter weights per model**, for training *and* sampling. Requests to a sampler of
an old version use the latest weights. The first request to a sampler loads its file into the model, which undoes the
optimizer steps since. Both were measured with skyrl 0.3.0. Neither can happen if nothing is sampled between an
optimizer step and the next version, as in synchronous training; samplers are then ``shared``. Otherwise they are
``separate``: two additional models take turns at sampling, and each version's state is loaded into the one without
requests. Hosted samplers are ``snapshots`` and need none of this.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rllm_core.errors import RunError
from rllm_tinker import sdk
from rllm_tinker.connection import Connection, ServerSettings
from rllm_tinker.sdk import Lost

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 10.0
RECOVERY_TTL_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True)
class Pass:
    """One forward-backward pass of a step.

    Attributes:
        data: Training examples, in the SDK's type.
        loss: Name of the loss on the server.
        settings: Parameters of the loss.
        has_signal: Whether any advantage is not 0.
    """

    data: list[Any]
    loss: str
    settings: dict[str, float]
    has_signal: bool


@dataclass
class _Step:
    """An optimizer step: its passes and settings, and its requests to the model with number ``generation``."""

    generation: int
    passes: list[Pass] = field(default_factory=list)
    futures: list[Any] = field(default_factory=list)
    adam: Any = None


@dataclass
class Sampler:
    """Samples from one weight version.

    Attributes:
        client: Sampling client of the SDK.
        version: Weight version.
        generation: Number of the model that the sampler belongs to.
        in_use: Number of requests in flight.
        idle: Set while no request is in flight.
    """

    client: Any
    version: int
    generation: int
    in_use: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    def __enter__(self) -> Sampler:
        self.in_use += 1
        self.idle.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self.in_use -= 1
        if not self.in_use:
            self.idle.set()


class RemotePolicy:
    """One policy on one server.

    Args:
        settings: Server, model and timeouts.

    Attributes:
        step: Number of completed optimizer steps.
        sampler: Sampler of the live weight version.
        last_saved: Path of the latest saved state on the server.
        recoveries: Number of times the model was restored.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.step = 0
        self.sampler: Sampler | None = None
        self.last_saved: str | None = None
        self.recoveries = 0
        # Unique per launch, so that states of other launches do not collide.
        self._name = f"rllm-{secrets.token_hex(4)}"
        self._saves = 0
        self._generation = 0
        self._server = Connection(settings)
        self._trainer: Any = None
        self._reference: Any = None
        self._sampling: list[tuple[Any, Sampler]] = []  # models used only for sampling, with their samplers
        self._live_step = 0
        self._initial: str | None = None  # state of another run, whose weights this run starts from
        self._recovery: tuple[str, int] | None = None  # a saved state, with its step
        self._since: list[_Step] = []  # completed steps since the state in `_recovery`
        self._current = _Step(0)
        self._is_doubtful = False
        self._lock = asyncio.Lock()
        self._reopening: asyncio.Task[None] | None = None
        self._gone: RunError | None = None

    @property
    def max_model_tokens(self) -> int | None:
        """Maximum length of prompt plus completion, if the server reports it."""
        return self._server.max_model_tokens

    # ----------------------------------------------------------------------------------------------------------------
    # Life cycle

    async def open(self) -> None:
        """Connects, and creates a new model.

        Raises:
            UserError: If the server does not respond, or rejects the request.
        """
        self._trainer = await self._server.open()

    async def start_from(self, path: str) -> None:
        """Starts from the weights of a state that another run saved; they also become the reference."""
        self._initial = path
        await self._surely(self._begin)

    async def _begin(self) -> None:
        self._trainer = await self._new("the model")

    async def _new(self, what: str) -> Any:
        """Creates a model with the initial weights of the run."""
        if self._initial is None:
            return await self._server.create(what)
        trainer = await self._server.from_weights(self._initial)
        if self.settings.samplers != "snapshots":
            # SkyRL also loads the optimizer. A step without gradient, decay rates and learning rate clears its moments.
            cleared = trainer.optim_step(sdk.adam(0.0, beta1=0.0, beta2=0.0, eps=1e-8, weight_decay=0.0))
            await self._server.answer("clearing the optimizer", cleared)
        return trainer

    async def resume(self, path: str, step: int) -> None:
        """Continues from a saved state, including its optimizer."""
        self.step, self._recovery, self.last_saved, self._live_step = step, (path, step), path, step
        self._since, self._current = [], _Step(self._generation)
        await self._surely(lambda: self._load(path))

    async def _load(self, path: str) -> None:
        # The model that `open` created is no longer used; servers unload it when its session ends.
        self._trainer = await self._server.from_state(path)

    async def close(self) -> None:
        """Releases the server and the models there; saved states stay."""
        if self._reopening is not None:
            self._reopening.cancel()
        await self._server.disconnect()

    # ----------------------------------------------------------------------------------------------------------------
    # Training

    async def forward_backward(self, part: Pass) -> None:
        """Requests one pass of the current step; `optimizer_step` waits for the response."""
        if not self._current.passes:
            # Recover before the first pass: on SkyRL, the next model in this slot inherits an abandoned model's
            # gradient.
            await self._settle()
            self._current = _Step(self._generation)
        self._current.passes.append(part)
        if self._current.generation == self._generation:
            self._current.futures.append(self._submitted(part))

    async def _settle(self) -> None:
        """Restores the model if the late response to an abandoned request could undo a step."""
        if self._is_doubtful:
            await self._recover(self._generation, Lost("the late response to an abandoned request could undo a step"))

    def _submitted(self, part: Pass) -> Any:
        return self._trainer.forward_backward(part.data, part.loss, part.settings or None)

    async def optimizer_step(self, adam: Any) -> tuple[list[Any], dict[str, float]]:
        """Completes the current step.

        Returns:
            The server's output for each training example, and its metrics.
        """
        await self._settle()
        current = self._current
        current.adam = adam
        outputs, metrics = await self._surely(lambda: self._trained(current))
        current.futures = []
        self._since.append(current)
        self._current = _Step(self._generation)
        self.step += 1
        return outputs, metrics

    async def _trained(self, step: _Step) -> tuple[list[Any], dict[str, float]]:
        is_new = step.generation == self._generation
        if not is_new:
            step.generation, step.futures = self._generation, [self._submitted(part) for part in step.passes]
        # Hosted servers process requests in one cycle if all are sent before waiting. SkyRL's engine polls for passes,
        # then for optimizer steps; if both arrive in between, it steps without the gradient. Send ahead only where this
        # can be detected and repaired; otherwise wait for the passes first.
        is_sent_ahead = self.settings.orders_requests or (is_new and len(step.passes) == 1)
        optimizer = self._trainer.optim_step(step.adam) if is_sent_ahead else None
        outputs: list[Any] = []
        for future in step.futures:
            outputs += (await self._server.answer("forward_backward", future)).loss_fn_outputs
        if optimizer is None:
            optimizer = self._trainer.optim_step(step.adam)
        metrics = dict((await self._server.answer("optim_step", optimizer)).metrics or {})
        may_have_slipped = is_sent_ahead and not self.settings.orders_requests
        if may_have_slipped and grad_norm(metrics) == 0 and any(part.has_signal for part in step.passes):
            raise Lost("the optimizer step ran before its gradient")
        return outputs, metrics

    async def forward(self, data: list[Any], *, reference: bool) -> list[Any]:
        """Returns the server's output for each example, under the current weights or those of the base model."""

        async def ask() -> list[Any]:
            trainer = self._trainer
            if reference:
                if self._reference is None:
                    self._reference = await self._new("the reference model")
                trainer = self._reference
            found: list[Any] = (
                await self._server.answer("forward", trainer.forward(data, "cross_entropy"))
            ).loss_fn_outputs
            return found

        return await self._surely(ask)

    # ----------------------------------------------------------------------------------------------------------------
    # Weights

    async def publish(self, version: int) -> None:
        """Publishes the current weights as ``version``, and samples from them."""

        async def ask() -> None:
            is_separate = self.settings.samplers == "separate"
            await self._keep(every_steps=1 if is_separate else self.settings.recovery_every_steps)
            await self._republish(version)
            self._live_step = self.step

        await self._surely(ask)

    async def _keep(self, *, every_steps: int) -> None:
        """Saves a recovery state if the last one is at least ``every_steps`` old."""
        if self._recovery is None or self.step - self._recovery[1] >= every_steps:
            ttl = RECOVERY_TTL_SECONDS if self.settings.samplers == "snapshots" else None
            await self._saved("recovery", ttl)
            assert self.last_saved is not None
            self._recovery, self._since = (self.last_saved, self.step), []

    async def _make_sampler(self, version: int, state: str | None) -> None:
        """Creates a sampler of the trainer's weights, or of a saved state, loaded into a separate model."""
        trainer, generation = self._trainer, self._generation
        if state is not None:
            trainer = await self._free_sampler()
            await self._server.answer("loading the sampler's weights", sdk.load_state(trainer, state))
        client = await self._server.made("saving the sampler's weights", trainer.save_weights_and_get_sampling_client)
        sampler = Sampler(client, version, generation)
        if state is not None:
            self._sampling.append((trainer, sampler))
        self.sampler = sampler

    async def _free_sampler(self) -> Any:
        """Returns a sampling model without requests in flight."""
        if len(self._sampling) < 2:
            return await self._server.create("a model to sample from")
        trainer, sampler = self._sampling.pop(0)
        await sampler.idle.wait()
        return trainer

    async def save(self, ttl_seconds: int | None) -> str:
        """Saves weights and optimizer, and returns their path on the server."""

        async def ask() -> str:
            return await self._saved("checkpoint", ttl_seconds)

        path = await self._surely(ask)
        if self._live_step == self.step:
            self._recovery, self._since = (path, self.step), []
        return path

    async def _saved(self, purpose: str, ttl_seconds: int | None) -> str:
        self._saves += 1
        name = f"{self._name}-{purpose}-step-{self.step:06d}-{self._saves}"
        lasting = {} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}
        saved = await self._server.answer(f"saving {name}", self._trainer.save_state(name, **lasting))
        self.last_saved = str(saved.path)
        return self.last_saved

    async def forget(self, paths: Sequence[str]) -> list[str]:
        """Deletes states that no checkpoint needs any more, if the server supports deletion.

        Returns:
            The states kept for now, because recovery needs them.
        """
        needed = [path for path in paths if self._recovery is not None and path == self._recovery[0]]
        if self.settings.samplers == "snapshots":
            for path in paths:
                if path not in needed:
                    await self._server.delete(path)
        return needed

    # ----------------------------------------------------------------------------------------------------------------
    # Recovery

    def doubt(self) -> None:
        """Records that a request was abandoned whose late response could undo a step."""
        self._is_doubtful = self.settings.samplers == "shared"

    async def ready(self) -> None:
        """Waits while a lost sampler's model is restored.

        Raises:
            RunError: If the server did not come back.
        """
        if self._gone is not None:
            raise self._gone
        if self._reopening is not None:
            await asyncio.shield(self._reopening)

    async def recover(self, sampler: Sampler, lost: Lost) -> None:
        """Restores the model after a request to ``sampler`` was lost, unless that has been done already.

        Recovery continues if the caller is cancelled, because a rollout may have less time than the server needs.

        Raises:
            RunError: If the server does not come back.
        """
        if self._reopening is None:
            self._reopening = asyncio.create_task(self._recover(sampler.generation, lost), name="recovery")
            self._reopening.add_done_callback(self._reopened)
        await asyncio.shield(self._reopening)

    def _reopened(self, task: asyncio.Task[None]) -> None:
        self._reopening = None
        if not task.cancelled():
            task.exception()  # mark as retrieved; waiting callers get it too, and `ready` raises it again

    async def _surely(self, ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Calls ``ask`` and returns its result; after a loss, reconnects and calls it again from the start."""
        async with self._lock:
            while True:
                if self._gone is not None:
                    raise self._gone
                try:
                    return await ask()
                except Lost as lost:
                    await self._reconnected(lost)

    async def _recover(self, generation: int, lost: Lost) -> None:
        async with self._lock:
            if generation == self._generation and self._gone is None:
                await self._reconnected(lost)

    async def _reconnected(self, lost: Lost) -> None:
        seconds = self.settings.reconnect_timeout_seconds
        deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
        logger.warning("%s; restoring the model", lost)
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._reopen()
                return
            except Lost as error:
                lost = error
            except TimeoutError:
                pass  # report the earlier loss, which is more informative
            if time.monotonic() + pause >= deadline:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
        self._gone = RunError(
            f"{self.settings.label} was lost and did not come back within {seconds:g} s "
            f"(tinker.reconnect_timeout_seconds): {lost}; last state saved there: {self.last_saved or 'none'}"
        )
        raise self._gone

    async def _reopen(self) -> None:
        """Recreates everything that the server may have forgotten."""
        self._generation += 1
        await self._server.disconnect()
        await self._server.connect()
        self._reference, self._sampling = None, []
        self._is_doubtful = False
        live = None if self.sampler is None else self.sampler.version
        if self._recovery is None:
            self._trainer = await self._new("the model")
        else:
            self._trainer = await self._server.from_state(self._recovery[0])
        step = self.step - len(self._since)
        if live is not None and step == self._live_step:
            await self._republish(live)
        for done in self._since:
            await self._trained(done)
            step += 1
            if live is not None and step == self._live_step:
                await self._republish(live)
        self.recoveries += 1

    async def _republish(self, version: int) -> None:
        state = None
        if self.settings.samplers == "separate":
            assert self._recovery is not None  # saved with every version
            state = self._recovery[0]
        await self._make_sampler(version, state)


def grad_norm(metrics: Mapping[str, float]) -> float | None:
    """Returns the gradient norm from a server's metrics, under any prefix."""
    return next((float(value) for name, value in metrics.items() if name.rpartition("/")[2] == "grad_norm"), None)
