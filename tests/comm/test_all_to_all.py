"""The flat exchange: a permutation of rows, and expert parallelism that equals one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchmoe import DispatchQueue, FusedExpertMLP, MoELayer, TopKRouter
from torchmoe.costs.colocated import flat_all_to_all, flat_exchange
from torchmoe.errors import ConfigError, ExchangeError
from torchmoe.placement import Deadlines, contiguous_owners
from torchmoe.testing import RankContext, RankFailure, RanksFailed, SimHub, run_ranks
from torchmoe.testing.oracle import relative_error

from .ep_programs import (
    DIM,
    HIDDEN,
    SAMPLE,
    Case,
    Fixed,
    all_dtypes,
    build_experts,
    copied_compiled_elsewhere,
    expert_parallel,
    flat,
    on_meshes,
    one_device,
    other_rows,
    random_routing,
    saved_and_loaded,
    sharded_over_replicas,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}  # relative to the norm


def blocks(sizes: list[list[int]], dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """Rows i -> j with values that say where they come from and go to."""
    return [
        [torch.tensor([[i, j, r] for r in range(n)], dtype=dtype).view(n, 3) for j, n in enumerate(row)]
        for i, row in enumerate(sizes)
    ]


def permuted(ctx: RankContext, sizes: list[list[int]], known: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    exchange = flat(ctx)
    x = torch.cat(blocks(sizes, dtype)[ctx.rank]).requires_grad_()
    recv = [row[ctx.rank] for row in sizes] if known else None
    out = exchange.all_to_all(x, sizes[ctx.rank], recv)
    (grad,) = torch.autograd.grad(out, x, out.detach() * 2)
    return out.detach(), grad


@st.composite
def square(draw: st.DrawFn) -> list[list[int]]:
    w = draw(st.integers(1, 5))
    return draw(st.lists(st.lists(st.integers(0, 3), min_size=w, max_size=w), min_size=w, max_size=w))


@given(square(), st.booleans(), st.sampled_from([torch.float64, torch.bfloat16, torch.float16]))
@settings(max_examples=20, deadline=None)
def test_rows_arrive_by_source_and_gradients_go_back_the_same_way(
    sizes: list[list[int]], known: bool, dtype: torch.dtype
) -> None:
    if not dtype.is_floating_point:
        dtype = torch.float16
    hub = SimHub(len(sizes))
    out = run_ranks(permuted, len(sizes), args=(sizes, known, dtype), hub=hub)
    parts = blocks(sizes, dtype)
    for j, (rows, grad) in enumerate(out):
        assert torch.equal(rows, torch.cat([parts[i][j] for i in range(len(sizes))]))
        assert torch.equal(grad, 2 * torch.cat(parts[j]))
    want = flat_all_to_all(sizes, [3 * dtype.itemsize])
    back = {(j, i): load for (i, j), load in want.items()}
    got: dict[tuple[int, int], list[int]] = {}
    for m in hub.log:
        if m.communicator == "ep.rows":
            got.setdefault((m.source, m.destination), []).append(m.num_bytes)
    for pair in {*want, *back, *got}:
        loads = [d[pair].num_bytes for d in (want, back) if pair in d]
        assert sorted(got.get(pair, [])) == sorted(loads)


# ---- expert parallelism against one device
@st.composite
def cases(draw: st.DrawFn) -> Case:
    w = draw(st.integers(1, 4))
    e = draw(st.integers(w, 9))
    k = draw(st.integers(1, min(3, e)))
    return {
        "tokens": draw(st.lists(st.integers(0, 5), min_size=w, max_size=w)),
        "experts": e,
        "top_k": k,
        "seed": draw(st.integers(0, 1000)),
        "drop": draw(st.booleans()),
        "idle": draw(st.booleans()),
        "capacity": draw(st.sampled_from([None, None, 1, 3])),
        "dtype": draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16])),
    }


def close(got: Tensor, want: Tensor, case: Case, name: str) -> None:
    scale = want.double().norm().item()
    if case["dtype"] != torch.float64:
        scale += 1.0  # of a few elements one may be a sum that cancels to far below its terms, which are near 1
    error = (got.double() - want.double()).norm().item()
    assert error <= TOLERANCE[case["dtype"]] * scale, f"{name}: {error:.2e} of {scale:.2e}"


def check_parity(case: Case, out: list[tuple[Tensor, dict[str, Tensor]]]) -> None:
    want_y, want = one_device(case)
    close(torch.cat([y for y, _ in out]), want_y, case, "y")
    for name in ("x", "router.gates"):
        close(torch.cat([g[name] for _, g in out]), want[name], case, name)
    for name in ("experts.w1_EFD", "experts.w2_EDF", "experts.w3_EFD"):
        got = torch.cat([g[name] for _, g in out])
        close(got, want[name], case, name)
        idle = want[name].flatten(1).abs().sum(1) == 0
        assert not got[idle].any(), "an expert without tokens has a gradient of exact zeros"


@given(cases())
@settings(max_examples=30, deadline=None)
def test_expert_parallel_layer_equals_one_device(case: Case) -> None:
    check_parity(case, run_ranks(expert_parallel, len(case["tokens"]), args=(case,)))


DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def test_expert_parallel_layer_equals_one_device_on_gloo() -> None:
    out = run_ranks(all_dtypes, 3, backend="gloo", timeout=240, args=(SAMPLE, DTYPES))
    for i, dtype in enumerate(DTYPES):
        check_parity({**SAMPLE, "dtype": dtype}, [per_dtype[i] for per_dtype in out])


def test_ep_mesh_takes_a_dimension_of_a_device_mesh() -> None:
    out = run_ranks(on_meshes, 4, backend="gloo", timeout=240)
    assert [n for _, _, n in out] == [3, 2, 3, 2]
    for got, want, _ in out:
        assert relative_error(got, want) < 1e-12


def test_a_layer_is_cast_copied_compiled_and_used_under_another_default_device() -> None:
    run_ranks(copied_compiled_elsewhere, 2, backend="gloo", timeout=240)


def test_fsdp2_over_the_replicas_of_expert_parallelism() -> None:
    """The experts' own FSDP2 group is gathered inside their forward; the layer once read their sharded size before it."""
    out = run_ranks(sharded_over_replicas, 4, backend="gloo", timeout=240)
    whole = MoELayer(TopKRouter(DIM, 4, 2, dtype=torch.float64), build_experts(SAMPLE | {"experts": 4}, (0, 1, 2, 3)))
    whole.router.weight_ED.data.copy_(torch.randn(4, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    x = torch.randn(4, 7, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y, _ = whole(x)
    y.square().sum().backward()
    for rank, (got, grads, owned) in enumerate(out):
        assert relative_error(got, y[rank].detach()) < 1e-12
        for name, p in whole.named_parameters():
            assert p.grad is not None
            assert relative_error(grads[name], p.grad[list(owned)] if name.startswith("experts") else p.grad) < 1e-12


def test_a_checkpoint_of_three_ranks_loads_on_two(tmp_path: Path) -> None:
    run_ranks(saved_and_loaded, 3, backend="gloo", timeout=240, args=(str(tmp_path),))
    run_ranks(saved_and_loaded, 2, backend="gloo", timeout=240, args=(str(tmp_path),))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x, ids, gates: (x, ids.float(), gates), "expert ids torch.float32 integers"),
        (lambda x, ids, gates: (x, ids, ids), "gates torch.int64 must be floating"),
        (lambda x, ids, gates: (x.long(), ids, gates), "x torch.int64"),
        (lambda x, ids, gates: (x, ids.to("meta"), gates), "expert ids on meta"),
    ],
)
def test_tokens_of_a_wrong_type_are_refused_before_anything_is_sent(change: Any, text: str) -> None:
    def program(ctx: RankContext) -> None:
        exchange = flat(ctx, num_experts=2)
        with pytest.raises(ConfigError, match=text):
            exchange.dispatch(*change(torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)))

    run_ranks(program, 2)


