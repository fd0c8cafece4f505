"""Checks whether a Ray cluster has room for a run's workers. Ray itself waits silently for missing resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rllm_verl.config import VerlConfig

# Worker groups per training device: trainers, reference and servers. verl requests one CPU for each.
GROUPS_PER_DEVICE = 3
# verl requests this many for each device of a separated server (`RolloutReplica.init_standalone`).
CPUS_PER_SERVER_DEVICE = 2
# Ray needs one free CPU to place each actor outside the groups (a server's front, a router of the user), but it then
# takes none.
CPUS_TO_PLACE_ACTORS = 1


@dataclass(frozen=True)
class _Group:
    """Workers that must be on one machine."""

    what: str
    count: int
    devices: int
    cpus_per_device: int

    @property
    def cpus(self) -> int:
        return self.devices * self.cpus_per_device

    def fitting(self, machines: Sequence[Mapping[str, float]], resource: str, *, cpus_count: bool) -> int:
        """Returns the number of such groups that fit on the machines if nothing else runs there."""
        found = 0
        for machine in machines:
            by_devices = int(machine.get(resource, 0)) // self.devices
            by_cpus = (int(machine.get("CPU", 0)) - CPUS_TO_PLACE_ACTORS) // self.cpus
            found += max(0, min(by_devices, by_cpus) if cpus_count else by_devices)
        return found


def _groups(settings: VerlConfig) -> list[_Group]:
    groups = [_Group("training", settings.nodes, settings.devices_per_node, GROUPS_PER_DEVICE)]
    if settings.placement == "separated":
        together = min(settings.tensor_parallel, settings.rollout_devices_per_node)
        count = settings.server_devices // together
        groups.append(_Group("sampling", count, together, CPUS_PER_SERVER_DEVICE))
    return groups


def shortage(machines: Sequence[Mapping[str, float]], settings: VerlConfig, resource: str) -> str | None:
    """Returns why a run cannot be placed, and what to do, in one line; None if nothing is known to be missing.

    Checks only what must hold for any placement, so that no cluster with enough room is rejected.

    Args:
        machines: Resources of each machine, as Ray reports them.
        settings: Section ``[verl]`` of the run file.
        resource: Ray's name for the devices.
    """
    groups = _groups(settings)
    devices, cpus = (int(sum(machine.get(name, 0) for machine in machines)) for name in (resource, "CPU"))
    if devices < settings.devices:
        return (
            f"the Ray cluster has {devices} devices and the run needs {settings.devices}: start Ray on the other "
            "machines, or lower verl.nodes, verl.devices_per_node, verl.rollout_nodes or verl.rollout_devices_per_node"
        )
    for group in groups:
        if (there := group.fitting(machines, resource, cpus_count=False)) < group.count:
            return (
                f"the Ray cluster has room for {there} groups of {group.devices} devices on one machine, and "
                f"{group.what} needs {group.count}: lower verl.devices_per_node, verl.rollout_devices_per_node or "
                "verl.tensor_parallel to what a machine has"
            )
    wanted = sum(group.count * group.cpus for group in groups) + CPUS_TO_PLACE_ACTORS
    lacks = [group for group in groups if group.fitting(machines, resource, cpus_count=True) < group.count]
    if cpus < wanted or lacks:
        machine = max(group.cpus for group in lacks or groups) + CPUS_TO_PLACE_ACTORS
        return (
            f"the Ray cluster has {cpus} CPUs ({', '.join(str(int(each.get('CPU', 0))) for each in machines)} by "
            f"machine) and the run needs {wanted}, of which at least {machine} on one machine: {GROUPS_PER_DEVICE} for "
            f"each training device, {CPUS_PER_SERVER_DEVICE} for each device of separated servers and "
            f"{CPUS_TO_PLACE_ACTORS} more; Ray only counts them, so start it with a larger --num-cpus"
        )
    return None
