"""Files of a run, and who reads and draws them."""
