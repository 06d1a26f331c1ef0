"""The runner, the exchange and AF-Pipe together: every layout computes what one process computes."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pipeline.runtime.af_model import Case, Data, Dense, build_stages, parameters, reference
from torchmoe.comm.m2n import M2NExchange
from torchmoe.errors import ConfigError, ScheduleError
from torchmoe.experts import FusedExpertMLP, RankExperts
from torchmoe.pipeline.lower import lower
from torchmoe.pipeline.runtime.runner import Runner
from torchmoe.pipeline.runtime.stage import AttentionOutput, Stages
from torchmoe.pipeline.schedules.afpipe import AFPipeSchedule
from torchmoe.placement import Placement
from torchmoe.router import TopKRouter
from torchmoe.testing.ranks import RankContext, run_ranks

CASES = {
    "1A1F": Case((1,), (1,)),
    "2A1F": Case((2,), (1,)),
    "1A2F": Case((1,), (2,)),
    "2A2F": Case((2,), (2,)),
    "3A1F, uneven sequences": Case((3,), (1,)),
    "2A4F, six experts over four ranks": Case((2,), (4,)),
    "[1,1]A[1,1]F, L = 3": Case((1, 1), (1, 1)),
    "[1,1]A[1,1]F, L = 4": Case((1, 1), (1, 1), layers=4),
    "[1,1]A[1,1]F, 7 micro-batches": Case((1, 1), (1, 1), microbatches=7),
    "[2,1]A[1,2]F": Case((2, 1), (1, 2), layers=5),
    "[2,3,1]A[2,1,2]F": Case((2, 3, 1), (2, 1, 2), layers=4, sequences=6, microbatches=6),
    "[2,1]A[3]F, pA = 2, pF = 1": Case((2, 1), (3,)),
    "[2]A[1,2]F, pA = 1, pF = 2": Case((2,), (1, 2)),
    "two replicas of 1A1F": Case((1,), (1,), replicas=2),
    "two replicas of [1,1]A[1,2]F": Case((1, 1), (1, 2), replicas=2),
    "2A2F, idle source": Case((2,), (2,), idle=(2, 3)),
    "[2,1]A[1,2]F, idle source": Case((2, 1), (1, 2), idle=(2, 3)),
    "2A2F, ragged sequences": Case((2,), (2,), lengths=((5, 1, 9, 3), (2, 7, 4, 4))),
    "[2,1]A[1,2]F, ragged, empty sequences": Case((2, 1), (1, 2), lengths=((5, 0, 9, 3), (0, 0, 1, 6))),
    "[3,2]A[1,2]F, ranks without sequences": Case((3, 2), (1, 2), sequences=2),
    "2A2F, everything dropped": Case((2,), (2,), drop=2.0),
    "2A2F, slots": Case((2,), (2,), options={"combine": "slots"}),
    "[2,1]A[1,2]F, slots": Case((2, 1), (1, 2), options={"combine": "slots"}),
    "2A2F, fixed sizes": Case((2,), (2,), options={"sizes": "fixed", "capacity": 12}),
    "[2,2]A[1,2]F, fixed sizes": Case((2, 2), (1, 2), options={"sizes": "fixed", "capacity": 24}),
    "2A2F, ride": Case((2,), (2,), options={"residual": "ride"}),
    "[1,1]A[1,1]F, ride": Case((1, 1), (1, 1), options={"residual": "ride"}),
    "[2,1]A[1,2]F, ride, idle source, ragged": Case(
        (2, 1), (1, 2), idle=(2, 3), lengths=((5, 0, 9, 3), (2, 7, 4, 4)), options={"residual": "ride"}
    ),
    "[3,2]A[1,2]F, ride, ranks without sequences": Case((3, 2), (1, 2), sequences=2, options={"residual": "ride"}),
    "two replicas of [1,1]A[1,2]F, ride": Case((1, 1), (1, 2), replicas=2, options={"residual": "ride"}),
    "2A2F, head on F": Case((2,), (2,), head="ffn"),
    "1A3F, head on F": Case((1,), (3,), sequences=5, head="ffn"),
    "[2,1]A[1,2]F, head on F": Case((2, 1), (1, 2), head="ffn"),
    "[1,1]A[2,1]F, L = 4, head on F, ragged": Case((1, 1), (2, 1), layers=4, lengths=((5, 0, 9, 3), (0, 0, 1, 6)), head="ffn"),
    "two replicas of [1,1]A[1,2]F, head on F, ride": Case((1, 1), (1, 2), replicas=2, head="ffn", options={"residual": "ride"}),
    "[2,1]A[1,2]F, head on F, slots": Case((2, 1), (1, 2), head="ffn", options={"combine": "slots"}),
    "1A3F, one rank owns no expert": Case((1,), (3,), owners=((0, 2, 0, 2, 0, 2),) * 3),
}


def run_case(ctx: Any, case: Case) -> dict[str, Any]:
    """One rank: a training step and a validation pass."""
    pl, data = case.placement, Data(case)
    residual = case.options.get("residual", pl.default_residual)
    transport = ctx.transport(pl.communicators(residual), record=True)
    exchange = M2NExchange(pl, transport, dim=case.shape.dim, top_k=case.shape.top_k, dtype=torch.float64, **case.options)
    params = {k: v.clone().requires_grad_() for k, v in parameters(case).items()}
    runner = Runner(
        pl,
        lower(AFPipeSchedule(pl, case.microbatches, cycle=case.cycle), pl, residual=residual),
        stages=build_stages(case, data, exchange.where, params),
        exchange=exchange,
        eval_schedule=lower(AFPipeSchedule(pl, case.microbatches, forward_only=True), pl, residual=residual),
        trace=True,
    )
    lengths = [case.length(m) for m in range(case.microbatches)]
    losses: list[Tensor] = []
    where, dense = exchange.where, Dense(case, data, params)
    targets = None
    if where.role == "attention":
        mine = pl.sequences(where.group, where.index, case.sequences, where.replica)
        targets = [dense.labels(m, mine) for m in range(case.microbatches)]
    runner.step(losses=losses, lengths=lengths, target_mbs=targets)
    sent = defaultdict(int)
    for message in transport.log():
        sent[message.destination] += 1
    aux = 0.0 if runner.aux_loss is None else float(runner.aux_loss)
    events = list(runner.events)
    eval_losses: list[Tensor] = []
    runner.eval(losses=eval_losses, lengths=lengths, target_mbs=targets)
    return {
        "loss": float(sum(losses)) + aux,
        "eval": float(sum(eval_losses)) + (0.0 if runner.aux_loss is None else float(runner.aux_loss)),
        "grads": {k: p.grad for k, p in params.items() if p.grad is not None},
        "events": events,
        "sent": dict(sent),
    }


def relative(a: Tensor, b: Tensor) -> float:
    scale = float(b.norm())
    return float((a - b).norm()) / (scale if scale else 1.0)


@pytest.mark.parametrize("name", CASES)
def test_every_layout_equals_one_process(name: str) -> None:
    case = CASES[name]
    loss, grads, _ = reference(case, Data(case))
    ranks = run_ranks(run_case, case.placement.world_size, args=(case,))
    assert abs(sum(r["loss"] for r in ranks) - loss) <= 1e-12 * abs(loss)
    assert abs(sum(r["eval"] for r in ranks) - loss) <= 1e-12 * abs(loss)
    for key, want in grads.items():
        parts = [r["grads"][key] for r in ranks if key in r["grads"]]
        got = sum(parts) if parts else torch.zeros_like(want)
        assert relative(got, want) < 1e-10, f"{key}: {relative(got, want):.1e}"


@pytest.mark.parametrize("name", ["2A2F", "[2,1]A[1,2]F", "[2,3,1]A[2,1,2]F", "1A3F, head on F", "[2,1]A[1,2]F, head on F"])
def test_no_deadlock_where_operations_wait_for_earlier_ones_of_their_communicator(name: str) -> None:
    """As on NCCL; gloo (the other tests) waits for nothing."""
    case = CASES[name]
    loss, _, _ = reference(case, Data(case))
    ranks = run_ranks(run_case, case.placement.world_size, args=(case,), mode="comm")
    assert abs(sum(r["loss"] for r in ranks) - loss) <= 1e-12 * abs(loss)


@pytest.mark.parametrize("name", ["2A2F", "[2,1]A[1,2]F, idle source"])
def test_gloo_processes_equal_one_process(name: str) -> None:
    case = CASES[name]
    loss, _, _ = reference(case, Data(case))
    ranks = run_ranks(run_case, case.placement.world_size, backend="gloo", args=(case,))
    assert abs(sum(r["loss"] for r in ranks) - loss) <= 1e-12 * abs(loss)


def test_two_runs_are_bit_equal() -> None:
    case = CASES["[2,1]A[1,2]F"]
    a, b = (run_ranks(run_case, case.placement.world_size, args=(case,)) for _ in range(2))
    for x, y in zip(a, b, strict=True):
        assert x["loss"] == y["loss"] and x["sent"] == y["sent"]
        assert all(torch.equal(x["grads"][k], y["grads"][k]) for k in x["grads"])


def test_every_action_is_recorded_once_with_ordered_times() -> None:
    case = CASES["2A2F"]
    ranks = run_ranks(run_case, 4, args=(case,))
    for r in ranks:
        compute = [e.action for e in r["events"] if e.kind == "compute"]
        assert len(compute) == len(set(compute))
        assert all(e.start <= e.end for e in r["events"])
    attention = [e for e in ranks[0]["events"] if e.kind == "compute"]
    experts = [e for e in ranks[2]["events"] if e.kind == "compute"]
    assert len(attention) == case.microbatches * (2 * case.layers + 2)
    assert len(experts) == case.microbatches * 3 * case.layers


def stand_alone(stages: Stages, **kw: Any) -> Runner:
    """A runner of rank 0 on a wire that is never used."""
    pl = Placement(attention=[1], ffn=[1], num_layers=1, num_experts=2)

    class Wire:
        rank, world_size = 0, 2

    exchange = M2NExchange(pl, Wire(), dim=4, top_k=1)  # type: ignore[arg-type]
    schedule = kw.pop("schedule", None) or lower(AFPipeSchedule(pl, 2), pl)
    return Runner(pl, schedule, stages=stages, exchange=exchange, **kw)


def all_stages() -> Stages:
    return Stages(attention={0: lambda h, mb: None}, embedding=lambda mb: None, head=lambda h, mb: None)


@pytest.mark.parametrize(
    "change, word",
    [({"attention": {}}, "attention[0]"), ({"embedding": None}, "embedding"), ({"head": None}, "head")],
)
def test_a_missing_stage_is_named(change: dict[str, Any], word: str) -> None:
    stages = all_stages()
    for k, v in change.items():
        setattr(stages, k, v)
    with pytest.raises(ConfigError) as e:
        stand_alone(stages)
    assert word in str(e.value)


def test_a_schedule_without_messages_is_refused() -> None:
    pl = Placement(attention=[1], ffn=[1], num_layers=1, num_experts=2)
    with pytest.raises(ScheduleError, match="lower"):
        stand_alone(all_stages(), schedule=AFPipeSchedule(pl, 2))


def test_wrong_inputs_are_refused_before_anything_is_sent() -> None:
    runner = stand_alone(all_stages())
    with pytest.raises(ConfigError, match="arg_mbs has 3 micro-batches"):
        runner.step(arg_mbs=[(torch.zeros(1, 2),)] * 3)
    with pytest.raises(ConfigError, match="lengths="):
        runner.step(arg_mbs=[(torch.zeros(3),)] * 2)
    with pytest.raises(ConfigError, match="return_outputs"):
        runner.step(return_outputs=True)
    with pytest.raises(ConfigError, match="eval_schedule"):
        runner.eval()


@pytest.mark.parametrize(
    ("residual", "loss", "text"),
    [
        (lambda h: h[:1], lambda h: h.sum(), r"attention\[0\] returned res \(1, 4\) and x \(3, 4\)"),  # would broadcast
        (lambda h: h, lambda h: h.sum(1), r"the head returned \(3,\); return one scalar"),
    ],
)
def test_what_a_stage_returns_is_checked(residual: Any, loss: Any, text: str) -> None:
    pl = Placement(attention=[1], ffn=[1], num_layers=1, num_experts=2)

    def program(ctx: RankContext) -> None:
        exchange = M2NExchange(pl, ctx.transport(pl.communicators("local")), dim=4, top_k=1)
        router = TopKRouter(4, 2, 1)
        stages = Stages(
            attention={0: lambda h, mb: AttentionOutput(residual(h), h, router(h))},
            embedding=lambda mb: torch.ones(3, 4, requires_grad=True),
            head=lambda h, mb: loss(h),
            experts={0: RankExperts(FusedExpertMLP(2, 4, 4), [0, 1], 2)},
        )
        runner = Runner(pl, lower(AFPipeSchedule(pl, 1), pl), stages=stages, exchange=exchange)
        runner.step(arg_mbs=[(torch.zeros(1, 3),)] if ctx.rank == 0 else None)

    assert re.search(text, run_ranks(program, 2, check=False)[0].text)
