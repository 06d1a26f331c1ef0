"""The automatic exchange: the model of the links, that all ranks choose alike, and that either choice moves the same rows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchmoe.comm.links import Hop, LinkModel, Sizes, fit_hop
from torchmoe.comm.topology import Topology
from torchmoe.errors import ConfigError
from torchmoe.testing import RankContext, run_ranks

from .ep_programs import SAMPLE, Case, auto, auto_parallel, flat, random_routing
from .test_all_to_all import blocks, cases, check_parity
from .test_halo import shapes

FREE = Hop(0.0, float("inf"))
DEAR = LinkModel(between=Hop(0.0, 1e9, per_message=1.0), inside=FREE)  # a message between nodes costs a second
CHEAP = LinkModel(between=Hop(1e-3, 1e6), inside=Hop(1e-3, 1e6))
SIZED = LinkModel(between=Hop(0.0, 1e3, per_message=0.1), inside=Hop(0.0, 2e3))  # depends on the rows


def test_the_model_prefers_few_messages_where_they_are_dear_and_one_hop_where_bytes_are() -> None:
    t = Topology(nodes=4, lanes=2)
    rows = Sizes(60, 10, 60, 40)
    assert DEAR.flat(t, rows, 64) > 1.9 * DEAR.halo(t, rows, 64)
    assert CHEAP.flat(t, rows, 64) < CHEAP.halo(t, rows, 64)
    # by hand: flat 6 messages of 0.1 s and 60 * 64 B at 1 kB/s; HALO 3 of them, then 40 * 64 B at 2 kB/s
    assert SIZED.flat(t, rows, 64) == pytest.approx(0.6 + 3.84)
    assert SIZED.halo(t, rows, 64) == pytest.approx(0.3 + 3.84 + 1.28)


@given(st.floats(0, 1e-2), st.floats(1e6, 1e9), st.floats(0, 1e-2))
@settings(max_examples=40, deadline=None)
def test_a_fit_of_exact_points_gives_them_back(latency: float, bandwidth: float, per_message: float) -> None:
    hop = Hop(latency, bandwidth, per_message)
    points = [(n, size, hop.seconds(n, size)) for n, size in itertools.product((1, 3, 6), (1024, 1 << 18))]
    fitted = fit_hop(points)
    for n, size, seconds in points:
        assert fitted.seconds(n, size) == pytest.approx(seconds, rel=1e-6)


def test_times_that_fall_with_the_size_still_give_a_link() -> None:
    hop = fit_hop([(1, 1000, 2e-3), (1, 100_000, 1e-3)])
    assert hop.latency > 0 and hop.bandwidth == float("inf")


@pytest.mark.parametrize("values", [(-1.0, 1.0), (0.0, 0.0), (0.0, float("nan"))])
def test_a_link_that_cannot_be_is_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        Hop(*values)


def both(ctx: RankContext, lanes: int, sizes: list[list[int]], links: LinkModel) -> Any:
    x = torch.cat(blocks(sizes)[ctx.rank])
    out: list[Tensor] = []
    exchange = auto(ctx, lanes, links=links)
    for e in (flat(ctx), exchange):
        leaf = x.clone().requires_grad_()
        y = e.all_to_all(leaf, sizes[ctx.rank])
        (grad,) = torch.autograd.grad(y, leaf, y.detach() * 3)
        out += [y.detach(), grad]
    return out, exchange.chosen, exchange.counts_form


@given(shapes(), st.sampled_from([DEAR, CHEAP, SIZED]))
@settings(max_examples=25, deadline=None)
def test_all_ranks_choose_alike_and_move_the_flat_exchanges_rows(shape: tuple[int, list[list[int]]], links: LinkModel) -> None:
    lanes, sizes = shape
    w = len(sizes)
    ranks = run_ranks(both, w, args=(lanes, sizes, links))
    assert all(r[1:] == ranks[0][1:] for r in ranks)
    for (y, g, ay, ag), _, _ in ranks:
        assert torch.equal(y, ay) and torch.equal(g, ag)
    # the choice is the model's, from the largest rank's rows, counted here by hand
    per = [[0] * 4 for _ in range(w)]
    for i, j in itertools.product(range(w), range(w)):
        n, away, other = sizes[i][j], i // lanes != j // lanes, i % lanes != j % lanes
        per[i][0] += n * away
        per[i][1] += n * (not away and i != j)
        per[i][2] += n * away
        per[i][3] += n * other
    most, t = Sizes(*(max(c) for c in zip(*per, strict=True))), Topology.of(w, lanes)
    want = "halo" if links.halo(t, most, 24) < 0.95 * links.flat(t, most, 24) else "flat"
    assert ranks[0][1] == {"flat": int(want == "flat"), "halo": int(want == "halo")}


def routed(ctx: RankContext, lanes: int, case: Case, links: LinkModel) -> Any:
    x, ids, gates, _ = random_routing(case)
    start = sum(case["tokens"][: ctx.rank])
    mine = slice(start, start + case["tokens"][ctx.rank])
    out = []
    for e in (flat(ctx, num_experts=case["experts"]), auto(ctx, lanes, links=links, num_experts=case["experts"])):
        d = e.dispatch(x[mine], ids[mine], gates[mine])
        out.append((d.rows_RD, d.expert_ids_RK, d.gates_RK))
    return out


@given(cases(), st.sampled_from([DEAR, CHEAP]))
@settings(max_examples=10, deadline=None)
def test_tokens_arrive_as_in_the_flat_exchange(case: Case, links: LinkModel) -> None:
    w = len(case["tokens"])
    for want, got in run_ranks(routed, w, args=(2 if w % 2 == 0 else 1, case, links)):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_layer_with_measured_links_equals_one_device(backend: Any) -> None:
    case = {**SAMPLE, "tokens": [5, 0, 7, 3]}
    ranks = run_ranks(auto_parallel, 4, backend=backend, args=(2, case))
    assert len({(str(r[1]), r[2]) for r in ranks}) == 1  # one measurement and one choice
    check_parity(case, [r[0] for r in ranks])
