"""Options that all judges share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rllm_core.config import Section

RUBRIC = """\
- A rollout that achieves its goal is always better than one that does not.
- Of rollouts that achieve their goal, those that take fewer detours are better.
- Of rollouts that do not, those that come closer are better.
- A claim is worth what the transcript shows: saying that the goal is achieved does not achieve it."""

ENDPOINT = "openai"
POLICY = "policy"


class JudgeOptions(Section, use_attribute_docstrings=True):
    """Options of ``algorithm.group_scorer_options`` for every judge of this package."""

    engine: str = ENDPOINT
    """Engine of the judge: `openai` for an OpenAI-compatible endpoint, `policy` for the model in training, or the name
    of a rollout engine that needs no backend.
    """
    model: str = ""
    """Model at the endpoint, or folder of the model that the engine loads. Empty for `policy`."""
    base_url: str | None = None
    """Address of the endpoint. Defaults to the variable OPENAI_BASE_URL, or else to OpenAI."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the endpoint's API key. If it is unset, a placeholder is sent."""
    frozen_version: Literal[0] | None = None
    """For `policy`: 0 uses the initial weights of the run throughout training. Defaults to the current weights,
    with which the judge learns what it rewards.
    """
    parser: str = ""
    """Parser of the engine's model. Defaults to that of the run file."""
    rubric: str = RUBRIC
    """Criteria of a good rollout."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature of the judge."""
    max_response_tokens: Annotated[int, Field(ge=1)] = 2048
    """Maximum length of a reply, with the judge's reasoning."""
    replies: Annotated[int, Field(ge=1)] = 3
    """Maximum replies to one question. If none can be read, the rollouts in the question are unscored."""
    request_timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Time limit of a request to the endpoint."""
    max_concurrent_requests: Annotated[int, Field(ge=1)] = 16
    """Maximum requests to the endpoint at a time."""
    max_transcript_characters: Annotated[int, Field(ge=1000)] = 100_000
    """Maximum length of a rollout in a question. The middle of a longer one is left out, and the question says so."""
    cache_file: str = ""
    """File for the judge's replies, by content, which other runs with the same seed reuse. Empty keeps them for this
    launch.
    """

    @model_validator(mode="after")
    def _check_model(self) -> Any:
        if not self.model and self.engine != POLICY:
            raise ValueError("model is not set; name the judge's model, or set engine = 'policy'")
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url = {self.base_url!r} must start with http:// or https://")
        if self.engine != ENDPOINT and self.base_url is not None:
            raise ValueError(f"base_url is for engine = {ENDPOINT!r}, but engine = {self.engine!r}; remove it")
        if self.engine != POLICY and self.frozen_version is not None:
            raise ValueError(
                f"frozen_version is for engine = {POLICY!r}, but engine = {self.engine!r}, whose model stays the same; "
                "remove it"
            )
        for key in ("model", "parser", "cache_file"):
            if self.engine == POLICY and getattr(self, key):
                raise ValueError(f"{key} is for a judge that is another model, but engine = {POLICY!r}; remove it")
        return self
