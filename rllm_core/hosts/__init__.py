"""Where rollouts run: in the process of the run, or in workers elsewhere."""
