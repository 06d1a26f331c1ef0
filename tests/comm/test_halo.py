"""The hierarchical exchange: the flat exchange's permutation, its traffic, its gradients, and its overlap with the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchmoe import MoELayer
from torchmoe.comm.halo import HierarchicalAllToAll
from torchmoe.comm.waves import Waves, overlapped
from torchmoe.costs.colocated import Load, halo_all_to_all, halo_exchange, total
from torchmoe.errors import ConfigError, ExchangeError
from torchmoe.placement import contiguous_owners
from torchmoe.testing import RankContext, SimHub, run_ranks
from torchmoe.testing.sim import Mode

from .ep_programs import (
    DIM,
    HIDDEN,
    SAMPLE,
    Case,
    Fixed,
    both_forms,
    build_experts,
    flat,
    hierarchical,
    hierarchical_parallel,
    late,
    on_node_mesh,
    one_device,
    overlapped_parallel,
    random_routing,
)
from .test_all_to_all import blocks, cases, check_parity

MODES: list[Mode] = ["async", "comm"]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """(lanes, rows from rank to rank) of 1 to 4 nodes of 1 to 3 lanes."""
    nodes, lanes = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    w = nodes * lanes
    flat_sizes = draw(st.lists(st.sampled_from([0, 0, 1, 2, 3]), min_size=w * w, max_size=w * w))
    return lanes, [flat_sizes[i * w : (i + 1) * w] for i in range(w)]


def both(ctx: RankContext, lanes: int, sizes: list[list[int]], domains: Any) -> list[tuple[Tensor, Tensor]]:
    x = torch.cat(blocks(sizes)[ctx.rank])
    recv = [row[ctx.rank] for row in sizes]
    out = []
    for exchange, known in ((flat(ctx), None), (hierarchical(ctx, lanes, domains=domains), recv)):
        leaf = x.clone().requires_grad_()
        y = exchange.all_to_all(leaf, sizes[ctx.rank], known)
        (grad,) = torch.autograd.grad(y, leaf, y.detach() * 3)
        out.append((y.detach(), grad))
    return out


@given(shapes(), st.sampled_from(MODES), st.booleans())
@settings(max_examples=25, deadline=None)
def test_bit_equal_to_the_flat_exchange_as_a_permutation(shape: tuple[int, list[list[int]]], mode: Mode, far: bool) -> None:
    lanes, sizes = shape
    nodes = len(sizes) // lanes
    domains = tuple((n // 2,) for n in range(nodes)) if far else ()
    hub = SimHub(len(sizes), mode=mode)
    for rank, ((y, g), (hy, hg)) in enumerate(run_ranks(both, len(sizes), args=(lanes, sizes, domains), hub=hub)):
        assert torch.equal(y, hy) and torch.equal(g, hg)
        assert torch.equal(hg, 3 * torch.cat(blocks(sizes)[rank]))
    # every message between nodes goes from a lane to the same lane
    for m in hub.log:
        if m.communicator.startswith("halo.lane"):
            assert m.source % lanes == m.destination % lanes and m.source // lanes != m.destination // lanes
        if m.communicator.startswith("halo.node"):
            assert m.source // lanes == m.destination // lanes
    if not far:
        check_traffic(hub, "out", halo_all_to_all(sizes, [24], lanes=lanes))
        check_traffic(hub, "back", reverse(halo_all_to_all(sizes, [24], lanes=lanes)))


def reverse(loads: dict[tuple[int, int], Load]) -> dict[tuple[int, int], Load]:
    return {(j, i): load for (i, j), load in loads.items()}


def check_traffic(hub: SimHub, what: str, want: dict[tuple[int, int], Load]) -> None:
    got: dict[tuple[int, int], Load] = {}
    for m in hub.log:
        if m.communicator in (f"halo.lane.{what}", f"halo.node.{what}"):
            old = got.get((m.source, m.destination), Load())
            got[m.source, m.destination] = Load(old.messages + 1, old.num_bytes + m.num_bytes)
    assert got == want


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_full_exchanges_send_the_closed_form_number_of_messages(nodes: int, lanes: int, rows: int) -> None:
    w = nodes * lanes
    loads = halo_all_to_all([[rows] * w] * w, [16], lanes=lanes)
    assert total(loads, lanes=lanes).messages == w * (nodes - 1)  # flat: w * (nodes - 1) * lanes
    inside = w * (lanes - 1) * (2 if nodes > 1 else 1)
    assert total(loads).messages == w * (nodes - 1) + inside
    assert total(loads, lanes=lanes).num_bytes == w * (nodes - 1) * (16 + lanes * rows * 16)


# ---- tokens
@st.composite
def layered(draw: st.DrawFn) -> tuple[int, Case]:
    case = draw(cases())
    w = len(case["tokens"])
    lanes = draw(st.sampled_from([n for n in (1, 2, 3, 4) if w % n == 0]))
    return lanes, case


def dispatches(ctx: RankContext, lanes: int, case: Case) -> list[tuple[Tensor, ...]]:
    x, ids, gates, _ = random_routing(case)
    at = sum(case["tokens"][: ctx.rank])
    mine = slice(at, at + case["tokens"][ctx.rank])
    out = []
    for exchange in (flat(ctx, num_experts=case["experts"]), hierarchical(ctx, lanes, num_experts=case["experts"])):
        here = exchange.dispatch(x[mine], ids[mine], gates[mine])
        out.append((here.rows_RD, here.expert_ids_RK, here.gates_RK))
    return out


@given(layered())
@settings(max_examples=15, deadline=None)
def test_dispatched_rows_are_those_of_the_flat_exchange_and_cross_once_a_node(given_: tuple[int, Case]) -> None:
    lanes, case = given_
    w, k = len(case["tokens"]), case["top_k"]
    hub = SimHub(w)
    for a, b in run_ranks(dispatches, w, args=(lanes, case), hub=hub):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    _, ids, _, _ = random_routing(case)
    owners = contiguous_owners(case["experts"], w)
    tokens = [i.tolist() for i in torch.split(ids, case["tokens"])]
    check_traffic(hub, "out", halo_exchange(tokens, owners, [8 * DIM, 8 * k, 4 * k], lanes=lanes))


@given(layered(), st.sampled_from(MODES))
@settings(max_examples=15, deadline=None)
def test_layer_over_nodes_equals_one_device(given_: tuple[int, Case], mode: Mode) -> None:
    lanes, case = given_
    check_parity(case, run_ranks(hierarchical_parallel, len(case["tokens"]), args=(lanes, case), mode=mode))


@given(layered(), st.sampled_from(MODES))
@settings(max_examples=15, deadline=None)
def test_overlapped_experts_equal_one_device(given_: tuple[int, Case], mode: Mode) -> None:
    lanes, case = given_
    case = {**case, "capacity": None}
    check_parity(case, run_ranks(overlapped_parallel, len(case["tokens"]), args=(lanes, case), mode=mode))


NODES: Case = {**SAMPLE, "tokens": [5, 0, 7, 2], "capacity": None}


def test_both_forms_equal_one_device_on_gloo() -> None:
    out = run_ranks(both_forms, 4, backend="gloo", timeout=240, args=(2, NODES))
    for i in range(2):
        check_parity(NODES, [forms[i] for forms in out])


def test_a_mesh_of_nodes_and_lanes_makes_the_exchange() -> None:
    case = {**NODES, "dtype": torch.float64}
    check_parity(case, run_ranks(on_node_mesh, 4, backend="gloo", timeout=240, args=(case,)))


@pytest.mark.parametrize("split", [False, True])
def test_combine_traffic_is_the_reverse_of_dispatch_and_reduced_per_node(split: bool) -> None:
    case = {**NODES, "tokens": [4, 3, 5, 2, 0, 6], "experts": 12, "top_k": 4, "drop": False}
    hub = SimHub(6)
    run_ranks(overlapped_parallel if split else hierarchical_parallel, 6, args=(2, case), hub=hub)
    _, ids, _, _ = random_routing(case)
    tokens = [i.tolist() for i in torch.split(ids, case["tokens"])]
    owners, k = contiguous_owners(12, 6), 4
    waves = 2 if split else 1

    def loads(*fields: int) -> dict[tuple[int, int], Load]:
        return halo_exchange(tokens, owners, list(fields), lanes=2, waves=waves)

    def both_ways(a: dict[tuple[int, int], Load], b: dict[tuple[int, int], Load]) -> dict[tuple[int, int], Load]:
        return {p: Load(*map(sum, zip(a.get(p, Load()), b.get(p, Load()), strict=True))) for p in {*a, *b}}

    check_traffic(hub, "out", both_ways(loads(8 * DIM, 8 * k, 4 * k), loads(8 * DIM)))
    check_traffic(hub, "back", both_ways(reverse(loads(8 * DIM)), reverse(loads(8 * DIM, 8 * k))))


def test_the_first_wave_is_the_own_node_and_comes_before_any_other_node_has_sent() -> None:
    """Messages between nodes take 0.3 s; the own node's rows are there at once."""
    case = {**NODES, "tokens": [4, 4, 4, 4], "experts": 8}
    hub = SimHub(4, delay=lambda communicator, source, destination, n: 0.3 if communicator == "halo.lane.out" else 0.0)

    def body(ctx: RankContext) -> list[float]:
        x, ids, gates, _ = random_routing(case)
        mine = slice(4 * ctx.rank, 4 * ctx.rank + 4)
        exchange = hierarchical(ctx, 2, num_experts=8)
        waves = Waves(
            exchange, exchange.plan(ids[mine], split=True), [x[mine], gates[mine], ids[mine].int()], "dispatch", "combine"
        )
        for wave in waves:
            waves.give(wave, [wave.fields[0]])
        waves.finish()
        return waves.waited

    for own, other, _ in run_ranks(body, 4, hub=hub):
        assert own < 0.25 < other


