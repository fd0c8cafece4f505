"""Training loop: coordination, buffering, rollout accounting, journal, checkpoints and metrics."""
