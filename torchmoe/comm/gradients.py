"""Sums of gradients and their norm over the ranks of a placement."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchmoe.errors import ConfigError
from torchmoe.placement import Placement

__all__ = ["clip_by_global_norm", "counts_in_norm", "global_norm", "sum_gradients"]


def _local(t: Tensor) -> Tensor:
    """The local part of a DTensor; plain tensors as they are."""
    return t.to_local() if hasattr(t, "to_local") else t  # type: ignore[no-any-return]


@torch.no_grad()
def sum_gradients(parameters: Iterable[Tensor], group: Any, *, dtype: torch.dtype | None = None) -> None:
    """One flat all-reduce (sum) per dtype over ``group``; a missing gradient counts as zeros, as on a rank without tokens.

    Every rank of the group passes the same parameters in the same order.

    Args:
        dtype: narrower gradients are summed in this dtype, at its bytes on the wire.
    """
    buckets: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if not p.requires_grad:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        buckets.setdefault(p.grad.dtype, []).append(_local(p.grad))
    for grads in buckets.values():
        flat = torch.cat([g.reshape(-1) for g in grads])
        if dtype is not None:
            flat = flat.to(torch.promote_types(flat.dtype, dtype))
        dist.all_reduce(flat, group=group)
        at = 0
        for g in grads:
            g.copy_(flat[at : at + g.numel()].view_as(g))
            at += g.numel()


def counts_in_norm(placement: Placement, rank: int) -> bool:
    """Whether this rank's gradients enter the global norm: attention parameters are replicated, experts only over replicas."""
    where = placement.where(rank)
    return where.replica == 0 and (where.role == "ffn" or where.index == 0)


@torch.no_grad()
def global_norm(
    parameters: Iterable[Tensor], *, counted: bool | Collection[Tensor], group: Any = None, norm_type: float = 2.0
) -> Tensor:
    """Norm of all gradients of the model, each counted once, over both roles: a scalar, the same on every rank.

    Call after :func:`sum_gradients`, on every rank of ``group`` (default: all).

    Args:
        counted: whether this rank's gradients are counted, see :func:`counts_in_norm`; or those of its parameters that are.
        norm_type: 2 or infinity.
    """
    if norm_type not in (2.0, float("inf")):
        raise ConfigError(f"norm_type={norm_type} is not supported; use 2.0 or float('inf')")
    have = [p for p in parameters if p.grad is not None]
    device = have[0].device if have else None  # also of a rank that is not counted: the sum runs where the gradients are
    chosen = {id(p) for p in (have if counted is True else () if counted is False else counted)}
    grads = [_local(p.grad) for p in have if p.grad is not None and id(p) in chosen]
    wide = torch.promote_types(grads[0].dtype, torch.float32) if grads else torch.float32
    # fp64 on the wire: ranks without a counted gradient do not know the others' dtype
    total = torch.zeros((), dtype=torch.float64, device=device)
    infinite = norm_type == float("inf")
    for g in grads:
        v = torch.linalg.vector_norm(g.to(wide), norm_type).double()
        total = torch.maximum(total, v) if infinite else total + v * v
    dist.all_reduce(total, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    return total if infinite else total.sqrt()


@torch.no_grad()
def clip_by_global_norm(
    parameters: Iterable[Tensor], max_norm: float, *, counted: bool | Collection[Tensor], group: Any = None
) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; returns the norm before."""
    params = list(parameters)
    norm = global_norm(params, counted=counted, group=group)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in params:
        if p.grad is not None:
            g = _local(p.grad)
            g.mul_(scale.to(g.dtype))
    return norm
