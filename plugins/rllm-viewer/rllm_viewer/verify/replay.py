"""Replays ``events.jsonl`` line by line to derive the state of the run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from rllm_viewer.verify import measures
from rllm_viewer.verify.records import Block, GroupRecord, Outcome, RolloutRecord, Snapshot
from rllm_viewer.verify.state import RunState


class Replay(RunState):
    """Replays a journal, line by line."""

    def line(self, number: int, line: bytes, end: int) -> None:
        """Replays one line; ``end`` is the offset of its end in bytes."""
        self._number, self._end = number, end
        self.found.events += 1
        try:
            event = json.loads(line)
            name = event["event"]
            self._check_order(name)
            if name in _HANDLERS:
                _HANDLERS[name](self, event)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self._problem(f"cannot be read as an event ({type(error).__name__}: {error})")

    def _check_order(self, name: str) -> None:
        """Checks whether an event of this name may come next."""
        if self._failed and name != "error":
            rollout = next(iter(self._failed))
            self._problem(f"rollout {rollout} failed, but no error follows")
            self._failed.clear()
        if name != "error":
            self._finished = None
        if not self.found.incarnations:
            self._require(name == "begin", f"{name} before the first begin")
        elif self._awaits_sync and name not in ("sync", "cancel", "begin"):
            self._problem(f"{name} before the sync of this launch")

    # ----------------------------------------------------------------------------------------------------------------
    # Launches and weights

    def _begin(self, event: dict[str, Any]) -> None:
        self._require(event["incarnation"] >= self.found.incarnations, "incarnations do not increase")
        self._require(
            event["step"] == self.found.steps,
            f"a launch resumes from step {event['step']}, expected {self.found.steps}",
        )
        self.found.incarnations = event["incarnation"] + 1
        self.is_current = "trajectories_per_step" in event
        self._planned_steps = event.get("steps", self.training.steps)  # a resume can add steps
        self._wanted = event.get("trajectories_per_step")
        self.recorded.per_step = event.get("groups_kept_per_step")
        kept = set(event["restored"])
        self._require(kept <= self.groups.keys(), f"restored groups {sorted(kept - self.groups.keys())} are unknown")
        self._give_up([ordinal for ordinal in self.groups if ordinal not in kept], "restart")
        for ordinal in kept & self.groups.keys():
            state = self.groups[ordinal].state
            self._require(state == "enqueued", f"group {ordinal} is restored as complete, but was {state}")
        self._running.clear()
        self._errors.clear()
        self._awaits_sync = True
        self.resumed_from = event["step"] or None

    def _sync(self, event: dict[str, Any]) -> None:
        version, before, steps = event["version"], self.found.weight_version, self.found.steps
        if event["reason"] == "step":
            allowed = before + 1
            due = steps % self.training.trigger_parameter_sync_step == 0 or steps == self._planned_steps
            self._require(due and self._synced_step < steps, f"a sync after step {steps} is not due")
            self._require(not self._awaits_sync, "a launch must not begin with a sync with reason step")
        else:
            allowed = before + (self._synced_step != steps)
            self._require(self._awaits_sync, f"a sync with reason {event['reason']} must begin a launch")
            self.resumed_from = steps if event["reason"] == "resume" else self.resumed_from
        self._require(version == allowed, f"weight version {version} follows {before}, expected {allowed}")
        self._compare(event, step=steps)
        if self.blocks and not self.blocks[-1].is_validation and event["reason"] == "step":
            self.blocks[-1].expected["weight_version"] = version
        self.found.weight_version, self._synced_step = version, steps
        self._awaits_sync, self._is_doubted, self._consumed_in_window = False, False, 0

    # ----------------------------------------------------------------------------------------------------------------
    # Groups and rollouts

    def _skip(self, event: dict[str, Any]) -> None:
        if event["event"] == "skip":
            self._require(event["task"] in self.quarantined, f"task {event['task']} is skipped, but not quarantined")
        ordinal = event["group"]
        if ordinal in self._again:
            self._again.discard(ordinal)
        else:
            self._require(
                ordinal == self._next_ordinal, f"group {ordinal} is dispatched, but {self._next_ordinal} is due"
            )
            self._next_ordinal = max(self._next_ordinal, ordinal + 1)

    def _dispatch(self, event: dict[str, Any]) -> None:
        self._skip(event)
        ordinal, size = event["group"], self.training.rollouts_per_group
        self._require(ordinal not in self.groups, f"group {ordinal} is dispatched twice")
        self._require(event["rollouts"] == size, f"group {ordinal} has {event['rollouts']} rollouts, expected {size}")
        self._check_live(event["weight_version"] == self.found.weight_version, "dispatch", event)
        self.groups[ordinal] = GroupRecord(
            ordinal, event["task"], event.get("epoch"), event["rollouts"], event["weight_version"]
        )
        self.dispatched += event["rollouts"]
        self._epoch = max(self._epoch, event.get("epoch", -1))
        outstanding = sum(group.state in ("dispatched", "enqueued") for group in self.groups.values())
        lead = outstanding + self._consumed_in_window
        self.found.max_lead = max(self.found.max_lead, lead)
        self._require(
            lead <= self.training.window_quota, f"{lead} groups ahead, at most {self.training.window_quota} allowed"
        )

    def _start(self, event: dict[str, Any]) -> None:
        rollout, ordinal, index = event["rollout"], event["group"], event["index"]
        self._require(rollout not in self._started, f"rollout {rollout} starts twice")
        self._started.add(rollout)
        self._running[rollout] = (ordinal, index)
        self.retries += event["attempt"] > 0
        group = self.groups.get(ordinal)
        if group is None:
            self._problem(f"rollout {rollout} starts in group {ordinal}, which is not in flight")
            return
        self._require(
            index in range(group.rollouts), f"start has index {index} in a group of {group.rollouts} rollouts"
        )
        self._compare(event, attempt=group.attempts.get(index, 0))
        group.attempts[index] = event["attempt"] + 1
        before = group.outcomes.pop(index, None)
        self._require(before is None or before.has_failed, f"rollout {rollout} is retried although it had succeeded")

    def _finish(self, event: dict[str, Any]) -> None:
        rollout = event["rollout"]
        if rollout not in self._running:
            self._problem(f"rollout {rollout} ends without running")
            return
        ordinal, index = self._running.pop(rollout)
        outcome = Outcome.read(event)
        self._require(not self.is_current or outcome.parts is not None, "finish has no field trajectories")
        group = self.groups.get(ordinal)
        if group is None:
            return
        group.outcomes[index] = outcome
        self._check_versions(outcome, event)
        if outcome.has_failed:
            self._require(
                not outcome.parts, f"rollout {rollout} ended with reason {outcome.reason}, but has trajectories"
            )
            self._failed[rollout] = group.task
        else:
            self._finished = rollout, group.task

    def _error(self, event: dict[str, Any]) -> None:
        rollout = event["rollout"]
        if rollout in self._failed:
            self._compare(event, task=self._failed.pop(rollout))
        elif rollout in self._started:
            self._require(
                self._finished == (rollout, event["task"]), f"error of rollout {rollout} does not follow its end"
            )
        else:
            self._errors.add(rollout)

    def _score(self, event: dict[str, Any]) -> None:
        group = self._expect(event["group"], "dispatched", "dispatched")
        if group is None:
            return
        rewards, known = event["rewards"], {outcome.rollout for outcome in group.ended_well}
        self._require(rewards.keys() <= known, f"score of group {group.ordinal} has rollouts that it lacks")
        self._require("error" not in event or not any(r is not None for r in rewards.values()), "score with an error")
        group.score(rewards)

    def _enqueue(self, event: dict[str, Any]) -> None:
        group = self._expect(event["group"], "dispatched", "enqueued")
        if group is None:
            return
        ended, name = len(group.outcomes), f"group {event['group']}"
        self._require(ended == group.rollouts, f"{name} is complete with {ended} ended rollouts")
        failed = [f"{o.rollout} with reason {o.reason}" for o in group.outcomes.values() if o.has_failed]
        self._require(not failed, f"{name} is complete, but a rollout failed: finish of {', '.join(failed)}")
        self._lost.pop(group.task, None)
        group.weight_version, group.left_out = event["weight_version"], event["left_out"]
        group.filtered = event.get("filtered")  # earlier versions did not write it
        out = {index for index, outcome in group.outcomes.items() if outcome.reason in self._left_out}
        self._compare(event, left_out=len(out))
        if self.is_current or "trajectories" in event:
            self._check_members(group, event["trajectories"], out)
        if (version := measures.oldest_version(group)) is not None:
            self._compare(event, weight_version=version)

    def _check_members(self, group: GroupRecord, written: dict[str, list[list[int]]], out: set[int]) -> None:
        members = {name: [(index, place) for index, place in places] for name, places in written.items()}
        flat = [pair for places in members.values() for pair in places]
        able = {
            (index, place)
            for index, outcome in group.outcomes.items()
            for place, part in enumerate(outcome.parts or ())
            if part.turns and index not in out and index not in group.unscored
        }
        is_sound = len(set(flat)) == len(flat) and set(flat) <= able
        self._require(is_sound, f"enqueue of group {group.ordinal} has trajectories {written}, which its rollouts lack")
        self._require(
            bool(flat) == (group.filtered is None),
            f"enqueue of group {group.ordinal} has filtered {group.filtered}, which contradicts trajectories {written}",
        )
        group.members = members if is_sound else None

    def _filter(self, event: dict[str, Any]) -> None:
        group = self._expect(event["group"], "dispatched", "filtered")
        if group is None:
            return
        failed = Counter(event["failed"])
        known = Counter(outcome.reason for outcome in group.outcomes.values() if outcome.has_failed)
        without = Counter(o.reason for o in group.outcomes.values() if not o.has_failed and not o.parts)
        if event["reason"] == "incomplete_group":
            self._lost[group.task] += 1
        else:
            self._lost.pop(group.task, None)
        is_sound = known <= failed <= known + without and (event["reason"] == "incomplete_group") == bool(failed)
        self._require(
            is_sound,
            f"filter of group {group.ordinal} has reason {event['reason']} and failed {event['failed']}, "
            f"but its rollouts failed with {dict(known)}",
        )
        self._books["failed"].update(failed)
        if group.rollouts > failed.total():
            self._books["filtered"][event["reason"]] += group.rollouts - failed.total()
        if not failed:
            ended = len(group.outcomes)
            self._require(
                ended == group.rollouts,
                f"group {group.ordinal} is filtered without failures, but {ended} rollouts ended",
            )
            self._filtered[measures.solved_by(group.outcomes.values())] += 1
        self.recorded.filtered(group, event["reason"], event["failed"], self.found.steps)
        del self.groups[event["group"]]

    def _quarantine(self, event: dict[str, Any]) -> None:
        self._require(event["task"] not in self.quarantined, f"task {event['task']} is quarantined twice")
        self.quarantined[event["task"]] = event["error"]

    # ----------------------------------------------------------------------------------------------------------------
    # Training

    def _consume(self, event: dict[str, Any]) -> None:
        self._check_live(event["weight_version"] == self.found.weight_version, "consume", event)
        for ordinal in event["groups"]:
            group = self._expect(ordinal, "enqueued", "consumed")
            if group is None:
                continue
            self._consumed += 1
            self._consumed_in_window += 1
            age = event["weight_version"] - group.weight_version
            self.found.max_staleness = max(self.found.max_staleness, age)
            self._require(age >= 0, f"group {ordinal} was sampled by a version that is not live yet")
            if self._max_age is not None:
                self._require(
                    age <= self._max_age, f"group {ordinal} is {age} versions old, at most {self._max_age} allowed"
                )

    def _step(self, event: dict[str, Any]) -> None:
        self._require(event["step"] == self.found.steps + 1, f"step {event['step']} follows step {self.found.steps}")
        self._require(
            self.found.steps % self.training.trigger_parameter_sync_step != 0 or self._synced_step == self.found.steps,
            f"step {event['step']} before the sync of step {self.found.steps}",
        )
        self.found.steps = event["step"]
        trained, expected = len(event["groups"]), self.training.groups_per_step
        self._require(trained == expected, f"step {event['step']} trained {trained} groups, expected {expected}")
        groups = [group for o in event["groups"] if (group := self._expect(o, "consumed", "trained")) is not None]
        for group in groups:
            if group.filtered is not None:
                self._books["filtered"][group.filtered] += group.rollouts
            else:
                not_trained = {"termination_reason": group.left_out, "unscored": len(group.unscored)}
                self._books["trained"]["trained"] += group.rollouts - sum(not_trained.values())
                self._books["filtered"].update({reason: count for reason, count in not_trained.items() if count})
            del self.groups[group.ordinal]
        self.recorded.trained(groups, event["step"])
        metrics = measures.of_step(groups, self.found.weight_version, self._filtered, event)
        if "trajectories" in event and "trajectories" in metrics:
            self._compare(event, trajectories=metrics["trajectories"])
        self._filtered.clear()
        episodes = [
            RolloutRecord(group.outcomes[index], group.task, index)
            for group in groups
            for index in sorted(group.outcomes)
        ]
        metrics["weight_version"] = self.found.weight_version
        places = measures.counted_places(groups)
        self.blocks.append(Block(event["step"], False, len(episodes), self._wanted, episodes, metrics, places))

    def _validation(self, event: dict[str, Any]) -> None:
        said = {name: value for name, value in event.items() if name not in ("event", "episodes")}
        total = event["rollouts"] + event["failed"]
        self._compare(event, step=self.found.steps, weight_version=self.found.weight_version)
        if self.validations:
            before = self.validations[-1]
            self._require(
                before["step"] < event["step"], f"validation of step {event['step']} follows step {before['step']}"
            )
            self._compare(event, failed=before["rollouts"] + before["failed"] - event["rollouts"])
        self._require(total <= self.training.validation_rollouts, f"validation has too many rollouts: {total}")
        outcomes = [Outcome.read(episode) for episode in event["episodes"]] if "episodes" in event else None
        if outcomes is not None:
            failed = [outcome for outcome in outcomes if outcome.has_failed]
            self._require(
                len(outcomes) == total, f"validation has rollouts + failed {total}, but {len(outcomes)} episodes"
            )
            self._require(
                len(failed) <= event["failed"], f"validation has failed {event['failed']}, but {len(failed)} failed"
            )
            for outcome in failed:
                self._require(outcome.rollout in self._errors, f"rollout {outcome.rollout} failed, but has no error")
            for outcome, written in zip(outcomes, event["episodes"], strict=True):
                self._check_versions(outcome, written)
            self._compare(event, **measures.of_validation(outcomes))
        self._errors.clear()
        self.validations.append(said)
        rollouts = None if outcomes is None else [RolloutRecord(outcome) for outcome in outcomes]
        self.recorded.validated(rollouts or (), event["step"])
        self.blocks.append(Block(event["step"], True, total, self._wanted, rollouts, {}))

    def _checkpoint(self, event: dict[str, Any]) -> None:
        self._compare(event, step=self.found.steps)
        self._require(event["step"] not in self.snapshots, f"checkpoint of step {event['step']} is saved twice")
        complete = {ordinal for ordinal, group in self.groups.items() if group.state == "enqueued"}
        expected = {
            "step": self.found.steps,
            "synced_step": self._synced_step,
            "incarnation": self.found.incarnations - 1,
            "coordinator.weight_version": self.found.weight_version,
            "coordinator.consumed": self._consumed,
            "coordinator.consumed_in_window": self._consumed_in_window,
            "books.dispatched": self.dispatched,
            "books.retries": self.retries,
            "books.ended": {account: dict(reasons) for account, reasons in self.books_by_reason.items()},
            "generation.next_ordinal": self._next_ordinal,
            "generation.quarantine.tasks": dict(self.quarantined),
            "generation.quarantine.lost": dict(self._lost),
            "recording": self.recorded.not_trained if self.recorded.per_step is not None else None,
            "validations": list(self.validations),
            "offsets.events": self._end,
        }
        if measures.UNTOLD not in self._filtered:
            expected["generation.difficulty"] = {name: n for name, n in self._filtered.items() if name is not None}
        self.snapshots[event["step"]] = Snapshot(
            expected,
            due=self.groups.keys() | self._again,
            complete=complete,
            size=self.training.rollouts_per_group,
            blocks=len(self.blocks),
            entries=len(self.recorded.entries),
            epoch=self._epoch if self.is_current else None,
        )

    def _return(self, event: dict[str, Any]) -> None:
        for ordinal in event["groups"]:
            if self._expect(ordinal, "consumed", "enqueued") is not None:
                self._consumed -= 1
                self._consumed_in_window -= 1

    def _cancel(self, event: dict[str, Any]) -> None:
        known = [ordinal for ordinal in event["groups"] if ordinal in self.groups]
        self._require(known == event["groups"], "cancelled groups were not outstanding")
        self._give_up(known, event["reason"])
        self._running = {rollout: place for rollout, place in self._running.items() if place[0] in self.groups}


_HANDLERS: dict[str, Callable[[Replay, dict[str, Any]], None]] = {
    "begin": Replay._begin,
    "dispatch": Replay._dispatch,
    "skip": Replay._skip,
    "start": Replay._start,
    "finish": Replay._finish,
    "error": Replay._error,
    "score": Replay._score,
    "enqueue": Replay._enqueue,
    "filter": Replay._filter,
    "quarantine": Replay._quarantine,
    "consume": Replay._consume,
    "step": Replay._step,
    "sync": Replay._sync,
    "validation": Replay._validation,
    "checkpoint": Replay._checkpoint,
    "return": Replay._return,
    "cancel": Replay._cancel,
}
