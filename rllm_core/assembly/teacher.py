"""Opens the teacher that the section ``[teacher]`` describes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from rllm_core.assembly.engines import build_parser, engine_class, open_engine
from rllm_core.assembly.resolution import Resolved
from rllm_core.config import ModelConfig
from rllm_core.distillation.teacher import Teacher
from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser


def check_teacher(resolved: Resolved) -> None:
    """Checks that the teacher can score.

    Raises:
        ConfigError: If the teacher's engine cannot score tokens, or the teacher's model is not set, is a path, but not
            of a model folder, or has no tokenizer that its parser can read.
    """
    name = resolved.config.teacher.engine
    if not engine_class(resolved, name).computes_logprobs:
        raise ConfigError(
            f"teacher.engine = {name!r} cannot score given tokens; choose an engine with computes_logprobs = True"
        )
    model = resolved.config.teacher.model
    if not model:
        raise ConfigError(
            f"teacher.model is not set; set it to the folder of the model that engine {name!r} should score with"
        )
    is_folder = Path(model).is_dir()
    if is_folder and not (Path(model) / "config.json").is_file():
        raise ConfigError(f"teacher.model = {model!r} is not a model folder: it has no config.json")
    is_path = model.startswith((".", "/")) or ("://" not in model and model.count("/") > 1)
    if not is_folder and (is_path or Path(model).exists()):
        raise ConfigError(f"teacher.model = {model!r}: there is no such folder")
    if is_folder or "/" not in model:  # another name may belong to a hub, and building the parser would download it
        _parser(resolved)


def _parser(resolved: Resolved) -> BaseParser:
    """Builds the parser for the teacher's model."""
    teacher = resolved.config.teacher
    try:
        return build_parser(resolved, teacher.parser or resolved.config.parser, teacher.model)
    except ConfigError as error:
        raise ConfigError(f"teacher.model = {teacher.model!r}: {error}") from error


@asynccontextmanager
async def open_teacher(resolved: Resolved, student: BaseParser | None) -> AsyncIterator[Teacher | None]:
    """Yields the run's teacher with its engine awake, or None if the run has no teacher.

    Raises:
        ConfigError: If the teacher's tokens cannot be compared with the policy's.
    """
    config = resolved.config
    teacher = config.teacher
    if not teacher.engine:
        yield None
        return
    if student is None:
        raise ConfigError("a teacher needs the policy's parser, but the engine of this backend has none")
    parser = _parser(resolved)
    reads_tokens = not teacher.parser and student.vocabulary() == parser.vocabulary()
    its_model = config.model_copy(update={"model": ModelConfig(path=teacher.model)})
    label = f"the teacher, engine {teacher.engine!r},"
    async with AsyncExitStack() as stack:
        opening = open_engine(replace(resolved, config=its_model), teacher.engine, parser, label)
        try:
            engine = await stack.enter_async_context(opening)
        except ConfigError as error:
            raise ConfigError(f"teacher.engine = {teacher.engine!r}: {error}") from error
        yield Teacher(engine, student, None if reads_tokens else parser, config.rollout)
