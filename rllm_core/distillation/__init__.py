"""Distillation on policy: a teacher scores what the student sampled."""
