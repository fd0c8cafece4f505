"""The trials of `benchmarks.hosts` in host ``ray``, on a cluster of two nodes on this machine. Prints their rows."""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import product

from benchmarks.hosts import CORES, trial


def main() -> None:
    """Plays the trials that the options of `benchmarks.hosts`, the only argument, ask for."""
    # Ray reads these when it is imported: no usage reports; the loopback interface only; and no token, even if this
    # machine has one for other clusters.
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}
    os.environ.update(own)
    from ray.cluster_utils import Cluster

    options = argparse.Namespace(**json.loads(sys.argv[1]))
    node = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(CORES - 1):
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        os.environ["RAY_ADDRESS"] = cluster.address
        for part, number in product(options.parts, range(options.trials)):
            for row in trial(part, number, "ray", options):
                print(json.dumps(row), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
