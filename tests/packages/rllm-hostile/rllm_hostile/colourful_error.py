"""An error with control sequences for the terminal."""

raise RuntimeError("\x1b[2J\x1b]0;owned\x07 \u202egnp.exe \x9b31m")
