"""Training and evaluation from Python: `rllm_core.train`, `rllm_core.evaluate` and `rllm_core.Run`."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from rllm_core.assembly.parts import parts_of
from rllm_core.assembly.resolution import resolve_run
from rllm_core.errors import ConfigError
from rllm_core.plugins import PluginManager
from rllm_core.plugins.classes import named
from rllm_core.providers import WorkflowProvider, forget_files
from rllm_core.run_file import read_toml
from rllm_core.run_folder.run import Run
from rllm_core.runs import starting
from rllm_core.training.stopping import Interrupted
from rllm_core.workflow import Split, Workflow

__all__ = ["Run", "evaluate", "train"]

Target = str | PathLike[str] | type[Workflow]

logger = logging.getLogger(__name__)


def train(
    target: Target | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    backend: str | None = None,
    parser: str | None = None,
    run_dir: str | PathLike[str] | None = None,
    resume: bool = False,
) -> Run:
    """Trains a model on a workflow, as ``rllm-core train`` does, and returns the run.

    Also works where an event loop is already running, as in a notebook. Returns when the training has ended.

        run = rllm_core.train("sort", {"training.steps": 50}, backend="local")

    Args:
        target: Name of a workflow, path of a Python file with one or of a run file, or a subclass of `Workflow`. With
            ``resume``, None uses the run file in ``run_dir``; so does the class that the run was started with.
        settings: Settings that override the run file: ``{"section.key": value}``, or nested tables.
        backend: Backend to use instead of the run file's.
        parser: Parser to use instead of the run file's.
        run_dir: Run folder; None for ``runs/WORKFLOW-DATE-TIME``.
        resume: Whether to continue the run in ``run_dir`` from its latest complete checkpoint.

    Raises:
        ConfigError: If the configuration is invalid.
        PluginError: If a part is missing or broken.
        RunError: If the run failed; its folder stays.
        KeyboardInterrupt: After Ctrl-C, or when the notebook was interrupted. The run has saved a checkpoint, and can
            be resumed. A second one ends the process immediately.
        Interrupted: After SIGTERM, with the same effects, or when the budget is spent.
    """
    plugins = _plugins()
    folder = Path(run_dir).expanduser() if run_dir is not None else None
    chosen = starting.target_to_train(_named(target, plugins, folder if resume else None), folder, resume=resume)
    parts = parts_of(resolve_run(chosen, plugins, settings=settings, backend=backend, parser=parser))
    path = starting.folder_of(parts, folder)
    with _reported() as left:
        try:
            starting.train(parts, path, left, resume=resume, owns_process=False)
        except Interrupted as interrupted:
            if interrupted.exit_code != 128 + signal.SIGINT:
                raise
            raise KeyboardInterrupt(f"the run in {path} has saved a checkpoint") from None
    return Run(path)


def evaluate(
    target: Target | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    model: str | PathLike[str] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    backend: str | None = None,
    engine: str | None = None,
    parser: str | None = None,
    split: Split = "validation",
    tasks: int | None = None,
    n: int = 1,
    k: Sequence[int] = (),
) -> dict[str, Any]:
    """Evaluates a model on a workflow, as ``rllm-core eval`` does.

    Args:
        target: See `train`. With ``checkpoint``, None uses the run file of the checkpoint's run; so does the class that
            the run was started with.
        settings: See `train`.
        model: Model folder or Hugging Face model ID, instead of the run file's.
        checkpoint: Checkpoint folder, or a run (`Run` or its folder) to use its latest one.
        backend: Backend to use instead of the run file's.
        engine: Engine to use instead of the backend's; no backend is started.
        parser: Parser to use instead of the run file's.
        split: ``validation`` or ``train``.
        tasks: Number of tasks, evenly spaced; None for all.
        n: Rollouts per task.
        k: The k of pass@k; empty for 1 and ``n``.

    Returns:
        The object that ``rllm-core eval --json`` prints, with ``reward_mean``, ``pass_at_k`` and others.

    Raises:
        ConfigError: If the configuration or an argument is invalid.
        PluginError: If a part is missing or broken.
        RunError: If every rollout failed.
    """
    if not isinstance(k, Sequence) or isinstance(k, str):
        raise ConfigError(f"k = {k!r:.80}: must be a list of integers, such as [1, 8]")
    for name, number in (("tasks", 1 if tasks is None else tasks), ("n", n), *(("k", one) for one in k)):
        if type(number) is not int or number < 1:
            raise ConfigError(f"{name} = {number!r:.80}: must be an integer and at least 1")
    if split not in ("validation", "train"):
        raise ConfigError(f"split = {split!r}: must be 'validation' or 'train'")
    plugins = _plugins()
    folder = Path(checkpoint).expanduser() if checkpoint is not None else None
    run_dir = starting.run_of(folder) if folder is not None else None
    chosen = starting.target_to_evaluate(_named(target, plugins, run_dir), folder)
    given = {**(settings or {}), **({"model.path": fspath(model)} if model is not None else {})}
    resolved = resolve_run(chosen, plugins, settings=given, backend=backend, parser=parser, engine=engine)
    with _reported() as left:
        return starting.evaluate(
            resolved,
            left,
            owns_process=False,
            checkpoint=folder,
            engine=engine,
            split=split,
            tasks=tasks,
            samples=n,
            ks=k,
        )


def _plugins() -> PluginManager:
    """Returns the plugins that a new process would find."""
    forget_files()
    return PluginManager.from_environment()


def _named(target: Target | None, plugins: PluginManager, run_dir: Path | None) -> str | None:
    """Returns the name of the target; None for the run file in ``run_dir``, also if ``target`` is that run's class."""
    if target is None:
        return None
    if isinstance(target, str | PathLike):
        return fspath(target)
    if not isinstance(target, type):
        raise ConfigError(f"{target!r:.80} is not the name of a workflow, a path, or a subclass of Workflow")
    name = named(target, plugins.providers(WorkflowProvider))
    run_file = run_dir / "run.toml" if run_dir is not None else None
    is_of_run = run_file is not None and run_file.is_file() and read_toml(run_file).get("workflow") == name
    return None if is_of_run else name


@contextmanager
def _reported() -> Iterator[list[str]]:
    """Yields a list for tasks and threads that do not stop, and warns if there are any."""
    left: list[str] = []
    try:
        yield left
    finally:
        if left:
            logger.warning("left running, because it did not stop: %s", ", ".join(left))
