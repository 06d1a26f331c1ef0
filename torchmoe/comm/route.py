"""Where every token's rows go: pure functions of the routing, the expert owners and the sequence map. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchmoe.errors import ConfigError, RoutingError
from torchmoe.placement import GroupId, Placement, Where

__all__ = ["ReceivedRoute", "Route", "SequenceMap"]


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

    def segments(self, where: Where, other: GroupId) -> list[tuple[int, int]]:
        """``where``'s tokens cut by the ranks of attention group ``other`` that hold the same sequences: [(index, tokens)].

        In token order. Ranks without a token in common are left out.
        """
        overlaps = self.placement.overlaps(where.group, where.index, other, len(self.lengths), where.replica)
        return [(i, n) for i, both in overlaps if (n := self._tokens(both))]


@dataclass(frozen=True)
class Route:
    """The rows of one attention rank and layer: one row per (token, destination F rank) that owns at least one of its slots.

    Args:
        num_tokens: T.
        top_k: K.
        token_indices_R: token of every row, F rank by F rank, ascending within one.
        owned_RK: the slots that the row's F rank owns.
        rows: rows per F rank (host integers).
    """

    num_tokens: int
    top_k: int
    token_indices_R: Tensor
    owned_RK: Tensor
    rows: tuple[int, ...]

    @classmethod
    def build(cls, expert_ids_TK: Tensor, owners_E: Tensor, num_ranks: int) -> Route:
        """Args:
            expert_ids_TK: logical expert ids, -1 for a dropped slot.
            owners_E: expert -> index in the F group, on the ids' device.
            num_ranks: size N of the F group.

        Raises:
            RoutingError: ids of another rank than 2.
        """
        if expert_ids_TK.dim() != 2:
            raise RoutingError(
                f"expert ids of shape {tuple(expert_ids_TK.shape)} must be [T, K]; reshape them to one row per token"
            )
        ids_TK = expert_ids_TK.long()
        owner_TK = torch.where(ids_TK >= 0, owners_E[ids_TK.clamp(min=0)], -1)
        owned_NTK = owner_TK == torch.arange(num_ranks, device=ids_TK.device)[:, None, None]
        sent_NT = owned_NTK.any(-1)
        rank_R, token_R = sent_NT.nonzero(as_tuple=True)
        rows = tuple(sent_NT.sum(1).tolist())
        return cls(ids_TK.shape[0], ids_TK.shape[1], token_R, owned_NTK[rank_R, token_R], rows)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Row offsets of the F ranks, N + 1 of them."""
        out = [0]
        for n in self.rows:
            out.append(out[-1] + n)
        return tuple(out)

    def counts(self, segments: Sequence[tuple[int, int]], num_next: int) -> Tensor:
        """Per F rank and rank of the next attention group: [N, num_next, 2] int64 of (rows, owned slots), on the host."""
        n = len(self.rows)
        device = self.token_indices_R.device
        next_T = torch.repeat_interleave(
            torch.tensor([i for i, _ in segments], dtype=torch.long), torch.tensor([t for _, t in segments], dtype=torch.long)
        ).to(device)
        rank_R = torch.repeat_interleave(torch.arange(n), torch.tensor(self.rows, dtype=torch.long)).to(device)
        flat_R = rank_R * num_next + next_T[self.token_indices_R]
        out = torch.zeros(n * num_next, 2, dtype=torch.long, device=device)
        out[:, 0] = torch.bincount(flat_R, minlength=n * num_next)
        # int64 sums are exact, so the order of the additions does not matter
        out[:, 1].index_add_(0, flat_R, self.owned_RK.sum(1))
        return out.view(n, num_next, 2).cpu()

    def sum_rows(self, rows_RD: Sequence[Tensor]) -> Tensor:
        """Sum of the partial rows of all F ranks per token, in F rank order, in fp32 or wider: y_TD.

        A token has at most one row per F rank, so every addition has one writer and the order is fixed.
        """
        first = rows_RD[0]
        wide = torch.promote_types(first.dtype, torch.float32)
        y_TD = torch.zeros(self.num_tokens, first.shape[1], dtype=wide, device=first.device)
        for n, rows in enumerate(rows_RD):
            if rows.shape[0]:
                y_TD.index_add_(0, self.token_indices_R[self.offsets[n] : self.offsets[n + 1]], rows.to(wide))
        return y_TD

    def take_slots(self, values_RK: Sequence[Tensor]) -> Tensor:
        """One value per slot, each from the slot's owner, never summed; 0 where a slot was dropped: [T, K]."""
        first = values_RK[0]
        out_TK = torch.zeros(self.num_tokens, self.top_k, dtype=first.dtype, device=first.device)
        for n, values in enumerate(values_RK):
            lo, hi = self.offsets[n], self.offsets[n + 1]
            row, slot = self.owned_RK[lo:hi].nonzero(as_tuple=True)
            out_TK[self.token_indices_R[lo:hi][row], slot] = values[row, slot]
        return out_TK


@dataclass(frozen=True)
class ReceivedRoute:
    """What an F rank knows of one (layer, micro-batch): rows and slots per source and per rank of the next attention group.

    Args:
        counts: [sources, next ranks, 2] int64 on the host: (rows, owned slots).
    """

    counts: Tensor

    @property
    def rows_in(self) -> tuple[int, ...]:
        """Rows from each source."""
        return tuple(self.counts[:, :, 0].sum(1).tolist())

    @property
    def rows_out(self) -> tuple[int, ...]:
        """Rows to each rank of the next attention group."""
        return tuple(self.counts[:, :, 0].sum(0).tolist())

    def blocks(self, headers: int) -> dict[tuple[int, int], tuple[int, int]]:
        """(source, next rank) -> [start, stop) of its rows in the receive buffer, ``headers`` rows ahead of every source."""
        out: dict[tuple[int, int], tuple[int, int]] = {}
        at = 0
        for s, per_next in enumerate(self.counts[:, :, 0].tolist()):
            at += headers if sum(per_next) else 0
            for c, n in enumerate(per_next):
                if n:
                    out[s, c] = (at, at + n)
                at += n
        return out
