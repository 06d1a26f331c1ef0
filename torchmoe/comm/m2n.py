"""M2NExchange: the many-to-many exchange between M attention ranks and N expert ranks (DisagMoE's M2N and N2M).

Four operations: dispatch (A -> F), combine (F -> next A), and their gradients d_combine (next A -> F) and d_dispatch
(F -> A): the gradient of a dispatch is a combine and the other way round. Each has two halves, a send and a posted receive,
called in schedule order with a :class:`Key`. Around them: counts (A -> F, host), and with several attention groups the
edges ids, residual and d_residual between consecutive attention groups.

A row is sent once per (token, destination rank) however many of the token's experts live there; it carries all K ids and
gates, the receiver masks by owner. Messages go over non-empty pairs only, with exact sizes known before they are posted, or
with ``sizes="fixed"`` padded to a capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchmoe.comm import debug as debugging
from torchmoe.comm.messages import Messages, nothing
from torchmoe.comm.pending import Key, Pending
from torchmoe.comm.plan import Combine, Overflow, Plan, Sizes, handshake
from torchmoe.comm.readback import Readback
from torchmoe.comm.route import ReceivedRoute, Route, SequenceMap
from torchmoe.comm.transport import P2P, Transport
from torchmoe.comm.wire import COUNTS_HEADER, Layout, Spans, pack_counts, unpack_counts
from torchmoe.errors import ExchangeError
from torchmoe.placement import GroupId, Placement, Residual

__all__ = ["Key", "M2NExchange", "Pending"]


class M2NExchange:
    """One rank's two ends of every operation.

    Args:
        placement: who is where.
        transport: the wire, holding ``placement.communicators(residual)``.
        dim: model width D of a row.
        top_k: experts per token K.
        dtype: dtype of rows on the wire; partial sums are added in fp32 or wider.
        residual: ``local`` (one attention group), ``direct`` or ``ride``; default by the number of attention groups. With
            ``ride`` the rows carry h itself and what comes back is the next layer's whole input: see :meth:`primary`.
        combine: ``partial``: one row per (token, F rank) comes back. ``slots``: combine and d_dispatch return one row per
            slot, summed in slot order, so that neither owners nor N change a bit; F ranks then see one row per slot (K = 1).
        sizes: ``exact``: counts go ahead on the host. ``fixed``: every message has ``capacity`` rows and nothing is counted.
        capacity: rows per (attention rank, F rank) message with fixed sizes.
        overflow: what happens to rows past the capacity: ``raise`` an error before anything is sent, ``drop`` them (gates
            are not renormalised), or ``grow`` this message to the next power of two times the capacity (costs the counts).
        device: where rows live.
        debug: checksums and mutate-in-flight detection; default: ``TORCHMOE_DEBUG=exchange``.

    Raises:
        ConfigError: a combination that cannot work.
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
        combine: Combine = "partial",
        sizes: Sizes = "exact",
        capacity: int | None = None,
        overflow: Overflow = "raise",
        device: torch.device | str = "cpu",
        debug: bool | None = None,
    ) -> None:
        self.plan = Plan(placement, dim, top_k, dtype, residual or placement.default_residual, combine, sizes, capacity, overflow)
        placement.check_world(transport.world_size)
        self.debug = debugging.enabled() if debug is None else debug
        self.transport = debugging.CheckedTransport(transport) if self.debug else transport
        self.placement, self.residual, self.combine = placement, self.plan.residual, combine
        self.where = placement.where(transport.rank)
        self.dim, self.top_k, self.dtype, self.device = dim, top_k, dtype, torch.device(device)
        self.gate_dtype = torch.promote_types(dtype, torch.float32)
        self._counted = sizes == "exact" or overflow == "grow"
        self._number = self.plan.number
        self._announced: dict[Key, tuple[int, ...]] = {}
        rows, gates, ids = (dim, dtype), (top_k, self.gate_dtype), (top_k, torch.int32)
        self.layouts: dict[str, Layout] = {
            "dispatch": Layout((rows, gates, ids)),
            "d_dispatch": Layout((rows, (1, self.gate_dtype) if combine == "slots" else gates)),
            "combine": Layout((rows,)),
            "d_combine": Layout((rows,)),
            "residual": Layout((rows,)),
            "d_residual": Layout((rows,)),
            "ids": Layout((ids,)),
            "labels": Layout(((1, torch.int64),)),
        }
        self._messages = Messages(
            placement,
            self.transport,
            layouts=self.layouts,
            device=self.device,
            check=self.debug,
            deferred=sizes == "fixed" and self.device.type != "cpu",
        )
        self._owners: dict[int, Tensor] = {}
        self._cut = torch.zeros((), dtype=torch.long, device=self.device)

    def __repr__(self) -> str:
        return f"M2NExchange(rank {self.transport.rank} in {self.where.group}, {self.plan})"

    def handshake(self) -> None:
        """Compare all settings with every rank this one exchanges counts with. Call it on all ranks before the first message.

        Raises:
            ConfigError: a setting differs; the first one is named with both values.
        """
        handshake(self.plan, self.transport)

    def settle(self) -> None:
        """Check what has arrived and was not checked yet (fixed sizes on CUDA). Call it at the end of a step.

        Raises:
            ExchangeError: a message was not the expected one.
        """
        self._messages.settle()

    # ---- pure helpers
    def owners(self, layer: int) -> Tensor:
        """Expert -> index in the layer's F group, on the exchange's device."""
        if layer not in self._owners:
            self._owners[layer] = torch.tensor(self.placement.expert_owners(layer), device=self.device)
        return self._owners[layer]

    def route(self, layer: int, expert_ids_TK: Tensor, seqs: SequenceMap | None = None) -> Route:
        """The rows that ``expert_ids_TK`` needs; the same function on the dispatching and on the next attention rank.

        Args:
            seqs: needed with residual='ride', where a token's position decides who carries it if it has no slot.
        """
        position_T = None
        if self.residual == "ride":
            if seqs is None:
                raise ExchangeError(
                    f"route of layer {layer}: residual='ride' needs the positions of the tokens; pass seqs= to route()"
                )
            position_T = seqs.positions(self.where).to(expert_ids_TK.device)
        n = self.placement.size(self.placement.ffn_group(layer))
        capacity, grow = self.plan.capacity, self.plan.overflow == "grow"
        return Route.build(expert_ids_TK, self.owners(layer), n, position_T=position_T, capacity=capacity, grow=grow)

    def primary(self, key: Key, received: ReceivedRoute, ids_RK: Tensor) -> Tensor:
        """residual='ride': the received rows [R] whose token this F rank is the primary of.

        It adds h (the row itself) and the shared experts to them. Every token has one primary: the owner of its first kept
        slot, or the one rank that a token without slots was sent to. Header rows are nobody's.
        """
        kept_RK = ids_RK >= 0
        first_R = kept_RK.int().argmax(1, keepdim=True)
        owner_R = self.owners(key.layer)[ids_RK.long().gather(1, first_R)[:, 0].clamp(min=0)]
        out = (owner_R == self.where.index) | ~kept_RK.any(1)
        for row in received.header_rows:
            out[row] = False
        return out

    def dropped_rows(self) -> int:
        """Rows that did not fit into the capacity so far on this rank (overflow='drop'). Waits for the device."""
        return int(self._cut)

    def _ranks(self, group: GroupId) -> range:
        return self.placement.ranks(group, self.where.replica)

    def _experts(self, key: Key) -> range:
        return self._ranks(self.placement.ffn_group(key.layer))

    def _wanted(self, key: Key, route: Route) -> list[tuple[int, int]]:
        """(index, global rank) of the F ranks that get rows."""
        return [(n, rank) for n, rank in enumerate(self._experts(key)) if route.rows[n]]

    def _send_rows(
        self,
        kind: str,
        key: Key,
        route: Route,
        fields: Sequence[tuple[Tensor, float]],
        finish: Callable[[], None] = nothing,
    ) -> Pending[None]:
        """Each F rank's rows of [T, columns] fields, picked straight into the messages where nothing is padded.

        Args:
            fields: each with what stands in its padding rows.
        """
        wanted = self._wanted(key, route)
        if not route.padded:
            ranks = [(rank, route.rows[n]) for n, rank in wanted]
            return self._messages.send_gathered(kind, key, ranks, [f for f, _ in fields], route.record_index_N, finish)
        parts = [(rank, [route.take(n, f, fill=fill) for f, fill in fields]) for n, rank in wanted]
        return self._messages.send(kind, key, parts, finish)

    # ---- attention ranks: forward
    def send_counts(self, key: Key, route: Route, seqs: SequenceMap) -> Pending[None]:
        """Announce rows and slots to every F rank of the layer, also zeros; F splits its results by them."""
        ops: list[P2P] = []
        if self._counted:
            nxt = self.placement.attention_group(key.layer + 1)
            counts = route.counts(seqs.segments(self.where, nxt), self.placement.size(nxt))
            ranks = self._experts(key)
            mine = self.transport.rank
            headers = [self._messages.header("counts", key, mine, r, n) for r, n in zip(ranks, route.rows, strict=True)]
            buffers = pack_counts(counts, headers, plan=self._number)
            ops = [P2P("send", r, b) for r, b in zip(ranks, buffers, strict=True)]
            self._announced[key] = route.rows
        return self._messages.post("counts", key, "send", ops, nothing)

    def send_dispatch(self, key: Key, route: Route, x_TD: Tensor, gates_TK: Tensor, expert_ids_TK: Tensor) -> Pending[None]:
        """Rows [x | gates | ids] to the F ranks that own a slot of the token.

        Raises:
            ExchangeError: shapes or dtypes that do not fit, rows other than announced, or an overflow of the capacity.
        """
        self._check_rows("x_TD", x_TD, route.num_tokens)
        self._check_shape("gates_TK", gates_TK, route.num_tokens, self.top_k)
        self._check_shape("expert_ids_TK", expert_ids_TK, route.num_tokens, self.top_k)
        announced = self._announced.pop(key, route.rows)
        if announced != route.rows:
            raise ExchangeError(
                f"dispatch of layer {key.layer}, micro-batch {key.microbatch} has {list(route.rows)} rows for the F ranks, "
                f"announced were {list(announced)}; use the same route for counts and dispatch"
            )
        over = self._overflow(key, route)
        fields = ((x_TD.detach(), 0), (gates_TK.detach(), 0), (expert_ids_TK, -1))
        return self._send_rows("dispatch", key, route, fields, over)

    def send_ids(self, key: Key, expert_ids_TK: Tensor, seqs: SequenceMap) -> Pending[None]:
        """The routing, to the next attention group, which sizes its combine with it."""
        return self._send_tokens("ids", key, self.placement.attention_group(key.layer + 1), seqs, expert_ids_TK)

    def send_residual(self, key: Key, res_TD: Tensor, seqs: SequenceMap) -> Pending[None]:
        """The residual stream, to the next attention group."""
        return self._send_tokens("residual", key, self.placement.attention_group(key.layer + 1), seqs, res_TD)

    def send_labels(self, key: Key, labels_T: Tensor, seqs: SequenceMap) -> Pending[None]:
        """The labels of this rank's tokens, to the home ranks of its sequences (head='ffn', last layer)."""
        return self._send_tokens("labels", key, self.placement.head_group, seqs, labels_T.reshape(-1, 1))

    def post_labels(self, key: Key, seqs: SequenceMap) -> Pending[Tensor]:
        """Receive the labels [T] of the sequences whose home is this rank."""
        return self._post_tokens("labels", key, self.placement.attention_group(key.layer), seqs)

    def post_ids(self, key: Key, seqs: SequenceMap) -> Pending[Tensor]:
        """Receive the routing of this rank's tokens from the previous attention group: expert_ids_TK."""
        return self._post_tokens("ids", key, self.placement.attention_group(key.layer), seqs)

    def post_residual(self, key: Key, seqs: SequenceMap) -> Pending[Tensor]:
        """Receive res_TD from the previous attention group."""
        return self._post_tokens("residual", key, self.placement.attention_group(key.layer), seqs)

    def post_combine(self, key: Key, route: Route) -> Pending[Tensor]:
        """Receive the experts' rows and sum them: y_TD in the exchange's dtype.

        One partial row per (token, F rank) in F rank order, or one row per slot in slot order.
        """
        slots = self.combine == "slots"

        def finish(buffer: Tensor, slices: list[Tensor]) -> Tensor:
            parts = [self.layouts["combine"].views(part)[0][1:] for part in slices]
            return (route.sum_slots(parts) if slots else route.sum_rows(parts)).to(self.dtype)

        sizes = route.slots if slots else route.rows
        return self._messages.receive("combine", key, list(zip(self._experts(key), sizes, strict=True)), finish)

    # ---- attention ranks: backward
    def send_d_combine(self, key: Key, route: Route, dy_TD: Tensor) -> Pending[None]:
        """The gradient of every row that came back is the token's gradient: one row per (token, F rank)."""
        self._check_rows("dy_TD", dy_TD, route.num_tokens)
        return self._send_rows("d_combine", key, route, [(dy_TD.detach(), 0)])

    def send_d_residual(self, key: Key, dres_TD: Tensor, seqs: SequenceMap) -> Pending[None]:
        """The residual's gradient, to the previous attention group."""
        return self._send_tokens("d_residual", key, self.placement.attention_group(key.layer), seqs, dres_TD)

    def post_d_residual(self, key: Key, seqs: SequenceMap) -> Pending[Tensor]:
        """Receive dres_TD from the next attention group."""
        return self._post_tokens("d_residual", key, self.placement.attention_group(key.layer + 1), seqs)

    def post_d_dispatch(self, key: Key, route: Route) -> Pending[tuple[Tensor, Tensor]]:
        """Receive (dx_TD summed over the F ranks, or slots; dgates_TK, each taken from its slot's owner)."""
        slots = self.combine == "slots"

        def finish(buffer: Tensor, slices: list[Tensor]) -> tuple[Tensor, Tensor]:
            views = [self.layouts["d_dispatch"].views(part) for part in slices]
            dx, dgates = [v[0][1:] for v in views], [v[1][1:] for v in views]
            if slots:
                return route.sum_slots(dx).to(self.dtype), route.place_slots(dgates)
            return route.sum_rows(dx).to(self.dtype), route.take_slots(dgates)

        sizes = route.slots if slots else route.rows
        return self._messages.receive("d_dispatch", key, list(zip(self._experts(key), sizes, strict=True)), finish)

    # ---- F ranks
    def post_counts(self, key: Key) -> Pending[ReceivedRoute]:
        """Receive the counts of every source."""
        num_next = self.placement.size(self.placement.attention_group(key.layer + 1))
        sources = self._ranks(self.placement.attention_group(key.layer))
        if not self._counted:
            rows = [self.plan.capacity or 0] * len(sources)
            return self._messages.post("counts", key, "recv", [], lambda: ReceivedRoute.fixed(rows))
        # filled with what no count is, so that a message that is too short is not taken for whole
        buffer = torch.full((len(sources), 8 * (COUNTS_HEADER + 2 * num_next)), 255, dtype=torch.uint8, device="cpu")
        expected = [self._messages.header("counts", key, s, self.transport.rank, -1) for s in sources]
        ops = [P2P("recv", s, b) for s, b in zip(sources, buffer.unbind(), strict=True)]

        def finish() -> ReceivedRoute:
            what = self._messages.what("recv", "counts", key)
            words_SW = unpack_counts(buffer, expected, sources, what, plan=self._number)
            rows = words_SW[:, COUNTS_HEADER - 1].tolist()
            if self.plan.sizes == "fixed":
                return ReceivedRoute.fixed(rows)
            received = ReceivedRoute(words_SW[:, COUNTS_HEADER:].view(len(sources), num_next, 2))
            if list(received.rows_in) != rows:
                raise ExchangeError(
                    f"{what}: rows per next rank add up to {list(received.rows_in)}, announced are {rows}; the senders miscounted"
                )
            return received

        return self._messages.post("counts", key, "recv", ops, finish, number=expected[0].sequence)

    def post_dispatch(self, key: Key, received: ReceivedRoute) -> Pending[tuple[Tensor, Tensor, Tensor]]:
        """Receive (rows_RD, ids_RK, gates_RK) of all sources as views of one buffer.

        Every non-empty source contributes one header row ahead of its rows: zeros with all ids -1, so R counts them and
        they cost nothing. ``received.blocks(1)`` says which rows are whose. With ``combine="slots"``: one row per slot this
        rank owns, copied, without header rows, as ([P, D], [P, 1], [P, 1]).
        """
        sources = self._ranks(self.placement.attention_group(key.layer))

        def finish(buffer: Tensor, slices: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            x_RD, gates_RK, ids_RK = self.layouts["dispatch"].views(buffer)
            for row in received.header_rows:  # a list as index would be copied to the device, and waited for
                ids_RK[row] = -1
            if self.combine == "slots":
                return self._per_slot(key, received, x_RD, ids_RK, gates_RK)
            return x_RD, ids_RK, gates_RK

        return self._messages.receive("dispatch", key, list(zip(sources, received.rows_in, strict=True)), finish)

    def send_combine(self, key: Key, received: ReceivedRoute, y_RD: Tensor) -> Pending[None]:
        """Rows to the next attention group: rank c gets its tokens' rows (or slots), source by source."""
        return self._send_blocks("combine", key, received, (y_RD,), to_next=True)

    def post_d_combine(self, key: Key, received: ReceivedRoute) -> Pending[Tensor]:
        """Receive dy_RD in the row order of :meth:`post_dispatch`; header rows are zero."""
        sources = self._ranks(self.placement.attention_group(key.layer + 1))

        def finish(buffer: Tensor, slices: list[Tensor]) -> Tensor:
            (rows,) = self.layouts["d_combine"].views(buffer)
            blocks = received.blocks(1)
            if list(blocks) == [(s, s) for s in range(len(sources)) if (s, s) in blocks] and received.slot_rows_P is None:
                return rows  # every source is its own next rank, so they came in the order of the dispatch, header for header
            dy_RD = rows.new_zeros(received.num_rows, self.dim)
            at, last = 0, -1
            for s, c in sorted(blocks, key=lambda pair: pair[::-1]):
                lo, hi = blocks[s, c]
                at += 1 if c != last else 0  # the header of the next source
                dy_RD[lo:hi] = rows[at : at + hi - lo]
                at, last = at + hi - lo, c
            return dy_RD if received.slot_rows_P is None else dy_RD[received.slot_rows_P]

        return self._messages.receive("d_combine", key, list(zip(sources, received.rows_out, strict=True)), finish)

    def send_d_dispatch(self, key: Key, received: ReceivedRoute, dx_RD: Tensor, dgates_RK: Tensor) -> Pending[None]:
        """[dx | dgates] back to the sources."""
        return self._send_blocks("d_dispatch", key, received, (dx_RD, dgates_RK), to_next=False)

    def _per_slot(
        self, key: Key, received: ReceivedRoute, x_RD: Tensor, ids_RK: Tensor, gates_RK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        kept = ids_RK >= 0
        mine = kept & (self.owners(key.layer)[ids_RK.long().clamp(min=0)] == self.where.index)
        row_P, k_P = mine.nonzero(as_tuple=True)
        if row_P.shape[0] != received.num_slots:
            raise ExchangeError(
                f"{self._messages.what('recv', 'dispatch', key)}: the rows hold {row_P.shape[0]} slots of this rank, "
                f"announced were {received.num_slots}; sender and receiver have different expert owners"
            )
        received.slot_rows_P = row_P
        return x_RD[row_P], ids_RK[row_P, k_P][:, None], gates_RK[row_P, k_P][:, None]

    # ---- what they share
    def _send_tokens(self, kind: str, key: Key, group: GroupId, seqs: SequenceMap, tensor: Tensor) -> Pending[None]:
        total = seqs.num_tokens(self.where)
        if kind == "ids":
            self._check_shape("expert_ids_TK", tensor, total, self.top_k)
        elif kind == "labels":
            self._check_shape("labels", tensor, total, 1)
        else:
            self._check_rows(kind, tensor, total)
        ranks, parts, at = self._ranks(group), [], 0
        for i, n in seqs.segments(self.where, group):
            parts.append((ranks[i], [tensor.detach()[at : at + n]]))
            at += n
        return self._messages.send(kind, key, parts)

    def _post_tokens(self, kind: str, key: Key, group: GroupId, seqs: SequenceMap) -> Pending[Tensor]:
        layout, ranks = self.layouts[kind], self._ranks(group)
        cols, dtype = layout.fields[0]

        def finish(buffer: Tensor, slices: list[Tensor]) -> Tensor:
            none = torch.empty(0, cols, dtype=dtype, device=buffer.device)
            return torch.cat([none, *(layout.views(part)[0][1:] for part in slices)]).to(self.device)

        return self._messages.receive(kind, key, [(ranks[i], n) for i, n in seqs.segments(self.where, group)], finish)

    def _send_blocks(
        self, kind: str, key: Key, received: ReceivedRoute, tensors: tuple[Tensor, ...], *, to_next: bool
    ) -> Pending[None]:
        slots = self.combine == "slots"
        total = received.num_slots if slots else received.num_rows
        columns = {0: self.dim, 1: 1 if slots else self.top_k}
        for i, t in enumerate(tensors):
            if tuple(t.shape) != (total, columns[i]) or not t.is_floating_point():
                raise ExchangeError(
                    f"{kind} of layer {key.layer}, micro-batch {key.microbatch} has shape {tuple(t.shape)} and {t.dtype}, "
                    f"{(total, columns[i])} floating point rows came in (header rows included); return one row per received row"
                )
        spans: dict[int, list[tuple[int, int]]] = {}
        for pair, span in received.blocks(0 if slots else 1, slots=slots).items():
            spans.setdefault(pair[1] if to_next else pair[0], []).append(span)
        ranks = self._ranks(self.placement.attention_group(key.layer + (1 if to_next else 0)))
        parts = [(ranks[i], [Spans(t.detach(), spans[i]) for t in tensors]) for i in sorted(spans)]
        return self._messages.send(kind, key, parts)

    def _overflow(self, key: Key, route: Route) -> Callable[[], None]:
        """What the end of a dispatch has to do about rows past the capacity."""
        capacity = self.plan.capacity
        if route.wanted_N is None or capacity is None or self.plan.overflow == "grow":
            return nothing
        if self.plan.overflow == "drop":
            self._cut += (route.wanted_N - capacity).clamp(min=0).sum()
            return nothing
        wanted_N = Readback(route.wanted_N)

        def check() -> None:
            wanted = wanted_N.read()
            if max(wanted) > capacity:
                raise ExchangeError(
                    f"dispatch of layer {key.layer}, micro-batch {key.microbatch} needs {wanted} rows for the F ranks, "
                    f"capacity={capacity}; raise the capacity, or choose overflow='drop' or 'grow'"
                )

        if self.device.type == "cpu":
            check()
            return nothing
        return check  # after the send has ended: the numbers are here by then

    def _check_rows(self, name: str, tensor: Tensor, tokens: int) -> None:
        self._check_shape(name, tensor, tokens, self.dim)
        if tensor.device.type != self.device.type:
            raise ExchangeError(
                f"{name} is on {tensor.device}, the exchange's rows live on {self.device}; move it, or build the exchange there"
            )
        if tensor.dtype != self.dtype:
            raise ExchangeError(
                f"{name} has {tensor.dtype}, the exchange carries {self.dtype}; cast it, or build the exchange with its dtype"
            )

    def _check_shape(self, name: str, tensor: Tensor, tokens: int, columns: int) -> None:
        if tuple(tensor.shape) != (tokens, columns):
            raise ExchangeError(
                f"{name} has shape {tuple(tensor.shape)}, this rank's tokens and the exchange need {(tokens, columns)}; "
                "pass one row per token"
            )
