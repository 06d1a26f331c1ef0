"""Fresh weights that do not depend on the layout: every parameter draws from its own seed, every expert from its own."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn

from torchmoe.errors import ConfigError
from torchmoe.titan.expert_part import LocalExperts

__all__ = ["initialise", "seed_of"]


def seed_of(seed: int, name: str) -> int:
    """A seed for one name, the same on every rank."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")


def _experts(module: LocalExperts, fqn: str, seed: int) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        for row, expert in enumerate(module.owned):
            torch.manual_seed(seed_of(seed, f"{fqn}.{name}.{expert}"))
            _draw(module, name, parameter[row : row + 1], fqn)


def _draw(module: Any, name: str, tensor: torch.Tensor, fqn: str) -> None:
    inits = module._param_init or {}
    if name not in inits:
        raise ConfigError(f"{fqn}.{name} has no initialiser; set param_init on the module's Config")
    if not isinstance(tensor, DTensor):
        inits[name](tensor)
        return
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    inits[name](whole)
    (placement,) = tensor.placements
    mesh = tensor.device_mesh
    shards = whole.chunk(mesh.size(), dim=placement.dim)  # type: ignore[attr-defined]
    if mesh.get_local_rank() < len(shards):
        tensor.to_local().copy_(shards[mesh.get_local_rank()])


@torch.no_grad()
def initialise(part: Any, seed: int) -> None:
    """Set all parameters and buffers of a torchtitan model part, after ``to_empty``."""
    part.init_states(buffer_device=None)
    for name_here, module in part.named_modules():
        fqn = canonical_fqn(name_here)  # activation checkpointing changes no weight
        own = list(module.named_parameters(recurse=False))
        if isinstance(module, LocalExperts):
            _experts(module, fqn, seed)
        elif own and getattr(module, "_param_init", None):
            for name, parameter in own:
                torch.manual_seed(seed_of(seed, f"{fqn}.{name}"))
                _draw(module, name, parameter, fqn)
        elif own and isinstance(own[0][1], DTensor):
            raise ConfigError(f"{fqn} has no param_init, without which sharded weights would depend on the layout; set it")
        elif own:
            torch.manual_seed(seed_of(seed, fqn))
            module._init_self_parameters()
    torch.manual_seed(seed)
