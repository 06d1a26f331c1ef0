"""The properties every dispatcher has, checked on simulated ranks, zero-token ranks and all-dropped tokens included.

Conservation (as many rows as copies), no duplication (each copy once, at its owner), order (by source, then token), inverse
(combine after dispatch gives every token its number of copies times itself), linearity, equivariance under a permutation of
the tokens, and duality (the gradient of a dispatch is a combine).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from torchmoe.placement import contiguous_owners
from torchmoe.testing.ranks import RankContext, run_ranks
from torchmoe.testing.tolerance import assert_close_rel

__all__ = ["Dispatcher", "check_dispatcher"]


class Dispatcher(Protocol):
    """One rank of a dispatcher, as the checks call it."""

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor) -> tuple[Tensor, Any]:
        """(rows_RD of the tokens that have an expert here, whatever :meth:`combine` needs)."""

    def combine(self, rows_RD: Tensor, state: Any) -> Tensor:
        """y_TD: the sum of every token's rows, back on its rank."""


def check_dispatcher(
    make: Callable[[RankContext], Dispatcher],
    *,
    world: int,
    num_experts: int,
    top_k: int,
    copies: Literal["rank", "slot"] = "rank",
    owners: Sequence[int] | None = None,
    examples: int = 6,
    seed: int = 0,
) -> None:
    """Check all properties on ``examples`` random routings.

    Args:
        make: builds the dispatcher of one rank, from ``ctx.transport(...)`` or ``torch.distributed``.
        world: ranks, threads of this process.
        num_experts, top_k: of the routings.
        copies: whether a token is sent once per rank that owns one of its experts, or once per slot.
        owners: expert -> rank; default: contiguous blocks.
        examples: how many routings.
        seed: of the routings.

    Raises:
        RanksFailed: a rank raised or a property does not hold; it is named.
        AssertionError: rows were lost, doubled or came in another order.
    """
    table = tuple(owners if owners is not None else contiguous_owners(num_experts, world))
    for example in range(examples):
        cases = [_case(seed + example, r, num_experts, top_k, example) for r in range(world)]
        arrived = run_ranks(_program, world, backend="sim-dist", args=(make, cases, table, copies, seed + example))
        for rank, rows in enumerate(arrived):
            want = [(s, t) for s in range(world) for t, n in enumerate(_copies(cases[s], table, copies)[rank]) for _ in range(n)]
            _same_rows(rank, rows, want, example)


def _case(seed: int, rank: int, num_experts: int, top_k: int, example: int) -> Tensor:
    """Ids of one rank: some ranks without tokens, some tokens without slots, one example with nothing at all."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    tokens = 0 if (rank + example) % 3 == 2 else int(torch.randint(1, 7, (1,), generator=g))
    ids = torch.rand(tokens, num_experts, generator=g).topk(top_k, dim=1).indices
    drop = 2.0 if example == 2 else 0.25
    return ids.masked_fill(torch.rand(tokens, top_k, generator=g) < drop, -1)


def _copies(ids: Tensor, table: Sequence[int], copies: str) -> list[list[int]]:
    """[rank][token] -> rows."""
    out = [[0] * len(ids) for _ in range(max(table) + 1)]
    for t, row in enumerate(ids.tolist()):
        for rank, n in Counter(table[e] for e in row if e >= 0).items():
            out[rank][t] = n if copies == "slot" else 1
    return out


def _same_rows(rank: int, rows: list[tuple[int, int]], want: list[tuple[int, int]], example: int) -> None:
    where = f"rank {rank}, example {example}"
    if len(rows) != len(want):
        raise AssertionError(f"conservation: {where}: {len(rows)} rows arrived, {len(want)} copies were due")
    if Counter(rows) != Counter(want):
        wrong = list((Counter(rows) - Counter(want)).items())[:3]
        raise AssertionError(f"no duplication: {where}: these (source, token) came too often or do not belong here: {wrong}")
    if rows != want:
        i = next(i for i, (a, b) in enumerate(zip(rows, want, strict=True)) if a != b)
        raise AssertionError(f"order: {where}: row {i} is (source, token) {rows[i]}, expected {want[i]}")


def _program(
    ctx: RankContext,
    make: Callable[[RankContext], Dispatcher],
    cases: list[Tensor],
    table: Sequence[int],
    copies: str,
    seed: int,
) -> list[tuple[int, int]]:
    d, ids = make(ctx), cases[ctx.rank]
    t = len(ids)
    g = torch.Generator().manual_seed(7 * seed + ctx.rank)
    names = torch.tensor([[ctx.rank, i] for i in range(t)], dtype=torch.float64).view(t, 2)
    rows, _ = d.dispatch(names, ids)
    arrived = [(int(a), int(b)) for a, b in rows.detach().tolist()]

    x, y = (torch.randn(t, 3, generator=g, dtype=torch.float64) for _ in range(2))
    per_token = torch.tensor(_copies(ids, table, copies), dtype=torch.float64).sum(0).view(t, 1)
    x.requires_grad_()
    rows_x, state = d.dispatch(x, ids)
    back = d.combine(rows_x, state)
    assert_close_rel(back, per_token * x, rel=1e-14, name="inverse")
    rows_y, _ = d.dispatch(y, ids)
    rows_sum, _ = d.dispatch(2 * x.detach() - 3 * y, ids)
    assert_close_rel(rows_sum, 2 * rows_x - 3 * rows_y, rel=1e-14, name="linearity")

    perm = torch.randperm(t, generator=g)
    rows_p, state_p = d.dispatch(x.detach()[perm], ids[perm])
    assert_close_rel(d.combine(rows_p * rows_p, state_p), d.combine(rows_x * rows_x, state)[perm], rel=1e-13, name="permutation")

    grad_rows = torch.randn(rows_x.shape, generator=g, dtype=torch.float64)
    (grad_x,) = torch.autograd.grad(rows_x, x, grad_rows, retain_graph=True)
    assert_close_rel(grad_x, d.combine(grad_rows, state), rel=1e-13, name="duality")
    return arrived
