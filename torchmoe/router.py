"""Token-choice routing: which experts each token goes to, with which gates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Routing"]


@dataclass(frozen=True)
class Routing:
    """The decision of a router for T tokens. It is data: recompute replays it, it is never decided twice.

    Args:
        expert_ids_TK: logical expert ids, int32 or int64; -1 is a dropped slot. Carries no gradient.
        gates_TK: weight of each slot, fp32 or wider; carries gradient.
        aux: scalar balancing loss of these tokens, already scaled, or None. Its gradient is taken with the gates'.
    """

    expert_ids_TK: Tensor
    gates_TK: Tensor
    aux: Tensor | None = None
