"""M2NExchange: the many-to-many exchange between M attention ranks and N expert ranks (DisagMoE's M2N and N2M).

Four operations: dispatch (A -> F), combine (F -> next A), and their gradients d_combine (next A -> F) and d_dispatch
(F -> A): the gradient of a dispatch is a combine and the other way round. Each has two halves, a send and a posted receive,
called in schedule order with a :class:`Key`. Around them: counts (A -> F, host), and with several attention groups the
edges ids, residual and d_residual between consecutive attention groups.

A row is sent once per (token, destination rank) however many of the token's experts live there; it carries all K ids and
gates, the receiver masks by owner. Messages go over non-empty pairs only, with exact sizes known before they are posted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchmoe.comm.route import ReceivedRoute, Route, SequenceMap
from torchmoe.comm.transport import P2P, Transport, Work
from torchmoe.comm.wire import COUNTS_HEADER, Header, Layout, pack_counts, unpack_counts
from torchmoe.errors import ConfigError, ExchangeError
from torchmoe.placement import GroupId, Placement, Residual

__all__ = ["Key", "M2NExchange", "Pending"]

T_co = TypeVar("T_co", covariant=True)


class Key(NamedTuple):
    """Which unit a message belongs to: MoE layer and micro-batch."""

    layer: int
    microbatch: int


class Pending(Generic[T_co]):
    """A posted half of an operation. It owns its buffers until it is done.

    Args:
        work: the transport's handle.
        timeout: seconds :meth:`wait` may take.
        finish: makes the result from the received bytes; called once, by the first :meth:`wait`.
        num_bytes: bytes of all its messages.
    """

    def __init__(self, work: Work, timeout: float, finish: Callable[[], T_co], num_bytes: int = 0) -> None:
        self._work: Work | None = work
        self._timeout = timeout
        self._finish: Callable[[], T_co] | None = finish
        self._result: T_co | None = None
        self.num_bytes = num_bytes

    def done(self) -> bool:
        """Whether the messages have ended. Never blocks."""
        return self._work is None or self._work.done()

    def wait(self) -> T_co:
        """Block until the messages have ended; a second call returns the same result.

        Raises:
            ExchangeTimeout: not within the deadline.
            PeerLost: a peer died.
            ExchangeError: a message was not the expected one.
        """
        if self._finish is not None:
            assert self._work is not None
            self._work.wait(self._timeout)
            self._result, self._finish, self._work = self._finish(), None, None
        return self._result  # type: ignore[return-value]


class M2NExchange:
    """One rank's two ends of every operation.

    Args:
        placement: who is where.
        transport: the wire, holding ``placement.communicators(residual)``.
        dim: model width D of a row.
        top_k: experts per token K.
        dtype: dtype of rows on the wire; partial sums are added in fp32 or wider.
        residual: ``local`` (one attention group) or ``direct``; default by the number of attention groups.
        device: where rows live.

    Raises:
        ConfigError: a residual mode that the placement cannot have, or a width below 1.
    """

    def __init__(
        self,
        placement: Placement,
        transport: Transport,
        *,
        dim: int,
        top_k: int,
        dtype: torch.dtype = torch.float32,
        residual: Residual | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if dim < 1 or top_k < 1:
            raise ConfigError(f"dim={dim} and top_k={top_k} must be at least 1")
        residual = placement.default_residual if residual is None else residual
        placement.check_residual(residual)
        placement.check_world(transport.world_size)
        self.placement, self.transport, self.residual = placement, transport, residual
        self.where = placement.where(transport.rank)
        self.dim, self.top_k, self.dtype, self.device = dim, top_k, dtype, torch.device(device)
        self.gate_dtype = torch.promote_types(dtype, torch.float32)
        self._sequence: Counter[tuple[str, int, int]] = Counter()
        rows, gates, ids = (dim, dtype), (top_k, self.gate_dtype), (top_k, torch.int32)
        self.layouts: dict[str, Layout] = {
            "dispatch": Layout((rows, gates, ids)),
            "d_dispatch": Layout((rows, gates)),
            "combine": Layout((rows,)),
            "d_combine": Layout((rows,)),
            "residual": Layout((rows,)),
            "d_residual": Layout((rows,)),
            "ids": Layout((ids,)),
        }
        self._owners: dict[int, Tensor] = {}

    # ---- pure helpers
    def owners(self, layer: int) -> Tensor:
        """Expert -> index in the layer's F group, on the exchange's device."""
        if layer not in self._owners:
            self._owners[layer] = torch.tensor(self.placement.expert_owners(layer), device=self.device)
        return self._owners[layer]

    def route(self, layer: int, expert_ids_TK: Tensor) -> Route:
        """The rows that ``expert_ids_TK`` needs; the same function on the dispatching and on the next attention rank."""
        return Route.build(expert_ids_TK, self.owners(layer), self.placement.size(self.placement.ffn_group(layer)))

    def _ranks(self, group: GroupId) -> range:
        return self.placement.ranks(group, self.where.replica)

    # ---- attention ranks: forward
    def send_counts(self, key: Key, route: Route, seqs: SequenceMap) -> Pending[None]:
        """Announce rows and slots to every F rank of the layer, also zeros; F splits its results by them."""
        nxt = self.placement.attention_group(key.layer + 1)
        counts = route.counts(seqs.segments(self.where, nxt), self.placement.size(nxt))
        ops = []
        for n, rank in enumerate(self._ranks(self.placement.ffn_group(key.layer))):
            header = self._header("counts", key, self.transport.rank, rank, int(counts[n, :, 0].sum()))
            ops.append(P2P("send", rank, pack_counts(counts[n], header)))
        return self._post("counts", key, "send", ops)

    def send_dispatch(self, key: Key, route: Route, x_TD: Tensor, gates_TK: Tensor, expert_ids_TK: Tensor) -> Pending[None]:
        """Rows [x | gates | ids] to the F ranks that own a slot of the token."""
        self._check_tokens("x_TD", x_TD, route, self.dim)
        self._check_tokens("gates_TK", gates_TK, route, self.top_k)
        fields = (x_TD.detach(), gates_TK.detach(), expert_ids_TK)
        return self._send_rows("dispatch", key, self.placement.ffn_group(key.layer), route, fields)

    def send_ids(self, key: Key, expert_ids_TK: Tensor, seqs: SequenceMap) -> Pending[None]:
        """The routing, to the next attention group, which sizes its combine with it."""
        return self._send_tokens("ids", key, self.placement.attention_group(key.layer + 1), seqs, expert_ids_TK)

    def send_residual(self, key: Key, res_TD: Tensor, seqs: SequenceMap) -> Pending[None]:
        """The residual stream, to the next attention group."""
        return self._send_tokens("residual", key, self.placement.attention_group(key.layer + 1), seqs, res_TD)

    def post_ids(self, key: Key, seqs: SequenceMap) -> Pending[Tensor]:
        """Receive the routing of this rank's tokens from the previous attention group: expert_ids_TK."""
        return self._post_tokens("ids", key, self.placement.attention_group(key.layer), seqs)

    def post_residual(self, key: Key, seqs: SequenceMap) -> Pending[Tensor]:
        """Receive res_TD from the previous attention group."""
        return self._post_tokens("residual", key, self.placement.attention_group(key.layer), seqs)

    def post_combine(self, key: Key, route: Route) -> Pending[Tensor]:
        """Receive the experts' partial rows and sum them in F rank order: y_TD in the exchange's dtype."""

        def finish(rows: list[list[Tensor]]) -> Tensor:
            return route.sum_rows([r[0] for r in rows]).to(self.dtype)

        return self._post_rows("combine", key, self.placement.ffn_group(key.layer), route.rows, finish)

    # ---- attention ranks: backward
    def send_d_combine(self, key: Key, route: Route, dy_TD: Tensor) -> Pending[None]:
        """The gradient of every partial row is the token's gradient: one row per (token, F rank)."""
        self._check_tokens("dy_TD", dy_TD, route, self.dim)
        return self._send_rows("d_combine", key, self.placement.ffn_group(key.layer), route, (dy_TD.detach(),))

    def send_d_residual(self, key: Key, dres_TD: Tensor, seqs: SequenceMap) -> Pending[None]:
        return self._send_tokens("d_residual", key, self.placement.attention_group(key.layer), seqs, dres_TD)

    def post_d_residual(self, key: Key, seqs: SequenceMap) -> Pending[Tensor]:
        """Receive dres_TD from the next attention group."""
        return self._post_tokens("d_residual", key, self.placement.attention_group(key.layer + 1), seqs)

    def post_d_dispatch(self, key: Key, route: Route) -> Pending[tuple[Tensor, Tensor]]:
        """Receive (dx_TD summed over the F ranks, dgates_TK taken from each slot's owner)."""

        def finish(rows: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
            return route.sum_rows([r[0] for r in rows]).to(self.dtype), route.take_slots([r[1] for r in rows])

        return self._post_rows("d_dispatch", key, self.placement.ffn_group(key.layer), route.rows, finish)

    # ---- F ranks
    def post_counts(self, key: Key) -> Pending[ReceivedRoute]:
        """Receive the counts of every source."""
        num_next = self.placement.size(self.placement.attention_group(key.layer + 1))
        sources = self._ranks(self.placement.attention_group(key.layer))
        size = 8 * (COUNTS_HEADER + 2 * num_next)
        buffers = [torch.empty(size, dtype=torch.uint8) for _ in sources]
        expected = [self._header("counts", key, s, self.transport.rank, -1) for s in sources]
        ops = [P2P("recv", s, b) for s, b in zip(sources, buffers, strict=True)]

        def finish() -> ReceivedRoute:
            parts = [unpack_counts(b, h, s) for s, b, h in zip(sources, buffers, expected, strict=True)]
            return ReceivedRoute(torch.stack(parts))

        return self._post("counts", key, "recv", ops, finish)

    def post_dispatch(self, key: Key, received: ReceivedRoute) -> Pending[tuple[Tensor, Tensor, Tensor]]:
        """Receive (rows_RD, ids_RK, gates_RK) of all sources as views of one buffer.

        Every non-empty source contributes one header row ahead of its rows: zeros with all ids -1, so R counts them and
        they cost nothing. ``received.blocks(1)`` says which rows are whose.
        """
        layout = self.layouts["dispatch"]
        sources = self._ranks(self.placement.attention_group(key.layer))
        buffer, slices = self._receive_buffer(layout, received.rows_in)
        ops, expected = self._expect("dispatch", key, sources, received.rows_in, slices)

        def finish() -> tuple[Tensor, Tensor, Tensor]:
            x_RD, gates_RK, ids_RK = layout.views(buffer)
            at = 0
            for part, header, source in expected:
                layout.check(part, header, source)
                ids_RK[at] = -1
                at += header.rows + 1
            return x_RD, ids_RK, gates_RK

        return self._post("dispatch", key, "recv", ops, finish)

    def send_combine(self, key: Key, received: ReceivedRoute, y_RD: Tensor) -> Pending[None]:
        """Partial rows to the next attention group: rank c gets its tokens' rows, source by source."""
        return self._send_blocks("combine", key, received, (y_RD,), to_next=True)

    def post_d_combine(self, key: Key, received: ReceivedRoute) -> Pending[Tensor]:
        """Receive dy_RD in the row order of :meth:`post_dispatch`; header rows are zero."""
        layout = self.layouts["d_combine"]
        sources = self._ranks(self.placement.attention_group(key.layer + 1))
        buffer, slices = self._receive_buffer(layout, received.rows_out)
        ops, expected = self._expect("d_combine", key, sources, received.rows_out, slices)

        def finish() -> Tensor:
            for part, header, source in expected:
                layout.check(part, header, source)
            (rows,) = layout.views(buffer)
            total = sum(n + 1 for n in received.rows_in if n)
            dy_RD = rows.new_zeros(total, self.dim)
            blocks = received.blocks(1)
            at = 0
            for c, n in enumerate(received.rows_out):
                at += 1 if n else 0
                for s in range(len(received.rows_in)):
                    if (s, c) in blocks:
                        lo, hi = blocks[s, c]
                        dy_RD[lo:hi] = rows[at : at + hi - lo]
                        at += hi - lo
            return dy_RD

        return self._post("d_combine", key, "recv", ops, finish)

    def send_d_dispatch(self, key: Key, received: ReceivedRoute, dx_RD: Tensor, dgates_RK: Tensor) -> Pending[None]:
        """[dx | dgates] back to the sources."""
        return self._send_blocks("d_dispatch", key, received, (dx_RD, dgates_RK), to_next=False)

    # ---- what all of them do
    def _header(self, kind: str, key: Key, source: int, destination: int, rows: int) -> Header:
        """The next header of this communicator and pair; counted where a message is posted, so both ends agree."""
        pair = (self.placement.communicator(kind, key.layer), source, destination)
        self._sequence[pair] += 1
        return Header(kind, key.layer, key.microbatch, self._sequence[pair], rows)

    def _post(
        self, kind: str, key: Key, side: str, ops: Sequence[P2P], finish: Callable[[], T_co] | None = None
    ) -> Pending[T_co]:
        what = f"{side} {kind} of layer {key.layer}, micro-batch {key.microbatch}"
        work = self.transport.post(self.placement.communicator(kind, key.layer), ops, what)
        done: Callable[[], T_co] = finish if finish is not None else lambda: None  # type: ignore[assignment,return-value]
        return Pending(work, self.placement.deadlines.exchange, done, sum(op.buffer.numel() for op in ops))

    def _pack(self, kind: str, key: Key, rank: int, tensors: Sequence[Tensor]) -> P2P:
        header = self._header(kind, key, self.transport.rank, rank, tensors[0].shape[0])
        return P2P("send", rank, self.layouts[kind].pack(header, tensors, device=self.device))

    def _send_rows(self, kind: str, key: Key, group: GroupId, route: Route, fields: Sequence[Tensor]) -> Pending[None]:
        ops = []
        for n, rank in enumerate(self._ranks(group)):
            index = route.token_indices_R[route.offsets[n] : route.offsets[n + 1]]
            if route.rows[n]:
                ops.append(self._pack(kind, key, rank, [f[index] for f in fields]))
        return self._post(kind, key, "send", ops)

    def _send_tokens(self, kind: str, key: Key, group: GroupId, seqs: SequenceMap, tensor: Tensor) -> Pending[None]:
        total = seqs.num_tokens(self.where)
        if tensor.shape[0] != total:
            raise ExchangeError(
                f"{kind} of layer {key.layer}, micro-batch {key.microbatch} has {tensor.shape[0]} rows but this rank holds "
                f"{total} tokens; pass one row per token of its sequences"
            )
        ranks, ops, at = self._ranks(group), [], 0
        for i, n in seqs.segments(self.where, group):
            ops.append(self._pack(kind, key, ranks[i], [tensor.detach()[at : at + n]]))
            at += n
        return self._post(kind, key, "send", ops)

    def _send_blocks(
        self, kind: str, key: Key, received: ReceivedRoute, tensors: Sequence[Tensor], *, to_next: bool
    ) -> Pending[None]:
        total = sum(n + 1 for n in received.rows_in if n)
        if tensors[0].shape[0] != total:
            raise ExchangeError(
                f"{kind} of layer {key.layer}, micro-batch {key.microbatch} has {tensors[0].shape[0]} rows but {total} came in "
                "(header rows included); return one row per received row"
            )
        layer = key.layer + 1 if to_next else key.layer
        blocks = received.blocks(1)
        ops = []
        for i, rank in enumerate(self._ranks(self.placement.attention_group(layer))):
            mine = [span for pair, span in sorted(blocks.items()) if pair[1 if to_next else 0] == i]
            if mine:
                ops.append(self._pack(kind, key, rank, [torch.cat([t[lo:hi] for lo, hi in mine]) for t in tensors]))
        return self._post(kind, key, "send", ops)

    def _receive_buffer(self, layout: Layout, rows: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        sizes = [layout.num_bytes(n) for n in rows]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        return buffer, list(torch.split(buffer, sizes))

    def _expect(
        self, kind: str, key: Key, sources: Sequence[int], rows: Sequence[int], slices: Sequence[Tensor]
    ) -> tuple[list[P2P], list[tuple[Tensor, Header, int]]]:
        ops, expected = [], []
        for source, n, part in zip(sources, rows, slices, strict=True):
            if n:
                ops.append(P2P("recv", source, part))
                expected.append((part, self._header(kind, key, source, self.transport.rank, n), source))
        return ops, expected

    def _post_rows(
        self,
        kind: str,
        key: Key,
        group: GroupId,
        rows: Sequence[int],
        finish: Callable[[list[list[Tensor]]], T_co],
    ) -> Pending[T_co]:
        layout = self.layouts[kind]
        _, slices = self._receive_buffer(layout, rows)
        ops, expected = self._expect(kind, key, self._ranks(group), rows, slices)

        def done() -> T_co:
            for part, header, source in expected:
                layout.check(part, header, source)
            return finish([[v[1:] for v in layout.views(part)] for part in slices])

        return self._post(kind, key, "recv", ops, done)

    def _post_tokens(self, kind: str, key: Key, group: GroupId, seqs: SequenceMap) -> Pending[Tensor]:
        segments = seqs.segments(self.where, group)
        ranks = self._ranks(group)
        layout = self.layouts[kind]
        rows = [n for _, n in segments]
        _, slices = self._receive_buffer(layout, rows)
        ops, expected = self._expect(kind, key, [ranks[i] for i, _ in segments], rows, slices)

        def finish() -> Tensor:
            for part, header, source in expected:
                layout.check(part, header, source)
            cols, dtype = layout.fields[0]
            if not slices:
                return torch.empty(0, cols, dtype=dtype, device=self.device)
            return torch.cat([layout.views(part)[0][1:] for part in slices])

        return self._post(kind, key, "recv", ops, finish)

    def _check_tokens(self, name: str, tensor: Tensor, route: Route, columns: int) -> None:
        if tuple(tensor.shape) != (route.num_tokens, columns):
            raise ExchangeError(
                f"{name} has shape {tuple(tensor.shape)}, the route and the exchange need {(route.num_tokens, columns)}; "
                "pass one row per routed token"
            )
