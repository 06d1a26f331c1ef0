"""Route: conservation, no duplication, order, and exact sums, for any routing and owner table."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmoe.comm.route import ReceivedRoute, Route, SequenceMap
from torchmoe.placement import Placement
from torchmoe.testing.strategies import owners, routings

FEW = settings(max_examples=60, deadline=None)


@FEW
@given(routings(), st.data())
def test_every_kept_slot_is_owned_by_one_row_and_rows_are_ordered(routing: tuple, data: st.DataObject) -> None:
    shape, ids, _ = routing
    n = data.draw(st.integers(1, 5))
    table = data.draw(owners(shape.E, n))
    route = Route.build(ids, torch.tensor(table), n)
    slots = []
    for rank in range(n):
        lo, hi = route.offsets[rank], route.offsets[rank + 1]
        tokens = route.token_indices_R[lo:hi].tolist()
        assert tokens == sorted(set(tokens))
        for token, owned in zip(tokens, route.owned_RK[lo:hi].tolist(), strict=True):
            assert any(owned)
            slots += [(token, k, rank) for k, mine in enumerate(owned) if mine]
    want = [(t, k, table[e]) for t, row in enumerate(ids.tolist()) for k, e in enumerate(row) if e >= 0]
    assert sorted(slots) == sorted(want)
    assert route.slots == tuple(sum(s[2] == r for s in want) for r in range(n))
    assert route.rows == tuple(len({s[0] for s in want if s[2] == r}) for r in range(n))


@FEW
@given(routings(), st.data())
def test_sums_and_slots_equal_loops(routing: tuple, data: st.DataObject) -> None:
    shape, ids, _ = routing
    n = data.draw(st.integers(1, 4))
    route = Route.build(ids, torch.tensor(data.draw(owners(shape.E, n))), n)
    g = torch.Generator().manual_seed(0)
    rows = [torch.randn(r, 3, generator=g, dtype=torch.float64) for r in route.rows]
    values = [torch.randn(r, shape.K, generator=g, dtype=torch.float64) for r in route.rows]
    slots = [torch.randn(s, 3, generator=g, dtype=torch.float64) for s in route.slots]
    y, v = torch.zeros(shape.T, 3, dtype=torch.float64), torch.zeros(shape.T, shape.K, dtype=torch.float64)
    per_slot = {}
    for r in range(n):
        at = 0
        for i, t in enumerate(route.token_indices_R[route.offsets[r] : route.offsets[r + 1]].tolist()):
            y[t] += rows[r][i]
            for k in range(shape.K):
                if route.owned_RK[route.offsets[r] + i, k]:
                    v[t, k] = values[r][i, k]
                    per_slot[t, k] = slots[r][at]
                    at += 1
    z = torch.zeros_like(y)
    for t, k in sorted(per_slot, key=lambda p: (p[0], p[1])):
        z[t] += per_slot[t, k]
    assert torch.equal(route.sum_rows(rows), y)
    assert torch.equal(route.take_slots(values), v)
    assert torch.equal(route.sum_slots(slots), z)


@FEW
@given(routings(), st.data())
def test_a_capacity_keeps_the_first_rows_and_pads_the_rest(routing: tuple, data: st.DataObject) -> None:
    shape, ids, _ = routing
    n, capacity = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    table = torch.tensor(data.draw(owners(shape.E, n)))
    exact, fixed = Route.build(ids, table, n), Route.build(ids, table, n, capacity=capacity)
    assert fixed.rows == (capacity,) * n and fixed.wanted_N is not None and tuple(fixed.wanted_N.tolist()) == exact.rows
    x = torch.arange(float(shape.T * 2)).view(shape.T, 2)
    for r in range(n):
        kept = min(capacity, exact.rows[r])
        assert torch.equal(fixed.take(r, x, fill=-7)[:kept], exact.take(r, x)[:kept])
        assert bool((fixed.take(r, x, fill=-7)[kept:] == -7).all())
        assert not bool(fixed.owned_RK[r * capacity + kept : (r + 1) * capacity].any())
    grown = Route.build(ids, table, n, capacity=capacity, grow=True)
    assert max(exact.rows, default=0) <= grown.rows[0] and (grown.rows[0] == capacity or grown.rows[0] < 2 * max(exact.rows))
    ones = [torch.ones(r, 1) for r in grown.rows]
    assert torch.equal(grown.sum_rows(ones), exact.sum_rows([torch.ones(r, 1) for r in exact.rows]))


@FEW
@given(routings(), st.data())
def test_riding_tokens_without_slots_have_one_row_by_position(routing: tuple, data: st.DataObject) -> None:
    shape, ids, _ = routing
    n = data.draw(st.integers(1, 4))
    position = torch.tensor(data.draw(st.lists(st.integers(0, 9), min_size=shape.T, max_size=shape.T)), dtype=torch.long)
    route = Route.build(ids, torch.tensor(data.draw(owners(shape.E, n))), n, position_T=position)
    rank_R = torch.repeat_interleave(torch.arange(n), torch.tensor(route.rows))
    for t in range(shape.T):
        mine = rank_R[route.token_indices_R == t].tolist()
        assert mine
        if not bool((ids[t] >= 0).any()):
            assert mine == [int(position[t]) % n]


def test_tokens_permute_with_their_ids() -> None:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(-1, 6, (20, 3), generator=g)
    table, perm = torch.tensor([0, 1, 2, 0, 1, 2]), torch.randperm(20, generator=g)
    a, b = Route.build(ids, table, 3), Route.build(ids[perm], table, 3)
    assert a.rows == b.rows and a.slots == b.slots
    x = torch.randn(20, 4, generator=g)
    back = b.sum_rows([b.take(n, x[perm]) for n in range(3)])
    assert torch.equal(back, a.sum_rows([a.take(n, x) for n in range(3)])[perm])


def test_blocks_are_the_rows_of_each_pair_in_buffer_order() -> None:
    counts = torch.tensor([[[2, 3], [0, 0]], [[0, 0], [0, 0]], [[1, 1], [4, 6]]])
    received = ReceivedRoute(counts)
    assert received.rows_in == (2, 0, 5) and received.rows_out == (3, 4)
    assert received.header_rows == (0, 3) and received.num_rows == 9 and received.num_slots == 10
    assert received.blocks(1) == {(0, 0): (1, 3), (2, 0): (4, 5), (2, 1): (5, 9)}
    assert received.blocks(0, slots=True) == {(0, 0): (0, 3), (2, 0): (3, 4), (2, 1): (4, 10)}


def test_a_fixed_route_reads_nothing_back() -> None:
    """Shape inference alone can build it: any read of a value would fail on the meta device."""
    ids = torch.empty(6, 2, dtype=torch.long, device="meta")
    route = Route.build(ids, torch.empty(4, dtype=torch.long, device="meta"), 2, capacity=3)
    assert route.rows == (3, 3) and route.token_indices_R.shape == (6,)
    assert route.take(1, torch.empty(6, 5, device="meta")).shape == (3, 5)
    assert route.sum_rows([torch.empty(3, 5, device="meta")] * 2).shape == (6, 5)
    with pytest.raises((RuntimeError, NotImplementedError)):
        Route.build(ids, torch.empty(4, dtype=torch.long, device="meta"), 2)


@FEW
@given(routings(), st.data())
def test_counts_equal_a_loop(routing: tuple, data: st.DataObject) -> None:
    shape, ids, _ = routing
    n, num_next = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    table = data.draw(owners(shape.E, n))
    cuts = sorted(data.draw(st.lists(st.integers(0, shape.T), min_size=num_next - 1, max_size=num_next - 1)))
    edges = [0, *cuts, shape.T]
    segments = [(i, b - a) for i, (a, b) in enumerate(pairwise(edges)) if b > a]
    counts = Route.build(ids, torch.tensor(table), n).counts(segments, num_next)
    want = torch.zeros(n, num_next, 2, dtype=torch.long)
    nxt = [i for i, m in segments for _ in range(m)]
    for t, slots in enumerate(ids.tolist()):
        for rank in range(n):
            owned = sum(s >= 0 and table[s] == rank for s in slots)
            want[rank, nxt[t], 0] += owned > 0
            want[rank, nxt[t], 1] += owned
    assert torch.equal(counts, want)


def test_segments_and_positions_follow_the_lengths() -> None:
    pl = Placement(attention=[2, 3], ffn=[1, 1], num_layers=2, num_experts=2)
    seqs = SequenceMap(pl, (5, 0, 2, 7))
    a0, a1 = pl.groups("attention")
    assert seqs.num_tokens(pl.where(0)) == 5 and seqs.num_tokens(pl.where(1)) == 9
    # A1 holds sequences [0], [1], [2, 3]: the empty one leaves no segment
    assert seqs.segments(pl.where(0), a1) == [(0, 5)]
    assert seqs.segments(pl.where(1), a1) == [(2, 9)]
    assert seqs.segments(pl.where(4), a0) == [(1, 9)]
    assert seqs.positions(pl.where(1)).tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6]
    assert seqs.positions(pl.where(3)).tolist() == []
