"""Every other file of a run folder, held against what the events make of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm_core.errors import RunError
from rllm_core.training import checkpoint
from rllm_core.training.verification.episodes import check_episode
from rllm_core.training.verification.findings import Verification, same
from rllm_core.training.verification.lines import Lines
from rllm_core.training.verification.records import Block, Rollout, Snapshot
from rllm_core.training.verification.replay import Replay
from rllm_core.training.verification.trajectories import Trajectories

STATUSES = ("completed", "failed", "interrupted")
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)


def read_summary(run_dir: Path, replay: Replay, found: Verification) -> dict[str, Any] | None:
    """``summary.json`` of the last start; None if that was killed. Its status is that of the run."""
    path = run_dir / "summary.json"
    starts = _starts(run_dir, found)
    if starts is not None and starts < found.incarnations:
        found.problem(f"plugins.json says {starts} starts, events.jsonl incarnation {found.incarnations - 1}")
    if not path.is_file():
        return None
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        incarnation, status = summary["incarnation"], summary["status"]
        began = incarnation < found.incarnations
        # A disk may refuse plugins.json already; then there never was anything to count.
        is_counted = began or "books_by_reason" in summary
        started = found.incarnations if starts is None else starts
        if incarnation + 1 < started and not replay.is_current:
            return None  # earlier versions left that of the start before
        if started not in ((incarnation + 1,) if is_counted else (incarnation, incarnation + 1)):
            found.problem(f"summary.json says incarnation {incarnation}, plugins.json has {started} starts")
        if status not in STATUSES:
            found.problem(f"summary.json says status {status}; there are {', '.join(STATUSES)}")
        if (status == "completed") == ("error" in summary):
            found.problem(f"summary.json says status {status}, and error {summary.get('error')}")
    except UNREADABLE as error:
        found.problem(f"summary.json cannot be read: {type(error).__name__}: {error}")
        return None
    found.status = status
    if not began:  # the files are those of the start before
        if status == "completed":
            found.problem(f"summary.json says status completed, events.jsonl has no begin of incarnation {incarnation}")
        return None
    return summary


def _starts(run_dir: Path, found: Verification) -> int | None:
    path = run_dir / "plugins.json"
    try:
        return len(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    except UNREADABLE as error:
        found.problem(f"plugins.json cannot be read: {type(error).__name__}: {error}")
        return None


def check_summary(summary: dict[str, Any], replay: Replay, found: Verification) -> None:
    """Every number of ``summary.json`` that events tell, too."""
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
        # A run may fail between the end of a validation and the line about it.
        validations = summary["validation"]
        more = range(2 if summary["status"] != "completed" else 1)
        if len(validations) - len(replay.validations) not in more:
            found.problem(
                f"summary.json says validation {len(validations)} times, events.jsonl {len(replay.validations)}"
            )
        for number, (said, known) in enumerate(zip(validations, replay.validations, strict=False)):
            found.compare(f"summary.json validation[{number}] (step {known['step']})", said, known)
            for name in sorted(said.keys() - known.keys()):
                found.problem(f"summary.json validation[{number}] says {name} {said[name]}, events.jsonl nothing")
        outstanding = len(replay.groups)
    except UNREADABLE as error:
        found.problem(f"summary.json cannot be read: {type(error).__name__}: {error}")
        return
    if summary["status"] == "completed":
        if found.steps != found.planned_steps:
            found.problem(f"a completed run has {found.steps} of {found.planned_steps} planned steps")
        if outstanding:
            found.problem(f"a completed run left {outstanding} groups outstanding")


def check_whole(lines: Sequence[Lines], found: Verification) -> None:
    """No file of a run that completed ends in the middle of a line."""
    for file in lines:
        if file.is_torn and found.status == "completed":
            found.problem(f"{file.name} ends in a line without an end, summary.json says status completed")


def check_step_lines(lines: Lines, run_dir: Path, found: Verification) -> None:
    """``metrics.jsonl`` or ``timings.jsonl``: a line per step."""
    steps = [written["step"] for _, written in lines.objects]
    # A step is in the journal before its line is: a run that failed or was killed in between has one line less, or one
    # more where a kill lost the events. A start that resumes cuts this file back to the checkpoint before the journal.
    complete = checkpoint.complete(run_dir / "checkpoints")
    allowed = {found.steps}
    if found.status != "completed":
        allowed |= {found.steps - 1}
    if found.status == "interrupted":
        allowed |= {found.steps + 1, int(complete[-1].name.removeprefix("step-")) if complete else 0}
    if steps != list(range(1, len(steps) + 1)) or len(steps) not in allowed:
        found.problem(f"{lines.name} has the steps {_shortened(steps)}, events.jsonl has {found.steps} steps")


def check_metrics(lines: Lines, blocks: Sequence[Block], found: Verification) -> None:
    """What each line of ``metrics.jsonl`` says that events and episodes tell, too."""
    steps = {block.step: block for block in blocks if not block.is_validation}
    for number, written in lines.objects:
        if (block := steps.get(written["step"])) is not None:
            place = f"metrics.jsonl line {number} (step {block.step})"
            found.compare(place, written, block.expected)
            found.compare(place, written, block.of_episodes, "trajectories.jsonl")
            for told, prefix in ((block.expected, "reward_mean/"), (block.of_episodes, "segment_breaks/")):
                for name in sorted(written.keys() - told.keys()):
                    if name.startswith(prefix) and prefix[:-1] in told:
                        found.problem(f"{place} says {name} {written[name]}, which no trajectory has")


def check_end_of_trajectories(
    run_dir: Path, trajectories: Trajectories, found: Verification, *, is_killed: bool
) -> None:
    """Of a run that failed or was killed, the last lines may be missing; of one that completed, none."""
    missing, size = trajectories.missing, trajectories.lines.ends[-1]
    if missing <= (found.status != "completed"):
        return
    if is_killed:  # or a start that resumes has cut them off, and was killed before it had cut the journal
        complete = checkpoint.complete(run_dir / "checkpoints")
        if size == (checkpoint.read(complete[-1])["offsets"]["trajectories"] if complete else 0):
            return
    lines = len(trajectories.lines.ends) - 1
    found.problem(f"trajectories.jsonl has {lines} lines, events.jsonl tells of {missing} more steps or validations")


def check_validations(replay: Replay, found: Verification) -> None:
    """The workflow's own metrics of a validation, where all of its episodes are kept."""
    blocks = (block for block in replay.blocks if block.is_validation)
    for block, known in zip(blocks, replay.validations, strict=True):
        found.compare(f"events.jsonl validation of step {block.step}", known, block.of_episodes, "trajectories.jsonl")


