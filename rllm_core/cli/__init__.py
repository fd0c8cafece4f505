"""Command line. A command's module is imported when the command runs, not when commands are listed."""

import sys

try:
    from rllm_core.cli.core_commands import CORE_COMMANDS
    from rllm_core.cli.entry import cli, main
    from rllm_core.cli.groups import LazyGroup
    from rllm_core.cli.options import Session, no_plugins_option, session
except KeyboardInterrupt:  # Ctrl-C before the command line runs
    print("interrupted by SIGINT", file=sys.stderr)
    sys.exit(130)

__all__ = ["CORE_COMMANDS", "LazyGroup", "Session", "cli", "main", "no_plugins_option", "session"]
