"""``python -m rllm_core`` is ``rllm-core``."""

from rllm_core.cli import main

main()
