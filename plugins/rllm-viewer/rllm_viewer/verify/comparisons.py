"""Compares the other files of a run folder with the content expected from its events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm_core.errors import RunError
from rllm_core.run_folder import checkpoint
from rllm_viewer.verify.episodes import check_episode
from rllm_viewer.verify.findings import Verification, same
from rllm_viewer.verify.groups import Groups
from rllm_viewer.verify.lines import Lines
from rllm_viewer.verify.records import Block, RolloutRecord, Snapshot
from rllm_viewer.verify.replay import Replay
from rllm_viewer.verify.trajectories import Trajectories

STATUSES = ("completed", "failed", "interrupted")
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)


def read_summary(run_dir: Path, replay: Replay, found: Verification) -> dict[str, Any] | None:
    """Reads ``summary.json`` of the last launch (None after a kill), and sets the status of the run."""
    path = run_dir / "summary.json"
    starts = _starts(run_dir, found)
    if starts is not None and starts < found.incarnations:
        found.problem(f"plugins.json has {starts} launch(es), but events.jsonl has {found.incarnations}")
    if not path.is_file():
        return None
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        incarnation, status = summary["incarnation"], summary["status"]
        began = incarnation < found.incarnations
        # If even plugins.json could not be written, the run ended before it could count any rollout.
        is_counted = began or "books_by_reason" in summary
        started = found.incarnations if starts is None else starts
        if incarnation + 1 < started and not replay.is_current:
            return None  # earlier versions left the previous launch's file in place
        if started not in ((incarnation + 1,) if is_counted else (incarnation, incarnation + 1)):
            found.problem(f"summary.json has incarnation {incarnation}, but plugins.json has {started} launch(es)")
        if status not in STATUSES:
            found.problem(f"summary.json has status {status}, expected one of {', '.join(STATUSES)}")
        if (status == "completed") == ("error" in summary):
            found.problem(f"summary.json has status {status}, which contradicts error {summary.get('error')}")
    except UNREADABLE as error:
        found.problem(f"summary.json cannot be read: {type(error).__name__}: {error}")
        return None
    found.status = status
    if not began:  # the previous launch wrote the other files
        if status == "completed":
            found.problem(
                f"summary.json has status completed, but events.jsonl has no begin of incarnation {incarnation}"
            )
        return None
    return summary


def _starts(run_dir: Path, found: Verification) -> int | None:
    path = run_dir / "plugins.json"
    if not path.is_file():
        if found.incarnations:
            found.problem(f"plugins.json is missing, but events.jsonl has {found.incarnations} launch(es)")
        return None
    try:
        return len(json.loads(path.read_text(encoding="utf-8")))
    except UNREADABLE as error:
        found.problem(f"plugins.json cannot be read: {type(error).__name__}: {error}")
        return None


def check_summary(summary: dict[str, Any], replay: Replay, found: Verification) -> None:
    """Checks every number of ``summary.json`` that follows from the events."""
    by_reason = replay.books_by_reason
    totals = {account: sum(by_reason.get(account, {}).values()) for account in found.books}
    expected: dict[str, Any] = {
        "optimizer_steps": found.steps,
        "planned_steps": found.planned_steps,
        "resumed_from_step": replay.resumed_from,
        "weight_version": found.weight_version,
        "retries": replay.retries,
        "quarantined": replay.quarantined,
        "books": {"dispatched": replay.dispatched, **totals},
    }
    try:
        found.compare("summary.json", summary, expected)
        reasons = {account: reasons for account, reasons in summary["books_by_reason"].items() if any(reasons.values())}
        found.compare("summary.json", {"books_by_reason": reasons}, {"books_by_reason": by_reason})
        # A run may fail after a validation and before its event is written.
        validations = summary["validation"]
        more = range(2 if summary["status"] != "completed" else 1)
        if len(validations) - len(replay.validations) not in more:
            found.problem(
                f"summary.json has validation {len(validations)} times, "
                f"expected {len(replay.validations)} from events.jsonl"
            )
        for number, (said, known) in enumerate(zip(validations, replay.validations, strict=False)):
            found.compare(f"summary.json validation[{number}] (step {known['step']})", said, known)
            for name in sorted(said.keys() - known.keys()):
                found.problem(f"summary.json validation[{number}] has {name} {said[name]}, which events.jsonl lacks")
        outstanding = len(replay.groups)
    except UNREADABLE as error:
        found.problem(f"summary.json cannot be read: {type(error).__name__}: {error}")
        return
    if summary["status"] == "completed":
        if found.steps != found.planned_steps:
            found.problem(f"the run completed with {found.steps} of {found.planned_steps} planned steps")
        if outstanding:
            found.problem(f"the run completed with {outstanding} outstanding group(s)")


def check_whole(lines: Sequence[Lines], found: Verification) -> None:
    """Checks that no file of a completed run ends in the middle of a line."""
    for file in lines:
        if file.is_torn and found.status == "completed":
            found.problem(f"{file.name} ends in the middle of a line, but summary.json has status completed")


def check_step_lines(lines: Lines, run_dir: Path, found: Verification) -> None:
    """Checks that ``metrics.jsonl`` or ``timings.jsonl`` has one line per step."""
    steps = [written["step"] for _, written in lines.objects]
    # The event of a step is written before its line, so a failure in between leaves one line less. A kill may also lose
    # events and leave one line more. A resuming launch truncates this file to the checkpoint before the journal.
    complete = checkpoint.complete(run_dir / "checkpoints")
    allowed = {found.steps}
    if found.status != "completed":
        allowed |= {found.steps - 1}
    if found.status == "interrupted":
        allowed |= {found.steps + 1, int(complete[-1].name.removeprefix("step-")) if complete else 0}
    if steps != list(range(1, len(steps) + 1)) or len(steps) not in allowed:
        found.problem(f"{lines.name} has the steps {_shortened(steps)}, but events.jsonl has {found.steps} step(s)")


def check_metrics(lines: Lines, blocks: Sequence[Block], found: Verification) -> None:
    """Checks the fields of ``metrics.jsonl`` that follow from events and episodes."""
    steps = {block.step: block for block in blocks if not block.is_validation}
    for number, written in lines.objects:
        if (block := steps.get(written["step"])) is not None:
            place = f"metrics.jsonl line {number} (step {block.step})"
            found.compare(place, written, block.expected)
            found.compare(place, written, block.of_episodes, "trajectories.jsonl")
            for told, prefix in ((block.expected, "reward_mean/"), (block.of_episodes, "segment_breaks/")):
                for name in sorted(written.keys() - told.keys()):
                    if name.startswith(prefix) and prefix[:-1] in told:
                        found.problem(f"{place} has {name} {written[name]}, but no trajectory has it")


def check_end_of_trajectories(
    run_dir: Path, trajectories: Trajectories, found: Verification, *, is_killed: bool
) -> None:
    """Checks the end of ``trajectories.jsonl``: its last lines may be missing, unless the run completed."""
    missing, size = trajectories.missing, trajectories.lines.ends[-1]
    if missing <= (found.status != "completed"):
        return
    if is_killed:  # perhaps while resuming: after truncating this file, and before truncating the journal
        complete = checkpoint.complete(run_dir / "checkpoints")
        if size == (checkpoint.read(complete[-1])["offsets"]["trajectories"] if complete else 0):
            return
    lines = len(trajectories.lines.ends) - 1
    found.problem(f"trajectories.jsonl has {lines} line(s); events.jsonl has {missing} more step(s) or validation(s)")


def check_end_of_groups(run_dir: Path, groups: Groups, found: Verification, *, is_killed: bool) -> None:
    """Checks the end of ``groups.jsonl``: the lines of the last event may be missing, unless the run completed."""
    missing = groups.missing
    if not missing or (found.status != "completed" and missing[0].event == missing[-1].event):
        return
    if is_killed:  # perhaps while resuming: after truncating this file, and before truncating the journal
        complete = checkpoint.complete(run_dir / "checkpoints")
        if groups.lines.ends[-1] == (checkpoint.read(complete[-1])["offsets"].get("groups") if complete else 0):
            return
    lines = len(groups.lines.ends) - 1
    found.problem(f"groups.jsonl has {lines} line(s); events.jsonl has {len(missing)} more group(s) or validation(s)")


def check_validations(replay: Replay, found: Verification) -> None:
    """Checks the workflow's own metrics of a validation, if all of its episodes are kept."""
    blocks = (block for block in replay.blocks if block.is_validation)
    for block, known in zip(blocks, replay.validations, strict=True):
        found.compare(f"events.jsonl validation of step {block.step}", known, block.of_episodes, "trajectories.jsonl")