@given(cases())
@settings(max_examples=12, deadline=None)
def test_dispatch_traffic_equals_the_count_from_the_routing(case: Case) -> None:
    hub = SimHub(len(case["tokens"]))

    def dispatches(ctx: RankContext) -> None:
        x, ids, gates, _ = random_routing(case)
        at = sum(case["tokens"][: ctx.rank])
        mine = slice(at, at + case["tokens"][ctx.rank])
        exchange = flat(ctx, num_experts=case["experts"])
        here = exchange.dispatch(x[mine], ids[mine], gates[mine])
        assert set(here.expert_ids_RK.unique().tolist()) <= {-1, *exchange.local_experts}
        assert bool((here.expert_ids_RK >= 0).any(1).all()), "every received row has a slot here"

    run_ranks(dispatches, len(case["tokens"]), hub=hub)
    _, ids, _, _ = random_routing(case)
    owners = contiguous_owners(case["experts"], len(case["tokens"]))
    k = case["top_k"]
    want = flat_exchange([i.tolist() for i in torch.split(ids, case["tokens"])], owners, [8 * DIM, 8 * k, 4 * k])
    got = {(m.source, m.destination): m.num_bytes for m in hub.log if m.communicator == "ep.rows"}
    assert got == {pair: load.num_bytes for pair, load in want.items()}


# ---- refusals
def refused(ctx: RankContext) -> None:
    exchange = flat(ctx, num_experts=4)
    x, ids, gates = torch.zeros(2, DIM), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)
    with pytest.raises(ConfigError, match=r"must be \[T, D\], \[T, K\] and \[T, K\] of one T"):
        exchange.dispatch(x[:1], ids, gates)
    with pytest.raises(ConfigError, match=r"send_rows=\[1, 0\] must cut the rows of \(2, 6\) into 2 parts"):
        exchange.all_to_all(x, [1, 0])
    with pytest.raises(ExchangeError, match="pass what each rank sends here"):
        exchange.all_to_all(x, [1, 1], [5, 5])
    with pytest.raises(ConfigError, match="rank 0 of the exchange owns 2 of 4" if ctx.rank == 0 else "rank 1 of"):
        MoELayer(TopKRouter(DIM, 4, 1), FusedExpertMLP(4, DIM, HIDDEN), exchange=exchange)
    with pytest.raises(ConfigError, match="must name one of 2 ranks for each of 4 experts"):
        exchange.own([0, 1, 2, 0])
    with pytest.raises(ConfigError, match="without num_experts"):
        flat(ctx).dispatch(x, ids, gates)


