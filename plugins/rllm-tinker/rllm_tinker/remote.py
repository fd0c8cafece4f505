"""The policy on the server: its adapters and optimizer, the samplers made of them, and how both survive a restart.

A server that restarts forgets every model. What the run did since the last saved state is kept here (`_Step`), so after
a loss a new model is made from that state, the steps since are trained again, and the weights are those that were lost:
versions mean what they meant. States for this are saved where a version goes live, so that its sampler can be made
again.

**SkyRL's JAX engine has one set of adapter weights per model**, which trains *and* samples. Requests to a sampler of an
old version are answered with the newest weights; and the first request to a sampler loads its file into the model,
which undoes the optimizer steps since. Both were measured with skyrl 0.3.0. While nothing is sampled between an
optimizer step and the next version, as in synchronous training, neither can happen (samplers are ``shared``). Otherwise
they are ``separate``: two further models take turns to sample, and each version's state is loaded into the one that no
request uses any more. Hosted samplers are ``snapshots``, and need none of this.
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
    """One forward and backward of a step.

    Attributes:
        data: Training examples of the SDK.
        loss: What the server calls the loss.
        settings: Its parameters.
        has_signal: Whether any advantage is not 0.
    """

    data: list[Any]
    loss: str
    settings: dict[str, float]
    has_signal: bool


@dataclass
class _Step:
    """An optimizer step: what it is made of, and its requests to model number ``generation``."""

    generation: int
    passes: list[Pass] = field(default_factory=list)
    futures: list[Any] = field(default_factory=list)
    adam: Any = None


@dataclass
class Sampler:
    """Samples from one version.

    Attributes:
        client: The SDK's.
        version: Weight version.
        generation: Of the model it belongs to.
        in_use: Requests that wait for an answer.
        idle: Set while there are none.
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
        settings: Where, and how patient to be.

    Attributes:
        step: Optimizer steps done.
        sampler: Of the live version.
        last_saved: Path of the newest state on the server.
        recoveries: How often the model was made again.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.step = 0
        self.sampler: Sampler | None = None
        self.last_saved: str | None = None
        self.recoveries = 0
        self._name = f"rllm-{secrets.token_hex(4)}"  # of this start of the run: no state of another one is in the way
        self._saves = 0
        self._generation = 0
        self._server = Connection(settings)
        self._trainer: Any = None
        self._reference: Any = None
        self._sampling: list[tuple[Any, Sampler]] = []  # models that are only sampled, and what is
        self._live_step = 0
        self._recovery: tuple[str, int] | None = None  # a state, and the step that it is of
        self._since: list[_Step] = []  # steps done since then
        self._current = _Step(0)
        self._is_doubtful = False
        self._lock = asyncio.Lock()
        self._reopening: asyncio.Task[None] | None = None
        self._gone: RunError | None = None

    @property
    def max_model_tokens(self) -> int | None:
        """Longest prompt plus completion, if the server says."""
        return self._server.max_model_tokens

    # ----------------------------------------------------------------------------------------------------------------
    # Life cycle

    async def open(self) -> None:
        """Connect, and make a new model.

        Raises:
            UserError: If the server is not there, or refuses.
        """
        self._trainer = await self._server.open()

    async def resume(self, path: str, step: int) -> None:
        """Go on from a saved state, its optimizer included."""
        self.step, self._recovery, self.last_saved, self._live_step = step, (path, step), path, step
        self._since, self._current = [], _Step(self._generation)
        await self._surely(lambda: self._load(path))

    async def _load(self, path: str) -> None:
        # The model that `open` made is of no use any more; servers unload it when its session ends.
        self._trainer = await self._server.from_state(path)

    async def close(self) -> None:
        """Let go of the server and of the models there; saved states stay."""
        if self._reopening is not None:
            self._reopening.cancel()
        await self._server.disconnect()

    # ----------------------------------------------------------------------------------------------------------------
    # Training

    async def forward_backward(self, part: Pass) -> None:
        """Ask for one pass of the current step; the answer is waited for in `optimizer_step`."""
        if not self._current.passes:
            # Now rather than at the step: a model that is given up with a gradient leaves it, on SkyRL, to the model
            # that gets its place next.
            await self._settle()
            self._current = _Step(self._generation)
        self._current.passes.append(part)
        if self._current.generation == self._generation:
            self._current.futures.append(self._submitted(part))

    async def _settle(self) -> None:
        """Make the model again if a late answer could undo a step."""
        if self._is_doubtful:
            await self._recover(self._generation, Lost("a request was given up whose late answer could undo a step"))

    def _submitted(self, part: Pass) -> Any:
        return self._trainer.forward_backward(part.data, part.loss, part.settings or None)

    async def optimizer_step(self, adam: Any) -> tuple[list[Any], dict[str, float]]:
        """End the current step.

        Returns:
            What each training example gave, and the server's metrics.
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
        # Hosted servers do in one cycle what is sent before anything is waited for. SkyRL's engine looks for passes and
        # for optimizer steps one after the other, and steps without the gradient if both arrive in between: this costs
        # nothing where it can be noticed and made good, and otherwise the passes are waited for.
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
            raise Lost("the optimizer step went ahead of its gradient")
        return outputs, metrics

    async def forward(self, data: list[Any], *, reference: bool) -> list[Any]:
        """What each example gives, under the current weights or those that the base model has."""

        async def ask() -> list[Any]:
            trainer = self._trainer
            if reference:
                if self._reference is None:  # adapters that were never trained change nothing
                    self._reference = await self._server.create("the reference model")
                trainer = self._reference
            found: list[Any] = (
                await self._server.answer("forward", trainer.forward(data, "cross_entropy"))
            ).loss_fn_outputs
            return found

        return await self._surely(ask)

    # ----------------------------------------------------------------------------------------------------------------
    # Weights

    async def publish(self, version: int) -> None:
        """Make the current weights ``version``, and sample from them."""

        async def ask() -> None:
            is_separate = self.settings.samplers == "separate"
            await self._keep(every_steps=1 if is_separate else self.settings.recovery_every_steps)
            await self._republish(version)
            self._live_step = self.step

        await self._surely(ask)

    async def _keep(self, *, every_steps: int) -> None:
        """Save a state to recover from, if the last one is so many steps old."""
        if self._recovery is None or self.step - self._recovery[1] >= every_steps:
            ttl = RECOVERY_TTL_SECONDS if self.settings.samplers == "snapshots" else None
            await self._saved("recovery", ttl)
            assert self.last_saved is not None
            self._recovery, self._since = (self.last_saved, self.step), []

    async def _make_sampler(self, version: int, state: str | None) -> None:
        """A sampler of the trainer's weights, or of a saved state that is loaded into a model of its own."""
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
        """A model that nothing is sampled from any more."""
        if len(self._sampling) < 2:
            return await self._server.create("a model to sample from")
        trainer, sampler = self._sampling.pop(0)
        await sampler.idle.wait()
        return trainer

    async def save(self, ttl_seconds: int | None) -> str:
        """Save weights and optimizer; returns where."""

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
        """Delete states that no checkpoint needs any more, where the server does that.

        Returns:
            Those that are kept for now, because the model would be made again from them.
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
        """A request was given up, and may still be answered at a time that does harm."""
        self._is_doubtful = self.settings.samplers == "shared"

    async def ready(self) -> None:
        """Wait while the model is made again for a sampler's sake.

        Raises:
            RunError: If the server did not come back.
        """
        if self._gone is not None:
            raise self._gone
        if self._reopening is not None:
            await asyncio.shield(self._reopening)

    async def recover(self, sampler: Sampler, lost: Lost) -> None:
        """A request to ``sampler`` was lost: make the model again, unless that has been done.

        It goes on if the caller gives up: a rollout may have less time than a server needs.

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
            task.exception()  # whoever waits has it; if nobody does any more, `ready` says so

    async def _surely(self, ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """What ``ask`` returns; it is called again, from its beginning, after a loss."""
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
        logger.warning("%s; making the model again", lost)
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._reopen()
                return
            except Lost as error:
                lost = error
            except TimeoutError:
                pass  # what was lost first says more
            if time.monotonic() + pause >= deadline:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
        self._gone = RunError(
            f"{self.settings.label} is lost and did not come back within {seconds:g} s "
            f"(tinker.reconnect_timeout_seconds): {lost}; the last state saved there is {self.last_saved or 'none'}"
        )
        raise self._gone

    async def _reopen(self) -> None:
        """Everything that the server may have forgotten, made again."""
        self._generation += 1
        await self._server.disconnect()
        await self._server.connect()
        self._reference, self._sampling = None, []
        self._is_doubtful = False
        live = None if self.sampler is None else self.sampler.version
        if self._recovery is None:
            self._trainer = await self._server.create("the model")
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
    """What a server calls the norm of the gradient, whatever stands before it."""
    return next((float(value) for name, value in metrics.items() if name.rpartition("/")[2] == "grad_norm"), None)