def check_timings(timings: Lines, metrics: Lines, found: Verification) -> None:
    """Checks the timings that follow from the metrics and from each other."""
    tokens = {written["step"]: written.get("sampled_tokens") for _, written in metrics.objects}
    for number, written in timings.objects:
        place = f"timings.jsonl line {number} (step {written['step']})"
        try:
            seconds = written["step_seconds"]
            waited = written["generation_wait_seconds"] + written["drain_seconds"]
            share = min(1.0, waited / seconds) if seconds > 0 else 0.0
            found.compare(place, written, {"training_idle_share": share}, "its own seconds")
            sampled = tokens.get(written["step"])
            if sampled is not None:
                rate = sampled / max(seconds, 1e-9)
                found.compare(place, written, {"tokens_per_second": rate}, "sampled_tokens of metrics.jsonl")
        except UNREADABLE as error:
            found.problem(f"{place} cannot be read ({type(error).__name__}: {error})")


def check_checkpoints(
    run_dir: Path,
    replay: Replay,
    ends: Mapping[str, Sequence[int]],
    block_ends: Mapping[str, Sequence[int]],
    found: Verification,
) -> None:
    """Checks every manifest against the state of the run at that checkpoint.

    Args:
        run_dir: The run folder.
        replay: The replayed events.
        ends: Offset of the end of each line in bytes, by file.
        block_ends: Number of lines up to the end of each block of ``trajectories.jsonl`` and entry of ``groups.jsonl``.
        found: Receives the problems.
    """
    for folder in checkpoint.complete(run_dir / "checkpoints"):
        try:
            manifest = checkpoint.read(folder)
        except RunError as error:
            found.problem(str(error))
            continue
        place, snapshot = f"checkpoints/{folder.name}/manifest.json", replay.snapshots.get(manifest["step"])
        if folder.name != f"step-{manifest['step']:06d}":
            found.problem(f"{place} has step {manifest['step']}, which contradicts its folder")
        elif snapshot is None:
            found.problem(f"{place} has step {manifest['step']}, but events.jsonl has no such checkpoint")
        else:
            try:
                _check_manifest(place, manifest, snapshot, found)
                _check_offsets(place, manifest, snapshot, ends, block_ends, found)
                _check_buffer(folder / "buffer.jsonl", manifest, replay, found)
            except UNREADABLE as error:
                found.problem(f"{place} cannot be read ({type(error).__name__}: {error})")


