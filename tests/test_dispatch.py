"""DispatchQueue: order, drops, capacity, limits, pairs; against a queue built by loops."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.experts_kit import experts, inputs, routings, split_weights
from torchmoe.dispatch import DispatchQueue
from torchmoe.errors import ConfigError, RoutingError
from torchmoe.testing import oracle


def loops(
    ids: Tensor, num_experts: int, capacity: int | None = None, max_rows: int | None = None
) -> tuple[list[int], list[int], Tensor]:
    """(token of each row, offsets, row of each slot) from the definition: by expert, then token, then slot."""
    rows, offsets, index_map = [], [0], torch.full(ids.shape, -1, dtype=torch.int32)
    slots: dict[int, list[tuple[int, int]]] = {}
    for t, row in enumerate(ids.tolist()):
        for k, e in enumerate(row):
            slots.setdefault(e, []).append((t, k))
    for e in range(num_experts):
        for t, k in slots.get(e, [])[:capacity]:
            if max_rows is None or len(rows) < max_rows:
                index_map[t, k] = len(rows)
                rows.append(t)
        offsets.append(len(rows))
    return rows, offsets, index_map


def check(queue: DispatchQueue, ids: Tensor, num_experts: int, **limits: int | None) -> None:
    rows, offsets, index_map = loops(ids, num_experts, **limits)
    assert queue.expert_token_offsets.tolist() == offsets
    assert queue.expert_token_indices[: len(rows)].tolist() == rows
    assert (queue.expert_token_indices[len(rows) :] == -1).all()
    assert torch.equal(queue.token_index_map, index_map)
    assert torch.equal(queue.token_expert_indices, torch.where(index_map >= 0, ids, -1).int())
    assert queue.counts().tolist() == [b - a for a, b in itertools.pairwise(offsets)]
    for t in (queue.expert_token_indices, queue.expert_token_offsets, queue.token_expert_indices, queue.token_index_map):
        assert t.dtype == torch.int32


def test_the_example_of_figure_2() -> None:
    """MoEBlaze, Figure 2, with the printed token_expert_indices corrected (it omits one token)."""
    queue = DispatchQueue.build(torch.tensor([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]]), 4, validate=True)
    assert queue.expert_token_indices.tolist() == [1, 2, 4, 1, 3, 0, 3, 0, 2, 4]
    assert queue.expert_token_offsets.tolist() == [0, 3, 5, 7, 10]
    assert queue.token_index_map.tolist() == [[5, 7], [0, 3], [1, 8], [4, 6], [2, 9]]
    assert queue.token_expert_indices.flatten().tolist() == [2, 3, 0, 1, 0, 3, 1, 2, 0, 3]


@pytest.mark.parametrize("name", routings())
def test_rows_are_ordered_by_expert_token_slot(name: str) -> None:
    ids = routings()[name]
    check(DispatchQueue.build(ids, 7), ids, 7)
    check(DispatchQueue.build(ids.int(), 7), ids, 7)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_routing_capacity_and_row_limit(data: st.DataObject) -> None:
    T, K, E = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 16)), data.draw(st.sampled_from([1, 2, 3, 7, 31, 1024]))
    flat = data.draw(st.lists(st.integers(-1, E - 1), min_size=T * K, max_size=T * K))
    ids = torch.tensor(flat, dtype=torch.int64).reshape(T, K)
    capacity = data.draw(st.none() | st.integers(0, 5))
    max_rows = data.draw(st.none() | st.integers(0, T * K + 3))
    queue = DispatchQueue.build(ids, E, capacity=capacity, max_rows=max_rows)
    check(queue, ids, E, capacity=capacity, max_rows=max_rows)
    assert queue.num_rows == (T * K if max_rows is None else max_rows)
    kept = len(loops(ids, E, capacity)[0])
    assert bool(queue.overflowed) == (max_rows is not None and kept > max_rows)


def test_ids_out_of_range_are_dropped_or_refused() -> None:
    """F.grouped_mm silently accepts bad offsets; SonicMoE's -1 writes before the buffer."""
    ids = torch.tensor([[0, 7], [-5, 3]])
    check(DispatchQueue.build(ids, 4), torch.tensor([[0, -1], [-1, 3]]), 4)
    with pytest.raises(RoutingError, match=r"expert id 7 of token 0, slot 1 is outside \[-1, 4\)"):
        DispatchQueue.build(ids, 4, validate=True)


