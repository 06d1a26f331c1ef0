"""The planner (Piper): every PP x EP x DP of a cluster under five constraints, ranked by predicted MFU, beside the split plan.

Constraints: PP x EP x DP = GPUs; EP divides E; PP <= layers; EP within the fast domain; the fullest stage fits in memory.
Every strategy that fails says which one and by how much. DP grows where a larger EP would leave the fast domain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torchmoe.alloc.allocator import MEMORY_MODES, Allocation, Nics, Recompute, Residuals, RooflineAllocator, Save
from torchmoe.alloc.colocated import AllToAll, ColocatedCosts, StepParts
from torchmoe.alloc.specs import ClusterSpec, Workload
from torchmoe.costs.flops import model_flops
from torchmoe.costs.memory import MemoryParts
from torchmoe.costs.model import ModelShape
from torchmoe.errors import ConfigError

__all__ = ["Capacity", "Plan", "PlanReport", "Rejected", "capacity", "plan"]

Bottleneck = Literal["all-to-all latency", "missing overlap", "skinny GEMMs", "placement"]


@dataclass(frozen=True)
class Plan:
    """A colocated strategy that fits.

    Args:
        memory: parts of the fullest stage; ``stages`` total bytes of every stage.
        parts: seconds of a step by cause.
        lost: seconds of a step that each of the four bottlenecks costs.
    """

    costs: ColocatedCosts
    memory: MemoryParts
    stages: tuple[float, ...]
    parts: StepParts
    mfu: float
    lost: dict[str, float]
    flat: float
    halo: float

    @property
    def degrees(self) -> str:
        c = self.costs
        return f"PP {c.pp} x EP {c.ep} x DP {c.dp}"

    @property
    def step(self) -> float:
        return self.parts.total

    @property
    def tokens_per_second(self) -> float:
        return self.costs.workload.global_tokens / self.step

    @property
    def bottleneck(self) -> str:
        return max(self.lost, key=lambda k: self.lost[k])

    def to_dict(self) -> dict[str, Any]:
        c, w = self.costs, self.costs.workload
        return {
            "kind": "colocated",
            "pp": c.pp,
            "ep": c.ep,
            "dp": c.dp,
            "overlap": c.overlap,
            "micro_batch": w.micro_batch,
            "micro_batches": c.micro_batches,
            "recompute": w.recompute,
            "save": w.save,
            "step": self.step,
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
            "bottleneck": self.bottleneck,
            "lost": self.lost,
            "parts": vars(self.parts),
            "all_to_all": {"flat": self.flat, "halo": self.halo},
            "memory": dict(self.memory.rows()),
            "stages": list(self.stages),
        }


@dataclass(frozen=True)
class Rejected:
    """A strategy that breaks a constraint: which, and by how much; ``least`` bytes of the fullest stage where that is memory."""

    pp: int
    ep: int
    dp: int
    constraint: str
    reason: str
    least: float | None = None


@dataclass(frozen=True)
class PlanReport:
    """All plans, best first; the split of attention and experts (or why there is none); what was rejected."""

    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    split: Allocation | None
    split_refused: str
    cluster: ClusterSpec
    model: ModelShape

    @property
    def best(self) -> Plan | Allocation:
        """The fastest of all."""
        options: list[Plan | Allocation] = [*self.plans[:1], *([self.split] if self.split else [])]
        if not options:
            raise ConfigError(self.nothing_fits())
        return min(options, key=lambda p: p.step)

    def nothing_fits(self) -> str:
        counts = Counter(r.constraint for r in self.rejected)
        why = ", ".join(f"{k}: {v}" for k, v in counts.most_common())
        return f"{self.model.name} fits no strategy on {self.cluster.gpus} GPUs ({why}); {self.split_refused}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "plans": [p.to_dict() for p in self.plans],
            "rejected": [vars(r) for r in self.rejected],
            "disaggregated": self.split.to_dict() if self.split else None,
            "disaggregated_refused": self.split_refused,
        }


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _strategies(cluster: ClusterSpec) -> Iterator[tuple[int, int, int]]:
    for ep in _divisors(cluster.gpus):
        for pp in _divisors(cluster.gpus // ep):
            yield pp, ep, cluster.gpus // ep // pp


def _lost(costs: ColocatedCosts, parts: StepParts) -> dict[str, float]:
    """Seconds per step that each of Piper's four bottlenecks costs; hidden communication costs nothing."""
    exposed = (parts.exchange - parts.hidden) / parts.exchange if parts.exchange else 0.0
    gpu, w, shape = costs.cluster.gpu, costs.workload, costs.model
    per_expert = costs.workload.tokens * shape.top_k / shape.num_experts
    best = max(y for _, y in gpu.grouped_gemm.points)
    inside = costs.exchange(one_node=True).total
    here = costs.exchange().total
    calls = parts.exchange / here if here else 0.0
    latency = parts.exchange_latency * exposed
    placement = max(0.0, calls * (here - inside) * exposed)
    overlappable = min(parts.exchange - parts.hidden, max(0.0, parts.compute - parts.hidden)) + parts.p2p
    return {
        "all-to-all latency": latency,
        "missing overlap": overlappable,
        "skinny GEMMs": parts.experts * (1 - gpu.grouped_gemm(per_expert) / best) if w.dtype else 0.0,
        "placement": placement,
    }