def check_timings(timings: Lines, metrics: Lines, found: Verification) -> None:
    """What timings say that follows from the metrics and from each other."""
    tokens = {written["step"]: written.get("sampled_tokens") for _, written in metrics.objects}
    for number, written in timings.objects:
        place = f"timings.jsonl line {number} (step {written['step']})"
        try:
            seconds = written["step_seconds"]
            waited = written["generation_wait_seconds"] + written["drain_seconds"]
            share = min(1.0, waited / seconds) if seconds > 0 else 0.0
            found.compare(place, written, {"training_idle_share": share}, "its seconds")
            sampled = tokens.get(written["step"])
            if sampled is not None:
                rate = sampled / max(seconds, 1e-9)
                found.compare(place, written, {"tokens_per_second": rate}, "sampled_tokens of metrics.jsonl")
        except UNREADABLE as error:
            found.problem(f"{place} cannot be read ({type(error).__name__}: {error})")


def check_checkpoints(
    run_dir: Path, replay: Replay, ends: Mapping[str, Sequence[int]], block_ends: Sequence[int], found: Verification
) -> None:
    """Every manifest, with the run as it was when it was written.

    Args:
        run_dir: The run folder.
        replay: Its events.
        ends: By file, its length up to the end of each line, in bytes.
        block_ends: Lines of ``trajectories.jsonl`` up to the end of each block.
        found: Where problems go.
    """
    for folder in checkpoint.complete(run_dir / "checkpoints"):
        try:
            manifest = checkpoint.read(folder)
        except RunError as error:
            found.problem(str(error))
            continue
        place, snapshot = f"checkpoints/{folder.name}/manifest.json", replay.snapshots.get(manifest["step"])
        if folder.name != f"step-{manifest['step']:06d}":
            found.problem(f"{place} says step {manifest['step']}")
        elif snapshot is None:
            found.problem(f"{place} says step {manifest['step']}, events.jsonl has no checkpoint of it")
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
    if lost > 0:  # what was in flight is lost to a restart
        cancelled = ended.setdefault("cancelled", {})
        cancelled["restart"] = cancelled.get("restart", 0) + lost
    expected["books.ended"] = ended
    expected["generation.due_ordinals"] = sorted(snapshot.due - buffered)
    if "difficulty" not in generation:  # earlier versions wrote none
        expected.pop("generation.difficulty", None)
    found.compare(place, manifest, expected)
    if not buffered <= snapshot.complete:
        found.problem(
            f"{place} says generation.buffered_ordinals {sorted(buffered)}, events.jsonl {sorted(snapshot.complete)}"
        )
    epoch = generation["epoch"]
    if snapshot.epoch is not None and epoch not in (snapshot.epoch, snapshot.epoch + 1):
        found.problem(f"{place} says generation.epoch {epoch}, events.jsonl {snapshot.epoch}")


def _check_offsets(
    place: str,
    manifest: dict[str, Any],
    snapshot: Snapshot,
    ends: Mapping[str, Sequence[int]],
    block_ends: Sequence[int],
    found: Verification,
) -> None:
    kept = [0, *block_ends][snapshot.blocks] if snapshot.blocks <= len(block_ends) else None
    lines = {"metrics": manifest["step"], "timings": manifest["step"], "trajectories": kept}
    for name, count in lines.items():
        if count is not None and count < len(ends[name]):
            found.compare(place, manifest, {f"offsets.{name}": ends[name][count]}, f"{name}.jsonl")
        else:
            offset = manifest["offsets"][name]
            found.problem(f"{place} says offsets.{name} {offset}, {name}.jsonl has {ends[name][-1]} bytes")


def _check_buffer(path: Path, manifest: dict[str, Any], replay: Replay, found: Verification) -> None:
    """The complete groups of a checkpoint, as far as they have not been trained since."""
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
            rollout = Rollout(group.outcomes[index], group.task, index)
            check_episode(found, f"{place} line {number}", episode, rollout)
    if not same(ordinals, manifest["generation"]["buffered_ordinals"]):
        found.problem(
            f"{place} has the groups {ordinals}, manifest.json says buffered_ordinals "
            f"{manifest['generation']['buffered_ordinals']}"
        )


def _shortened(steps: Sequence[Any]) -> str:
    return str(list(steps)) if len(steps) <= 6 else f"[{steps[0]}, ..., {steps[-1]}] ({len(steps)} lines)"
