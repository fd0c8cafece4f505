"""A workflow that can only be imported by another Python interpreter (``rollout.python``), as the run sees it.

Its tasks are listed there and fetched by their positions; its rollouts run in the workers of a rollout host.
"""

from __future__ import annotations

import random
import subprocess
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn

from pydantic import ConfigDict

from rllm_core.engine import Completer
from rllm_core.errors import ConfigError, PluginError
from rllm_core.hosts import wire
from rllm_core.sandbox.processes import end
from rllm_core.text import printable
from rllm_core.types import Episode, Task, Trajectory
from rllm_core.workflow import Conversation, LazyTasks, Split, Workflow, WorkflowConfig

CONVERSATIONS_PER_FETCH = 32
TASKS_PER_FETCH = 256
TASKS_KEPT = 64 * TASKS_PER_FETCH
GROUP = "group"  # key of a trajectory's metadata


class ElsewhereConfig(WorkflowConfig):
    """Section of the workflow; the other interpreter knows its keys, and has checked them."""

    model_config = ConfigDict(extra="allow", frozen=True)


class WorkflowElsewhere(Workflow):
    """Represents the workflow in the process of the run."""

    name: ClassVar[str]
    config_model = ElsewhereConfig

    def place(
        self, python: str, load: str, *, name: str, sandbox: str, samples: bool, warm_starts: bool = False
    ) -> None:
        """Sets where the workflow is."""
        opening = wire.Open(wire.VERSION, load, self.config.model_dump(mode="json"), sandbox=sandbox, opens=False)
        self._lister = _Lister(python, opening)
        self.name = name  # type: ignore[misc]  # of the class elsewhere, like the next one
        self.samples = samples  # type: ignore[misc]  # of the class elsewhere
        self._warm_starts = warm_starts

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns the tasks that the workflow has in the other interpreter."""
        return _tasks(self._lister, split)

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Fails: the workflow cannot run in this process.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("this workflow runs in workers only")

    def warm_start(self, rng: random.Random) -> Iterator[Conversation] | None:
        """Returns the conversations that the workflow makes in the other interpreter."""
        return self._lister.conversations(rng) if self._warm_starts else None

    def group_of(self, episode: Episode, trajectory: Trajectory) -> str:
        """Returns the group that the workflow named in the other interpreter, or the role."""
        return str(trajectory.metadata.get(GROUP, trajectory.role))


def _tasks(lister: _Lister, split: Split) -> LazyTasks:
    """Returns the tasks of a split, fetched when they are needed."""
    total = lister.total(split)
    fetched: dict[int, Task] = {}

    def task(index: int) -> Task:
        if index not in fetched:
            stop = min(index + TASKS_PER_FETCH, total)
            fetched.update(enumerate(lister.fetch(split, index, stop), index))
        found = fetched[index]
        while len(fetched) > TASKS_KEPT:
            del fetched[next(iter(fetched))]
        return found

    return LazyTasks(task, total)


class _Lister:
    """A worker that only lists tasks. It starts at the first request, and ends with its workflow object."""

    def __init__(self, python: str, opening: wire.Open) -> None:
        self._python = python
        self._opening = opening
        self._process: subprocess.Popen[bytes] | None = None
        self._frames = wire.Frames()
        self._received: list[Any] = []
        self._streams = 0

    def total(self, split: Split) -> int:
        """Returns the number of tasks in a split."""
        return int(self._ask(wire.ListTasks(split), wire.Listed).total)

    def fetch(self, split: Split, start: int, stop: int) -> list[Task]:
        """Returns the tasks at positions ``[start, stop)``; fewer (at least one) if they take long to make."""
        fetched = self._ask(wire.FetchTasks(split, start, stop), wire.Fetched)
        return [Task(task_id=task.task_id, data=task.data) for task in fetched.tasks]

    def conversations(self, rng: random.Random) -> Iterator[Conversation] | None:
        """Returns a new stream of conversations, or None if the workflow has none."""
        self._streams += 1
        state = list(rng.getstate()[1])
        first = self._ask(wire.FetchConversations(self._streams, CONVERSATIONS_PER_FETCH, state), wire.Conversations)
        return None if first.conversations is None else self._following(self._streams, first.conversations)

    def _following(self, stream: int, found: list[Conversation]) -> Iterator[Conversation]:
        while found:
            yield from found
            found = self._ask(
                wire.FetchConversations(stream, CONVERSATIONS_PER_FETCH), wire.Conversations
            ).conversations

    def _ask(self, message: Any, wanted: type[Any]) -> Any:
        if self._process is None:
            self._start()
            self._send(self._opening)
            self._answer(wire.Ready)
            self._answer(wire.Opened)
        self._send(message)
        return self._answer(wanted)

    def _start(self) -> None:
        command = [self._python, "-m", "rllm_core.hosts.worker"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
            )
        except OSError as error:
            raise no_interpreter(self._python, error) from error
        self._end = weakref.finalize(self, end, self._process)

    def _send(self, message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(wire.frame(wire.encoded([message])))
        except BrokenPipeError:
            self._has_ended()

    def _answer(self, wanted: type[Any]) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        while not self._received:
            data = self._process.stdout.read(1 << 16)
            if not data:
                self._has_ended()
            try:
                for content in self._frames.feed(data):
                    self._received += wire.decode_from_worker(content)
            except ValueError as error:
                raise PluginError(
                    f"rollout.python = {self._python!r} broke the worker protocol while it listed tasks: {error}"
                ) from error
        answer = self._received.pop(0)
        if isinstance(answer, wire.Broken | wire.Unlisted):
            is_config = isinstance(answer, wire.Unlisted) and answer.is_config
            raise (ConfigError if is_config else PluginError)(printable(answer.message))
        if not isinstance(answer, wanted):
            raise PluginError(
                f"rollout.python = {self._python!r} broke the worker protocol while it listed tasks: it sent "
                f"{type(answer).__name__} instead of {wanted.__name__}"
            )
        return answer

    def _has_ended(self) -> NoReturn:
        assert self._process is not None
        code = self._process.wait()
        raise PluginError(
            f"rollout.python = {self._python!r} ended with exit code {code}; it must be the Python interpreter of an "
            "environment that has rllm-core and the workflow"
        )


def no_interpreter(python: str | None, error: OSError) -> ConfigError:
    """Returns the error for an interpreter that cannot be started."""
    return ConfigError(
        f"rollout.python = {python!r} cannot be started: {error.strerror}; set it to the Python interpreter of an "
        "environment that has rllm-core and the workflow"
    )