def plan(
    cluster: ClusterSpec,
    model: ModelShape,
    workload: Workload,
    *,
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    modes: Sequence[tuple[Recompute, Save]] = MEMORY_MODES,
    all_to_all: AllToAll = "halo",
    memory_model: Literal["exact", "paper"] = "exact",
    overlap: Sequence[Literal["none", "ideal"]] = ("none", "ideal"),
    nics: Nics = "fixed",
    residual: Residuals = "direct",
    split: bool = True,
    simulate: bool = False,
    split_micro_batches: Sequence[int] = (),
    max_seconds: float = 60.0,
    progress: Callable[[], None] = lambda: None,
) -> PlanReport:
    """Rank the strategies.

    Args:
        micro_batches: sequences per GPU and micro-batch to try; a plan takes the fastest that fits.
        modes: (recompute, save) pairs, from the fastest to the smallest; a plan takes the first that fits.
        memory_model: "paper" judges stage 0 by Piper's M_1F1B instead.
        overlap: rank blocking exchanges, ideal overlap, or both.
        nics, residual: of the split plan; ``split=False`` leaves it out.
        simulate: run the split plan through the simulator, choose its cycle by that, and rank it by that.
        split_micro_batches: of the split plan, sequences per pipeline; none: 1 to 64 in doublings.
        max_seconds: of the split plan's solver.
        progress: called after each strategy.
    """
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    peak = cluster.gpus * cluster.gpu.peak(workload.dtype)
    flops = model_flops(model, seq_len=workload.seq_len, causal=workload.causal) * workload.global_tokens
    for pp, ep, dp in _strategies(cluster):
        progress()
        no = _broken(cluster, model, workload, pp, ep, dp)
        if no is not None:
            rejected.append(no)
            continue
        fitting: list[ColocatedCosts] = []
        least = None
        for k in micro_batches:
            if workload.global_batch % (k * ep * dp):
                continue
            for recompute, save in modes:
                w = replace(workload, micro_batch=k * ep, recompute=recompute, save=save)
                costs = ColocatedCosts(cluster, model, w, pp, ep, dp, all_to_all)
                used = (
                    costs.paper_memory() + cluster.reserved_bytes
                    if memory_model == "paper"
                    else max(costs.memory(i).total for i in range(pp))
                )
                least = used if least is None else min(least, used)
                if used <= cluster.gpu.hbm_bytes:
                    fitting.append(costs)
                    break
        if not fitting:
            rejected.append(_too_full(cluster, workload, pp, ep, dp, least))
            continue
        for way in overlap:
            best = min((replace(c, overlap=way) for c in fitting), key=lambda c: c.step().total)
            parts, memory = best.step(), [best.memory(i) for i in range(pp)]
            fullest = max(memory, key=lambda m: m.total)
            plans.append(
                Plan(
                    best,
                    fullest,
                    tuple(m.total for m in memory),
                    parts,
                    flops / (parts.total * peak),
                    _lost(best, parts),
                    best.exchange("flat").total,
                    best.exchange("halo").total,
                )
            )
    plans.sort(key=lambda p: p.step)
    found, refused = None, "the split was not asked for"
    if split:
        sizes = split_micro_batches or [b for b in (1, 2, 4, 8, 16, 32, 64) if workload.global_batch % b == 0]
        allocator = RooflineAllocator(
            cluster,
            model,
            workload,
            nics=nics,
            residual=residual,
            micro_batches=sizes,
            memory_modes=modes,
            max_seconds=max_seconds,
        )
        found, refused = _split(allocator, simulate)
    return PlanReport(tuple(plans), tuple(rejected), found, refused, cluster, model)


