"""Raises SystemExit."""

import sys

sys.exit("goodbye")
