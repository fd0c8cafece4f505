"""``[ray]``: the host's section of the run file. Does not import Ray."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from rllm_core.config import Section


class RayConfig(Section, use_attribute_docstrings=True):
    """``[ray]``: the Ray cluster of rollout host ``ray``, and what each of its workers takes."""

    address: str = ""
    """Cluster to join: `auto` (the one this machine belongs to) or `host:port` of its head. Empty starts one on this
    machine for this run only, unless the backend has joined or started one, which is then used.
    """
    num_cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """CPUs that Ray reserves for each worker."""
    resources: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """Other resources of the cluster that Ray reserves for each worker, such as one that only some nodes have."""
    environment: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = ()
    """Names of environment variables of this process that workers get."""

    @field_validator("address")
    @classmethod
    def _is_joinable(cls, address: str) -> str:
        if address.startswith("ray://"):
            raise ValueError(
                f"{address} is an address for Ray clients, which cannot train; start the run on a node of the "
                "cluster with address = 'auto'"
            )
        host, _, port = address.rpartition(":")
        if address not in ("", "auto") and not (host and port.isdecimal()):
            raise ValueError(f"{address!r} is neither 'auto' nor 'host:port' of the head of a Ray cluster")
        return address

    @model_validator(mode="after")
    def _has_resources(self) -> Self:
        if self.resources and not self.address:
            raise ValueError("resources needs the address of a cluster; one that the run starts has only CPUs")
        return self
