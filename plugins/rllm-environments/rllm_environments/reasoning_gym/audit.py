"""Audits the datasets of the installed reasoning-gym; see `audits`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rllm_core.errors import ConfigError
from rllm_core.sandbox import ChildError, ChildFunction, Limits
from rllm_core.services import Services
from rllm_core.workflow import Split
from rllm_environments.catalog import unknown
from rllm_environments.reasoning_gym.datasets import installed_version
from rllm_environments.reasoning_gym.workflow import POSE, ReasoningGymConfig, ReasoningGymWorkflow

ITEMS = 5
SPLIT_TASKS = 40
SPLIT_TASKS_OF_SLOW = 4
SLOW_SECONDS = 0.05
CHECK_LIMITS = Limits(wall_seconds=120.0, memory_bytes=4 << 30)
MAKE_LIMITS = Limits(wall_seconds=300.0, memory_bytes=4 << 30)
STARTED_AT_ONCE = 8
SPLITS: tuple[Split, ...] = ("train", "validation")
PROBE = "rllm_environments.reasoning_gym.audit_child"

JUNK = (
    "",
    "x",
    "0",
    "True",
    "9" * 50,
    "[",
    "[[1,2],[3]]",
    '{"a":1}',
    "None",
    "\x00",
    "a b c",
    "\u16a0" * 20,
    "(" * 300,
    "1/0",
    "(x",
    "foo(",
)
CANARIES = (
    "open({path!r}, 'w')",
    "[open({path!r}, 'w')]",
    "__import__('os').system('touch {path}')",
    "[[__import__('os').system('touch {path}')]]",
    '{{"a": __import__("os").system("touch {path}")}}',
    "{path}",
    "$(touch {path})",
    "; touch {path} ;",
    "!!python/object/apply:os.system ['touch {path}']",
)
"""Answers that create a file if anything executes them: as Python, as an expression of sympy, as YAML, in a shell."""


def names() -> list[str]:
    """Returns the dataset names of the installed reasoning-gym."""
    function = ChildFunction(f"{PROBE}:names", MAKE_LIMITS, children=1)

    async def call() -> list[str]:
        found: list[str] = await function()
        return found

    try:
        return asyncio.run(call())
    finally:
        function.close()


def audits(variants: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each dataset's name and findings, with its default options.

    A dataset counts as audited if another process reproduces it, its splits share no question, its own answers score 1
    in the checker's child process, wrong ones score less, and the reward is not constant. It counts as played if it
    passes all checks of `rllm_devkit.checks.check_workflow`. A checker that executes answers is played only in a
    sandbox that isolates.

    Args:
        variants: Names of datasets; empty for all.

    Raises:
        ConfigError: If reasoning-gym, or rllm-devkit, which plays the rollouts, is missing.
    """
    installed_version()
    known = names()
    wrong = [name for name in variants if name not in known]
    if wrong:
        raise unknown("environment", wrong[0], known)
    if find_spec("rllm_devkit") is None:
        raise ConfigError("an audit plays with rllm-devkit: pip install rllm-devkit")
    players = _Players()
    check = ChildFunction(f"{PROBE}:score", CHECK_LIMITS, children=2)
    make, again, executes = (
        ChildFunction(f"{PROBE}:{name}", MAKE_LIMITS, children=1) for name in ("items", "items", "executes")
    )
    try:
        for name in variants or known:
            found = asyncio.run(_audited(name, players, check, make, again, executes))
            if found["refused"] is None and (not found["executes_answers"] or players.have_sandbox):
                failed = asyncio.run(players.play(name, found))
                found |= {"played": not failed, "notes": [*found["notes"], *failed]}
            yield name, found
    finally:
        for each in (check, make, again, executes, players):
            each.close()


async def _audited(
    name: str,
    players: _Players,
    check: ChildFunction,
    make: ChildFunction,
    remake: ChildFunction,
    executes: ChildFunction,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "turns": "1",
        "players": 1,
        "needs": [],
        "audited": False,
        "played": False,
        "refused": None,
        "notes": [],
        "executes_answers": False,
        "slow": False,
    }
    try:
        first = await make(name, 1, ITEMS, "forward")
    except ChildError as error:
        return {**found, "refused": f"it cannot be created without options ({_reason(error)})"}
    again = await remake(name, 1, ITEMS, "backward")
    found["slow"] = min(first["seconds"], again["seconds"]) > SLOW_SECONDS * ITEMS
    if first["items"] != again["items"]:
        return {**found, "refused": "another process creates other questions for the same seed"}
    found |= {
        "survives_json": first["survives_json"],
        "neighboring_seeds_share": await _shared(name, make, first["items"]),
    }
    try:
        found["splits_share"] = await players.shared(name, SPLIT_TASKS_OF_SLOW if found["slow"] else SPLIT_TASKS)
    except ChildError as error:
        return {**found, "refused": f"its questions cannot be split ({_reason(error)})"}
    scores = await _scores(name, check, first["items"])
    found |= {key: scores[key] for key in ("oracle", "junk", "rejects")}
    found["executes_answers"] = await _executes(name, check, await executes(name))
    found["refused"] = _refusal(found, scores)
    found["audited"] = found["refused"] is None
    found["needs"] = (
        ["a sandbox that isolates, since its checker executes answers"] if found["executes_answers"] else []
    )
    found["notes"] = _notes(found)
    return found


