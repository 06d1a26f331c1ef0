"""A transport on the process groups that a DeviceMesh has already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from torchmoe.comm.c10d import C10dTransport, connect
from torchmoe.placement import Communicator

__all__ = ["mesh_transport"]


def mesh_transport(
    device_type: str, communicators: Sequence[Communicator], groups: Mapping[str, dist.ProcessGroup]
) -> C10dTransport:
    """A :class:`C10dTransport` of ``communicators``; those without a group in ``groups`` get a new one.

    Collective over the ranks of the communicators alone, not over the world.
    """
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    found: dict[str, tuple[Communicator, dist.ProcessGroup]] = {}
    for c in communicators:
        group = groups.get(c.name)
        if group is None:
            backend = "gloo" if c.host or device_type == "cpu" else "nccl"
            group = dist.new_group(list(c.ranks), backend=backend, use_local_synchronization=True, group_desc=c.name)
        found[c.name] = (c, group)
        connect(c, group, device)
    return C10dTransport(found, device=device, record=False)