def _check_manifest(place: str, manifest: dict[str, Any], snapshot: Snapshot, found: Verification) -> None:
    expected, generation = dict(snapshot.expected), manifest["generation"]
    buffered = set(generation["buffered_ordinals"])
    ended = {account: dict(reasons) for account, reasons in expected["books.ended"].items()}
    total = sum(sum(reasons.values()) for reasons in ended.values())
    lost = expected["books.dispatched"] - total - len(buffered) * snapshot.size
    if lost > 0:  # a restart loses rollouts in flight
        cancelled = ended.setdefault("cancelled", {})
        cancelled["restart"] = cancelled.get("restart", 0) + lost
    expected["books.ended"] = ended
    expected["generation.due_ordinals"] = sorted(snapshot.due - buffered)
    if "difficulty" not in generation:  # earlier versions wrote none
        expected.pop("generation.difficulty", None)
    found.compare(place, manifest, expected)
    if not buffered <= snapshot.complete:
        found.problem(
            f"{place} has generation.buffered_ordinals {sorted(buffered)}, "
            f"expected only groups of {sorted(snapshot.complete)} from events.jsonl"
        )
    epoch = generation["epoch"]
    if snapshot.epoch is not None and epoch not in (snapshot.epoch, snapshot.epoch + 1):
        found.problem(f"{place} has generation.epoch {epoch}, expected {snapshot.epoch} or the next from events.jsonl")


def _check_offsets(
    place: str,
    manifest: dict[str, Any],
    snapshot: Snapshot,
    ends: Mapping[str, Sequence[int]],
    block_ends: Mapping[str, Sequence[int]],
    found: Verification,
) -> None:
    kept = _lines_until(block_ends["trajectories"], snapshot.blocks)
    lines = {"metrics": manifest["step"], "timings": manifest["step"], "trajectories": kept}
    if snapshot.expected["recording"] is not None:  # earlier versions recorded no groups
        lines["groups"] = lines["groups_index"] = _lines_until(block_ends["groups"], snapshot.entries)
    for name, count in lines.items():
        if count is not None and count < len(ends[name]):
            found.compare(place, manifest, {f"offsets.{name}": ends[name][count]}, f"{name}.jsonl")
        elif (offset := manifest["offsets"][name]) > ends[name][-1]:  # missing lines are reported without it, too
            found.problem(f"{place} has offsets.{name} {offset}, but {name}.jsonl has {ends[name][-1]} bytes")


def _lines_until(ends: Sequence[int], blocks: int) -> int | None:
    return [0, *ends][blocks] if blocks <= len(ends) else None


def _check_buffer(path: Path, manifest: dict[str, Any], replay: Replay, found: Verification) -> None:
    """Checks the complete groups of a checkpoint that have not been trained since."""
    place, ordinals = f"{path.parent.name}/{path.name}", []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        written = json.loads(line)
        ordinals.append(written["ordinal"])
        group = replay.groups.get(written["ordinal"])
        if group is None or group.state != "enqueued":
            continue
        told = {"task_id": group.task, "epoch": group.epoch, "dispatched_version": group.dispatched_version}
        if group.epoch is None:
            del told["epoch"]
        found.compare(f"{place} line {number}", written, told)
        for episode in written["episodes"]:
            index = episode["rollout_index"]
            rollout = RolloutRecord(group.outcomes[index], group.task, index)
            check_episode(found, f"{place} line {number}", episode, rollout)
    if not same(ordinals, manifest["generation"]["buffered_ordinals"]):
        found.problem(
            f"{place} has the groups {ordinals}, but manifest.json has buffered_ordinals "
            f"{manifest['generation']['buffered_ordinals']}"
        )


def _shortened(steps: Sequence[Any]) -> str:
    return str(list(steps)) if len(steps) <= 6 else f"[{steps[0]}, ..., {steps[-1]}] ({len(steps)} lines)"
