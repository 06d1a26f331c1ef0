"""Code that calls torch.distributed itself runs on simulated ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed.device_mesh import init_device_mesh

from torchmoe.errors import ExchangeError
from torchmoe.testing import RankContext, RanksFailed, run_ranks

BOTH = ("sim-dist", "gloo")


def collectives(ctx: RankContext) -> list[list[float]]:
    r, w = dist.get_rank(), dist.get_world_size()
    out = []
    x = torch.arange(3.0) + r
    dist.all_reduce(x)
    out.append(x.tolist())
    m = torch.tensor([float(r)])
    dist.all_reduce(m, op=dist.ReduceOp.MAX)
    out.append(m.tolist())
    b = torch.full((2,), float(r))
    dist.broadcast(b, src=1)
    out.append(b.tolist())
    g = [torch.empty(2) for _ in range(w)]
    dist.all_gather(g, torch.full((2,), float(r)))
    out.append(torch.cat(g).tolist())
    flat = torch.empty(2 * w)
    dist.all_gather_into_tensor(flat, torch.full((2,), float(r)))
    out.append(flat.tolist())
    s = torch.empty(2)
    dist.reduce_scatter_tensor(s, torch.arange(2.0 * w) * (r + 1))
    out.append(s.tolist())
    ins, outs = [(r + j) % 3 for j in range(w)], [(j + r) % 3 for j in range(w)]
    y = torch.empty(sum(outs))
    dist.all_to_all_single(y, torch.full((sum(ins),), float(r)), outs, ins)
    out.append(y.tolist())
    dist.barrier()
    return out


def test_collectives_give_what_gloo_gives() -> None:
    assert run_ranks(collectives, 4, backend="sim-dist") == run_ranks(collectives, 4, backend="gloo")


def ring(ctx: RankContext) -> float:
    b = torch.empty(1)
    ops = [
        dist.P2POp(dist.isend, torch.tensor([float(ctx.rank)]), (ctx.rank + 1) % ctx.world),
        dist.P2POp(dist.irecv, b, (ctx.rank - 1) % ctx.world),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return b.item()


def autograd(ctx: RankContext) -> list[float]:
    mesh = init_device_mesh("cpu", (2, ctx.world // 2), mesh_dim_names=("outer", "inner"))
    n = ctx.world // 2
    x = (torch.arange(float(n)) + ctx.rank).requires_grad_()
    y = fc.all_to_all_single_autograd(x, [1] * n, [1] * n, mesh["inner"])
    (y * (ctx.rank + 1)).sum().backward()
    assert x.grad is not None
    return [*y.tolist(), *x.grad.tolist()]


@pytest.mark.parametrize("backend", BOTH)
def test_point_to_point_batches(backend: str) -> None:
    assert run_ranks(ring, 4, backend=backend) == [3.0, 0.0, 1.0, 2.0]


def test_autograd_over_a_device_mesh_gives_what_gloo_gives() -> None:
    assert run_ranks(autograd, 4, backend="sim-dist") == run_ranks(autograd, 4, backend="gloo")


def test_64_ranks() -> None:
    assert run_ranks(ring, 64, backend="sim-dist") == [(r - 1) % 64 for r in range(64)]
    assert len(run_ranks(autograd, 64, backend="sim-dist")) == 64


def splits(ctx: RankContext) -> None:
    ins, outs = [1] * ctx.world, [1] * ctx.world
    if ctx.rank == 1:
        ins[0] = 2
    dist.all_to_all_single(torch.empty(sum(outs)), torch.ones(sum(ins)), outs, ins)


def other_op(ctx: RankContext) -> None:
    if ctx.rank == 0:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(1))


def sizes(ctx: RankContext) -> None:
    if ctx.rank == 0:
        dist.send(torch.ones(4), 1)
    elif ctx.rank == 1:
        dist.recv(torch.ones(8), 0)


def fails(ctx: RankContext) -> None:
    if ctx.rank == 1:
        raise ValueError("boom")
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (splits, r"rank 1 sends 2 rows to rank 0, which expects 1"),
        (other_op, r"collective number \d+ of group .* differs between ranks: \{0: 'barrier', 1: 'allreduce'"),
        (sizes, r"sent \(4,\) torch.float32, expected \(8,\) torch.float32"),
        (fails, r"missing ranks \[1\].*rank 1 has left: ValueError: boom"),
    ],
    ids=["splits", "other collective", "sizes", "dead rank"],
)
def test_what_gloo_answers_with_an_abort_or_a_timeout_is_named(fn: object, text: str) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as e:
        run_ranks(fn, 3, backend="sim-dist", timeout=20)  # type: ignore[arg-type]
    assert time.monotonic() - start < 15
    assert any(isinstance(f.error, ExchangeError) for f in e.value.failures)
    e.match(text)


def test_the_process_is_as_before_afterwards() -> None:
    run_ranks(ring, 2, backend="sim-dist")
    assert not dist.is_initialized()
    assert run_ranks(ring, 3, backend="sim-dist") == [2.0, 0.0, 1.0]
