"""Micro-benchmarks of the hardware at hand: attention, grouped experts, dense products, and messages between processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from torchmoe.dispatch import DispatchQueue
from torchmoe.experts import FusedExpertMLP

__all__ = ["Timer", "attention", "dense", "experts", "messages"]


class Timer:
    """Lower quartile of the seconds of repeated calls, after warm-up: what else runs on the machine only ever adds time."""

    def __init__(self, device: torch.device, *, seconds: float = 0.2, least: int = 5) -> None:
        self.device, self.seconds, self.least = device, seconds, least

    def __call__(self, run: Callable[[], Any]) -> float:
        run()
        self._wait()
        spent: list[float] = []
        while len(spent) < self.least or (sum(spent) < self.seconds and len(spent) < 50):
            began = time.perf_counter()
            run()
            self._wait()
            spent.append(time.perf_counter() - began)
        return sorted(spent)[len(spent) // 4]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def attention(timer: Timer, *, seq_len: int, head_dim: int, heads: int, dtype: torch.dtype) -> tuple[float, float]:
    """(FLOPs, seconds) of causal attention, forward and backward, one sequence: 3.5 x 2 products of s (s+1) / 2 scores."""
    q, k, v = (torch.randn(1, heads, seq_len, head_dim, device=timer.device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn_like(q)

    def run() -> None:
        q.grad = k.grad = v.grad = None
        torch.autograd.backward(F.scaled_dot_product_attention(q, k, v, is_causal=True), grad)

    forward = 2 * 2 * heads * head_dim * seq_len * (seq_len + 1) / 2
    return 3.5 * forward, timer(run)


def dense(timer: Timer, *, rows: int, dim: int, dtype: torch.dtype) -> tuple[float, float]:
    """(FLOPs, seconds) of one product [rows, dim] by [dim, dim]."""
    a, b = (torch.randn(n, dim, device=timer.device, dtype=dtype) for n in (rows, dim))
    return 2.0 * rows * dim * dim, timer(lambda: a @ b)


def experts(timer: Timer, *, per_expert: int, num_experts: int, dim: int, width: int, dtype: torch.dtype) -> tuple[float, float]:
    """(FLOPs, seconds) of the library's expert MLP, forward and backward, balanced, ``per_expert`` tokens each."""
    tokens = per_expert * num_experts
    mlp = FusedExpertMLP(num_experts, dim, width, device=timer.device, dtype=dtype)
    x = torch.randn(tokens, dim, device=timer.device, dtype=dtype, requires_grad=True)
    ids = torch.arange(tokens, device=timer.device).remainder(num_experts)[:, None].to(torch.int32)
    gates = torch.rand(tokens, 1, device=timer.device)
    queue = DispatchQueue.build(ids, num_experts)
    grad = torch.randn(tokens, dim, device=timer.device, dtype=dtype)

    def run() -> None:
        x.grad = None
        mlp.zero_grad()
        torch.autograd.backward(mlp(x, queue, gates), grad)

    return 3.0 * 6 * tokens * dim * width, timer(run)


def messages(timer: Timer, *, sizes: list[int]) -> dict[str, dict[int, float]]:
    """Seconds by bytes per rank: "all_to_all N" for groups of N ranks, "m2n" from one half to the other, "p2p". Collective."""
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    out: dict[str, dict[int, float]] = {}
    groups = [n for n in (2, 4, 8, 16, 32, 64) if n < world] + [world]
    made = {n: dist.new_group(list(range(n))) for n in groups}

    def timed(run: Callable[[], Any]) -> float:
        run()
        spent = []
        for _ in range(7):
            dist.barrier()
            began = time.perf_counter()
            run()
            timer._wait()
            spent.append(time.perf_counter() - began)
        slowest = torch.tensor([statistics.median(spent)], device=timer.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    for size in sizes:
        for n in groups:
            elements = max(1, size // 4 // n)
            send = torch.randn(elements * n, device=timer.device)
            receive = torch.empty_like(send)

            def exchange(n: int = n, send: torch.Tensor = send, receive: torch.Tensor = receive) -> None:
                if rank < n:
                    dist.all_to_all_single(receive, send, group=made[n])

            out.setdefault(f"all_to_all {n}", {})[size] = timed(exchange)
        half = world // 2
        data = torch.randn(max(1, size // 4), device=timer.device)
        into = torch.empty_like(data)
        piece = data.chunk(max(1, half))
        room = into.chunk(max(1, half))

        def m2n(piece: Any = piece, room: Any = room, half: int = half) -> None:
            ops = []
            for i in range(min(half, len(piece))):
                if rank < half:
                    ops.append(dist.P2POp(dist.isend, piece[i], half + i))
                elif rank < 2 * half:
                    ops.append(dist.P2POp(dist.irecv, room[i], i))
            for work in dist.batch_isend_irecv(ops) if ops else []:
                work.wait()

        if half > 1:
            out.setdefault("m2n", {})[size] = timed(m2n)

        def p2p(data: torch.Tensor = data, into: torch.Tensor = into) -> None:
            if rank == 0:
                dist.send(data, world - 1)
            elif rank == world - 1:
                dist.recv(into, 0)

        out.setdefault("p2p", {})[size] = timed(p2p)
    return out
