"""Whether a cluster has room, from the resources of its machines."""

from __future__ import annotations

from typing import Any

import pytest
from rllm_verl.config import VerlConfig
from rllm_verl.resources import shortage


def machines(*pairs: tuple[int, int]) -> list[dict[str, float]]:
    """Machines with that many GPUs and CPUs."""
    return [{"GPU": gpus, "CPU": cpus} if gpus else {"CPU": cpus} for gpus, cpus in pairs]


COLOCATED: dict[str, Any] = {"devices_per_node": 8}
SEPARATED: dict[str, Any] = {"placement": "separated", "devices_per_node": 4, "rollout_devices_per_node": 4}
TWO: dict[str, Any] = {"nodes": 2, "devices_per_node": 8}


@pytest.mark.parametrize(
    ("settings", "there"),
    [
        (COLOCATED, machines((8, 25))),
        (COLOCATED, machines((0, 64), (8, 25))),
        (SEPARATED, machines((8, 21))),  # 4 x 3 + 4 x 2 + 1
        (SEPARATED, machines((4, 13), (4, 9))),
        (SEPARATED | {"tensor_parallel": 4}, machines((4, 13), (4, 9))),
        # Servers of a device each fit wherever one is left.
        (SEPARATED, machines((4, 13), (2, 5), (2, 5))),
        (TWO, machines((8, 25), (8, 25))),
        (TWO, machines((16, 49))),  # Ray may place both groups on one machine
        ({"placement": "separated", "rollout_nodes": 2, "rollout_devices_per_node": 8, "tensor_parallel": 16},
         machines((1, 4), (8, 17), (8, 17))),
    ],
)  # fmt: skip
def test_enough(settings: dict[str, Any], there: list[dict[str, float]]) -> None:
    assert shortage(there, VerlConfig(**settings), "GPU") is None


@pytest.mark.parametrize(
    ("settings", "there", "message"),
    [
        (COLOCATED, machines((4, 100)), "the Ray cluster has 4 devices and the run needs 8"),
        (
            COLOCATED,
            machines((4, 100), (4, 100)),
            "room for 0 groups of 8 devices on one machine, and training",
        ),
        (
            TWO,
            machines((8, 100), (4, 100), (4, 100)),
            "room for 1 groups of 8 devices on one machine",
        ),
        (
            SEPARATED | {"rollout_devices_per_node": 8, "tensor_parallel": 4},
            machines((4, 99), (4, 99), (2, 99), (2, 99)),
            None,  # 4 to train and 2 servers of 4 do not fit, but no necessary condition shows it
        ),
        (COLOCATED, machines((8, 24)), "has 24 CPUs (24 by machine) and the run needs 25, of which at least 25 on one"),
        (
            COLOCATED,
            machines((8, 8), (0, 64)),
            "has 72 CPUs (8, 64 by machine) and the run needs 25, of which at",
        ),
        (SEPARATED, machines((8, 20)), "has 20 CPUs (20 by machine) and the run needs 21, of which at least 13 on one"),
        (
            SEPARATED | {"tensor_parallel": 4},
            machines((4, 30), (4, 8)),
            None,  # the servers' group fits the first machine, if taken alone
        ),
    ],
)
def test_what_is_missing(settings: dict[str, Any], there: list[dict[str, float]], message: str | None) -> None:
    found = shortage(there, VerlConfig(**settings), "GPU")
    if message is None:
        assert found is None
    else:
        assert found is not None
        assert message in found
        assert "\n" not in found


def test_the_advice_helps() -> None:
    settings = VerlConfig(**SEPARATED)
    found = shortage(machines((8, 4)), settings, "GPU")
    assert found is not None
    assert "larger --num-cpus" in found
    needed = int(found.split("the run needs ")[1].split(",")[0])
    assert shortage(machines((8, needed)), settings, "GPU") is None
    assert shortage(machines((8, needed - 1)), settings, "GPU") is not None
