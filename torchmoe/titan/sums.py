"""Which gradients of a model part are summed over which ranks, and which of them this rank counts in the global norm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.components.checkpointer.utils import canonical_fqn

from torchmoe.placement import Placement, Residual, Where

__all__ = ["GradientSum", "gradient_ranks", "gradient_sums"]


@dataclass(frozen=True)
class GradientSum:
    """Parameters whose gradients are summed over ``ranks``. ``counted``: they enter the global norm on this rank."""

    ranks: tuple[int, ...]
    counted: bool
    parameters: tuple[Tensor, ...]


def gradient_ranks(placement: Placement, residual: Residual) -> tuple[tuple[int, ...], ...]:
    """All sets of more than one rank over which gradients are summed, in the order in which every rank uses its own.

    A group's own parameters are summed over the group in every replica, experts over replicas; with residual='ride' ffn_norm
    lives on both groups of its layer.
    """
    sets = {placement.attention_gradient_ranks(g) for g in placement.groups("attention")}
    for group in placement.groups("ffn"):
        sets |= {placement.expert_gradient_ranks(group, i) for i in range(placement.size(group))}
        if residual == "ride" or placement.head_group == group:
            sets.add(placement.attention_gradient_ranks(group))
    if residual == "ride":
        sets |= {tuple(sorted(placement.ride_gradient_ranks(layer))) for layer in range(placement.num_layers)}
    return tuple(sorted(s for s in sets if len(s) > 1))


def gradient_sums(
    part: Any, placement: Placement, where: Where, residual: Residual, moe_blocks: Sequence[str], *, sharded: bool = False
) -> tuple[GradientSum, ...]:
    """The parameters of this rank's part by the ranks that share them, in the order of :func:`gradient_ranks`.

    Args:
        part: the model part of this rank.
        moe_blocks: block name of every MoE layer of the model.
        sharded: attention ranks hold shards of their group's parameters, whose gradients FSDP2 has summed already.
    """
    sets: dict[tuple[tuple[int, ...], bool], list[Tensor]] = {}
    first = where.replica == 0 and where.index == 0
    for name, parameter in part.named_parameters():
        plain = canonical_fqn(name)
        block = re.match(r"layers\.([^.]+)\.ffn_norm\.", plain)
        if residual == "ride" and block and block[1] in moe_blocks:
            ranks = tuple(sorted(placement.ride_gradient_ranks(moe_blocks.index(block[1]))))
            counted = first and where.role == "attention"
        elif ".routed_experts." in plain:
            ranks, counted = placement.expert_gradient_ranks(where.group, where.index), where.replica == 0
        elif sharded and where.role == "attention":
            ranks, counted = (placement.ranks(where.group, where.replica)[where.index],), where.replica == 0
        else:
            ranks, counted = placement.attention_gradient_ranks(where.group), first
        sets.setdefault((ranks, counted), []).append(parameter)
    return tuple(GradientSum(ranks, counted, tuple(found)) for (ranks, counted), found in sorted(sets.items(), key=_order))


def _order(item: tuple[tuple[tuple[int, ...], bool], list[Tensor]]) -> tuple[tuple[int, ...], bool]:
    return item[0]
