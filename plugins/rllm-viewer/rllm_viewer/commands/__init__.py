"""Commands that the viewer adds to ``rllm-core``."""
