"""Every fault of one message ends, on every survivor, in a named error within the deadline plus a second. Nothing hangs."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from torchmoe.comm.debug import CheckedTransport
from torchmoe.comm.m2n import Key, M2NExchange
from torchmoe.comm.route import SequenceMap
from torchmoe.comm.transport import P2P
from torchmoe.errors import ConfigError, ExchangeError, ExchangeTimeout
from torchmoe.placement import Communicator, Deadlines, Placement
from torchmoe.testing import Fault, FaultyTransport, RankFailure, run_ranks

DEADLINE = 0.8
LIMIT = DEADLINE + 1.0
ALLOWANCE = 3.0  # for a loaded machine, on top of the promise
MICROBATCHES = 3
BOTH = ("sim", "gloo")
KINDS = ("counts", "dispatch", "combine", "d_combine:head", "d_dispatch")
SENDER = {"counts": 0, "dispatch": 0, "combine": 2, "d_combine:head": 0, "d_dispatch": 2}
PLACEMENT = Placement(
    attention=[2], ffn=[2], num_layers=1, num_experts=4, deadlines=Deadlines(exchange=DEADLINE, step=30.0, init=60.0)
)


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its error, and after how long since all ranks were ready."""

    error: str
    type: str
    seconds: float


def program(ctx: Any, fault: Fault | None, faulty: int, settings: dict[str, Any], other: dict[str, Any]) -> Ended | str:
    """Three micro-batches of one layer; equal sizes in all of them, so that swapped messages fit into each other's buffers."""
    transport = ctx.transport(PLACEMENT.communicators("local"))
    if fault is not None and ctx.rank == faulty:
        transport = FaultyTransport(transport, fault, process=ctx.backend == "gloo")
    base = {"dim": 4, "top_k": 2, "dtype": torch.float64, **settings, **(other if ctx.rank == faulty else {})}
    ex = M2NExchange(base.pop("placement", PLACEMENT), transport, **base)
    ctx.barrier()
    start = time.monotonic()
    try:
        run = attention if ex.where.role == "attention" else ffn
        run(ex)
    except (ExchangeError, ConfigError) as e:
        return Ended(str(e), type(e).__name__, time.monotonic() - start)
    return "ended well"


def attention(ex: M2NExchange) -> None:
    seqs, sends = SequenceMap(PLACEMENT, (4, 4)), []
    ids = torch.tensor([[0, 2], [1, 3], [0, 3], [2, 1]])
    routes = {}
    for m in range(MICROBATCHES):
        key = Key(0, m)
        x = torch.arange(16.0, dtype=ex.dtype).view(4, 4) + 100 * m
        routes[m] = ex.route(0, ids)
        sends.append(ex.send_counts(key, routes[m], seqs))
        sends.append(ex.send_dispatch(key, routes[m], x, torch.ones(4, 2, dtype=ex.gate_dtype), ids))
    for m in range(MICROBATCHES):
        ex.post_combine(Key(0, m), routes[m]).wait()
    for m in range(MICROBATCHES):
        sends.append(ex.send_d_combine(Key(0, m), routes[m], torch.ones(4, 4, dtype=ex.dtype)))
    for m in range(MICROBATCHES):
        ex.post_d_dispatch(Key(0, m), routes[m]).wait()
    for s in sends:
        s.wait()


def ffn(ex: M2NExchange) -> None:
    sends, received = [], {}
    for m in range(MICROBATCHES):
        key = Key(0, m)
        received[m] = ex.post_counts(key).wait()
        rows, _, _ = ex.post_dispatch(key, received[m]).wait()
        sends.append(ex.send_combine(key, received[m], rows * 2))
    for m in range(MICROBATCHES):
        key = Key(0, m)
        dy = ex.post_d_combine(key, received[m]).wait()
        sends.append(ex.send_d_dispatch(key, received[m], dy, torch.ones(dy.shape[0], ex.top_k, dtype=ex.gate_dtype)))
    for s in sends:
        s.wait()


def run(
    backend: str, fault: Fault | None, faulty: int, settings: dict[str, Any] | None = None, other: dict[str, Any] | None = None
) -> list[Any]:
    return run_ranks(program, 4, backend=backend, args=(fault, faulty, settings or {}, other or {}), check=False, timeout=40)


def named(out: list[Any], *words: str) -> None:
    """Some survivor's error has all of ``words``."""
    texts = [o.error for o in out if isinstance(o, Ended)]
    assert any(all(w in t for w in words) for t in texts), f"no error names {words}: {texts}"


def in_time(out: list[Any], but: tuple[int, ...] = ()) -> None:
    for rank, o in enumerate(out):
        if rank not in but:
            assert isinstance(o, Ended), f"rank {rank}: {o}"
            assert o.seconds < LIMIT + ALLOWANCE, f"rank {rank} took {o.seconds:.1f} s"


