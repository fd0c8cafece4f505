"""Property tests draw the same examples in every run, and no machine is too slow for them."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("hypothesis"):  # some of the other environments have none
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "tests", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("tests")
