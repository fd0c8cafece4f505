"""On-policy distillation: a teacher scores the tokens that the student samples."""
