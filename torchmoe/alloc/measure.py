"""Micro-benchmarks of the hardware at hand: attention, grouped experts, dense products, and messages between processes.

All sizes are measured in turns, several rounds of them, so that a disturbance that lasts longer than one size does not bend the
curve at that size. Of a kernel's repetitions the fastest counts: what else runs on the machine only ever adds time. Of a
message's rounds the median counts: what it waits for (the other processes' turns on the cores) is part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from torchmoe.dispatch import DispatchQueue
from torchmoe.experts import FusedExpertMLP

__all__ = ["Case", "attention", "dense", "experts", "messages", "timed"]


@dataclass(frozen=True)
class Case:
    """One shape of one kernel: its FLOPs, and what makes its inputs and returns the call to be timed."""

    name: str
    size: float
    flops: float
    prepare: Callable[[], Callable[[], Any]]


def timed(
    cases: Sequence[Case],
    device: torch.device,
    *,
    rounds: int,
    seconds: float,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[float, tuple[float, float]]]:
    """Name -> size -> (FLOPs, seconds of a call).

    Args:
        rounds: how often all cases are measured in turn.
        seconds: a case is repeated for this long in every round (once at least, after a warm-up call).
    """

    def once(run: Callable[[], Any]) -> float:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    best: dict[str, dict[float, tuple[float, float]]] = {}
    for i in range(rounds):
        for c in cases:
            progress(f"round {i + 1} of {rounds}: {c.name}, {c.size:g}")
            run = c.prepare()
            once(run)
            spent, fastest = 0.0, best.get(c.name, {}).get(c.size, (c.flops, float("inf")))[1]
            while not spent or spent < seconds:
                t = once(run)
                spent, fastest = spent + t, min(fastest, t)
            best.setdefault(c.name, {})[c.size] = (c.flops, fastest)
    return best


def attention(device: torch.device, *, seq_len: int, head_dim: int, heads: int, dtype: torch.dtype) -> Case:
    """Causal attention, forward and backward, one sequence: 3.5 x 2 products of s (s+1) / 2 scores."""

    def prepare() -> Callable[[], Any]:
        q, k, v = (torch.randn(1, heads, seq_len, head_dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        grad = torch.randn_like(q)

        def run() -> None:
            q.grad = k.grad = v.grad = None
            torch.autograd.backward(F.scaled_dot_product_attention(q, k, v, is_causal=True), grad)

        return run

    forward = 2 * 2 * heads * head_dim * seq_len * (seq_len + 1) / 2
    return Case(f"attention {head_dim}", seq_len, 3.5 * forward, prepare)


def dense(device: torch.device, *, rows: int, dim: int, dtype: torch.dtype) -> Case:
    """One product [rows, dim] by [dim, dim]."""

    def prepare() -> Callable[[], Any]:
        a, b = (torch.randn(n, dim, device=device, dtype=dtype) for n in (rows, dim))
        return lambda: a @ b

    return Case("gemm", rows, 2.0 * rows * dim * dim, prepare)


def experts(device: torch.device, *, per_expert: int, num_experts: int, dim: int, width: int, dtype: torch.dtype) -> Case:
    """The library's expert MLP, forward and backward, balanced, ``per_expert`` tokens each."""
    tokens = per_expert * num_experts

    def prepare() -> Callable[[], Any]:
        mlp = FusedExpertMLP(num_experts, dim, width, device=device, dtype=dtype)
        x = torch.randn(tokens, dim, device=device, dtype=dtype, requires_grad=True)
        ids = torch.arange(tokens, device=device).remainder(num_experts)[:, None].to(torch.int32)
        gates = torch.rand(tokens, 1, device=device)
        queue = DispatchQueue.build(ids, num_experts)
        grad = torch.randn(tokens, dim, device=device, dtype=dtype)

        def run() -> None:
            x.grad = None
            mlp.zero_grad()
            torch.autograd.backward(mlp(x, queue, gates), grad)

        return run

    return Case("grouped_gemm", per_expert, 3.0 * 6 * tokens * dim * width, prepare)


def messages(
    device: torch.device, *, sizes: Sequence[int], rounds: int, volume: int = 1 << 21, most: int = 32
) -> dict[str, dict[float, float]]:
    """Seconds by bytes per rank: "all_to_all N" for groups of N ranks, "m2n" from one half to the other, "p2p". Collective.

    M2N and P2P are timed there and back, and halved. Small messages are repeated (up to ``most`` times, about ``volume`` bytes)
    between two barriers; a round's time is that of its slowest rank.
    """
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    half = world // 2
    groups = [n for n in (2, 4, 8, 16, 32, 64) if n < world] + [world]
    made = {n: dist.new_group(list(range(n))) for n in groups}
    longest = max(sizes) // 4 + world
    out = torch.randn(longest, device=device)
    into = torch.empty_like(out)

    def all_to_all(n: int, elements: int) -> Callable[[], Any]:
        whole = max(1, elements // n) * n
        return lambda: dist.all_to_all_single(into[:whole], out[:whole], group=made[n])

    def exchange(peers: Sequence[int], elements: int, *, first: bool) -> Callable[[], Any]:
        # the sending half sends all its pieces and then receives as many; the other half the other way round
        piece = max(1, elements // len(peers))

        def run() -> None:
            for send in (first, not first):
                op, data = (dist.isend, out) if send else (dist.irecv, into)
                ops = [dist.P2POp(op, data[i * piece : (i + 1) * piece], p) for i, p in enumerate(peers)]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()

        return run

    # name -> (does this rank take part, what it runs for a number of elements, passes in it)
    plans: dict[str, tuple[bool, Callable[[int], Callable[[], Any]], int]] = {}
    for n in groups:
        plans[f"all_to_all {n}"] = (rank < n, lambda e, n=n: all_to_all(n, e), 1)  # type: ignore[misc]
    if half > 1:
        peers = list(range(half, 2 * half)) if rank < half else list(range(half))
        plans["m2n"] = (rank < 2 * half, lambda e: exchange(peers, e, first=rank < half), 2)
    plans["p2p"] = (rank in (0, world - 1), lambda e: exchange([world - 1 - rank], e, first=rank == 0), 2)

    cases = [(name, size) for size in sizes for name in plans]
    spent = torch.zeros(rounds, len(cases), dtype=torch.float64, device=device)
    for i in range(rounds):
        for j, (name, size) in enumerate(cases):
            takes_part, make, passes = plans[name]
            run = make(max(1, size // 4)) if takes_part else (lambda: None)
            repeat = max(1, min(most, volume // size))
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            dist.barrier()
            began = time.perf_counter()
            for _ in range(repeat):
                run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            spent[i, j] = (time.perf_counter() - began) / repeat / passes
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    found: dict[str, dict[float, float]] = {}
    for (name, size), t in zip(cases, spent.median(0).values.tolist(), strict=True):
        found.setdefault(name, {})[float(size)] = t
    return found
