"""The parts of `rllm_core.training.verify`; they share no code with the training loop whose files they check."""