def _broken(cluster: ClusterSpec, model: ModelShape, w: Workload, pp: int, ep: int, dp: int) -> Rejected | None:
    if model.num_experts % ep:
        return Rejected(pp, ep, dp, "EP divides E", f"EP {ep} does not divide {model.num_experts} experts")
    if pp > model.num_layers:
        return Rejected(pp, ep, dp, "PP within layers", f"PP {pp} is more than {model.num_layers} layers")
    if ep > cluster.fast_domain:
        return Rejected(pp, ep, dp, "EP in the fast domain", f"EP {ep} leaves the fast domain of {cluster.fast_domain} GPUs")
    if w.global_batch % (ep * dp):
        return Rejected(
            pp, ep, dp, "sequences", f"{w.global_batch} sequences do not divide over EP {ep} x DP {dp} = {ep * dp} GPUs"
        )
    return None


def _too_full(cluster: ClusterSpec, w: Workload, pp: int, ep: int, dp: int, least: float | None) -> Rejected:
    if least is None:
        return Rejected(pp, ep, dp, "sequences", f"no micro-batch size divides {w.global_batch} sequences over {ep * dp} GPUs")
    have = cluster.gpu.hbm_bytes
    text = f"the fullest stage needs at least {least / 2**30:.1f} GiB of {have / 2**30:.1f}"
    return Rejected(pp, ep, dp, "memory", text, least)


def _split(allocator: RooflineAllocator, simulate: bool) -> tuple[Allocation | None, str]:
    if allocator.world < 2:
        return None, "one GPU cannot be split"
    try:
        found = allocator.solve()
    except ConfigError as e:
        return None, str(e)
    if simulate:
        from torchmoe.alloc.simulated import refine

        found = refine(allocator, found)
    return found, ""


@dataclass(frozen=True)
class Capacity:
    """The largest member of a family that fits, and what stops the next one.

    Args:
        next_bytes: what the next one needs at least on a GPU, where that is what stops it; ``hbm_bytes`` what a GPU has.
    """

    model: ModelShape | None
    plan: Plan | Allocation | None
    next_model: ModelShape
    stopped_by: str
    reason: str
    next_bytes: float | None
    hbm_bytes: float


def capacity(
    cluster: ClusterSpec,
    base: ModelShape,
    workload: Workload,
    *,
    grow: Literal["experts", "layers", "width"] = "experts",
    limit: int = 1 << 14,
    **options: Any,
) -> Capacity:
    """The largest model of the family of ``base`` that fits ``cluster``; ``options`` go to :func:`plan`.

    Args:
        grow: what distinguishes the family's members: experts in doublings of K..., layers or expert width in steps of 1/8.
        limit: members to look at.
    """

    def member(i: int) -> ModelShape:
        if grow == "experts":
            return replace(base, num_experts=base.num_experts * 2**i)
        step = max(1, base.num_layers // 8) if grow == "layers" else max(1, base.expert_dim // 8)
        if grow == "layers":
            return replace(base, num_layers=base.num_layers + i * step)
        return replace(base, expert_dim=base.expert_dim + i * step)

    def report(i: int) -> PlanReport:
        return plan(cluster, member(i), workload, **options)

    last: tuple[ModelShape, Plan | Allocation] | None = None
    low, high = -1, 0
    while high < limit:  # gallop, then bisect: whether a member fits is monotone
        r = report(high)
        if not r.plans and r.split is None:
            break
        last, low = (r.model, r.best), high
        high = 2 * high + 1
    else:
        raise ConfigError(f"member {limit} of the family of {base.name} still fits; raise limit")
    while high - low > 1:
        mid = (low + high) // 2
        r = report(mid)
        if r.plans or r.split is not None:
            last, low = (r.model, r.best), mid
        else:
            high = mid
    failed = report(high)
    counts = Counter(x.constraint for x in failed.rejected)
    memory = [(x.least, x.reason) for x in failed.rejected if x.least is not None]
    stopped, reason = counts.most_common(1)[0][0], failed.nothing_fits()
    least = None
    if memory:  # the other constraints remove strategies of every member alike
        stopped, (least, reason) = "memory", min(memory)
    model, best = last or (None, None)
    return Capacity(model, best, failed.model, stopped, reason, least, cluster.gpu.hbm_bytes)
