"""Files of a run, and the code that writes, reads and draws them."""
