"""``textarena``: games for one or several players, with scripted players or self-play."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rllm_core.engine import Completer, derive_seed
from rllm_core.errors import ConfigError
from rllm_core.types import Episode, FinishReason, Messages, Step, Task, TerminationReason, Trajectory
from rllm_core.workflow import LazyTasks, Split, Workflow, WorkflowConfig
from rllm_environments.answers import action_of
from rllm_environments.catalog import AuditFiles, Description
from rllm_environments.textarena.game import Game, View
from rllm_environments.textarena.names import AUDIT_FILES, findings
from rllm_environments.textarena.refusals import opened
from rllm_environments.warm_starts import Conversation, random_legal_actions

LOST = -1.0
NO_RESULT = 0.0
# Games read numbers with int(), which raises above 4300 digits.
MAX_MOVE_CHARACTERS = 4000
FAILS_IN_PLAY = "it fails in play"
FIRST_VALIDATION_SEED = 1_000_000


class TextArenaConfig(WorkflowConfig):
    """``[textarena]``: the game, who plays, and how it is shown."""

    environment: Annotated[str, Field(min_length=1, description="Id of the game.")] = "TicTacToe-v0"
    options: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the game, instead of those it is registered with."
    )
    players: Annotated[
        int | None, Field(ge=1, le=15, description="Number of players. If unset, the smallest that the game allows.")
    ] = None
    opponents: Annotated[
        Literal["random", "self"],
        Field(
            description="Who plays the other seats: scripted players that draw from the legal moves, or the policy "
            "itself, with a trajectory for each seat."
        ),
    ] = "random"
    seat: Annotated[
        int | None,
        Field(ge=0, le=14, description="Seat of the policy, from 0. If unset, the tasks take turns with the seats."),
    ] = None
    view: Annotated[
        View,
        Field(
            description="What the policy sees each turn: everything new, only the newest board, or only the actions of "
            "the others."
        ),
    ] = "new"
    instructions: Annotated[
        bool,
        Field(description="Whether the prompt explains the rules. A model with a warm start needs no rules."),
    ] = True
    max_turns: Annotated[
        int, Field(ge=1, le=10_000, description="Maximum turns of the policy per seat. Then the game has no result.")
    ] = 100
    train_tasks: Annotated[int, Field(ge=1, le=1_000_000, description="Number of training games.")] = 4096
    validation_tasks: Annotated[int, Field(ge=1, le=1_000_000, description="Number of validation games.")] = 256

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.opponents == "self" and self.seat is not None:
            raise ValueError('seat has no effect with opponents = "self", where the policy plays all seats; remove it')
        return self


class TextArenaWorkflow(Workflow):
    """Plays games of TextArena; each turn appends only the text that a player has not seen yet.

    The reward is the game's own, for the policy's seat. A player that loses by an illegal move gets -1, whatever the
    game pays, and the others get 0, because an opponent's mistake is no merit. Scripted players only make moves that
    the game accepts; if none is found, the rollout fails. A game without a result within ``max_turns`` gets the reward
    0.
    """

    name: ClassVar[str] = "textarena"
    config_model: ClassVar[type[WorkflowConfig]] = TextArenaConfig
    audit_files: ClassVar[AuditFiles] = AUDIT_FILES
    audits: ClassVar[str] = "rllm_environments.textarena.audit:audits"
    config: TextArenaConfig

    def __init__(self, config: WorkflowConfig | None = None, *, audited: bool = False) -> None:
        """Creates the workflow; ``audited`` means that an audit runs it, so no earlier audit is required."""
        super().__init__(config)
        refused = None if audited else findings(self.config.environment).get("refused")
        if refused is not None and refused.startswith(FAILS_IN_PLAY):
            raise ConfigError(f"textarena.environment: {self.config.environment} is refused: {refused}")
        _, self.players = opened(self.config.environment, self.config.players, 0, self.config.options)
        if self.config.seat is not None and self.config.seat >= self.players:
            raise ConfigError(f"textarena.seat = {self.config.seat}: the game has seats 0 to {self.players - 1}")
        if self.config.opponents == "self" and self.players == 1:
            raise ConfigError(
                f'textarena.opponents = "self": {self.config.environment} has one player; remove it, or set '
                "textarena.players"
            )

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns one task per game; validation uses other seeds."""
        size = self.config.train_tasks if split == "train" else self.config.validation_tasks
        first = 0 if split == "train" else FIRST_VALIDATION_SEED
        return LazyTasks(lambda number: self._task(first + number), size)

    def warm_start(self, rng: random.Random) -> Iterator[Conversation]:
        """Yields games with random legal moves: they teach the form of answers, but not which moves are good."""
        return random_legal_actions(
            _Seated(self, rng),
            rng,
            seeds=count(rng.randrange(FIRST_VALIDATION_SEED // 2)),
            max_turns=self.config.max_turns,
        )

    def made(self, seed: int) -> Game:
        """Starts a game."""
        return Game(self.config.environment, self.players, seed, self.config.options)

    def seen(self, game: Game) -> str:
        """Returns the text that the current player has not seen yet, in the configured view."""
        seen = game.seen(with_rules=self.config.instructions, view=self.config.view)
        return seen or "Your turn."

    @classmethod
    def describe(cls, variant: str) -> dict[str, Any]:
        """Describes a game for ``rllm-core environments``, without importing TextArena."""
        found = findings(variant)
        return {**found, **vars(Description.of(variant, found))} if found else {}

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Plays one game."""
        game = self.made(task.data["seed"])
        if self.config.opponents == "self":
            seats = {player: _Seat(completer.fork(key=f"player{player}")) for player in range(self.players)}
        else:
            seats = {task.data["seat"]: _Seat(completer)}
        rng = random.Random(derive_seed(completer.seed, "environment"))
        reason = TerminationReason.DONE
        while not game.is_over and reason is TerminationReason.DONE and not game.forfeited:
            player = game.player
            seat = seats.get(player)
            if seat is None:
                scripted_turn(game, rng)
            elif len(seat.steps) == self.config.max_turns:
                reason = TerminationReason.MAX_TURNS
            else:
                step = await seat.asked(self.seen(game))
                move = action_of(step.text)
                if step.finish_reason is FinishReason.LENGTH:
                    game.forfeited.add(player)
                    reason = TerminationReason.MAX_RESPONSE_TOKENS
                elif len(move) > MAX_MOVE_CHARACTERS:
                    game.forfeited.add(player)
                else:
                    game.act(move)
        return self._ended(task, game, seats, reason)

    def _ended(self, task: Task, game: Game, seats: dict[int, _Seat], reason: TerminationReason) -> Episode:
        paid = game.rewards() if game.is_over and not game.forfeited else {}
        rewards = {player: LOST if player in game.forfeited else paid.get(player, NO_RESULT) for player in seats}
        metrics = {
            "turns": float(sum(len(seat.steps) for seat in seats.values())),
            "illegal_moves": float(sum(game.illegal_moves[player] for player in seats)),
            "forfeits": float(len(game.forfeited)),
        }
        is_self_play = self.config.opponents == "self"
        if not is_self_play:
            [reward] = rewards.values()
            metrics |= {"won": float(reward > 0), "not_lost": float(reward >= 0 and game.is_over)}
        return Episode(
            task_id=task.task_id,
            trajectories=[
                Trajectory(
                    role=f"player{player}" if is_self_play else "agent", steps=seat.steps, reward=rewards[player]
                )
                for player, seat in seats.items()
                if seat.steps
            ],
            is_correct=None if is_self_play else reward > 0,
            termination_reason=reason,
            metrics=metrics,
            metadata={"reason": game.reason()},
        )

    def _task(self, seed: int) -> Task:
        seat = self.config.seat if self.config.seat is not None else seed % self.players
        data = {"seed": seed} if self.config.opponents == "self" else {"seed": seed, "seat": seat}
        return Task(task_id=f"{self.config.environment}-{seed}", data=data)


class _Seat:
    """The policy's conversation at one seat."""

    def __init__(self, completer: Completer) -> None:
        self.steps: list[Step] = []
        self._completer = completer
        self._messages = Messages([])

    async def asked(self, seen: str) -> Step:
        """Returns the policy's answer to an observation."""
        self._messages.append({"role": "user", "content": seen})
        step = await self._completer.complete(self._messages)
        self._messages.append(step.response)
        self.steps.append(step)
        return step


class _Seated:
    """A seat among scripted players, for `rllm_environments.warm_starts`."""

    def __init__(self, workflow: TextArenaWorkflow, rng: random.Random) -> None:
        self._workflow = workflow
        self._rng = rng

    def reset(self, seed: int) -> str:
        self._game = self._workflow.made(seed)
        self._seat = self._rng.randrange(self._workflow.players)
        if self._workflow.config.seat is not None:
            self._seat = self._workflow.config.seat
        return self._next() or ""

    def legal_actions(self, rng: random.Random) -> Sequence[str]:
        return [] if self._game.is_over else [self._game.legal_move(rng)]

    def step(self, action: str) -> str | None:
        self._game.act(action)
        return self._next()

    def _next(self) -> str | None:
        while not self._game.is_over and self._game.player != self._seat:
            scripted_turn(self._game, self._rng)
        return None if self._game.is_over else self._workflow.seen(self._game)


def scripted_turn(game: Game, rng: random.Random) -> None:
    """Makes a random legal move.

    Raises:
        NoLegalMove: If none is found.
        RuntimeError: If the game rejects a move that its copy accepted.
    """
    game.seen()
    move = game.legal_move(rng)
    if not game.act(move):
        raise RuntimeError(f"{game.name} rejects {move!r}, which it accepted from a copy of the same game")