def test_a_pair_listed_twice_is_refused_on_request_and_counted_twice_otherwise() -> None:
    ids = torch.tensor([[1, 0], [2, 2]])
    with pytest.raises(RoutingError, match="token 1 lists expert 2 twice"):
        DispatchQueue.build(ids, 3, validate=True)
    check(DispatchQueue.build(ids, 3), ids, 3)
    DispatchQueue.build(torch.tensor([[-1, -1]]), 3, validate=True)


def test_no_padding() -> None:
    """deepseek-ai/DeepGEMM#235, pytorch/torchtitan PR#2255: E = 512, 640 slots, 640 rows."""
    queue = DispatchQueue.build(torch.randint(0, 512, (320, 2)), 512)
    assert queue.num_rows == 640 and int(queue.expert_token_offsets[-1]) == 640


def test_refused_arguments_are_named() -> None:
    for call, text in (
        (lambda: DispatchQueue.build(torch.zeros(3, dtype=torch.long), 2), r"must be \[T, K\]"),
        (lambda: DispatchQueue.build(torch.zeros(3, 1), 2), "torch.float32"),
        (lambda: DispatchQueue.build(torch.zeros(3, 1, dtype=torch.long), 0), "num_experts=0"),
        (lambda: DispatchQueue.build(torch.zeros(3, 1, dtype=torch.long), 2, capacity=-1), "capacity=-1"),
        (lambda: DispatchQueue.build(torch.zeros(3, 1, dtype=torch.long), 2, capacity=1.25), "capacity=1.25 must be a whole"),
        (lambda: DispatchQueue.build(torch.zeros(3, 1, dtype=torch.long), 2, capacity=True), "capacity=True"),
        (lambda: DispatchQueue.build(torch.zeros(3, 1, dtype=torch.long), 2.0), "num_experts=2.0"),
        (lambda: DispatchQueue.build(torch.zeros(3, 1, dtype=torch.long), 2, max_rows=-1), "max_rows=-1"),
        (lambda: DispatchQueue.from_pairs(torch.zeros(3, dtype=torch.long), torch.zeros(2, dtype=torch.long), 2, 2), "one list"),
    ):
        with pytest.raises(ConfigError, match=text):
            call()
    queue, x = DispatchQueue.build(torch.zeros(3, 2, dtype=torch.long), 2), torch.zeros(6, 4)
    for call, text in (
        (lambda: queue.gather(x), r"x \(6, 4\) must be \[3, D\]"),
        (lambda: queue.gather(x[:3, 0]), r"x \(3,\)"),
        (lambda: queue.combine(x[:3]), r"y \(3, 4\) torch.float32 must be \[6, D\]"),
        (lambda: queue.combine(x.long()), "torch.int64"),
        (lambda: queue.combine(x, torch.zeros(3, 1)), "do not match"),
    ):
        with pytest.raises(ConfigError, match=text):
            call()
    two = torch.tensor([0, 0])
    with pytest.raises(RoutingError, match="token id 5"):
        DispatchQueue.from_pairs(torch.tensor([0, 5]), two, 2, 2, validate=True)
    with pytest.raises(RoutingError, match=r"pair \(token 0, expert 0\) appears twice"):
        DispatchQueue.from_pairs(two, two, 2, 2, validate=True)


