"""The expert stage of residual='ride' (DisagMoE's hand-over): the rows carry h itself, and what returns is the next layer's
whole input.

F recomputes x = ffn_norm(h). The token's primary F rank (the owner of its first kept slot) adds h and the shared experts, so
the residual costs no message of its own. ffn_norm and the shared experts live on F ranks too: the gradient of ffn_norm is
summed over the attention group, the F group and all replicas, that of the shared experts over the F group and the replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchmoe.pipeline.runtime.stage import ExpertStage, WeightWork

__all__ = ["RideExperts"]


@dataclass
class _Saved:
    experts: Any
    h_RD: Tensor
    x_RD: Tensor
    shared: Tensor | None
    primary_R: Tensor


class RideExperts:
    """Routed experts of one layer plus what rides with them.

    Args:
        experts: the rank's routed experts.
        norm: ffn_norm, with the same weights as on the attention ranks.
        shared: the shared experts, or None.
    """

    def __init__(
        self, experts: ExpertStage, norm: Callable[[Tensor], Tensor], shared: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.experts, self.norm, self.shared = experts, norm, shared

    def forward_saved(self, h_RD: Tensor, ids_RK: Tensor, gates_RK: Tensor, primary_R: Tensor) -> tuple[Tensor, Any]:
        """Partial rows [R, D]: this rank's experts of norm(h), plus h + shared(norm(h)) in primary rows."""
        with torch.enable_grad():
            h_RD = h_RD.detach().requires_grad_()
            x_RD = self.norm(h_RD)
            shared = None if self.shared is None else self.shared(x_RD[primary_R])
        y_RD, saved = self.experts.forward_saved(x_RD.detach(), ids_RK, gates_RK)
        own = h_RD.detach()[primary_R]
        y_RD[primary_R] += own if shared is None else own + shared.detach()
        return y_RD, _Saved(saved, h_RD, x_RD, shared, primary_R)

    def backward_input(self, saved: _Saved, dy_RD: Tensor) -> tuple[Tensor, Tensor, WeightWork]:
        """(the whole gradient of h, dgates, the routed experts' weight gradients); norm and shared accumulate here."""
        dx_RD, dgates_RK, work = self.experts.backward_input(saved.experts, dy_RD)
        own = dy_RD[saved.primary_R]
        outputs = [(saved.x_RD, dx_RD)] + ([] if saved.shared is None else [(saved.shared, own)])
        torch.autograd.backward([o for o, _ in outputs], [g for _, g in outputs])
        dh_RD = torch.zeros_like(dy_RD) if saved.h_RD.grad is None else saved.h_RD.grad
        dh_RD[saved.primary_R] += own
        return dh_RD, dgates_RK, work
