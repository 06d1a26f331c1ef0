"""What one rank of ``benchmarks.halo`` does: verify, then time, on an emulated node."""

from __future__ import annotations

import datetime
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.netns import Network
from torchmoe.comm.all_to_all import AllToAllExchange
from torchmoe.comm.auto import AutoAllToAll
from torchmoe.comm.c10d import C10dTransport
from torchmoe.comm.halo import HierarchicalAllToAll
from torchmoe.comm.token_exchange import TokenExchange
from torchmoe.comm.waves import Waves, overlapped
from torchmoe.placement import Deadlines

LANES = 2
DEADLINES = Deadlines(exchange=120, step=240, init=300)


def run(network: Network, rank: int, world: int, port: int, job: dict[str, Any]) -> dict[str, Any]:
    """Enter the node, set up, do the job: ``{"sizes": [...], "reps": n, "tokens": {...} or None}``."""
    torch.set_num_threads(1)
    network.enter(rank // LANES)
    store = dist.TCPStore(network.address(0), port, world, rank == 0, timeout=datetime.timedelta(seconds=300))
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=datetime.timedelta(seconds=300))
    ranks = range(world)
    transport = C10dTransport.create(AutoAllToAll.communicators(ranks, LANES), deadlines=DEADLINES)
    E = None if job["tokens"] is None else job["tokens"]["experts"]
    flat = AllToAllExchange(transport, num_experts=E, deadlines=DEADLINES)
    halo = HierarchicalAllToAll(transport, lanes=LANES, num_experts=E, deadlines=DEADLINES)
    auto = AutoAllToAll(transport, lanes=LANES, num_experts=E, deadlines=DEADLINES)
    out: dict[str, Any] = {
        "link": ping_pong(rank),
        "model": {"between": vars(auto.links.between), "inside": vars(auto.links.inside), "counts": auto.counts_form},
        "sizes": [plain(rank, world, n, flat, halo, auto, job["reps"]) for n in job["sizes"]],
    }
    if job["tokens"] is not None:
        out["tokens"] = tokens(rank, flat, halo, auto, job["tokens"], job["reps"])
        out["overlap"] = overlap(rank, halo, job["tokens"], job["reps"])
    dist.barrier()
    dist.destroy_process_group()
    return out


def ping_pong(rank: int) -> list[tuple[int, float]]:
    """(bytes, seconds one way) between lane 0 of nodes 0 and 1; the other ranks wait."""
    found = []
    for n in (64, 16384, 65536, 262144):
        buffer = torch.zeros(n, dtype=torch.uint8)
        times = []
        dist.barrier()
        for _ in range(7):
            start = time.perf_counter()
            if rank == 0:
                dist.send(buffer, LANES)
                dist.recv(buffer, LANES)
            elif rank == LANES:
                dist.recv(buffer, 0)
                dist.send(buffer, 0)
            times.append((time.perf_counter() - start) / 2)
        found.append((n, statistics.median(times)))
    return found


