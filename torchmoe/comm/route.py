"""Where every token's rows go: pure functions of the routing, the expert owners and the sequence map. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from torchmoe.errors import ConfigError, RoutingError
from torchmoe.placement import GroupId, Placement, Where

__all__ = ["ReceivedRoute", "Route", "SequenceMap"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class SequenceMap:
    """Which tokens of one micro-batch each attention rank holds.

    Args:
        placement: the layout.
        lengths: tokens of every sequence of the global micro-batch (all replicas), by global sequence index.
    """

    placement: Placement
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(n < 0 for n in self.lengths):
            raise ConfigError(f"lengths={list(self.lengths)}: a sequence cannot have a negative number of tokens")

    def _tokens(self, sequences: range) -> int:
        return sum(self.lengths[sequences.start : sequences.stop])

    def num_tokens(self, where: Where) -> int:
        """Tokens T of an attention rank."""
        return self._tokens(self.placement.sequences(where.group, where.index, len(self.lengths), where.replica))

    def positions(self, where: Where) -> Tensor:
        """Position of every token of an attention rank in its sequence: [T] int64 on the host."""
        held = self.placement.sequences(where.group, where.index, len(self.lengths), where.replica)
        parts = [torch.arange(self.lengths[q], device="cpu") for q in held]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device="cpu")

    def segments(self, where: Where, other: GroupId) -> list[tuple[int, int]]:
        """``where``'s tokens cut by the ranks of attention group ``other`` that hold the same sequences: [(index, tokens)].

        In token order. Ranks without a token in common are left out.
        """
        overlaps = self.placement.overlaps(where.group, where.index, other, len(self.lengths), where.replica)
        return [(i, n) for i, both in overlaps if (n := self._tokens(both))]


@dataclass(frozen=True)
class Route:
    """The rows of one attention rank and layer: one row per (token, destination F rank) that owns at least one of its slots.

    Padded routes (``sizes="fixed"``) have rows of no token: their token index is T and they own no slot.

    Args:
        num_tokens: T.
        top_k: K.
        token_indices_R: token of every row, F rank by F rank, ascending within one.
        owned_RK: the slots that the row's F rank owns.
        rows: rows per F rank (host integers).
        slots: owned slots per F rank (host integers); empty for padded routes, which do not count them.
        wanted_N: rows that each F rank would have needed, on the device, if a fixed capacity may have cut them.
    """

    num_tokens: int
    top_k: int
    token_indices_R: Tensor
    owned_RK: Tensor
    rows: tuple[int, ...]
    slots: tuple[int, ...] = ()
    wanted_N: Tensor | None = None

    @classmethod
    def build(
        cls,
        expert_ids_TK: Tensor,
        owners_E: Tensor,
        num_ranks: int,
        *,
        position_T: Tensor | None = None,
        capacity: int | None = None,
        grow: bool = False,
    ) -> Route:
        """Args:
            expert_ids_TK: logical expert ids, -1 for a dropped slot.
            owners_E: expert -> index in the F group, on the ids' device.
            num_ranks: size N of the F group.
            position_T: position of every token in its sequence. If given, a token without slots still has one row, to F rank
                ``position % N`` (residual='ride').
            capacity: if given, every F rank gets exactly this many rows: padded, and cut after the first ``capacity`` tokens.
                Nothing is read back to the host.
            grow: instead of cutting, take the smallest power of two times the capacity that fits (read back to the host).

        Raises:
            RoutingError: ids that are not [T, K], no integers, or outside [-1, E). (With a capacity the last count as dropped:
                telling would need the host.)
        """
        if expert_ids_TK.dim() != 2:
            raise RoutingError(
                f"expert ids of shape {tuple(expert_ids_TK.shape)} must be [T, K]; reshape them to one row per token"
            )
        if expert_ids_TK.dtype not in _INTEGERS:
            raise RoutingError(f"expert ids are {expert_ids_TK.dtype}; give integers, e.g. scores.topk(k).indices")
        ids_TK = expert_ids_TK.long()
        e = owners_E.shape[0]
        kept_TK = (ids_TK >= 0) & (ids_TK < e)
        owner_TK = torch.where(kept_TK, owners_E[ids_TK.clamp(0, e - 1)], -1)
        ranks_N = torch.arange(num_ranks, device=ids_TK.device)
        owned_NTK = owner_TK == ranks_N[:, None, None]
        sent_NT = owned_NTK.any(-1)
        if position_T is not None:
            sent_NT |= ~kept_TK.any(-1) & (position_T % num_ranks == ranks_N[:, None])
        t, k = ids_TK.shape
        if capacity is not None:
            if grow:
                while capacity < int(sent_NT.sum(1).max()):
                    capacity *= 2
            return cls._padded(sent_NT, owned_NTK, capacity)
        wrong = ((ids_TK < -1) | (ids_TK >= e)).sum()
        sizes = torch.cat([sent_NT.sum(1), owned_NTK.sum((1, 2)), wrong.view(1)]).tolist()  # the one copy to the host
        if sizes[-1]:
            raise RoutingError(
                f"{sizes[-1]} expert ids are outside [-1, {e}), from {int(ids_TK.min())} to {int(ids_TK.max())}; "
                "give logical ids of the layer's experts, or -1 for a dropped slot"
            )
        rank_R, token_R = sent_NT.nonzero(as_tuple=True)
        return cls(t, k, token_R, owned_NTK[rank_R, token_R], tuple(sizes[:num_ranks]), tuple(sizes[num_ranks:-1]))

    @classmethod
    def _padded(cls, sent_NT: Tensor, owned_NTK: Tensor, capacity: int) -> Route:
        n, t, k = owned_NTK.shape
        place_NT = torch.where(sent_NT, sent_NT.cumsum(1) - 1, capacity).clamp(max=capacity)
        token_NC = torch.full((n, capacity + 1), t, dtype=torch.long, device=sent_NT.device)
        # every place below the capacity has one writer; place `capacity` takes what is cut and is thrown away
        token_NC.scatter_(1, place_NT, torch.arange(t, device=sent_NT.device).expand(n, t))
        token_NC = token_NC[:, :capacity]
        padded = torch.cat([owned_NTK, owned_NTK.new_zeros(n, 1, k)], 1)
        owned_NCK = padded.gather(1, token_NC[:, :, None].expand(n, capacity, k))
        wanted_N = sent_NT.sum(1)
        return cls(t, k, token_NC.reshape(-1), owned_NCK.reshape(-1, k), (capacity,) * n, wanted_N=wanted_N)

    @property
    def padded(self) -> bool:
        """Whether rows of no token may be there."""
        return self.wanted_N is not None

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Row offsets of the F ranks, N + 1 of them."""
        return tuple(accumulate(self.rows, initial=0))

    @cached_property
    def record_index_N(self) -> Tensor:
        """Token of every record of the messages to all F ranks that get rows; token 0 in the places of their headers."""
        header = self.token_indices_R.new_zeros(1)
        parts = torch.split(self.token_indices_R, list(self.rows))
        return torch.cat([p for part in parts if part.shape[0] for p in (header, part)] or [header[:0]])

    @cached_property
    def slot_index(self) -> tuple[Tensor, Tensor]:
        """(token_P, k_P): every owned slot, F rank by F rank, token by token, slot by slot."""
        row_P, k_P = self.owned_RK.nonzero(as_tuple=True)
        return self.token_indices_R[row_P], k_P

    def take(self, n: int, values_TX: Tensor, *, fill: float = 0) -> Tensor:
        """The rows of ``values_TX`` that go to F rank ``n``; padding rows are ``fill``."""
        index_R = self.token_indices_R[self.offsets[n] : self.offsets[n + 1]]
        if not self.padded:
            return values_TX[index_R]
        if not self.num_tokens:
            return values_TX.new_full((index_R.shape[0], values_TX.shape[1]), fill)
        rows = values_TX[index_R.clamp(max=self.num_tokens - 1)]
        return rows.masked_fill((index_R == self.num_tokens)[:, None], fill)

    def counts(self, segments: Sequence[tuple[int, int]], num_next: int) -> Tensor:
        """Per F rank and rank of the next attention group: [N, num_next, 2] int64 of (rows, owned slots), on the host."""
        n = len(self.rows)
        if self.padded:  # padding rows are of no next rank, and whoever receives padded rows does not cut them by counts
            return torch.zeros(n, num_next, 2, dtype=torch.long, device="cpu")
        if len(segments) == 1:  # one rank has all these tokens next; always so with one attention group
            out = torch.zeros(n, num_next, 2, dtype=torch.long, device="cpu")
            out[:, segments[0][0]] = torch.tensor([self.rows, self.slots], device="cpu").T
            return out
        device = self.token_indices_R.device
        next_T = torch.repeat_interleave(
            torch.tensor([i for i, _ in segments], dtype=torch.long, device="cpu"),
            torch.tensor([t for _, t in segments], dtype=torch.long, device="cpu"),
        ).to(device)
        rank_R = torch.repeat_interleave(
            torch.arange(n, device="cpu"), torch.tensor(self.rows, dtype=torch.long, device="cpu")
        ).to(device)
        flat_R = rank_R * num_next + next_T[self.token_indices_R]
        out = torch.zeros(n * num_next, 2, dtype=torch.long, device=device)
        out[:, 0] = torch.bincount(flat_R, minlength=n * num_next)
        # int64 sums are exact, so the order of the additions does not matter
        out[:, 1].index_add_(0, flat_R, self.owned_RK.sum(1))
        return out.view(n, num_next, 2).cpu()

    def sum_rows(self, rows_RD: Sequence[Tensor]) -> Tensor:
        """Sum of the partial rows of all F ranks per token, in F rank order, in fp32 or wider: y_TD.

        A token has at most one row per F rank, so every addition has one writer and the order is fixed. (Padding rows share
        one place that is thrown away.)
        """
        y_TD = self._zeros(rows_RD)
        for n, rows in enumerate(rows_RD):
            if rows.shape[0]:
                # index_add_ takes ten times as long from rows of a wider record
                rows = rows.to(y_TD.dtype).contiguous()
                y_TD.index_add_(0, self.token_indices_R[self.offsets[n] : self.offsets[n + 1]], rows)
        return y_TD[: self.num_tokens]

    def sum_slots(self, rows_PD: Sequence[Tensor]) -> Tensor:
        """Sum of one row per slot, in slot order whatever rank it came from, in fp32 or wider: y_TD.

        Neither the owner of a slot nor the number of F ranks changes a bit.
        """
        token_P, k_P = self.slot_index
        y_TD = self._zeros(rows_PD)
        rows = torch.cat(list(rows_PD))
        for k in range(self.top_k):
            at = (k_P == k).nonzero()[:, 0]
            y_TD.index_add_(0, token_P[at], rows[at].to(y_TD.dtype))
        return y_TD[: self.num_tokens]

    def _zeros(self, rows: Sequence[Tensor]) -> Tensor:
        wide = torch.promote_types(rows[0].dtype, torch.float32)
        return torch.zeros(self.num_tokens + self.padded, rows[0].shape[1], dtype=wide, device=rows[0].device)

    def take_slots(self, values_RK: Sequence[Tensor]) -> Tensor:
        """One value per slot, each from the slot's owner, never summed; 0 where a slot was dropped: [T, K]."""
        first = values_RK[0]
        out_TK = torch.zeros(self.num_tokens + self.padded, self.top_k, dtype=first.dtype, device=first.device)
        for n, values in enumerate(values_RK):
            lo, hi = self.offsets[n], self.offsets[n + 1]
            token_R = self.token_indices_R[lo:hi]
            # rows of one F rank are of different tokens, so each place has one writer
            out_TK[token_R] = torch.where(self.owned_RK[lo:hi], values, out_TK[token_R])
        return out_TK[: self.num_tokens]

    def place_slots(self, values_P: Sequence[Tensor]) -> Tensor:
        """The same from one value per slot: [T, K]."""
        out_TK = torch.zeros(self.num_tokens, self.top_k, dtype=values_P[0].dtype, device=values_P[0].device)
        out_TK[self.slot_index] = torch.cat([v.view(-1) for v in values_P])
        return out_TK


