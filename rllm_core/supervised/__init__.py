"""Supervised fine-tuning: conversations that others wrote, as rollouts of the one loop."""
