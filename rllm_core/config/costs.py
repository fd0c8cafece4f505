"""Keys of prices and of the budget."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from rllm_core.run_file import Section

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PricesConfig(Section, use_attribute_docstrings=True):
    """``[costs.prices.KIND]``: prices of one kind of cost, such as `sampling` or `judge`, in any currency."""

    million_prompt_tokens: Price = 0.0
    """Price of a million prompt tokens. For `training`, of tokens without a gradient."""
    million_completion_tokens: Price = 0.0
    """Price of a million completion tokens. For `training`, of tokens with a gradient."""
    thousand_calls: Price = 0.0
    """Price of a thousand calls."""
    hour: Price = 0.0
    """Price of an hour of calls; concurrent calls add up."""


class BudgetConfig(Section, use_attribute_docstrings=True):
    """``[costs.budget]``: what a run may spend over all launches. It stops before, with a checkpoint."""

    tokens: Annotated[int | None, Field(ge=1)] = None
    """Maximum tokens to and from models, excluding training. Defaults to no limit."""
    calls: Annotated[int | None, Field(ge=1)] = None
    """Maximum calls to models, tools and reward functions, excluding training. Defaults to no limit."""
    money: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Maximum cost by the prices. Defaults to no limit."""


class CostsConfig(Section, use_attribute_docstrings=True):
    """``[costs]``: prices and the budget. Neither changes what is trained, so both may change on resume."""

    prices: dict[str, PricesConfig] = Field(default_factory=dict)
    """Prices by kind of cost. Without any, no money is reported."""
    budget: BudgetConfig = Field(default_factory=BudgetConfig)

    @model_validator(mode="after")
    def _check_money(self) -> Any:
        if self.budget.money is not None and not self.prices:
            raise ValueError("costs.budget.money needs prices; set costs.prices.sampling, or another kind")
        return self