def timed(forms: dict[str, Callable[[], Any]], reps: int) -> dict[str, list[float]]:
    """Seconds of every form, taken in turn so that a disturbance meets all; each is the slowest rank's."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    gc.disable()
    for i in range(reps + 1):
        for name, form in forms.items():
            dist.barrier()
            start = time.perf_counter()
            form()
            worst = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            if i:  # the first round opens connections and grows windows
                times[name].append(float(worst))
    gc.enable()
    return times


def gloo_counts(send: Sequence[int]) -> list[int]:
    out = torch.empty(len(send), dtype=torch.int64)
    dist.all_to_all_single(out, torch.tensor(list(send)))
    return [int(n) for n in out]


def gloo_rows(x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
    out = x.new_empty(sum(recv), x.shape[1])
    dist.all_to_all_single(out, x, list(recv), list(send))
    return out


def plain(
    rank: int, world: int, pair_bytes: int, flat: TokenExchange, halo: TokenExchange, auto: AutoAllToAll, reps: int
) -> dict[str, Any]:
    """Ragged rows of about ``pair_bytes`` per pair of ranks: with the counts, and the rows alone."""
    cols = 16 if pair_bytes < 4096 else 256
    rows = max(1, pair_bytes // (4 * cols))
    g = torch.Generator().manual_seed(pair_bytes)
    table = torch.randint(max(1, rows - rows // 4), rows + rows // 4 + 1, (world, world), generator=g).tolist()
    send, recv = table[rank], [row[rank] for row in table]
    x = torch.randn(sum(send), cols, generator=torch.Generator().manual_seed(rank))
    want = gloo_rows(x, send, recv)
    for exchange in (flat, halo, auto):
        if not torch.equal(exchange.all_to_all(x, send), want):
            raise RuntimeError(f"{type(exchange).__name__} differs from all_to_all_single at {pair_bytes} B")
    plans = {e: e._plan_rows(tuple(send), None) for e in (flat, halo, auto)}
    before = dict(auto.chosen)
    times = timed(
        {
            "gloo": lambda: gloo_rows(x, send, gloo_counts(send)),
            "flat": lambda: flat.all_to_all(x, send),
            "halo": lambda: halo.all_to_all(x, send),
            "auto": lambda: auto.all_to_all(x, send),
            "gloo rows": lambda: gloo_rows(x, send, recv),
            "flat rows": lambda: flat._out(plans[flat], "rows", [x]),
            "halo rows": lambda: halo._out(plans[halo], "rows", [x]),
            "auto rows": lambda: auto._out(plans[auto], "rows", [x]),
        },
        reps,
    )
    form = max(auto.chosen, key=lambda f: auto.chosen[f] - before[f])
    return {"pair_bytes": pair_bytes, "rank_bytes": 4 * cols * sum(send), "times": times, "form": form}


def routed(rank: int, shape: dict[str, int]) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(100 + rank)
    T, D, E, K = (shape[n] for n in ("T", "D", "experts", "K"))
    ids = torch.rand(T, E, generator=g).topk(K, 1).indices.to(torch.int32)
    return torch.randn(T, D, generator=g), ids, torch.rand(T, K, generator=g)


def gloo_slots(x: Tensor, ids: Tensor, per_rank: int, world: int) -> Tensor:
    """Classic dispatch and combine: one row per slot, counts and rows by all_to_all_single, experts that return their rows."""
    order = torch.argsort(ids.view(-1).long(), stable=True)
    send = torch.bincount(ids.view(-1).long() // per_rank, minlength=world).tolist()
    recv = gloo_counts(send)
    there = gloo_rows(x[order // ids.shape[1]], send, recv)
    back = gloo_rows(there, recv, send)
    return torch.zeros_like(x).index_add_(0, order // ids.shape[1], back)


def tokens(
    rank: int, flat: TokenExchange, halo: TokenExchange, auto: TokenExchange, shape: dict[str, int], reps: int
) -> dict[str, Any]:
    """Dispatch and combine of tokens with identity experts: per slot by gloo, rank-deduplicated, node-deduplicated."""
    x, ids, gates = routed(rank, shape)
    per_rank = shape["experts"] // flat.num_ranks

    def form(exchange: TokenExchange) -> Tensor:
        here = exchange.dispatch(x, ids, gates)
        # as many identity experts as the row has slots here, so that all forms compute K x
        return exchange.combine(here.rows_RD * (here.expert_ids_RK >= 0).sum(1, keepdim=True), here)

    forms = {
        "slots": lambda: gloo_slots(x, ids, per_rank, flat.num_ranks),
        "rank dedup": lambda: form(flat),
        "node dedup": lambda: form(halo),
        "auto": lambda: form(auto),
    }
    for name, call in forms.items():
        torch.testing.assert_close(call(), x * shape["K"], msg=lambda m, name=name: f"{name}: {m}")
    return {"shape": shape, "times": timed(forms, reps)}


def overlap(rank: int, halo: HierarchicalAllToAll, shape: dict[str, int], reps: int) -> dict[str, Any]:
    """Experts of about the exchange's own duration: their work behind the exchange, against after and before it."""
    x, ids, gates = routed(rank, shape)
    start = time.perf_counter()
    here = halo.dispatch(x, ids, gates)
    halo.combine(here.rows_RD, here)
    each = torch.tensor([(time.perf_counter() - start) / max(1, here.rows_RD.shape[0])])
    dist.all_reduce(each)
    per_row = float(each) / halo.num_ranks
    computed: list[float] = []

    def experts(rows: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        time.sleep(per_row * rows.shape[0])  # an accelerator's time: the processor is free for the messages
        computed.append(per_row * rows.shape[0])
        return rows * gates.sum(1, keepdim=True)

    def whole() -> Tensor:
        here = halo.dispatch(x, ids, gates)
        return halo.combine(experts(here.rows_RD, here.expert_ids_RK, here.gates_RK), here)

    waited: list[float] = []

    def keep(waves: Waves) -> None:
        waited.append(sum(waves.waited))

    def waves() -> Tensor:
        return overlapped(halo, x, ids, gates, experts=experts, on_waves=keep)

    # the sum of a slot's gates does not depend on how rows are grouped, so both forms are equal up to rounding
    torch.testing.assert_close(whole(), waves())
    computed.clear()
    whole()
    busy = torch.tensor([sum(computed)])
    dist.all_reduce(busy, op=dist.ReduceOp.MAX)
    times = timed({"whole": whole, "waves": waves}, reps)
    return {"compute": float(busy), "times": times, "waited": statistics.median(waited)}
