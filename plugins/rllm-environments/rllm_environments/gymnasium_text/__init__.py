"""Workflow ``gymnasium``: environments of gymnasium, MiniGrid and BabyAI, with observations and actions as text."""
