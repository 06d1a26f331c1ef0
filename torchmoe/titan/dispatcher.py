"""torchtitan's token dispatcher over this library's exchanges: one line in a recipe.

    override=OverrideConfig(imports=["torchmoe.titan.dispatcher.all_to_all"])
    override=OverrideConfig(imports=[("torchmoe.titan.dispatcher.hierarchical", {"lanes": 8})])

or on the command line ``--override.imports torchmoe.titan.dispatcher.all_to_all``. Every ``AllToAllTokenDispatcher`` of the
model is replaced; rows, counts and results are bit-equal to torchtitan's own dispatcher (rows are not deduplicated, because its
experts want one row per slot).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import derive, override
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from torchmoe.comm.all_to_all import AllToAllExchange
from torchmoe.comm.halo import HierarchicalAllToAll
from torchmoe.comm.mesh import mesh_transport
from torchmoe.comm.token_exchange import TokenExchange

__all__ = ["ExchangeTokenDispatcher", "all_to_all", "hierarchical"]


class ExchangeTokenDispatcher(AllToAllTokenDispatcher):  # type: ignore[misc]
    """``AllToAllTokenDispatcher`` whose rows go over a :class:`TokenExchange`. Under torch.compile the exchange runs eagerly."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):  # type: ignore[misc]
        """``lanes``: ranks of a node for the hierarchical exchange; None for the flat one."""

        lanes: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.lanes = config.lanes
        self.exchange: TokenExchange | None = None

    def init_buffer(self) -> None:
        """Build the exchange on the expert mesh: called once, when the mesh is known."""
        self.exchange = None if self.ep_mesh is None else _exchange(self.ep_mesh, self.lanes)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _exchanged(self, rows: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]) -> Tensor:
        assert self.exchange is not None  # dispatch without an expert mesh never comes here
        return self.exchange.all_to_all(rows, send_rows, recv_rows)

    def _token_count_exchange(self, num_local_tokens_per_expert_E: Tensor, pg: Any, ep_size: int) -> Tensor:
        counts = num_local_tokens_per_expert_E.reshape(ep_size, -1)
        return self._exchanged(counts, [1] * ep_size, [1] * ep_size)  # type: ignore[no-any-return]

    def _dispatch_token_exchange(
        self, routed_input_ND: Tensor, pg: Any, output_splits: list[int], input_splits: list[int]
    ) -> Tensor:
        return self._exchanged(routed_input_ND, input_splits, output_splits)  # type: ignore[no-any-return]

    def _combine_token_exchange(
        self, routed_output_RD: Tensor, pg: Any, input_splits: list[int], output_splits: list[int]
    ) -> Tensor:
        return self._exchanged(routed_output_RD, output_splits, input_splits)  # type: ignore[no-any-return]


def _exchange(mesh: DeviceMesh, lanes: int | None) -> TokenExchange:
    if lanes is None:
        return AllToAllExchange.from_mesh(mesh)
    ranks = tuple(mesh.mesh.flatten().tolist())
    mine = [c for c in HierarchicalAllToAll.communicators(ranks, lanes) if dist.get_rank() in c.ranks]
    return HierarchicalAllToAll(mesh_transport(mesh.device_type, mine, {}), lanes=lanes, ranks=ranks)


@override(  # type: ignore[untyped-decorator]
    target=AllToAllTokenDispatcher.Config,
    description="torchmoe: all-to-all over checked messages.",
    exact=True,
)
def all_to_all(cfg: AllToAllTokenDispatcher.Config) -> AllToAllTokenDispatcher.Config:
    """Rows go directly between ranks."""
    return derive(cfg, ExchangeTokenDispatcher.Config)


@override(  # type: ignore[untyped-decorator]
    target=AllToAllTokenDispatcher.Config,
    description="torchmoe: hierarchical all-to-all over nodes and lanes.",
    exact=True,
)
def hierarchical(cfg: AllToAllTokenDispatcher.Config, *, lanes: int) -> AllToAllTokenDispatcher.Config:
    """Rows go lane to lane between nodes, then inside the node.

    Args:
        lanes: ranks of a node; it must divide the expert-parallel degree.
    """
    return derive(cfg, ExchangeTokenDispatcher.Config, lanes=lanes)
