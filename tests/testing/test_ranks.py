"""run_ranks: results by rank, named failures, no hang, on threads and on processes."""

from __future__ import annotations

import os
import time

import pytest
import torch

from torchmoe.comm.transport import P2P, Message
from torchmoe.errors import ConfigError, ExchangeError, ExchangeTimeout, PeerLost
from torchmoe.placement import Communicator
from torchmoe.testing.ranks import RankContext, RankFailure, RanksFailed, run_ranks
from torchmoe.testing.sim import Deadlock, SimHub

BOTH = ("sim", "gloo")


def everyone(ctx: RankContext, name: str = "all", host: bool = False) -> list[Communicator]:
    return [Communicator(name, tuple(range(ctx.world)), host)]


def buffer(n: int, value: int = 0) -> torch.Tensor:
    return torch.full((n,), value, dtype=torch.uint8)


def ring(ctx: RankContext, n: int) -> tuple[list[int], list[Message]]:
    t = ctx.transport(everyone(ctx), record=True)
    got = buffer(n)
    recv = t.post("all", [P2P("recv", (ctx.rank - 1) % ctx.world, got)], "ring")
    send = t.post("all", [P2P("send", (ctx.rank + 1) % ctx.world, buffer(n, ctx.rank))], "ring")
    recv.wait(20)
    send.wait(20)
    assert recv.done() and send.done()
    return got.tolist(), t.log()


@pytest.mark.parametrize("backend", BOTH)
def test_every_rank_receives_its_neighbours_bytes_and_logs_what_it_sent(backend: str) -> None:
    out = run_ranks(ring, 4, backend=backend, args=(5,))
    for rank, (got, log) in enumerate(out):
        assert got == [(rank - 1) % 4] * 5
        assert log == [Message("all", rank, (rank + 1) % 4, 5)]


@pytest.mark.parametrize("world", [64, 256])
def test_many_ranks_run_as_threads(world: int) -> None:
    assert [got[0] for got, _ in run_ranks(ring, world, args=(1,))] == [(r - 1) % world for r in range(world)]


def fifo(ctx: RankContext) -> list[int]:
    t = ctx.transport(everyone(ctx))
    if ctx.rank == 0:
        works = [t.post("all", [P2P("send", 1, buffer(3, i))], f"message {i}") for i in range(20)]
        for w in reversed(works):
            w.wait(20)
        return []
    got = [buffer(3) for _ in range(20)]
    works = [t.post("all", [P2P("recv", 0, b)], f"message {i}") for i, b in enumerate(got)]
    for w in reversed(works):
        w.wait(20)
    return [int(b[0]) for b in got]


@pytest.mark.parametrize("backend", BOTH)
def test_messages_of_one_edge_arrive_in_order_however_they_are_waited_for(backend: str) -> None:
    assert run_ranks(fifo, 2, backend=backend)[1] == list(range(20))


def poll(ctx: RankContext) -> tuple[bool, bool]:
    t = ctx.transport(everyone(ctx))
    if ctx.rank == 0:
        work = t.post("all", [P2P("send", 1, buffer(3))], "late")
        early = work.done()
        ctx.barrier()
        end = time.monotonic() + 20
        while not work.done() and time.monotonic() < end:
            time.sleep(0.001)
        return early, work.done()
    ctx.barrier()
    t.post("all", [P2P("recv", 0, buffer(3))], "late").wait(20)
    return False, True


@pytest.mark.parametrize("backend", BOTH)
def test_done_is_false_before_the_receive_is_posted_and_true_without_any_wait(backend: str) -> None:
    assert run_ranks(poll, 2, backend=backend) == [(False, True), (False, True)]


def circle(ctx: RankContext) -> None:
    t = ctx.transport(everyone(ctx))
    t.post("all", [P2P("recv", (ctx.rank + 1) % ctx.world, buffer(8))], "combine of layer 3").wait(1.0)


def test_a_deadlock_is_proven_at_once_and_names_who_waits_for_what() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as e:
        run_ranks(circle, 3)
    assert time.monotonic() - start < 0.9  # before the deadline of 1 s: it was not a timeout
    assert isinstance(e.value.failures[0].error, Deadlock)
    assert "rank 2 waits in combine of layer 3 (8 B from rank 0 on 'all')" in str(e.value)


def test_gloo_ends_the_same_deadlock_at_its_deadline_and_names_the_message() -> None:
    out = run_ranks(circle, 3, backend="gloo", check=False)
    assert all(isinstance(f, RankFailure) and f.seconds < 20 for f in out)
    for f in out:
        # who gives up first closes its connections, so a neighbour may see that instead
        assert isinstance(f.error, ExchangeTimeout | PeerLost)
        assert f"8 B from rank {(f.rank + 1) % 3} on communicator 'all'" in f.text and "combine of layer 3" in f.text


def dies(ctx: RankContext, how: str) -> None:
    t = ctx.transport(everyone(ctx))
    if ctx.rank == 1:
        if how == "exit":
            os._exit(3)
        raise ValueError("boom")
    t.post("all", [P2P("recv", 1, buffer(8))], "dispatch of layer 0").wait(10.0)


