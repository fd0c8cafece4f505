"""A plugin that imports a dependency nobody has installed."""

import rllm_fixture_not_there  # noqa: F401
