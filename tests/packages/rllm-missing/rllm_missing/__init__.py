"""A plugin that imports a missing dependency."""

import rllm_fixture_not_there  # noqa: F401
