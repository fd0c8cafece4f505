"""The viewer: serves run folders as a page on this machine, and writes parts of a run to a single file."""
