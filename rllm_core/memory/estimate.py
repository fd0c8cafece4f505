"""Memory that a run needs, per device and phase, and whether it fits."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rllm_core.errors import ConfigError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Memory for one purpose on a device in one phase of a step.

    Attributes:
        phase: Phase of a step, such as ``training``, ``weight sync`` or ``generation``.
        what: Purpose, such as ``weights``, ``gradients``, ``optimizer``, ``logits``, ``activations``, ``cache``,
            ``sync buffers`` or ``contexts``.
        size_bytes: Size on one device.
    """

    phase: str
    what: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Device:
    """Devices of a run that all need the same memory.

    Attributes:
        name: Name in messages, such as ``trainer``.
        count: Number of such devices.
        capacity_bytes: Memory of one of them; None if unknown.
        uses: Uses of memory on each device, in the order to print. Uses at the same time have the same phase.
        advice: Advice by phase on what to change if the phase does not fit: a clause that follows a colon.
    """

    name: str
    count: int
    capacity_bytes: int | None
    uses: tuple[MemoryUse, ...]
    advice: dict[str, str]

    @property
    def phases(self) -> list[str]:
        """Phases, in the order of the uses."""
        return list(dict.fromkeys(use.phase for use in self.uses))

    def total_bytes(self, phase: str) -> int:
        """Returns the memory in use in a phase."""
        return sum(use.size_bytes for use in self.uses if use.phase == phase)

    def line(self, phase: str) -> str:
        """Returns the sizes of a phase, the total first."""
        parts = [f"{use.what} {gigabytes(use.size_bytes)}" for use in self.uses if use.phase == phase]
        return f"{gigabytes(self.total_bytes(phase))} GB: {', '.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of a run, computed from its run file and the model's configuration.

    Attributes:
        devices: One entry per kind of device.
        remarks: Notes on what the numbers leave out, one line each.
        chosen: Settings that the backend has chosen so that the run fits, one line each.
    """

    devices: tuple[Device, ...]
    remarks: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """Returns one line with the phase that does not fit, its device, and advice; None if everything fits."""
        for device in self.devices:
            if device.capacity_bytes is None:
                continue
            for phase in device.phases:
                if device.total_bytes(phase) > device.capacity_bytes:
                    return (
                        f"memory of a {device.name} during {phase}: {device.line(phase)}; it has "
                        f"{gigabytes(device.capacity_bytes)} GB: {device.advice[phase]}"
                    )
        return None

    def lines(self) -> list[str]:
        """Returns the table that a dry run prints."""
        found = []
        for device in self.devices:
            size = "" if device.capacity_bytes is None else f", each with {gigabytes(device.capacity_bytes)} GB"
            found.append(f"memory of {device.count} x {device.name}{size}")
            found += [f"  {phase}: {device.line(phase)}" for phase in device.phases]
        found += [f"  chosen: {line}" for line in self.chosen]
        return found + [f"  not counted: {remark}" for remark in self.remarks]

    def to_json(self) -> dict[str, object]:
        """Returns the table for ``--json``; sizes are in bytes."""
        return {
            "devices": [
                {
                    "name": device.name,
                    "count": device.count,
                    "capacity_bytes": device.capacity_bytes,
                    "phases": {
                        phase: {use.what: use.size_bytes for use in device.uses if use.phase == phase}
                        for phase in device.phases
                    },
                }
                for device in self.devices
            ],
            "remarks": list(self.remarks),
            "chosen": list(self.chosen),
        }


def parse_bytes(text: str) -> int:
    """Returns a size such as ``80GB`` (10⁹ bytes each) or ``79.2GiB`` (2³⁰ bytes each) in bytes.

    Raises:
        ConfigError: If ``text`` is not such a size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in UNITS or float(found[1]) == 0:
        raise ConfigError(f"{text!r} is not a memory size; use for example 80GB or 79.2GiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def gigabytes(size_bytes: int) -> str:
    """Returns a size in GB (10⁹ bytes) with three significant digits, or more for hundreds of GB."""
    size = size_bytes / 10**9
    return f"{size:.0f}" if size >= 99.95 else f"{size:.3g}"
