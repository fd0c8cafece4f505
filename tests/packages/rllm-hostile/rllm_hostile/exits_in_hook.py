"""A provider hook that ends the process."""

import sys

from rllm_core import hookimpl


@hookimpl
def workflows():
    sys.exit("from a hook")
