"""Broken algorithm components, named after their fault."""

from rllm_core import hookimpl
from rllm_core.providers import AdvantageEstimatorProvider, CorrectionProvider, PolicyLossProvider


def records(kind, module, **classes):
    return [
        kind(name=name, load=f"rllm_wrongs.{module}:{found}", summary=f"Wrong: {name}.")
        for name, found in classes.items()
    ]


@hookimpl
def advantage_estimators():
    return [
        *records(AdvantageEstimatorProvider, "no_such_module", cannot_be_imported="Any"),
        *records(AdvantageEstimatorProvider, "raising", raises_at_import="Any"),
        *records(
            AdvantageEstimatorProvider,
            "estimators",
            no_estimator="NoEstimator",
            cannot_be_made="CannotBeMade",
            exits_when_made="ExitsWhenMade",
            says_nan="SaysNaN",
            says_nothing="SaysNothing",
            wrong_shape="WrongShape",
            wrong_count="WrongCount",
            fails="Fails",
            exits="Exits",
            undeclared_tokens="UndeclaredTokens",
            lax_options="LaxOptions",
        ),
        *records(AdvantageEstimatorProvider, "estimators", rloo="WrongCount"),
    ]


@hookimpl
def policy_losses():
    return records(
        PolicyLossProvider,
        "losses",
        no_loss="NoLoss",
        averages="Averages",
        nan_loss="NaNLoss",
        failing_loss="FailingLoss",
    )


@hookimpl
def corrections():
    return records(
        CorrectionProvider,
        "corrections",
        no_correction="NoCorrection",
        negative="Negative",
        short="Short",
        failing_correction="FailingCorrection",
    )
