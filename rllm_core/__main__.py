"""``python -m rllm_core`` runs ``rllm-core``, and also imports nothing from the working directory."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109 - as Python itself has put it there
    del sys.path[0]

from rllm_core.cli import main

main()