# ---- refusals
def refused(ctx: RankContext) -> None:
    with pytest.raises(ConfigError, match="lanes must divide the ranks"):
        HierarchicalAllToAll(flat(ctx)._wire.transport, lanes=3)
    exchange = hierarchical(ctx, 2, num_experts=8)
    with pytest.raises(ExchangeError, match="pass what they send, or None"):
        exchange.all_to_all(torch.zeros(4, 2), [1] * 4, [2] * 4)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    waves = Waves(exchange, exchange.plan(ids, split=True), [torch.zeros(1, 2), torch.ones(1, 1), ids], "dispatch", "combine")
    rows = list(waves)
    with pytest.raises(ConfigError, match="iterate and give all first"):
        waves.finish()
    with pytest.raises(ConfigError, match="give every wave once, in order"):
        waves.give(rows[1], [rows[1].fields[0]])
    for wave in rows:
        waves.give(wave, [wave.fields[0]])
    waves.finish()


def test_what_cannot_work_is_refused() -> None:
    run_ranks(refused, 4)


@pytest.mark.parametrize("backend, collective", [("sim", False), ("gloo", False), ("gloo", True)])
def test_a_late_rank_is_a_named_error_within_the_deadline(backend: str, collective: bool) -> None:
    *told, last = run_ranks(late, 4, backend=backend, timeout=120, args=(2, collective))  # type: ignore[arg-type]
    assert last == "late"
    for text in told:
        seconds = float(text.split(" ")[0])
        # a rank that waits for one that gave up starts its own deadline later: two hops, two deadlines
        assert seconds < 2 * 2.0 + 1.0 and "counts on rank" in text, text
    assert any("rank 3" in text or "ranks [2, 3]" in text or "ranks [3]" in text or "[1, 3]" in text for text in told)


