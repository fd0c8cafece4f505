"""The parts of `rllm_core.training.verify`; they import nothing of the loop whose files they check."""