def test_what_cannot_work_is_refused_before_anything_is_sent() -> None:
    run_ranks(refused, 2)


def disagree(ctx: RankContext) -> None:
    exchange = flat(ctx, num_experts=4, deadlines=Deadlines(exchange=3.0))
    x = torch.zeros(2, DIM)
    if ctx.rank:
        exchange.all_to_all(x, [1, 1], [1, 1])
    else:
        exchange.dispatch(x, torch.tensor([[3], [2]]), torch.ones(2, 1))


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_ranks_that_call_different_exchanges_are_told_and_do_not_hang(backend: str) -> None:
    out = run_ranks(disagree, 2, backend=backend, timeout=120, check=False)  # type: ignore[arg-type]
    assert all(isinstance(f, RankFailure) and isinstance(f.error, ExchangeError) and f.seconds < 60 for f in out)


@pytest.mark.parametrize("backend", ["sim", "gloo"])
@pytest.mark.parametrize("what", ["dtype", "width", "k", "gates", "owners", "call"])
def test_rows_that_the_others_do_not_expect_are_refused_with_the_counts(what: str, backend: str) -> None:
    for lanes, world in ((0, 2), (2, 4)):
        out = run_ranks(other_rows, world, backend=backend, timeout=60, check=False, args=(lanes, what))  # type: ignore[arg-type]
        assert all(isinstance(f, RankFailure) and isinstance(f.error, ExchangeError) for f in out), out
        assert any("announces other rows" in f.text and "call the same operation" in f.text for f in out)


def other_results(ctx: RankContext) -> None:
    exchange = flat(ctx, num_experts=2)
    here = exchange.dispatch(torch.ones(2, DIM), torch.tensor([[0], [1]]), torch.ones(2, 1))
    rows = here.rows_RD
    for wrong in (rows.double(), rows[:1], torch.cat([rows, rows], 1), None):
        with pytest.raises(ConfigError, match="return one row per received row, of its width and dtype"):
            exchange.combine(wrong, here)  # type: ignore[arg-type]
    exchange.combine(rows, here)


def test_results_that_the_others_do_not_expect_are_refused_before_anything_is_sent() -> None:
    run_ranks(other_results, 2)


def wrong_counts(ctx: RankContext) -> None:
    """Rank 0 sends one row, rank 1 was told two: on gloo the message is short and arrives without an error."""
    flat(ctx).all_to_all(torch.zeros(2 - ctx.rank, DIM), [1, 1] if ctx.rank == 0 else [0, 1], [1, 0] if ctx.rank == 0 else [2, 1])


def test_a_short_message_is_noticed_on_gloo() -> None:
    with pytest.raises(RanksFailed, match=r"from rank 0 to rank 1 .* got a message that is too short"):
        run_ranks(wrong_counts, 2, backend="gloo", timeout=120)


def test_owners_may_be_any_table_and_change_between_calls() -> None:
    owners = [[2, 0, 0, 1, 2], [1, 1, 2, 2, 0]]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, DIM, generator=g, dtype=torch.float64)
    ids = torch.rand(3, 4, 5, generator=g).topk(2, -1).indices
    gates = torch.rand(3, 4, 2, generator=g, dtype=torch.float64)

    def body(ctx: RankContext) -> list[Tensor]:
        exchange, out = flat(ctx, num_experts=5, owners=owners[0]), []
        for table in owners:
            exchange.own(table)
            experts = build_experts({**SAMPLE, "experts": 5}, exchange.local_experts)
            here = exchange.dispatch(x[ctx.rank], ids[ctx.rank], gates[ctx.rank])
            queue = DispatchQueue.build(exchange.local_ids(here.expert_ids_RK), len(exchange.local_experts), backend="reference")
            out.append(exchange.combine(experts(here.rows_RD, queue, here.gates_RK), here).detach())
        return out

    whole = MoELayer(Fixed(ids.view(12, 2), gates.view(12, 2)), build_experts({**SAMPLE, "experts": 5}, tuple(range(5))))
    want = whole(x.view(12, DIM))[0].view(3, 4, DIM)
    for rank, ys in enumerate(run_ranks(body, 3)):
        for y in ys:
            assert relative_error(y, want[rank]) < 1e-12


def test_two_runs_are_bit_equal() -> None:
    case = {**SAMPLE, "dtype": torch.float32}
    runs = [run_ranks(expert_parallel, 3, args=(case,)) for _ in range(2)]
    for (y1, g1), (y2, g2) in zip(*runs, strict=True):
        assert torch.equal(y1, y2) and all(torch.equal(g1[n], g2[n]) for n in g1)
