"""MoELayer: router, queue and experts of one layer, on one device or with its experts spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchmoe.autocast import autocast_enabled
from torchmoe.comm.all_to_all import AllToAllExchange
from torchmoe.comm.token_exchange import TokenExchange
from torchmoe.dispatch import DispatchQueue
from torchmoe.errors import ConfigError, check_whole
from torchmoe.experts import FusedExpertMLP
from torchmoe.router import Routing, TopKRouter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["MoELayer"]


class MoELayer(nn.Module):
    """y = sum of gated experts (+ shared(x)).

    Args:
        router: gives a :class:`Routing` for x [T, D]; :class:`TopKRouter` or any module with its call.
        experts: the routed experts.
        shared: a module that sees every token, or None.
        capacity: most rows an expert takes (a number of rows, not a factor); what comes later in the batch is dropped. None:
            dropless. With expert parallelism the batch is that of all ranks, in rank order.
        ep_mesh: 1-D mesh over whose ranks the experts are spread, each rank with its own tokens; ``experts`` then holds this
            rank's alone, in blocks of equal size up to one (``torchmoe.placement.contiguous_owners``), in ascending order.
        exchange: instead of ``ep_mesh``: an exchange of your own choice (other owners, hierarchical, simulated ranks).

    With expert parallelism a loss that is summed over the ranks gives the gradients of one device holding all tokens: complete
    for ``experts``, to be summed over the ranks for the router and ``shared``, which every rank holds.
    """

    def __init__(
        self,
        router: TopKRouter | nn.Module,
        experts: FusedExpertMLP,
        shared: nn.Module | None = None,
        *,
        capacity: int | None = None,
        ep_mesh: DeviceMesh | None = None,
        exchange: TokenExchange | None = None,
    ) -> None:
        super().__init__()
        if ep_mesh is not None:
            if exchange is not None:
                raise ConfigError("ep_mesh and exchange both say where the experts are; give one of them")
            num_experts = getattr(router, "num_experts", None)
            if not isinstance(num_experts, int):
                raise ConfigError(
                    f"ep_mesh needs the number of experts of all ranks, and {type(router).__name__} has no num_experts; "
                    "pass exchange=AllToAllExchange.from_mesh(mesh, num_experts=...)"
                )
            exchange = AllToAllExchange.from_mesh(ep_mesh, num_experts=num_experts)
        total = experts.num_experts if exchange is None else exchange.num_experts
        if isinstance(router, TopKRouter) and (router.dim, router.num_experts) != (experts.dim, total):
            raise ConfigError(
                f"the router is for dim={router.dim}, {router.num_experts} experts and the experts for dim={experts.dim}, "
                f"{total}; build both for one layer"
            )
        if capacity is not None:
            check_whole("capacity", capacity, 0, "it counts rows of one expert; use None for no limit")
        self.router, self.experts, self.shared, self.capacity = router, experts, shared, capacity
        self.exchange = exchange
        self._check_held()

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
        if self.exchange is None:
            y_TD = self._experts(x_TD, routing.expert_ids_TK, routing.gates_TK)
        else:
            if not isinstance(self.experts.w2_EDF, DTensor):  # sharded ones are seen by the experts, when FSDP2 gathered them
                self._check_held()  # before anything is sent
            sent_TD = x_TD
            if autocast_enabled(x_TD.device) and x_TD.dtype != torch.float64:  # rows travel as the experts compute with them
                sent_TD = x_TD.to(torch.get_autocast_dtype(x_TD.device.type))
            here = self.exchange.dispatch(sent_TD, routing.expert_ids_TK, routing.gates_TK)
            y_RD = self._experts(here.rows_RD, self.exchange.local_ids(here.expert_ids_RK), here.gates_RK)
            y_TD = self.exchange.combine(y_RD, here)
        if self.shared is not None:
            shared_TD = self.shared(x_TD)
            if shared_TD.shape != y_TD.shape:
                raise ConfigError(f"shared(x) is {tuple(shared_TD.shape)} and must be {tuple(y_TD.shape)}; check its width")
            y_TD = y_TD + shared_TD
        return y_TD if x.ndim == 2 else y_TD.reshape(x.shape), routing

    def _check_held(self) -> None:
        """
        Raises:
            ConfigError: the experts on this rank are not as many as the exchange's owners say.
        """
        held = self.experts.weights().w2.size(0)
        if self.exchange is not None and held != len(self.exchange.local_experts):
            mine = len(self.exchange.local_experts)
            remedy = f"build FusedExpertMLP({mine}, ...)" if mine else "use at most as many ranks as experts"
            raise ConfigError(
                f"experts holds {held} experts and rank {self.exchange.index} of the exchange owns {mine} of "
                f"{self.exchange.num_experts}; {remedy}"
            )

    def _experts(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        rows = None
        if self.exchange is not None and ids_TK.device.type == "cpu" and self.experts.chunk_tokens is None:
            rows = int((ids_TK >= 0).sum())  # most slots live elsewhere; on the host their number is free to read
        held = self.experts.num_experts if self.exchange is None else len(self.exchange.local_experts)
        queue = DispatchQueue.build(ids_TK, held, capacity=self.capacity, max_rows=rows, backend=self.experts.backend)
        y_TD: Tensor = self.experts(x_TD, queue, gates_TK)
        return y_TD
