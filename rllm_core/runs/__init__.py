"""A run of training or an evaluation from start to end: what is opened, closed and written, and what signals do."""
