"""DispatchQueue: a routing turned into per-expert queues of token rows (MoEBlaze, section 4), without copying a token.

A queue is four int32 tensors. Rows are ordered by expert, then token, then slot, so two builds are bit-equal::

    expert_token_indices [P]    the token of each row
    expert_token_offsets [E+1]  expert e owns rows [offsets[e], offsets[e+1])
    token_expert_indices [T, K] the expert of each slot; -1 = dropped
    token_index_map      [T, K] the row of each slot;    -1 = dropped

P = T*K, or ``max_rows``. Shapes never depend on the routing: no host sync, and recomputation, CUDA graphs and torch.compile
see the same shapes whatever the router decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchmoe.errors import ConfigError, RoutingError, check_whole
from torchmoe.kernels import ops, scheme

__all__ = ["DispatchQueue"]


@dataclass(frozen=True)
class DispatchQueue:
    """Per-expert queues of the (token, expert) pairs of T tokens. Build with :meth:`build` or :meth:`from_pairs`.

    Args:
        expert_token_indices: int32 [P], token of each row; -1 in rows that do not exist.
        expert_token_offsets: int32 [E+1].
        token_expert_indices: int32 [T, K] (pairs: [P] in token order), -1 = dropped.
        token_index_map: int32, same shape, row of each slot, -1 = dropped.
        overflowed: bool [1], whether ``max_rows`` was too small.
        num_tokens: T.
        num_experts: E.
        token_offsets: int32 [T+1] for ragged queues (:meth:`from_pairs`): token t owns slots [offsets[t], offsets[t+1]).
        pair_order: int64 [P] for ragged queues: slot i came from pair ``pair_order[i]``.
    """

    expert_token_indices: Tensor
    expert_token_offsets: Tensor
    token_expert_indices: Tensor
    token_index_map: Tensor
    overflowed: Tensor
    num_tokens: int
    num_experts: int
    token_offsets: Tensor | None = None
    pair_order: Tensor | None = None

    @classmethod
    def build(
        cls,
        expert_ids_TK: Tensor,
        num_experts: int,
        *,
        capacity: int | None = None,
        max_rows: int | None = None,
        validate: bool = False,
        backend: str = "auto",
    ) -> DispatchQueue:
        """Queue of a routing with K slots per token.

        Args:
            expert_ids_TK: int32 or int64 [T, K] in [-1, E); -1 is a dropped slot. Other ids count as dropped too, unless
                ``validate``.
            num_experts: E.
            capacity: keep only the first rows of each expert, in token order; a number of rows, not a factor.
            max_rows: rows of the buffers where the caller knows a bound below T*K; kept slots past it are dropped and
                ``overflowed`` is set.
            validate: check the ids on the host (a device sync): range, and no expert twice for one token.

        Raises:
            ConfigError: wrong shape or dtype, or a negative limit.
            RoutingError: ``validate`` found an id out of range or a duplicate pair.
        """
        _check_ids(expert_ids_TK, num_experts)
        for name, limit in (("capacity", capacity), ("max_rows", max_rows)):
            if limit is not None and not isinstance(limit, torch.SymInt):
                check_whole(name, limit, 0, "it counts rows; use None for no limit")
        if validate:
            _validate(expert_ids_TK, num_experts)
        T = expert_ids_TK.size(0)
        indices, offsets, index_map, overflowed = ops.build_queue(expert_ids_TK, num_experts, max_rows, backend)
        if capacity is not None and capacity < expert_ids_TK.numel():
            # Ranks come from a first build without a row limit; the ids that survive are built again by the same kernels.
            if max_rows is not None:
                _, offsets, index_map, _ = ops.build_queue(expert_ids_TK, num_experts, None, backend)
            first = offsets.index_select(0, expert_ids_TK.reshape(-1).clamp(0, num_experts - 1)).reshape(index_map.shape)
            kept = (index_map >= 0) & (index_map - first < capacity)
            expert_ids_TK = torch.where(kept, expert_ids_TK, -1)
            indices, offsets, index_map, overflowed = ops.build_queue(expert_ids_TK, num_experts, max_rows, backend)
        expert_indices = torch.where(index_map >= 0, expert_ids_TK, -1).to(torch.int32)
        return cls(indices, offsets, expert_indices, index_map, overflowed, T, num_experts)

    @classmethod
    def from_pairs(
        cls,
        token_ids: Tensor,
        expert_ids: Tensor,
        num_tokens: int,
        num_experts: int,
        *,
        validate: bool = False,
        backend: str = "auto",
    ) -> DispatchQueue:
        """Queue of any list of (token, expert) pairs: ragged top-k, thresholds, expert choice.

        Args:
            token_ids: int [P] in [0, T), in any order. A pair with a token out of range counts as dropped.
            expert_ids: int [P] in [-1, E).
            num_tokens: T.
            num_experts: E.
            validate: as in :meth:`build`.

        Gates for this queue are [P], in the order of the pairs.
        """
        if token_ids.ndim != 1 or token_ids.shape != expert_ids.shape:
            raise ConfigError(
                f"token_ids {tuple(token_ids.shape)} and expert_ids {tuple(expert_ids.shape)} "
                "must be one list of pairs; pass two [P] tensors"
            )
        if not isinstance(num_tokens, torch.SymInt):
            check_whole("num_tokens", num_tokens, 0, "pass the number of rows of x")
        _check_ids(token_ids[:, None], 1)
        _check_ids(expert_ids[:, None], num_experts)
        inside = (token_ids >= 0) & (token_ids < num_tokens)
        if validate:
            if not bool(inside.all()):
                bad = token_ids[~inside][0].item()
                raise RoutingError(f"token id {bad} is outside [0, {num_tokens}); pass rows of x")
            _validate_pairs(token_ids, expert_ids, num_experts)
        # Slots in token order; pairs of one token keep their order. Pairs without a token go behind the last token.
        token = torch.where(inside, token_ids, num_tokens)
        pair_order = torch.argsort(token, stable=True)
        token = token.index_select(0, pair_order)
        expert = torch.where(token < num_tokens, expert_ids.index_select(0, pair_order), -1)
        slots, offsets, index_map, overflowed = ops.build_queue(expert[:, None], num_experts, None, backend)
        index_map = index_map[:, 0]
        # The kernel numbered slots as if each were a token; the token of a row is the token of its slot.
        if slots.numel():
            owner = token.index_select(0, slots.clamp(min=0)).to(torch.int32)
            slots = torch.where(slots >= 0, owner, -1)
        boundaries = torch.arange(num_tokens + 1, device=token.device, dtype=token.dtype)
        token_offsets = torch.searchsorted(token, boundaries, out_int32=True)
        expert = torch.where(index_map >= 0, expert, -1).to(torch.int32)
        return cls(slots, offsets, expert, index_map, overflowed, num_tokens, num_experts, token_offsets, pair_order)

    @property
    def index(self) -> scheme.Index:
        return scheme.Index(self.expert_token_indices, self.expert_token_offsets, self.token_index_map, self.token_offsets)

    @property
    def num_rows(self) -> int:
        """P, the rows of the buffers (an upper bound of the kept pairs)."""
        return self.expert_token_indices.numel()

    def counts(self) -> Tensor:
        """int32 [E], kept rows of each expert."""
        return self.expert_token_offsets.diff()

    def slot_gates(self, gates: Tensor) -> Tensor:
        """Gates in the order of ``token_index_map``: [T, K] as they are; of pairs, [P] from pair order to token order."""
        if gates.shape != self.token_index_map.shape:
            raise ConfigError(
                f"gates {tuple(gates.shape)} do not match the queue's slots "
                f"{tuple(self.token_index_map.shape)}; pass one gate per slot"
            )
        return gates if self.pair_order is None else gates.index_select(0, self.pair_order)

    def gather(self, x_TD: Tensor) -> Tensor:
        """x of each row, [P, D], 0 in rows that do not exist (differentiable; for own expert loops)."""
        if x_TD.ndim != 2 or x_TD.size(0) != self.num_tokens:
            raise ConfigError(f"x {tuple(x_TD.shape)} must be [{self.num_tokens}, D], the tokens of this queue")
        return ops.gather(x_TD, *self.index)

    def combine(self, y_PD: Tensor, gates: Tensor | None = None) -> Tensor:
        """Sum of gate * row over the slots of each token, [T, D], in fp32 in slot order (differentiable)."""
        if y_PD.ndim != 2 or y_PD.size(0) != self.num_rows or not y_PD.is_floating_point():
            raise ConfigError(
                f"y {tuple(y_PD.shape)} {y_PD.dtype} must be [{self.num_rows}, D] and floating, one row per row of gather(x)"
            )
        return ops.combine(y_PD, None if gates is None else self.slot_gates(gates), *self.index)


def _check_ids(ids: Tensor, num_experts: int) -> None:
    if ids.ndim != 2:
        raise ConfigError(f"expert_ids {tuple(ids.shape)} must be [T, K]; flatten batch and sequence first")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"ids are {ids.dtype}; the rule is int32 or int64, convert with .to(torch.int32)")
    check_whole("num_experts", num_experts, 1, "pass the number of experts these ids speak of")


def _validate(ids: Tensor, num_experts: int) -> None:
    wrong = (ids < -1) | (ids >= num_experts)
    if bool(wrong.any()):
        token, slot = (int(i) for i in wrong.nonzero()[0])
        raise RoutingError(
            f"expert id {int(ids[token, slot])} of token {token}, slot {slot} is outside [-1, {num_experts}); mask it with -1"
        )
    ordered = ids.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        token, slot = (int(i) for i in twice.nonzero()[0])
        raise RoutingError(
            f"token {token} lists expert {int(ordered[token, slot])} twice; a pair may appear once, add up its gates or use -1"
        )


def _validate_pairs(token_ids: Tensor, expert_ids: Tensor, num_experts: int) -> None:
    _validate(expert_ids[:, None], num_experts)
    kept = expert_ids >= 0
    pairs = token_ids[kept].long() * num_experts + expert_ids[kept]
    values, counts = torch.unique(pairs, return_counts=True)
    if bool((counts > 1).any()):
        pair = int(values[counts > 1][0])
        raise RoutingError(
            f"pair (token {pair // num_experts}, expert {pair % num_experts}) appears twice; "
            "a pair may appear once, add up its gates"
        )
