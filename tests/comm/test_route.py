"""Routes against plain Python: which rows go where, and what is summed on return."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchmoe.comm.route import ReceivedRoute, Route, SequenceMap
from torchmoe.placement import Placement


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    t, k, e, n = draw(st.integers(0, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 7)), draw(st.integers(1, 4))
    owners = torch.tensor(draw(st.lists(st.integers(0, n - 1), min_size=e, max_size=e)))
    ids = torch.tensor(draw(st.lists(st.integers(-1, e - 1), min_size=t * k, max_size=t * k)), dtype=torch.long).view(t, k)
    return ids, owners, n


@given(routings())
def test_one_row_per_token_and_rank_that_owns_a_slot(case: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    ids, owners, n = case
    route = Route.build(ids, owners, n)
    want = []
    for rank in range(n):
        for t, slots in enumerate(ids.tolist()):
            owned = [s >= 0 and int(owners[s]) == rank for s in slots]
            if any(owned):
                want.append((rank, t, owned))
    got_ranks = [r for r, m in enumerate(route.rows) for _ in range(m)]
    got = list(zip(got_ranks, route.token_indices_R.tolist(), route.owned_RK.tolist(), strict=True))
    assert got == want


@given(routings(), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 4))
def test_counts_equal_a_loop(case: tuple[torch.Tensor, torch.Tensor, int], cuts: list[int], num_next: int) -> None:
    ids, owners, n = case
    segments, left = [], len(ids)
    for i in range(num_next):
        take = min(left, cuts[i % len(cuts)]) if i < num_next - 1 else left
        if take:
            segments.append((i, take))
        left -= take
    counts = Route.build(ids, owners, n).counts(segments, num_next)
    want = torch.zeros(n, num_next, 2, dtype=torch.long)
    nxt = [i for i, m in segments for _ in range(m)]
    for t, slots in enumerate(ids.tolist()):
        for rank in range(n):
            owned = sum(s >= 0 and int(owners[s]) == rank for s in slots)
            want[rank, nxt[t], 0] += owned > 0
            want[rank, nxt[t], 1] += owned
    assert torch.equal(counts, want)


@given(routings(), st.integers(1, 3))
def test_sums_and_slots_return_to_their_token(case: tuple[torch.Tensor, torch.Tensor, int], dim: int) -> None:
    ids, owners, n = case
    route = Route.build(ids, owners, n)
    g = torch.Generator().manual_seed(0)
    rows = [torch.randn(m, dim, generator=g, dtype=torch.float64) for m in route.rows]
    values = [torch.randn(m, ids.shape[1], generator=g, dtype=torch.float64) for m in route.rows]
    y, slots = torch.zeros(len(ids), dim, dtype=torch.float64), torch.zeros(ids.shape, dtype=torch.float64)
    for rank in range(n):
        mine = route.token_indices_R[route.offsets[rank] : route.offsets[rank + 1]].tolist()
        for r, t in enumerate(mine):
            y[t] += rows[rank][r]
            for k, e in enumerate(ids[t].tolist()):
                if e >= 0 and int(owners[e]) == rank:
                    slots[t, k] = values[rank][r, k]
    assert torch.equal(route.sum_rows(rows), y)
    assert torch.equal(route.take_slots(values), slots)


@given(st.lists(st.integers(0, 4), min_size=6, max_size=6))
def test_blocks_tile_the_receive_buffer(rows: list[int]) -> None:
    counts = torch.zeros(3, 2, 2, dtype=torch.long)
    counts[:, :, 0] = torch.tensor(rows).view(3, 2)
    received = ReceivedRoute(counts)
    spans = sorted(received.blocks(1).values())
    headers = sum(1 for n in received.rows_in if n)
    covered = [r for lo, hi in spans for r in range(lo, hi)]
    assert len(set(covered)) == len(covered) == sum(rows)
    assert all(0 <= r < sum(rows) + headers for r in covered)
    assert sum(received.rows_in) == sum(received.rows_out) == sum(rows)


def test_segments_follow_the_lengths() -> None:
    pl = Placement(attention=[2, 3], ffn=[1, 1], num_layers=2, num_experts=2)
    seqs = SequenceMap(pl, (5, 0, 2, 7))
    a0, a1 = pl.groups("attention")
    assert seqs.num_tokens(pl.where(0)) == 5 and seqs.num_tokens(pl.where(1)) == 9
    # A1 holds sequences [0], [1], [2, 3]: the empty one leaves no segment
    assert seqs.segments(pl.where(0), a1) == [(0, 5)]
    assert seqs.segments(pl.where(1), a1) == [(2, 9)]
    assert seqs.segments(pl.where(4), a0) == [(1, 9)]
