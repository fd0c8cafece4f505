"""Workflow ``reasoning_gym``: the datasets of reasoning-gym, scored by their own checkers."""
