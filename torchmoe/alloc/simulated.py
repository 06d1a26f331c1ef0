"""Allocations and colocated baselines run through the simulator, with costs from the same tables.

The step of an :class:`Allocation` is a closed form; here its schedule runs, with the real order, transfers that share NICs, and
latency. Colocated baselines: interleaved 1F1B with blocking exchanges, the best chunked overlap, and a DualPipe-like overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torchmoe.alloc.allocator import Allocation, RooflineAllocator
from torchmoe.alloc.colocated import ColocatedCosts
from torchmoe.pipeline.costs import Costs
from torchmoe.pipeline.network import Links
from torchmoe.pipeline.schedules.afpipe import AFPipeSchedule
from torchmoe.pipeline.schedules.colocated import ColocatedWiring, colocated
from torchmoe.pipeline.simulate import Simulation, simulate
from torchmoe.placement import Placement

__all__ = [
    "UNITS",
    "extended",
    "links_of",
    "placement_of",
    "refine",
    "simulate_allocation",
    "simulate_colocated",
    "simulated_step",
]

UNITS = 8_000
"""Most (layer, micro-batch) units that are simulated; a longer step is simulated shorter and extended."""


def placement_of(allocation: Allocation, *, num_layers: int, num_experts: int) -> Placement:
    """The placement of an allocation."""
    return Placement(
        attention=allocation.attention_sizes,
        ffn=allocation.ffn_sizes,
        num_layers=num_layers,
        num_experts=num_experts,
        replicas=allocation.replicas,
    )


def simulate_allocation(allocator: RooflineAllocator, a: Allocation, *, record: bool = False) -> Simulation:
    """One replica's step of AF-Pipe under ``a``: group level, all ranks of a group alike."""
    costs = replace(allocator.costs_of(a), cycle=a.cycle)
    shape, w = allocator.model, a.workload
    place = replace(placement_of(a, num_layers=shape.num_moe_layers, num_experts=shape.num_experts), replicas=1)
    sequences = w.micro_batch / a.m if w.micro_batch % a.m == 0 else -(-w.micro_batch // a.m)
    head = 2 * shape.num_moe_layers
    forward, backward = {}, {}
    again = 1 if w.recompute == "full" else 0
    for layer in range(shape.num_moe_layers):
        t = costs.attention_seconds(sequences, layer=shape.num_dense_layers + layer, shared=not costs.rides(a.pa))
        if layer == 0:
            t += sum(costs.attention_seconds(sequences, layer=i) for i in range(shape.num_dense_layers))
        forward[2 * layer], backward[2 * layer] = t / (3 + again), t * (2 + again) / (3 + again)
        t = costs.expert_seconds(a.n, a.pa)
        forward[2 * layer + 1], backward[2 * layer + 1] = t / 3, t * 2 / 3
    t = costs.head_seconds(sequences)
    forward[head], backward[head] = t, 0.0  # forward, loss and backward are one action
    traffic = costs.traffic(a.n, a.pa)
    kinds = ("dispatch", "combine", "d_combine", "d_dispatch", "residual", "d_residual", "ids")
    message = {k: getattr(traffic, k) * w.tokens for k in kinds}
    half = {s: b / 2 for s, b in backward.items()}
    return simulate(
        AFPipeSchedule(place, a.micro_batches, cycle=a.cycle, transfer=_transfer(a)),
        Costs(forward=forward, input_grad=half, weight_grad=half, message=message),
        place,
        residual=a.residual,
        links=links_of(allocator, a),
        issue="ahead",
        record=record,
    )


def links_of(allocator: RooflineAllocator, a: Allocation) -> Links:
    """The network between the groups of ``a``: every side with its own NICs and latency (two pools may be of unequal kinds)."""
    costs = allocator.costs
    (band_a, _), (band_f, _) = costs.link(allocator.cluster), costs.link(costs.f_cluster)
    inside = allocator.cluster.nodes == 1 and allocator.ffn_cluster is None
    latency_a, latency_f = (c.intra_latency if inside else c.nic_latency for c in (allocator.cluster, costs.f_cluster))
    groups_f = [f"F{j}" for j in range(a.pf)]
    return Links(
        bandwidth=band_a,
        latency=latency_a,
        # an expert side's NIC counts as so many of the attention side's
        nics={f"A{i}": a.nics_a for i in range(a.pa)} | dict.fromkeys(groups_f, a.nics_f * band_f / band_a),
        latencies=dict.fromkeys(groups_f, latency_f),
    )


def _transfer(a: Allocation) -> float:
    """A transfer in units of a forward, at most the 1.0 that a stage of its own has."""
    forward = max(a.attention, a.ffn) / 3
    return min(1.0, max(a.network_a, a.network_f) / 4 / forward) if forward else 0.0


def simulate_colocated(
    costs: ColocatedCosts, *, num_chunks: int = 1, scheme: str = "blocking", chunks: int = 4, record: bool = False
) -> Simulation:
    """One copy's step of the colocated strategy.

    Args:
        num_chunks: layer chunks per stage (interleaving); layers must divide into stages of chunks.
        scheme: "blocking" interleaved 1F1B; "chunked" (all-to-alls in ``chunks`` parts); "dualpipe" (forward and backward of
            two micro-batches take turns).
    """
    shape, w = costs.model, costs.workload
    wiring = ColocatedWiring(
        num_layers=shape.num_layers,
        ep_size=costs.ep,
        num_groups=costs.pp,
        num_chunks=num_chunks,
        a2a_chunks=chunks if scheme == "chunked" else 1,
    )
    split = costs.split
    again = 1 if w.recompute == "full" else 0
    forward, backward = {}, {}
    for layer in range(shape.num_layers):
        a = split.attention_seconds(costs.local_sequences, layer=layer)
        e = split.expert_seconds(costs.ep)
        forward[2 * layer], backward[2 * layer] = a / (3 + again), a * (2 + again) / (3 + again)
        forward[2 * layer + 1], backward[2 * layer + 1] = e / 3, e * 2 / 3
    t = split.head_seconds(costs.local_sequences)
    forward[2 * shape.num_layers], backward[2 * shape.num_layers] = t / 3, t * 2 / 3
    # the simulator's NIC stands for whatever bounds the exchange: bytes that take exchange().total at the NIC share
    one = costs.exchange()
    band = costs.cluster.nic_share if costs.cluster.nodes > 1 else costs.cluster.intra_bandwidth
    size = (one.total - one.latency) * band * costs.ep
    hidden = costs.local_sequences * w.seq_len * shape.dim * w.itemsize * costs.ep
    message = dict.fromkeys(("dispatch", "combine", "d_combine", "d_dispatch"), size)
    message |= dict.fromkeys(("act", "d_act"), hidden)
    half = {s: b / 2 for s, b in backward.items()}
    return simulate(
        colocated(wiring, costs.micro_batches, overlap=scheme == "dualpipe"),
        Costs(forward=forward, input_grad=half, weight_grad=half, message=message, parts=wiring.a2a_chunks),
        wiring,
        links=Links(bandwidth=band, latency=one.latency),
        issue="ahead",
        record=record,
    )


def extended(run: Callable[[int], Simulation], n: int, short: int) -> tuple[float, float, float, str]:
    """(step, bound, share not computing, note) of n micro-batches, from ``short`` and half of it if n is too many to simulate.

    A full pipeline adds the same time for every further cycle, so the step is extended along that line.
    """
    whole = run(short)
    if short == n:
        return whole.makespan, whole.bound, whole.exposed, ""
    half = run(short // 2)
    more = (n - short) / (short - short // 2)
    step = whole.makespan + more * (whole.makespan - half.makespan)
    bound = whole.bound + more * (whole.bound - half.bound)
    busy = max(whole.busy.values())
    work = busy + more * (busy - max(half.busy.values()))
    return step, bound, 1 - work / step, f"{short} of {n} micro-batches simulated, then extended"


def simulated_step(allocator: RooflineAllocator, a: Allocation) -> tuple[float, float, float, str]:
    """(step, bound, share not computing, note) of an allocation's AF-Pipe."""
    n = a.micro_batches
    short = n if n * 2 * allocator.model.num_moe_layers <= UNITS else min(n, 2 * a.cycle)
    return extended(lambda k: simulate_allocation(allocator, replace(a, micro_batches=k)), n, short)


def refine(
    allocator: RooflineAllocator, a: Allocation, *, factors: Sequence[int] = (2, 4), parts: Sequence[int] = (1, 2)
) -> Allocation:
    """The allocation's group sizes with the cycle, the micro-batch and the way of the residual whose simulated step is shortest.

    Unchanged where two cycles are more units than ``UNITS``: they would take minutes, the closed form has to do.

    Args:
        factors: cycles to try, times p.
        parts: numbers of parts to cut the micro-batch into: transfers of one part hide behind computations of another, and
            fewer activations live, at the price of thinner expert products.
    """
    p = max(a.pa, a.pf)
    if 4 * p * 2 * allocator.model.num_moe_layers > UNITS:
        return a
    best = None
    for residual in allocator.residuals(a.pa):
        for k in parts:
            if a.workload.micro_batch % k or a.workload.micro_batch // k < a.m:
                continue
            if allocator.even_sequences and a.workload.micro_batch // k % a.m:
                continue
            w = replace(a.workload, micro_batch=a.workload.micro_batch // k)
            batches = max(1, w.global_batch // w.micro_batch // a.replicas)
            for cycle in sorted({max(2, min(f, -(-batches // p))) * p for f in factors}):
                c = replace(allocator.costs, workload=w, cycle=cycle, residual="ride" if residual == "ride" else "direct")
                tried = allocator.describe(
                    c, replicas=a.replicas, pa=a.pa, pf=a.pf, m=a.m, n=a.n, nics_a=a.nics_a, nics_f=a.nics_f
                )
                if tried.memory_a.total > allocator.cluster.gpu.hbm_bytes or tried.memory_f.total > c.f_cluster.gpu.hbm_bytes:
                    continue
                tried = replace(tried, gap=a.gap, rejected=a.rejected, simulated=simulated_step(allocator, tried)[0])
                if best is None or tried.step < best.step:
                    best = tried
    return best or a