@pytest.mark.parametrize("capacity", [6, 2**31, 2**40, 2**70])
def test_a_capacity_beyond_the_slots_drops_nothing(capacity: int) -> None:
    """Past 2**31 a comparison in int32 once dropped every row."""
    ids = torch.tensor([[0, 1], [0, 1], [0, -1]])
    assert DispatchQueue.build(ids, 2, capacity=capacity).counts().tolist() == [3, 2]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_pairs_in_any_order_give_the_sums_and_gradients_of_the_oracle(data: st.DataObject) -> None:
    """Ragged top-k, thresholds, expert choice: tokens with no pair, with all experts, pairs in any order, dropped pairs."""
    T, E = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 5))
    pairs = data.draw(st.lists(st.tuples(st.integers(-1, T), st.integers(-1, E - 1)), max_size=20))
    tokens = torch.tensor([p[0] for p in pairs], dtype=torch.int64)
    chosen = torch.tensor([p[1] for p in pairs], dtype=torch.int64)
    module = experts(E, 4, 3, bias=True, dtype=torch.float64)
    x, gates, dy = inputs(tokens, 4, torch.float64)
    x = torch.randn(T, 4, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(T, 4, dtype=torch.float64)
    queue = DispatchQueue.from_pairs(tokens, chosen, T, E)
    y = module(x, queue, gates)
    dx, dgates = torch.autograd.grad(y, (x, gates), dy)
    # One slot per pair for the oracle: token t has slot i if pair i is its own.
    real = (tokens >= 0) & (tokens < T)
    wide = torch.full((T, len(pairs)), -1)
    wide[tokens[real], real.nonzero()[:, 0]] = chosen[real]
    want_y, want = oracle.expert_mlp_grads(x, wide, gates.detach().expand(T, -1), split_weights(module), dy)
    assert (y - want_y).norm() <= 1e-12 * (1 + want_y.norm())
    assert (dx - want["x"]).norm() <= 1e-12 * (1 + want["x"].norm())
    assert (dgates - want["gates"].sum(0)).norm() <= 1e-12 * (1 + dgates.norm())
    y2, saved = module.forward_saved(x.detach(), queue, gates.detach())
    dx2, dgates2, work = module.backward_input(saved, dy)
    work.run()
    assert torch.equal(y2, y) and torch.equal(dx2, dx) and torch.equal(dgates2, dgates)


@pytest.mark.parametrize("pairs", [False, True])
def test_gather_and_combine_are_differentiable(pairs: bool) -> None:
    """For own expert loops: gradcheck of both, with dropped slots."""
    ids = torch.tensor([[0, 2], [1, -1], [-1, -1], [2, 0]])
    if pairs:
        queue = DispatchQueue.from_pairs(torch.tensor([3, 0, 0, 1, 3]), torch.tensor([2, 0, 2, -1, 0]), 4, 3)
        gates = torch.rand(5, dtype=torch.float64, requires_grad=True)
    else:
        queue = DispatchQueue.build(ids, 3)
        gates = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(queue.num_rows, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(queue.gather, (x,))
    assert torch.autograd.gradcheck(lambda y, g: queue.combine(y, g), (rows, gates))
    assert torch.autograd.gradcheck(lambda y: queue.combine(y), (rows,))


def test_an_own_loop_of_gather_and_combine_equals_the_module() -> None:
    ids = routings()["sentinels"]
    module = experts(7, 6, 5, dtype=torch.float64)
    x, gates, _ = inputs(ids, 6, torch.float64, grad=False)
    queue = DispatchQueue.build(ids, 7)
    rows, bounds = queue.gather(x), queue.expert_token_offsets.tolist()
    y = torch.zeros_like(rows)
    for e in range(7):
        r = rows[bounds[e] : bounds[e + 1]]
        a = torch.nn.functional.silu(r @ module.w1_EFD[e].t()) * (r @ module.w3_EFD[e].t())
        y[bounds[e] : bounds[e + 1]] = a @ module.w2_EDF[e].t()
    want = module(x, queue, gates)
    assert (queue.combine(y, gates) - want).norm() < 1e-12 * want.norm()


def test_combine_is_exact_in_slot_order() -> None:
    """pytorch/torchtitan#1720: sums in bf16 lose small terms; here one rounding at the end."""
    ids = torch.arange(16)[None]
    queue = DispatchQueue.build(ids, 16)
    rows = torch.full((16, 2), 1.0, dtype=torch.bfloat16)
    rows[0] = 256.0
    assert queue.combine(rows).tolist() == [[272.0, 272.0]]
