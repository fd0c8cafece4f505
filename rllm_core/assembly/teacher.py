"""Opens the teacher that ``[teacher]`` describes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rllm_core import providers
from rllm_core.assembly.engines import engine_class, standalone_engine
from rllm_core.config import ModelConfig, RunConfig
from rllm_core.distillation.teacher import Teacher
from rllm_core.errors import ConfigError
from rllm_core.limits.timeouts import within
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager

CLOSING_TIMEOUT_SECONDS = 60.0


def check_teacher(config: RunConfig, plugins: PluginManager) -> None:
    """Checks that the teacher can score.

    Raises:
        ConfigError: If its engine cannot score tokens, or its model is not set.
    """
    name = config.teacher.engine
    found = engine_class(plugins, name)
    if not found.computes_logprobs:
        raise ConfigError(
            f"teacher.engine = {name!r} cannot score given tokens; choose an engine with computes_logprobs = True"
        )
    if not config.teacher.model:
        raise ConfigError(
            f"teacher.model is not set; set it to the folder of the model that engine {name!r} should score with"
        )


@asynccontextmanager
async def open_teacher(
    config: RunConfig, plugins: PluginManager, student: BaseParser | None
) -> AsyncIterator[Teacher | None]:
    """Yields the run's teacher with its engine awake, or None if the run has no teacher.

    Raises:
        ConfigError: If the teacher's tokens cannot be compared with the policy's.
    """
    if not config.teacher.engine:
        yield None
        return
    if student is None:
        raise ConfigError("a teacher needs the policy's parser, but the engine of this backend has none")
    parser = _parser(config, plugins)
    reads_tokens = not config.teacher.parser and student.vocabulary() == parser.vocabulary()
    own_model = config.model_copy(update={"model": ModelConfig(path=config.teacher.model)})
    engine = standalone_engine(config.teacher.engine, own_model, plugins, parser)
    what = f"the teacher, engine {config.teacher.engine!r},"
    try:
        await within(config.training.backend_timeout_seconds, f"{what} wake_up", engine.wake_up())
    except ConfigError as error:
        raise ConfigError(f"teacher.engine = {config.teacher.engine!r}: {error}") from error
    try:
        yield Teacher(engine, student, None if reads_tokens else parser, config.rollout)
    finally:
        await within(CLOSING_TIMEOUT_SECONDS, f"{what} sleep", engine.sleep())


def _parser(config: RunConfig, plugins: PluginManager) -> BaseParser:
    name = config.teacher.parser or config.parser
    parser_class: type[BaseParser] = plugins.load(plugins.select(providers.ParserProvider, name))
    return parser_class.from_model(config.teacher.model, config.plugins.get(name))
