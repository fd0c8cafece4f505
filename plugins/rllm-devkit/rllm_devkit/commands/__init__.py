"""Commands that the devkit adds to ``rllm-core``."""
