"""What users reported of other systems, as scenarios here. Each test is named after a thread (survey, sections 3.2 and 4)."""

from __future__ import annotations

import gc
import time
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm.toy import Toy, gathered, random_toy, reference, run_rank
from torchmoe.comm.m2n import Key, M2NExchange
from torchmoe.comm.route import SequenceMap
from torchmoe.comm.transport import P2P
from torchmoe.errors import ConfigError, ExchangeError
from torchmoe.placement import Communicator, Deadlines, Placement
from torchmoe.testing import RankFailure, SimHub, assert_close_rel, run_ranks


def run(toy: Toy, **more: Any) -> list[dict[str, Any]]:
    return run_ranks(run_rank, toy.placement.world_size, args=(toy,), **more)


# ---- hangs, mismatches, empties
def test_megatron_4851_ranks_without_tokens_end_their_backward_with_zeros() -> None:
    """W = 4, everything routed to the first F rank, the second attention rank has no sequence."""
    ids = (((0, 1),) * 5,)
    toy = Toy((2,), (2,), (ids,), 4)
    ranks = run(toy)
    h, grads = gathered(toy, ranks)
    want_h, want = reference(toy)
    assert_close_rel(h, want_h, rel=1e-12)
    idle = ranks[3]["grads"]
    assert sorted(k for k in idle if ".e" in k) == ["0.e2", "0.e3"]  # zeros, not None
    assert all(not bool(idle[k].any()) for k in idle)
    assert_close_rel(grads["0.a"], want["0.a"], rel=1e-10)


def test_pytorch_172439_an_expert_without_tokens_has_a_gradient_of_exact_zeros() -> None:
    toy = random_toy([3], [2], layers=2)  # the last expert is never chosen
    _, grads = gathered(toy, run(toy))
    assert all(torch.equal(grads[f"{layer}.e6"], torch.zeros(6, 6, dtype=torch.float64)) for layer in range(2))


def test_torchrec_4149_the_order_of_communicators_is_a_function_of_the_placement() -> None:
    pl = Placement(attention=[2, 1], ffn=[1, 2], num_layers=5, num_experts=4)
    assert pl.communicators("direct") == Placement.from_json(pl.to_json()).communicators("direct")
    names = [c.name for c in pl.communicators("direct")]
    assert len(names) == len(set(names))


def other_lists(ctx: Any) -> None:
    base = Placement(attention=[1], ffn=[2], num_layers=1, num_experts=4).communicators("local")
    ctx.transport([*base, Communicator("more", (0, 1), False)] if ctx.rank == 1 else base)


def test_vllm_48720_another_list_of_communicators_is_an_error_at_start_up_on_every_rank() -> None:
    """gloo: 'new_group not called by all' returns at once and hangs later."""
    for f in run_ranks(other_lists, 3, backend="gloo", check=False, timeout=60):
        assert isinstance(f.error, ConfigError) and f.seconds < 50
        assert "is ['more', [0, 1], False] on rank 1 and nothing on rank 0" in f.text


def test_pytorch_159942_micro_batches_of_1_7_3_and_5_tokens_equal_one_process() -> None:
    toy = random_toy([2, 2], [1, 2], layers=3, lengths=(1, 7, 3, 5))
    h, grads = gathered(toy, run(toy))
    want_h, want = reference(toy)
    assert_close_rel(h, want_h, rel=1e-12)
    for k, v in want.items():
        assert_close_rel(grads[k], v, rel=1e-10, name=k)


def no_new_groups(ctx: Any, toy: Toy) -> int:
    made = Counter()
    real = dist.new_group

    def counted(*args: Any, **kw: Any) -> Any:
        made["groups"] += 1
        return real(*args, **kw)

    dist.new_group = counted
    try:
        run_rank(ctx, toy)
    finally:
        dist.new_group = real
    return made["groups"]


def test_pytorch_129140_all_groups_are_made_at_start_up_and_none_later() -> None:
    toy = random_toy([1], [1], layers=2)
    out = run_ranks(no_new_groups, 2, backend="gloo", args=(toy,))
    assert out == [len(toy.placement.communicators("local"))] * 2


# ---- gloo's own failures, section 3.2
def send_send(ctx: Any) -> None:
    t = ctx.transport([Communicator("a", (0, 1), False)])
    t.post("a", [P2P("send", 1 - ctx.rank, torch.zeros(64, dtype=torch.uint8))], "send first").wait(0.5)