def _refusal(found: Mapping[str, Any], scores: Mapping[str, Any]) -> str | None:
    if scores["constant"]:
        return "its checker gives the same reward to every answer"
    if found["splits_share"]:
        return f"its splits share {found['splits_share']} questions"
    if found["oracle"] is not None and found["oracle"] < 1.0:
        return f"its own answers get a reward of {found['oracle']:g}"
    if found["junk"] >= 1.0:  # a lower score is partial credit, which does not count as correct
        return f"its checker gives {found['junk']:g} to the answer {scores['best_junk']:.20}, which is wrong"
    return None


def _notes(found: Mapping[str, Any]) -> list[str]:
    notes = []
    if found["oracle"] is None:
        notes.append("It has no answers of its own, so it was not checked that right answers get 1.")
    if found["slow"]:
        notes.append("Its generator is slow.")
    if found["rejects"]:
        notes.append("Its checker raises on answers of another form; they get 0 and count in the metric `rejected`.")
    return notes


async def _shared(name: str, make: ChildFunction, items: Sequence[Mapping[str, Any]]) -> int:
    """Returns how many of the questions also occur with the next seed."""
    other = await make(name, 2, ITEMS, "forward")
    return len({item["question"] for item in items} & {item["question"] for item in other["items"]})


async def _scores(name: str, check: ChildFunction, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Scores the dataset's own answers and junk answers through the child process and JSON."""
    oracle, every = [], []
    junk: dict[str, float] = {}
    rejects = False
    for index, item in enumerate(items):
        own = item["answer"]
        if own is not None:
            reward, _ = await _score(check, name, index, own)
            oracle.append(reward)
        for text in JUNK:
            reward, was_rejected = await _score(check, name, index, text)
            rejects = rejects or was_rejected
            every.append(reward)
            if own is None or not _equal(text, own):
                junk[text] = max(reward, junk.get(text, 0.0))
    return {
        "oracle": round(min(oracle), 4) if oracle else None,
        "junk": round(max(junk.values()), 4),
        "best_junk": max(junk, key=lambda text: junk[text]),
        "rejects": rejects,
        "constant": bool(oracle) and len({*oracle, *every}) == 1,
    }


def _equal(text: str, own: str) -> bool:
    """Whether a text is the dataset's own answer, apart from case and number format."""
    try:
        return float(text) == float(own)
    except ValueError:
        return text.casefold() == own.casefold()


async def _score(check: ChildFunction, name: str, index: int, text: str) -> tuple[float, bool]:
    try:
        reward, parts = await check(name, index, text)
    except ChildError:
        return 0.0, True
    return float(reward), bool(parts["rejected"])


async def _executes(name: str, check: ChildFunction, is_written: bool) -> bool:
    """Whether the checker executes answers, judged by its source or by a file that an answer creates."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "canary"
        for template in CANARIES:
            for index in range(2):
                await _score(check, name, index, template.format(path=str(path)))
        return is_written or path.exists()


class _Player(ReasoningGymWorkflow):
    """Shares child processes with the other datasets of an audit, because each imports reasoning-gym, which is slow."""

    async def close(self) -> None:
        """Leaves the child processes open for the audit."""


class _SharedServices(Services):
    async def close(self) -> None:
        """Leaves the child processes open for the audit."""


class _Players:
    """Plays whole rollouts with the scripted policy of rllm-devkit."""

    def __init__(self) -> None:
        self._services = _SharedServices()
        self._children = ChildFunction(POSE, MAKE_LIMITS, children=1)

    @cached_property
    def have_sandbox(self) -> bool:
        """Whether this machine has a sandbox with isolation."""
        try:
            self._services.isolating_sandbox()
        except ConfigError:
            return False
        return True

    async def play(self, name: str, found: Mapping[str, Any]) -> list[str]:
        """Returns the failed checks of a workflow; empty if all passed."""
        from rllm_devkit.checks import check_workflow

        def make() -> _Player:
            return self._player(name, found)

        player = make()
        [task] = player.tasks("train")[:1]
        index, _ = await player.question(task)
        # Start all child processes now, since the checks count the ones that a workflow leaves behind.
        await asyncio.gather(*(player.score(task, index, str(number)) for number in range(STARTED_AT_ONCE)))
        results = await check_workflow(make, answers=JUNK[1:], tasks_per_split=1, rollout_timeout_seconds=300.0)
        return [f"check {each.name!r} failed: {each.detail:.200}" for each in results if each.outcome == "failed"]

    async def shared(self, name: str, tasks: int) -> int:
        """Returns how many questions, ignoring case, occur among the first tasks of both splits."""
        player = self._player(name, {"executes_answers": False, "slow": False})
        asked = [
            {(await player.question(task))[1].casefold() for task in player.tasks(split)[:tasks]} for split in SPLITS
        ]
        return len(set.intersection(*asked))

    def _player(self, name: str, found: Mapping[str, Any]) -> _Player:
        player = _Player(ReasoningGymConfig(environment=name), found=found)
        player.services, player._children = self._services, self._children
        return player

    def close(self) -> None:
        """Ends the child processes."""
        self._children.close()
        asyncio.run(Services.close(self._services))


def _reason(error: ChildError) -> str:
    return " ".join(str(error).partition(" raised ")[2].split())[:200]