@dataclass
class ReceivedRoute:
    """What an F rank knows of one (layer, micro-batch): rows and slots per source and per rank of the next attention group.

    Args:
        counts: [sources, next ranks, 2] int64 on the host: (rows, owned slots).
        slot_rows_P: with one row per slot, the received row of each; set when the rows have come.
    """

    counts: Tensor
    slot_rows_P: Tensor | None = None

    @classmethod
    def fixed(cls, rows: Sequence[int]) -> ReceivedRoute:
        """Every source's rows all go on to the next attention rank of the same index."""
        counts = torch.zeros(len(rows), len(rows), 2, dtype=torch.long, device="cpu")
        counts[:, :, 0] = torch.diag(torch.tensor(rows, dtype=torch.long, device="cpu"))
        return cls(counts)

    @cached_property
    def rows_in(self) -> tuple[int, ...]:
        """Rows from each source."""
        return tuple(self.counts[:, :, 0].sum(1).tolist())

    @cached_property
    def rows_out(self) -> tuple[int, ...]:
        """Rows to each rank of the next attention group."""
        return tuple(self.counts[:, :, 0].sum(0).tolist())

    @cached_property
    def num_rows(self) -> int:
        """Records in the receive buffer: all rows and one header per source that sends any."""
        return sum(n + 1 for n in self.rows_in if n)

    @cached_property
    def num_slots(self) -> int:
        """Slots owned by this rank."""
        return int(self.counts[:, :, 1].sum())

    @cached_property
    def header_rows(self) -> tuple[int, ...]:
        """Places of the header rows among the received rows."""
        out, at = [], 0
        for n in self.rows_in:
            if n:
                out.append(at)
                at += n + 1
        return tuple(out)

    def blocks(self, headers: int, *, slots: bool = False) -> dict[tuple[int, int], tuple[int, int]]:
        """(source, next rank) -> [start, stop) of its rows in the receive buffer, ``headers`` rows ahead of every source.

        Args:
            slots: of its slots instead, in a tensor with one row per slot.
        """
        per_SC = self.counts[:, :, int(slots)]
        start_SC = (per_SC.flatten().cumsum(0) - per_SC.flatten()).view_as(per_SC)
        start_SC = start_SC + ((per_SC.sum(1) > 0).cumsum(0) * headers)[:, None]
        pairs = per_SC.nonzero()
        starts, sizes = start_SC[per_SC > 0].tolist(), per_SC[per_SC > 0].tolist()
        return {(s, c): (at, at + n) for (s, c), at, n in zip(pairs.tolist(), starts, sizes, strict=True)}