def test_gloo_head_to_head_sends_are_a_proven_deadlock_here_and_a_named_timeout_there() -> None:
    sim, gloo = (run_ranks(send_send, 2, backend=b, check=False) for b in ("sim", "gloo"))
    assert any("deadlock of 2 ranks: rank 0 waits in send first" in f.text for f in sim)
    assert all("send first" in f.text and "64 B to rank" in f.text for f in gloo)


def late_failure(ctx: Any) -> tuple[bool, str]:
    t = ctx.transport([Communicator("a", (0, 1), False)])
    if ctx.rank == 1:
        raise ValueError("boom")
    work = t.post("a", [P2P("recv", 1, torch.zeros(8, dtype=torch.uint8))], "recv x")
    end = time.monotonic() + 20
    while not work.done() and time.monotonic() < end:
        time.sleep(0.01)
    try:
        work.wait(1)
    except ExchangeError as e:
        return True, str(e)
    return False, ""


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_gloo_an_asynchronous_failure_is_done_and_raises_at_wait(backend: str) -> None:
    out = run_ranks(late_failure, 2, backend=backend, check=False)
    assert out[0][0] and "8 B from rank 1" in out[0][1]


def two_orders(ctx: Any) -> str:
    t = ctx.transport([Communicator(n, (0, 1), False) for n in "ab"])
    names = "ab" if ctx.rank else "ba"
    works = []
    for n in names:
        buffers = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
        works.append(t.post(n, [P2P("send", 1 - ctx.rank, buffers[0]), P2P("recv", 1 - ctx.rank, buffers[1])], n))
    for w in works:
        w.wait(20)
    return "fine"


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_gloo_two_groups_in_different_order_are_fine_when_nothing_blocks(backend: str) -> None:
    assert run_ranks(two_orders, 2, backend=backend) == ["fine", "fine"]


# ---- determinism and accuracy of the combine
def test_torchtitan_1974_reruns_are_bit_equal_also_when_messages_arrive_in_another_order() -> None:
    toy = random_toy([3], [3], layers=2, top_k=4, dtype=torch.float32)
    first = gathered(toy, run(toy))

    def shuffled(communicator: str, source: int, destination: int, n: int) -> float:
        return (source * 7 + destination * 3 + n) % 5 * 0.004

    second = gathered(toy, run(toy, hub=SimHub(6, delay=shuffled)))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][k], second[1][k]) for k in first[1])