def other_owners(ctx: RankContext) -> None:
    exchange = hierarchical(ctx, 2, num_experts=4)
    if ctx.rank == 1:
        exchange.own([1, 0, 2, 3])
    exchange.dispatch(torch.zeros(1, 2), torch.tensor([[0]]), torch.ones(1, 1))


def test_different_owner_tables_are_noticed() -> None:
    out = run_ranks(other_owners, 4, check=False)
    assert any(f is not None and "announces other rows" in f.text and "owners" in f.text for f in out)


def test_twice_through_an_overlapped_backward_is_refused() -> None:
    def body(ctx: RankContext) -> None:
        exchange = hierarchical(ctx, 1, num_experts=2)
        x = torch.ones(2, DIM, requires_grad=True)
        y = overlapped(exchange, x, torch.tensor([[0], [1]]), torch.ones(2, 1), experts=lambda rows, ids, gates: 2 * rows)
        y.sum().backward(retain_graph=True)
        assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2.0))
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()

    run_ranks(body, 2)


def test_two_runs_are_bit_equal() -> None:
    case = {**NODES, "dtype": torch.float32}
    runs = [run_ranks(hierarchical_parallel, 4, args=(2, case)) for _ in range(2)]
    for (y1, g1), (y2, g2) in zip(*runs, strict=True):
        assert torch.equal(y1, y2) and all(torch.equal(g1[n], g2[n]) for n in g1)


def test_one_device_helper_is_a_layer_without_exchange() -> None:
    """The reference of this file is the layer that the experts' own tests check against an oracle."""
    y, grads = one_device(NODES)
    x, ids, gates, dy = random_routing(NODES)
    layer = MoELayer(Fixed(ids, gates), build_experts(NODES, tuple(range(NODES["experts"]))))
    assert layer.exchange is None and torch.equal(layer(x)[0], y)
    assert grads["experts.w1_EFD"].shape == (NODES["experts"], HIDDEN, DIM) and dy.shape == y.shape
