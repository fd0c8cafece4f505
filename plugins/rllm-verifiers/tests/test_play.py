"""Tasksets of our own in verifiers' format, played through its public interface."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest
from players import Policy, calling, check_exact, opened, play, shown, workflow
from rllm_verifiers.folders import MACHINE
from rllm_verifiers.workflow import EpisodeFailed

from rllm_core.engine import EngineError, Terminated
from rllm_core.types import TerminationReason

OLD_TENACITY = pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated")


def letter(prompt: str, seed: int) -> str:
    """The right letter, a wrong one, all letters, or a speech, by the seed."""
    asked = re.findall(r"last: (\w) (\w) (\w)", prompt)[-1]
    return [asked[2], asked[0], "".join(asked), "the last letter is what I was asked"][seed % 4]


def number(prompt: str, seed: int) -> str:
    """A number for the first agent, a higher or a lower one for the second."""
    if "up to" in prompt:
        return "5"
    return ["9", "3"][seed % 2]


def bookkeeper(prompt: str, seed: int) -> str:
    """Books both amounts, one by one, and repeats the last total."""
    amounts = re.findall(r"Book (\d+) and (\d+)", prompt)[0]
    totals = re.findall(r"total \d+", prompt)
    if len(totals) < 2:
        return calling(("ledger_book", {"amount": int(amounts[len(totals)])}))
    return totals[-1]


async def test_a_turn_is_scored_by_the_taskset_and_exact() -> None:
    played, policy = workflow("last_letter"), Policy(letter)
    async with opened(played):
        tasks = played.tasks("train")[:8]
        episodes = [await play(played, task, policy, seed=number) for number, task in enumerate(tasks)]
    check_exact(policy, episodes)
    rewards = [one.reward for episode in episodes for one in episode.trajectories]
    assert set(rewards) == {0.0, 0.25, 1.0}
    assert [episode.is_correct for episode in episodes] == [reward == 1.0 for reward in rewards]
    for episode in episodes:
        [one] = episode.trajectories
        assert one.role == "agent"
        assert one.trainable
        assert episode.metrics == {"reward_right": one.reward, "length": len(one.steps[0].text)}


async def test_two_agents_are_two_trajectories() -> None:
    played, policy = workflow("higher"), Policy(number)
    async with opened(played):
        episodes = [await play(played, played.tasks("train")[0], policy, seed=seed) for seed in range(6)]
    check_exact(policy, episodes)
    seen = set()
    for episode in episodes:
        first, second = episode.trajectories
        assert (first.role, first.trainable, len(first.steps)) == ("first", False, 1)
        assert (second.role, second.trainable, len(second.steps)) == ("second", True, 2)
        is_higher = second.steps[-1].text == "9"
        assert (first.reward, second.reward) == (0.5, 0.5 + 0.5 * is_higher)
        assert episode.is_correct is is_higher
        assert second.steps[1].messages[-1]["content"] == "Are you sure? Say it again."
        assert episode.metrics["second_reward_higher"] == 0.5 * is_higher
        seen.add(is_higher)
    assert seen == {True, False}


@OLD_TENACITY
async def test_tools_run_in_their_own_server() -> None:
    played, policy = workflow("ledger"), Policy(bookkeeper)
    async with opened(played):
        tasks = played.tasks("train")[:2]
        episodes = await asyncio.gather(*(play(played, task, policy) for task in tasks))
    check_exact(policy, episodes)
    for episode in episodes:
        [one] = episode.trajectories
        assert one.reward == 1.0
        assert len(one.steps) == 3
        said = [message["content"] for message in one.steps[-1].messages if message["role"] == "tool"]
        assert said[-1] == one.steps[-1].text
    assert len({one.steps[-1].text for episode in episodes for one in episode.trajectories}) == 2, "a state each"


@OLD_TENACITY
async def test_wrong_calls_are_answered() -> None:
    said = [
        calling(("nothing", {})),
        calling(("ledger_book", [1])),
        calling(("ledger_book", {"amount": "many"})),
        "I give up",
    ]
    played, policy = workflow("ledger"), Policy(lambda prompt, seed: said.pop(0))
    async with opened(played):
        episode = await play(played, played.tasks("train")[0], policy)
    [one] = episode.trajectories
    answers = [message["content"] for message in one.steps[-1].messages if message["role"] == "tool"]
    assert "unknown tool" in answers[0]
    assert "JSON object" in answers[1]
    assert "amount" in answers[2]
    assert one.reward == 0.0


async def test_rollouts_at_once_equal_those_one_after_the_other() -> None:
    for name, answer in (("last_letter", letter), ("higher", number)):
        played, policy = workflow(name), Policy(answer)
        async with opened(played):
            tasks = [played.tasks("train")[number % 4] for number in range(16)]
            alone = [await play(played, task, policy, seed=seed) for seed, task in enumerate(tasks)]
            assert policy.most == 1
            together = await asyncio.gather(*(play(played, task, policy, seed=seed) for seed, task in enumerate(tasks)))
        assert policy.most > 1
        assert [shown(episode) for episode in together] == [shown(episode) for episode in alone]


async def test_agents_of_an_episode_may_play_at_once() -> None:
    played = workflow("last_letter", env_arguments={"id": "best-of-n", "n": 3, "max_concurrent_agents": None})
    policy = Policy(letter)
    async with opened(played):
        episode = await play(played, played.tasks("train")[0], policy)
    check_exact(policy, [episode])
    assert policy.most == 3
    assert len(episode.trajectories) == 3
    assert len({one.steps[0].text for one in episode.trajectories}) > 1, "their samples are different"


async def test_an_error_of_the_reward_is_raised() -> None:
    played = workflow("last_letter")
    async with opened(played):
        with pytest.raises(EpisodeFailed, match=r"this reward cannot judge that.*last_letter\.py"):
            await play(played, played.tasks("train")[0], Policy(lambda prompt, seed: "raise"))


async def test_an_error_of_the_engine_is_raised() -> None:
    played = workflow("higher")

    def fails(prompt: str, seed: int) -> str | Exception:
        return "5" if "up to" in prompt else EngineError("the engine is gone")

    async with opened(played):
        with pytest.raises(EngineError, match="the engine is gone"):
            await play(played, played.tasks("train")[0], Policy(fails))


async def test_a_stage_that_takes_too_long_is_no_reward() -> None:
    played = workflow("last_letter", env_arguments={"agent": {"timeout": {"scoring": 1e-9}}})
    async with opened(played):
        with pytest.raises(Terminated) as ended:
            await play(played, played.tasks("train")[0], Policy(letter))
    assert ended.value.reason is TerminationReason.TIMEOUT


async def test_a_cut_off_answer_says_so() -> None:
    played, policy = workflow("last_letter"), Policy(lambda prompt, seed: "abcdefgh")
    async with opened(played):
        episode = await play(played, played.tasks("train")[0], policy, max_response_tokens=3)
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_TOKENS


async def test_turns_run_out() -> None:
    played = workflow("higher", env_arguments={"second": {"max_turns": 1}})
    async with opened(played):
        episode = await play(played, played.tasks("train")[0], Policy(number))
    assert episode.termination_reason is TerminationReason.MAX_TURNS
    assert [len(one.steps) for one in episode.trajectories] == [1, 1]


async def test_a_cancelled_rollout_leaves_nothing() -> None:
    from verifiers.v1.utils.paths import CACHE_DIR

    def folders() -> set[Path]:
        """Folders of this process: others run their rollouts at the same time."""
        return set((CACHE_DIR / "runtimes" / "subprocess").glob(f"{MACHINE}-{os.getpid()}-*"))

    before = folders()
    played = workflow("last_letter")
    forever = asyncio.Event()
    policy = Policy(letter)

    async def hang(*args: object, **more: object) -> None:
        forever.set()
        await asyncio.Event().wait()

    policy.get_token_output_from_token_input = hang  # type: ignore[method-assign, assignment]
    async with opened(played):
        rollout = asyncio.ensure_future(play(played, played.tasks("train")[0], policy))
        await forever.wait()
        assert folders() - before
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        assert not played._bridge._seats
    assert folders() <= before