def test_slots_are_bit_equal_under_migration_and_any_number_of_expert_ranks_where_partial_sums_are_not() -> None:
    def bits(combine: str, ffn: int, owners: Any = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        toy = random_toy([2], [ffn], layers=2, top_k=4, dtype=torch.float32, settings={"combine": combine}, owners=owners)
        return gathered(toy, run(toy))

    moved = (tuple((e * 2 + 1) % 2 for e in range(7)), (1, 0, 0, 1, 1, 0, 1))
    for combine in ("slots", "partial"):
        h, grads = bits(combine, 2)
        same = []
        for ffn, owners in ((1, None), (3, None), (4, None), (2, moved)):
            other_h, other = bits(combine, ffn, owners)
            same.append(torch.equal(h, other_h) and all(torch.equal(grads[k], other[k]) for k in grads))
        assert all(same) if combine == "slots" else not all(same), (combine, same)


# ---- memory
def test_megablocks_154_a_receive_budget_that_is_exceeded_raises_before_anything_is_sent() -> None:
    toy = random_toy([2], [2], settings={"sizes": "fixed", "capacity": 3})
    out = run(toy, check=False)
    texts = [f.text for f in out if isinstance(f, RankFailure)]
    assert any("rows for the F ranks, capacity=3; raise the capacity, or choose overflow='drop' or 'grow'" in t for t in texts)


def test_megablocks_154_or_drops_the_last_rows_and_says_how_many() -> None:
    ids = (tuple((0, 2) for _ in range(5)), tuple((0, 1) for _ in range(2)))
    toy = Toy((2,), (2,), (ids,), 4, settings={"sizes": "fixed", "capacity": 3, "overflow": "drop"})
    ranks = run(toy)
    assert [r["dropped"] for r in ranks] == [4, 0, 0, 0]  # 2 of 5 rows for each F rank on the first attention rank
    cut = replace(toy, ids=((ids[0][:3] + ((-1, -1),) * 2, ids[1]),), settings={})
    h, grads = gathered(toy, ranks)
    want_h, want = reference(cut)
    assert_close_rel(h, want_h, rel=1e-12)
    for k, v in want.items():
        assert_close_rel(grads[k], v, rel=1e-10, name=k)


# ---- handles and configuration
def handles(ctx: Any) -> list[str]:
    pl = Placement(attention=[1], ffn=[1], num_layers=1, num_experts=1)
    ex = M2NExchange(pl, ctx.transport(pl.communicators("local")), dim=2, top_k=1)
    key, out = Key(0, 0), []
    if ctx.rank == 0:
        seqs, ids = SequenceMap(pl, (2,)), torch.zeros(2, 1, dtype=torch.long)
        route = ex.route(0, ids)
        sends = [ex.send_counts(key, route, seqs), ex.send_dispatch(key, route, torch.ones(2, 2), torch.ones(2, 1), ids)]
        pending = ex.post_combine(key, route)
        first = pending.wait()
        assert pending.wait() is first and pending.done()
        for s in sends:
            s.wait()
        gc.collect()  # handles that earlier tests left in cycles warn before, not within
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            lost = ex.post_combine(Key(0, 1), route)
            del lost
            gc.collect()
        out = [str(w.message) for w in seen if issubclass(w.category, ResourceWarning)]
    else:
        received = ex.post_counts(key).wait()
        rows, _, _ = ex.post_dispatch(key, received).wait()
        ex.send_combine(key, received, rows.clone()).wait()
    return out


def test_pytorch_188655_a_second_wait_gives_the_same_and_a_dropped_handle_warns() -> None:
    out = run_ranks(handles, 2)[0]
    assert out == [
        "recv combine number 2 of layer 0, micro-batch 1 was dropped while in flight; keep its handle and wait() for it"
    ]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"combine": "slots", "residual": "ride"}, "use combine='partial' or residual='direct'"),
        ({"combine": "slots", "sizes": "fixed", "capacity": 4}, "use sizes='exact'"),
        ({"sizes": "fixed"}, "give the rows per message"),
        ({"capacity": 4}, "leave it out"),
        ({"sizes": "fixed", "capacity": 4, "overflow": "drop", "residual": "ride"}, "use overflow='raise' or 'grow'"),
        ({"residual": "direct"}, "use residual='local'"),
        ({"combine": "mean"}, "use one of 'partial', 'slots'"),
        ({"dtype": torch.int32}, "use a floating point type"),
        ({"dim": 0}, "dim=0 must be a whole number >= 1"),
    ],
)
def test_megatron_1862_every_refused_pair_of_settings_says_why_and_what_to_change(settings: dict[str, Any], why: str) -> None:
    def build(ctx: Any) -> str:
        pl = Placement(attention=[1], ffn=[1], num_layers=1, num_experts=1)
        base = {"dim": 2, "top_k": 1, **settings}
        with pytest.raises(ConfigError) as e:
            M2NExchange(pl, ctx.transport(pl.communicators("local")), **base)
        return str(e.value)

    assert all(why in text for text in run_ranks(build, 2))


def test_torchtitan_2899_deadlines_are_ordered() -> None:
    with pytest.raises(ConfigError, match="ascending"):
        Deadlines(exchange=120, step=100, init=300)


def killed(ctx: Any) -> str:
    import os

    t = ctx.transport([Communicator("a", (0, 1), False), Communicator("b", (1, 2, 3), False)])
    if ctx.rank == 0:
        time.sleep(0.2)
        os._exit(9)
    peer = {1: 0, 2: 1, 3: 1}[ctx.rank]
    try:
        t.post("a" if ctx.rank == 1 else "b", [P2P("recv", peer, torch.zeros(8, dtype=torch.uint8))], "recv x").wait(3.0)
    except ExchangeError as e:
        t.report(e)
        raise
    return ""


def test_vllm_44428_a_dead_rank_is_named_also_by_those_who_never_spoke_to_it() -> None:
    out = run_ranks(killed, 4, backend="gloo", check=False, timeout=30)
    assert "code 9" in out[0].text
    for f in out[1:]:
        assert isinstance(f.error, ExchangeError) and f.seconds < 15
        assert "dead or stopped: rank 0, no heartbeat" in f.text, f.text
        assert f.text.count("recv x") <= 4  # DeepEP#181: one report, not a flood
