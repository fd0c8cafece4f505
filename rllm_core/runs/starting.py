"""Starts training and evaluation runs, for both the command line and Python programs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from rllm_core.assembly.parts import Parts, host_of, parts_of, workflow_of
from rllm_core.assembly.resolution import Resolved
from rllm_core.errors import ConfigError, RunError
from rllm_core.file_references import section_name
from rllm_core.limits.guard import Guard, guarded
from rllm_core.limits.running import run
from rllm_core.run_folder.folder import is_run_folder
from rllm_core.run_folder.progress import for_terminal
from rllm_core.runs import evaluation, launch
from rllm_core.runs.signals import until_signalled
from rllm_core.workflow import Split

MAX_NAME_CHARACTERS = 100  # of a run folder, without its date


def target_to_train(target: str | None, run_dir: Path | None, *, resume: bool) -> str:
    """Returns the target to train, for `rllm_core.assembly.resolution.resolve_run`.

    Without ``target``, that is the run file of the run to resume.

    Raises:
        ConfigError: If there is no target, or it is a run folder.
    """
    if resume and run_dir is None:
        raise ConfigError("--resume needs --run-dir DIR (in Python, run_dir), the folder of the run to continue")
    if target is not None:
        if is_run_folder(Path(target)):
            folder = quote(target)
            raise ConfigError(
                f"{target} is a run folder; continue its run with rllm-core train --resume --run-dir {folder}, or "
                f"start another like it with rllm-core train {folder}/run.toml"
            )
        return target
    if not resume or run_dir is None:
        raise ConfigError("specify a workflow or a run file: rllm-core train WORKFLOW|RUN.toml")
    if not (run_dir / "run.toml").is_file():
        raise ConfigError(f"run folder {run_dir} holds no run to resume")
    return str(run_dir / "run.toml")


def target_to_evaluate(target: str | None, checkpoint: Path | None) -> str:
    """Returns the target to evaluate: the one that the user named, or else the run file of the checkpoint's run.

    Raises:
        ConfigError: If there is none, it is a run folder, or the checkpoint does not exist.
    """
    if checkpoint is not None and not checkpoint.is_dir():
        raise ConfigError(f"checkpoint {checkpoint} does not exist; name a run folder, or a checkpoint folder in one")
    if target is not None:
        if is_run_folder(Path(target)):
            raise ConfigError(f"{target} is a run folder; evaluate it with rllm-core eval --checkpoint {quote(target)}")
        return target
    if checkpoint is None:
        raise ConfigError("specify a workflow or a run file: rllm-core eval WORKFLOW|RUN.toml, or --checkpoint RUN")
    run_dir = run_of(checkpoint)
    if run_dir is None:
        raise ConfigError(f"{checkpoint} belongs to no run folder; specify its workflow: rllm-core eval WORKFLOW")
    return str(run_dir / "run.toml")


def run_of(checkpoint: Path) -> Path | None:
    """Returns the run folder that a checkpoint belongs to, or ``checkpoint`` itself if it is one; None if neither."""
    folders = (checkpoint, *checkpoint.absolute().parents[:2])
    return next((folder for folder in folders if (folder / "run.toml").is_file()), None)


def folder_of(parts: Parts, run_dir: Path | None) -> Path:
    """Returns the run folder: ``run_dir``, or a new one in ``runs/``.

    Raises:
        RunError: If all names for a new one are taken.
    """
    if run_dir is not None:
        return run_dir
    section = section_name(parts.config.workflow)
    environment = getattr(parts.config.plugins.get(section), "environment", None)  # of NAME/VARIANT
    what = f"{section}-{environment}" if isinstance(environment, str) and environment else section
    name = f"{re.sub(r'[^A-Za-z0-9_.-]', '-', what)[:MAX_NAME_CHARACTERS]}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        path = Path("runs") / f"{name}{suffix}"
        if not path.exists():
            return path
    raise RunError(f"no free folder name like runs/{name}; choose a run folder")


def train(parts: Parts, path: Path, left: list[str], *, resume: bool, owns_process: bool) -> dict[str, Any]:
    """Trains, shows the progress on standard error, and returns the content of ``summary.json``.

    ``left`` receives descriptions of tasks and threads that did not stop. With ``owns_process``, the process exists
    only for the run, and ends if the event loop blocks.

    Raises:
        UserError: See `launch.train`.
    """
    advice = f"To continue: {launch.how_to_continue(parts.config.workflow, path)}"
    guard = Guard(parts.config.training.stall_timeout_seconds, advice) if owns_process else None
    return run(launch.train(parts, path, resume=resume, progress=for_terminal(), guard=guard), left)


def evaluate(
    resolved: Resolved,
    left: list[str],
    *,
    owns_process: bool,
    checkpoint: Path | None,
    engine: str | None,
    split: Split,
    tasks: int | None,
    samples: int,
    ks: Sequence[int],
    measured: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Evaluates a model on a workflow; see `rllm_core.from_python.evaluate`, where ``samples`` is ``n``.

    ``left`` receives descriptions of tasks and threads that did not stop. ``owns_process`` says whether the process
    exists only for the evaluation, and ends if the event loop blocks. For ``measured``, see `evaluation.evaluate`.
    """
    wanted = tuple(sorted(set(ks or (1, samples))))
    if wanted[-1] > samples:
        raise ConfigError(f"pass@{wanted[-1]} needs at least that many rollouts per task; -n is {samples}")
    if engine is None:
        parts = parts_of(resolved)
        host, opening = parts.host, evaluation.engine_of_backend(parts, checkpoint)
    elif checkpoint is not None:
        raise ConfigError(
            "--checkpoint needs a backend; omit --engine (in Python, engine), or export the model and use --model"
        )
    else:
        host = host_of(resolved, workflow_of(resolved))
        opening = evaluation.engine_by_name(engine, resolved)
    evaluating = evaluation.evaluate(
        resolved, host, opening, split=split, task_limit=tasks, samples=samples, ks=wanted, measured=measured
    )
    if owns_process:
        evaluating = until_signalled(guarded(evaluating, resolved.config.training.stall_timeout_seconds))
    return run(evaluating, left)
