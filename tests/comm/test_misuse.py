"""The calls used wrongly: every case ends in an error that says what to do, on every rank that is concerned; nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchmoe.comm.calls import M2NCalls, Rows
from torchmoe.comm.m2n import Key, M2NExchange
from torchmoe.comm.route import SequenceMap
from torchmoe.comm.transport import P2P
from torchmoe.errors import ConfigError, ExchangeError, RoutingError
from torchmoe.placement import Communicator, Deadlines, Placement
from torchmoe.router import Routing
from torchmoe.testing import RankContext, RankFailure, run_ranks

PL = Placement(attention=[1], ffn=[1], num_layers=2, num_experts=4, deadlines=Deadlines(exchange=0.5, step=20, init=60))
KEY = Key(0, 0)
IDS = torch.tensor([[0, 1], [2, 3], [1, 2]])


def summed(rows: Rows) -> torch.Tensor:
    return rows.rows_RD * rows.gates_RK.sum(1, keepdim=True)


def step(
    ctx: RankContext, *, ids: torch.Tensor = IDS, key: Key = KEY, experts: Callable[[Rows], Any] = summed, then: Any = None
) -> None:
    """A forward and backward; ``then(calls)`` on the F rank after its combine."""
    ex = M2NExchange(PL, ctx.transport(PL.communicators("local")), dim=4, top_k=2)
    calls = M2NCalls(ex)
    if ex.where.role == "ffn":
        calls(key, experts=experts)
        if then is not None:
            then(calls)
        calls.backward()
        return
    x = torch.ones(3, 4, requires_grad=True)
    y = calls(key, seqs=SequenceMap(PL, (3,)), x_TD=x, routing=Routing(ids, torch.ones(3, 2)))
    assert y is not None
    y.sum().backward()
    calls.finish()


def boom(rows: Rows) -> torch.Tensor:
    raise ValueError("boom")


@pytest.mark.parametrize(
    ("options", "rank", "error", "text"),
    [
        ({"ids": IDS.float() + 0.5}, 0, RoutingError, "expert ids are torch.float32; give integers"),
        ({"ids": IDS > 0}, 0, RoutingError, "expert ids are torch.bool; give integers"),
        ({"ids": IDS[:, 0]}, 0, Exception, "expert"),
        ({"ids": IDS + 9}, 0, RoutingError, "outside"),
        ({"key": Key(7, 0)}, 0, Exception, "layer"),
        ({"key": Key(-1, 0)}, 0, Exception, "layer"),
        ({"key": Key(0, -1)}, 0, ConfigError, "micro-batch -1 must be from 0 to 32767"),
        ({"key": Key(0, 40000)}, 0, ConfigError, "micro-batch 40000 must be from 0 to 32767"),
        ({"experts": lambda rows: None}, 1, ConfigError, "returned NoneType; return partial sums"),
        ({"experts": lambda rows: rows.rows_RD[:-1]}, 1, ExchangeError, "return one row per received row"),
        ({"experts": lambda rows: rows.rows_RD.int()}, 1, ExchangeError, "floating point rows"),
        ({"experts": boom}, 1, ValueError, "boom"),
        ({"then": lambda calls: calls.combine(KEY, torch.ones(1, 4))}, 1, ConfigError, "call receive() with this key first"),
        ({"then": lambda calls: calls.receive(KEY)}, 1, ExchangeError, "recv counts number 2 of layer 0, micro-batch 0"),
    ],
)
def test_a_wrong_call_is_named_and_the_other_rank_does_not_wait_for_ever(
    options: dict[str, Any], rank: int, error: type[Exception], text: str
) -> None:
    out = run_ranks(lambda ctx: step(ctx, **options), 2, check=False, timeout=20)
    wrong = out[rank]
    assert isinstance(wrong, RankFailure) and isinstance(wrong.error, error), wrong
    assert text in wrong.text, wrong.text
    other = out[1 - rank]
    assert isinstance(other, RankFailure) and other.seconds < 10


def closed(ctx: RankContext, how: str) -> None:
    t = ctx.transport([Communicator("a", (0, 1), False)])
    buffer = torch.zeros(8, dtype=torch.uint8)
    if how == "then post":
        t.close()
        t.close()
        t.post("a", [P2P("send", 1 - ctx.rank, buffer)], "send x")
    elif how == "in flight":
        work = t.post("a", [P2P("recv", 1 - ctx.rank, buffer)], "recv x")
        t.close()
        work.wait(1.0)
    else:
        t.post("a", [P2P("both", 1 - ctx.rank, buffer)], "send x")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["sim", "gloo"])
@pytest.mark.parametrize(
    ("how", "text"), [("then post", "was closed"), ("in flight", "recv x"), ("no such side", "use 'send' or 'recv'")]
)
def test_a_closed_transport_and_a_wrong_operation_are_named(how: str, text: str, backend: str) -> None:
    out = run_ranks(closed, 2, backend=backend, args=(how,), check=False, timeout=20)  # type: ignore[arg-type]
    for f in out:
        assert isinstance(f, RankFailure) and isinstance(f.error, ConfigError | ExchangeError) and text in f.text, f