@pytest.mark.parametrize("backend", BOTH)
def test_without_a_fault_the_program_ends_well(backend: str) -> None:
    assert run(backend, None, 0) == ["ended well"] * 4
    assert run(backend, None, 0, {"debug": True}) == ["ended well"] * 4


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_a_late_message_is_a_timeout_that_names_it(kind: str, backend: str) -> None:
    faulty = SENDER[kind]
    out = run(backend, Fault("late", kind, 1, LIMIT + 0.7), faulty)
    in_time(out, but=(faulty,))
    name = kind.split(":")[0]
    named(out, f"recv {name} number 2 of layer 0, micro-batch 1", f"from rank {faulty}", "got nothing within 0.8 s", " B ")
    assert any(o.type == ExchangeTimeout.__name__ for o in out if isinstance(o, Ended))


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_rank_is_named_by_every_survivor(kind: str, backend: str) -> None:
    faulty = SENDER[kind]
    out = run(backend, Fault("dead", kind, 1), faulty)
    in_time(out, but=(faulty,))
    dead = out[faulty]
    assert isinstance(dead, RankFailure) and ("code 17" in dead.text if backend == "gloo" else "Killed" in dead.text)
    for rank, o in enumerate(out):
        if rank != faulty:
            # from the heartbeat on gloo, from the chain of reasons in the simulator: never only the neighbour that fell over
            assert (
                f"dead or stopped: rank {faulty}," if backend == "gloo" else f"first to fail was rank {faulty}: Killed"
            ) in o.error
    # a dying process takes with it what was sent but not read yet, so an earlier message may be the one missed
    named(out, "recv ", "layer 0, micro-batch ", f"from rank {faulty}", " B ")


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_is_too_short_is_never_taken_for_whole(kind: str, backend: str) -> None:
    faulty = SENDER[kind]
    out = run(backend, Fault("short", kind, 1, 16), faulty)
    in_time(out)
    what = f"recv {kind.split(':')[0]}"
    named(out, what, "layer 0, micro-batch 1", f"rank {faulty}", " B")
    named(out, "expected" if backend == "sim" else "end never came" if kind != "counts" else "too few")


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_is_too_long_is_named_by_all_but_the_process_that_gloo_aborts(kind: str, backend: str) -> None:
    faulty = SENDER[kind]
    out = run(backend, Fault("long", kind, 1, 16), faulty)
    if backend == "sim":
        in_time(out)
        named(out, "layer 0, micro-batch 1", f"rank {faulty}", "expected", " B")
        return
    aborted = tuple(r for r, o in enumerate(out) if isinstance(o, RankFailure) and "signal 6" in o.text)
    assert aborted, out  # bytes injected below our size check
    in_time(out, but=aborted)
    names = "rank " if len(aborted) == 1 else "ranks "
    for rank, o in enumerate(out):
        if rank not in aborted:
            assert f"dead or stopped: {names}{', '.join(map(str, aborted))}," in o.error


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("fault", ["reordered", "duplicated"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_message_in_the_place_of_another_is_never_swapped_silently(kind: str, fault: str, backend: str) -> None:
    faulty = SENDER[kind]
    out = run(backend, Fault(fault, kind, 0), faulty)  # type: ignore[arg-type]
    in_time(out)
    name = kind.split(":")[0]
    first, got = (0, 2) if fault == "reordered" else (1, 1)
    named(
        out,
        f"from rank {faulty}",
        f"expected {name} number {first + 1} of layer 0, micro-batch {first}",
        f"got {name} number {got} of",
    )


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_a_corrupted_header_is_an_error_always_and_corrupted_rows_in_debug_mode(kind: str, backend: str) -> None:
    faulty = SENDER[kind]
    name = kind.split(":")[0]
    out = run(backend, Fault("corrupted", kind, 1, 1), faulty)
    in_time(out)
    named(out, f"recv {name}", f"from rank {faulty}", f"{name} number 2 of layer 0, micro-batch 1", " B")
    out = run(backend, Fault("corrupted", kind, 1, -9), faulty, {"debug": True})
    in_time(out)
    named(out, f"recv {name}", f"from rank {faulty}", f"{name} number 2 of layer 0, micro-batch 1", "corrupted")


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("faulty", [0, 2])
@pytest.mark.parametrize(
    "other",
    [{"dtype": torch.float32}, {"dim": 5}, {"combine": "slots"}, {"placement": replace(PLACEMENT, owners=[[0, 1, 0, 1]])}],
    ids=["dtype", "dim", "combine", "owners"],
)
def test_a_rank_with_another_plan_is_refused_at_its_first_counts(other: dict[str, Any], faulty: int, backend: str) -> None:
    out = run(backend, None, faulty, {}, other)
    in_time(out)
    named(out, "recv counts", "counts number 1 of layer 0, micro-batch 0", "other settings", "handshake")


def shake(ctx: Any, other: dict[str, Any]) -> str:
    transport = ctx.transport(PLACEMENT.communicators("local"))
    base = {"dim": 4, "top_k": 2, **(other if ctx.rank == 3 else {})}
    ex = M2NExchange(base.pop("placement", PLACEMENT), transport, **base)
    try:
        ex.handshake()
    except ConfigError as e:
        ctx.barrier()
        return str(e)
    ctx.barrier()
    return "agreed"


@pytest.mark.parametrize("backend", BOTH)
def test_the_handshake_names_the_setting_that_differs_with_both_values(backend: str) -> None:
    assert run_ranks(shake, 4, backend=backend, args=({},)) == ["agreed"] * 4
    out = run_ranks(shake, 4, backend=backend, args=({"dtype": torch.bfloat16},))
    assert out[2] == "agreed"  # it exchanges with attention ranks only, and they agree with it
    assert "dtype='torch.float32', rank 3 has dtype='torch.bfloat16'" in out[0]
    assert "dtype='torch.bfloat16', rank 0 has dtype='torch.float32'" in out[3]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_written_while_they_are_sent_never_pass_in_debug_mode(kind: str) -> None:
    """Thread pytorch#188655: the CPU analogue of reusing memory under a running copy. Either end may notice first."""
    out = run("sim", Fault("mutated", kind, 1, -9), SENDER[kind], {"debug": True})
    texts = [o.error for o in out if isinstance(o, Ended) and "layer 0, micro-batch 1" in o.error]
    assert any("written while" in t or "corrupted" in t for t in texts), out


def overwrites(ctx: Any) -> str:
    transport = CheckedTransport(ctx.transport([Communicator("pair", (0, 1), False)]))
    if ctx.rank == 1:
        ctx.barrier()
        transport.post("pair", [P2P("recv", 0, torch.zeros(16, dtype=torch.uint8))], "residual of layer 3").wait(20)
        return ""
    buffer = torch.zeros(16, dtype=torch.uint8)
    work = transport.post("pair", [P2P("send", 1, buffer)], "residual of layer 3")
    buffer[5] = 1
    ctx.barrier()
    with pytest.raises(ExchangeError) as e:
        work.wait(20)
    return str(e.value)


@pytest.mark.parametrize("backend", BOTH)
def test_the_sender_notices_that_its_buffer_was_written(backend: str) -> None:
    text = run_ranks(overwrites, 2, backend=backend)[0]
    assert text.startswith("residual of layer 3: the 16 B for rank 1 were written while they were being sent")


def wrong_calls(ctx: Any) -> list[str]:
    """What the sender is told before anything leaves."""
    transport = ctx.transport(PLACEMENT.communicators("local"), record=True)
    ex = M2NExchange(PLACEMENT, transport, dim=4, top_k=2)
    if ex.where.role == "ffn":
        return []
    seqs, ids = SequenceMap(PLACEMENT, (3, 3)), torch.tensor([[0, 2], [1, 3], [0, 3]])
    route, gates, x = ex.route(0, ids), torch.ones(3, 2), torch.zeros(3, 4)
    key, texts = Key(0, 0), []
    ex._announced[key] = (9, 9)
    calls = [
        lambda: ex.send_dispatch(key, route, x[:2], gates, ids),
        lambda: ex.send_dispatch(key, route, x.double(), gates, ids),
        lambda: ex.send_dispatch(key, route, x, gates[:, :1], ids),
        lambda: ex.send_dispatch(key, route, x, gates, ids),  # announced were 9 and 9
        lambda: ex.send_d_combine(key, route, torch.zeros(3, 5)),
        lambda: ex.route(0, torch.tensor([[0, 4]])),
        lambda: ex.route(0, torch.tensor([0, 4])),
    ]
    for call in calls:
        with pytest.raises((ExchangeError, ValueError)) as e:
            call()
        texts.append(str(e.value))
    assert transport.log() == []
    assert seqs.num_tokens(ex.where) == 3
    return texts


def test_calls_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    texts = run_ranks(wrong_calls, 4)[0]
    for text, words in zip(
        texts,
        [
            ["x_TD has shape (2, 4)", "(3, 4)"],
            ["torch.float64", "carries torch.float32"],
            ["gates_TK has shape (3, 1)", "(3, 2)"],
            ["[3, 3] rows", "announced were [9, 9]"],
            ["dy_TD has shape (3, 5)"],
            ["outside [-1, 4)", "from 0 to 4"],
            ["must be [T, K]"],
        ],
        strict=True,
    ):
        assert all(w in text for w in words), text


def test_a_fault_that_does_not_exist_is_refused() -> None:
    """A fault that never happens would make every test of it pass."""
    with pytest.raises(ConfigError, match="fault kind 'slow' is unknown"):
        Fault("slow", "rows")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nth=-1"):
        Fault("late", "rows", nth=-1)
