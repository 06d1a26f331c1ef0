"""MoELayer: router, queue and experts of one layer on one device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from torchmoe.dispatch import DispatchQueue
from torchmoe.errors import ConfigError
from torchmoe.experts import FusedExpertMLP
from torchmoe.router import Routing, TopKRouter

__all__ = ["MoELayer"]


class MoELayer(nn.Module):
    """y = sum of gated experts (+ shared(x)).

    Args:
        router: gives a :class:`Routing` for x [T, D]; :class:`TopKRouter` or any module with its call.
        experts: the routed experts.
        shared: a module that sees every token, or None.
        capacity: most rows an expert takes; what comes later in the batch is dropped. None: dropless.
    """

    def __init__(
        self,
        router: TopKRouter | nn.Module,
        experts: FusedExpertMLP,
        shared: nn.Module | None = None,
        *,
        capacity: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(router, TopKRouter) and (router.dim, router.num_experts) != (experts.dim, experts.num_experts):
            raise ConfigError(
                f"the router is for dim={router.dim}, {router.num_experts} experts and the experts for dim={experts.dim}, "
                f"{experts.num_experts}; build both for one layer"
            )
        self.router, self.experts, self.shared, self.capacity = router, experts, shared, capacity

    def forward(
        self,
        x: Tensor,
        *,
        routing: Routing | None = None,
        lengths: Sequence[int] | None = None,
        loss_weight: float | None = None,
    ) -> tuple[Tensor, Routing]:
        """(y like x, the routing with its balancing loss); nothing is kept in the module.

        Args:
            x: [..., D].
            routing: decided elsewhere; the router then does not run.
            lengths, loss_weight: see :meth:`TopKRouter.forward`.
        """
        x_TD = x.reshape(-1, x.size(-1))
        if routing is None:
            routing = self.router(x_TD, lengths=lengths, loss_weight=loss_weight)
        queue = DispatchQueue.build(
            routing.expert_ids_TK, self.experts.num_experts, capacity=self.capacity, backend=self.experts.backend
        )
        y_TD = self.experts(x_TD, queue, routing.gates_TK)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.reshape(x.shape), routing
