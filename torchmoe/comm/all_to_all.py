"""AllToAllExchange: classic colocated expert parallelism, every rank holds tokens and experts.

Point-to-point messages over the non-empty pairs instead of a collective: they are checked one by one (gloo's all-to-all kills
the process on a wrong split), errors name the peer, nothing is sent to pairs without rows, and the same code runs on simulated
ranks. The price on gloo is more work per message where all pairs are busy (`python -m benchmarks.halo` shows both).
A row goes once per (token, rank) however many of the token's experts live there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchmoe.comm.route import Route
from torchmoe.comm.rows import RowWire, fields_of
from torchmoe.comm.token_exchange import TokenExchange, gather, spread
from torchmoe.comm.transport import Transport
from torchmoe.errors import ConfigError, ExchangeError
from torchmoe.placement import Communicator, Deadlines

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AllToAllExchange"]

COUNTS, ROWS = "ep.counts", "ep.rows"


@dataclass(frozen=True)
class FlatPlan:
    """The way of one call's rows. ``route`` is None where rows came sorted by destination."""

    send_rows: tuple[int, ...]
    recv_rows: tuple[int, ...]
    route: Route | None


class AllToAllExchange(TokenExchange):
    """All-to-all over ``ranks``, one message per non-empty pair.

    Args:
        transport: holds :meth:`communicators` of these ranks.
        ranks: global ranks, in the order of expert owners; default: all.
        num_experts: E of the layer, see :class:`TokenExchange`.
        owners: expert -> index in ``ranks``.
        deadlines: how long one exchange may take.
        collective: one all-to-all of the process group where the transport has it, see :class:`HierarchicalAllToAll`.

    Raises:
        ConfigError: this rank is not in ``ranks``.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        ranks: Sequence[int] | None = None,
        num_experts: int | None = None,
        owners: Sequence[int] | None = None,
        deadlines: Deadlines | None = None,
        collective: bool = False,
    ) -> None:
        self.ranks = tuple(range(transport.world_size) if ranks is None else ranks)
        super().__init__(index_of(transport.rank, self.ranks), len(self.ranks), num_experts, owners)
        self._wire = RowWire(transport, (deadlines or Deadlines()).exchange, collective=collective)

    @staticmethod
    def communicators(ranks: Sequence[int]) -> tuple[Communicator, ...]:
        """What the transport must hold for an exchange over ``ranks``."""
        return Communicator(COUNTS, tuple(ranks), True), Communicator(ROWS, tuple(ranks), False)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        num_experts: int | None = None,
        owners: Sequence[int] | None = None,
        deadlines: Deadlines | None = None,
    ) -> AllToAllExchange:
        """An exchange over a 1-D DeviceMesh, on the mesh's own process group. Collective over the mesh's ranks."""
        from torchmoe.comm.mesh import mesh_transport

        if mesh.ndim != 1:
            raise ConfigError(f"mesh {mesh} has {mesh.ndim} dimensions; pass the 1-D sub-mesh of expert parallelism, mesh['ep']")
        ranks = tuple(mesh.mesh.tolist())
        transport = mesh_transport(mesh.device_type, cls.communicators(ranks), {ROWS: mesh.get_group()})
        return cls(transport, ranks=ranks, num_experts=num_experts, owners=owners, deadlines=deadlines)

    def __repr__(self) -> str:
        return f"AllToAllExchange(index={self.index} of {self.num_ranks}, num_experts={self.num_experts})"

    def _plan(self, expert_ids_TK: Tensor) -> FlatPlan:
        route = Route.build(expert_ids_TK, self._device_owners(expert_ids_TK.device), self.num_ranks)
        return FlatPlan(route.rows, self._counts(route.rows), route)

    def _plan_rows(self, send_rows: tuple[int, ...], recv_rows: tuple[int, ...] | None) -> FlatPlan:
        return FlatPlan(send_rows, check_recv(recv_rows, send_rows, self.index) or self._counts(send_rows), None)

    def _counts(self, send_rows: Sequence[int]) -> tuple[int, ...]:
        sent = {r: [n] for r, n in zip(self.ranks, send_rows, strict=True) if r != self._me}
        got = self._wire.counts(COUNTS, sent, 1, self.form)
        got[self._me] = [send_rows[self.index]]
        return tuple(got[r][0] for r in self.ranks)

    def _out(self, plan: FlatPlan, kind: str, fields: Sequence[Tensor]) -> list[Tensor]:
        if plan.route is None:
            parts = cut(fields, plan.send_rows)
        else:
            parts = [spread(plan.route, n, fields) for n in range(self.num_ranks)]
        return join(self._swap(kind, parts, plan.recv_rows), fields)

    def _back(self, plan: FlatPlan, kind: str, fields: Sequence[Tensor]) -> list[Tensor]:
        parts = self._swap(kind, cut(fields, plan.recv_rows), plan.send_rows)
        return join(parts, fields) if plan.route is None else gather(plan.route, parts)

    def _swap(self, kind: str, parts: Sequence[list[Tensor]], recv_rows: Sequence[int]) -> list[list[Tensor]]:
        """One list of fields per rank out, one per rank in."""
        sends = {r: p for r, p in zip(self.ranks, parts, strict=True) if r != self._me}
        receives = {r: n for r, n in zip(self.ranks, recv_rows, strict=True) if r != self._me}
        fields, device = fields_of(parts[0]), parts[0][0].device
        got = self._wire.post(ROWS, kind, sends, receives, fields, device=device).wait()
        got[self._me] = list(parts[self.index])
        none = [torch.empty(0, cols, dtype=dtype, device=device) for cols, dtype in fields]
        return [got.get(r, none) for r in self.ranks]

    @property
    def _me(self) -> int:
        return self.ranks[self.index]


def index_of(rank: int, ranks: Sequence[int]) -> int:
    """Index of ``rank`` in the exchange's ranks."""
    if rank not in ranks or len(set(ranks)) != len(ranks):
        raise ConfigError(f"ranks {list(ranks)} must be distinct and contain this rank, {rank}; build the exchange on its ranks")
    return ranks.index(rank)


def check_recv(recv_rows: tuple[int, ...] | None, send_rows: tuple[int, ...], index: int) -> tuple[int, ...] | None:
    """Refuse counts that cannot be right."""
    if recv_rows is not None and (len(recv_rows) != len(send_rows) or recv_rows[index] != send_rows[index] or min(recv_rows) < 0):
        raise ExchangeError(
            f"recv_rows={list(recv_rows)} does not fit send_rows={list(send_rows)} of rank {index}; "
            "pass what each rank sends here, or None to exchange the counts"
        )
    return recv_rows


def cut(fields: Sequence[Tensor], rows: Sequence[int]) -> list[list[Tensor]]:
    """Fields cut into parts of so many rows."""
    return [list(part) for part in zip(*(torch.split(f, list(rows)) for f in fields), strict=True)]


def join(parts: Sequence[Sequence[Tensor]], like: Sequence[Tensor]) -> list[Tensor]:
    """Fields of all parts, one below the other."""
    if not parts:
        return [f[:0] for f in like]
    return [torch.cat(list(field)) for field in zip(*parts, strict=True)]
