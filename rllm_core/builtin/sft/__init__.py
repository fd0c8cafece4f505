"""Supervised fine-tuning: example conversations as rollouts of the training loop."""