@pytest.mark.parametrize(("backend", "how"), [("sim", "raise"), ("gloo", "raise"), ("gloo", "exit")])
def test_a_dead_rank_is_the_first_failure_and_survivors_raise_peer_lost(backend: str, how: str) -> None:
    with pytest.raises(RanksFailed) as e:
        run_ranks(dies, 3, backend=backend, args=(how,))
    first, *rest = e.value.failures
    assert first.rank == 1 and ("boom" in first.text if how == "raise" else "code 3" in first.text)
    assert [type(f.error) for f in rest] == [PeerLost, PeerLost]
    assert all("dispatch of layer 0" in f.text and "rank 1" in f.text for f in rest)


def sleeps(ctx: RankContext) -> None:
    if ctx.rank == 1:
        time.sleep(30)


@pytest.mark.parametrize("backend", BOTH)
def test_a_rank_that_never_ends_is_ended_by_the_timeout(backend: str) -> None:
    start, limit = time.monotonic(), 0.5 if backend == "sim" else 5.0
    out = run_ranks(sleeps, 3, backend=backend, timeout=limit, check=False)
    assert time.monotonic() - start < 20
    assert out[0] is None and out[2] is None and f"still running after {limit:g} s" in out[1].text


def wrong_size(ctx: RankContext) -> None:
    t = ctx.transport(everyone(ctx))
    op = P2P("send", 1, buffer(8)) if ctx.rank == 0 else P2P("recv", 0, buffer(9))
    t.post("all", [op], "dispatch").wait(5)


def test_sim_names_a_message_of_another_size_on_both_ends() -> None:
    out = run_ranks(wrong_size, 2, check=False)
    for f in out:
        assert type(f.error) is ExchangeError and "dispatch of 8 B, expected dispatch of 9 B" in f.text


def bad_posts(ctx: RankContext) -> list[str]:
    t = ctx.transport([Communicator("pair", (0, 1), False)])
    if ctx.rank == 2:
        cases = [("pair", [])]
    else:
        cases = [
            ("nobody", []),
            ("pair", [P2P("send", ctx.rank, buffer(1))]),
            ("pair", [P2P("send", 2, buffer(1))]),
            ("pair", [P2P("send", 1 - ctx.rank, torch.zeros(4))]),
            ("pair", [P2P("send", 1 - ctx.rank, buffer(8)[::2])]),
        ]
    texts = []
    for name, ops in cases:
        with pytest.raises(ConfigError) as e:
            t.post(name, ops, "dispatch of layer 1")
        texts.append(str(e.value))
    return texts


@pytest.mark.parametrize("backend", BOTH)
def test_a_post_that_cannot_work_is_refused_before_anything_is_sent(backend: str) -> None:
    out = run_ranks(bad_posts, 3, backend=backend)
    assert [len(t) for t in out] == [5, 5, 1]
    assert all(text.startswith("dispatch of layer 1: ") for texts in out for text in texts)


def other_lists(ctx: RankContext) -> None:
    ctx.transport([Communicator("a" if ctx.rank != 1 else "b", (0, 1, 2), False)])


def test_ranks_that_create_different_communicators_are_told_so() -> None:
    with pytest.raises(RanksFailed, match=r"creates communicator Communicator\(name='[ab]'.* where rank \d creates "):
        run_ranks(other_lists, 3)


def test_a_function_that_cannot_be_pickled_is_refused_for_processes() -> None:
    with pytest.raises(ConfigError, match="picklable"):
        run_ranks(lambda ctx: None, 2, backend="gloo")


def head_of_line(ctx: RankContext) -> str:
    """Rank 0 sends on "one" first, rank 1 receives on "two" first: it passes only without an order between communicators."""
    t = ctx.transport([Communicator("one", (0, 1), False), Communicator("two", (0, 1), False)])
    if ctx.rank == 0:
        works = [t.post(name, [P2P("send", 1, buffer(4))], name) for name in ("one", "two")]
    else:
        first = t.post("two", [P2P("recv", 0, buffer(4))], "two")
        first.wait(5)
        works = [t.post("one", [P2P("recv", 0, buffer(4))], "one")]
    for w in works:
        w.wait(5)
    return "passed"


@pytest.mark.parametrize(("mode", "passes"), [("async", True), ("comm", True), ("rank", False)])
def test_modes_order_operations_as_they_say(mode: str, passes: bool) -> None:
    out = run_ranks(head_of_line, 2, mode=mode, check=False)
    assert (out == ["passed"] * 2) is passes
    if not passes:
        assert any(isinstance(f.error, Deadlock) for f in out)


def test_the_hub_logs_all_messages_and_delays_them() -> None:
    hub = SimHub(4, delay=lambda communicator, source, destination, n: 0.2 if source == 2 else 0.0)
    start = time.monotonic()
    run_ranks(ring, 4, args=(7,), hub=hub)
    assert time.monotonic() - start >= 0.2
    assert sorted(hub.log) == [Message("all", r, (r + 1) % 4, 7) for r in range(4)]
