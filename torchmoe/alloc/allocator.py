"""RooflineAllocator: how many GPUs and NICs for attention, how many for experts, in how many groups (DisagMoE section 4.3).

The tables come from :class:`SplitCosts`, the choice from the program in ``milp``. The answer explains itself: times of both
sides, the resource that binds, memory of the fullest ranks, and why the layouts that were left out were left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from torchmoe.alloc.milp import solve
from torchmoe.alloc.problem import Choice, Layout, Problem
from torchmoe.alloc.specs import ClusterSpec, Workload
from torchmoe.alloc.split import SplitCosts
from torchmoe.costs.flops import model_flops
from torchmoe.costs.memory import MemoryParts
from torchmoe.costs.model import ModelShape
from torchmoe.errors import ConfigError, check_whole
from torchmoe.placement import Residual

__all__ = ["MEMORY_MODES", "Allocation", "LengthRow", "RooflineAllocator"]

Nics = Literal["fixed", "free"]
Recompute = Literal["none", "full"]
Save = Literal["input", "half", "preact", "all"]
Residuals = Literal["direct", "ride", "auto"]
MEMORY_MODES: tuple[tuple[Recompute, Save], ...] = (("none", "preact"), ("none", "input"), ("full", "preact"), ("full", "input"))
"""From the fastest to the smallest."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A split and what it is predicted to do. Times are seconds per optimizer step; sizes are per group.

    Args:
        m, n: GPUs of an attention and of an FFN group; ``pa``, ``pf`` groups of each; ``replicas`` of the whole pipeline.
        nics_a, nics_f: NICs (or GPUs' fabric ports) of a group.
        attention, ffn, network_a, network_f: busy time of each resource; the largest binds.
        fill: time to fill and drain the pipeline, once per step.
        workload: with the micro-batch and memory mode that were chosen.
        residual: how it reaches the next attention group: "local" (there is one group), "direct" or "ride".
        gap: how far from the best the solver may be.
        simulated: seconds of the step in simulated time (see ``refine``); without it the step is a bound plus filling.
    """

    m: int
    n: int
    pa: int
    pf: int
    replicas: int
    nics_a: float
    nics_f: float
    cycle: int
    attention: float
    ffn: float
    network_a: float
    network_f: float
    fill: float
    flops: float
    peak: float
    gpus: int
    world: int
    workload: Workload
    micro_batches: int
    memory_a: MemoryParts
    memory_f: MemoryParts
    residual: Residual = "local"
    gap: float = 0.0
    simulated: float | None = None
    rejected: dict[str, int] = field(default_factory=dict)

    @property
    def times(self) -> dict[str, float]:
        return {
            "attention": self.attention,
            "experts": self.ffn,
            "network (attention side)": self.network_a,
            "network (expert side)": self.network_f,
        }

    @property
    def binding(self) -> str:
        """The busiest resource."""
        return max(self.times, key=lambda k: self.times[k])

    @property
    def busy(self) -> float:
        """T: the time of the busiest resource."""
        return max(self.times.values())

    @property
    def step(self) -> float:
        """Predicted seconds per step: simulated, or else the busiest resource (perfect overlap) plus filling and draining."""
        return self.busy + self.fill if self.simulated is None else self.simulated

    @property
    def tokens_per_second(self) -> float:
        return self.workload.global_tokens / self.step

    @property
    def mfu(self) -> float:
        """Model FLOPs (no recomputation) over the peak of the GPUs that are used."""
        return self.flops / (self.step * self.peak)

    @property
    def attention_sizes(self) -> list[int]:
        return [self.m] * self.pa

    @property
    def ffn_sizes(self) -> list[int]:
        return [self.n] * self.pf

    def to_dict(self) -> dict[str, Any]:
        out = asdict(self)
        out |= {
            "binding": self.binding,
            "step": self.step,
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
            "placement": {"attention": self.attention_sizes, "ffn": self.ffn_sizes, "replicas": self.replicas},
        }
        return out

    def explain(self) -> str:
        """The answer in words and numbers."""
        pool_a, pool_f = self.replicas * self.pa * self.m, self.replicas * self.pf * self.n
        more = f", {self.replicas} replicas" if self.replicas > 1 else ""
        how = f"perfect overlap, then {self.fill * 1e3:.1f} ms to fill and drain"
        if self.simulated is not None:
            how = f"simulated; {self.busy / self.simulated:.0%} of it the busiest resource"
        lines = [
            f"{self.gpus} of {self.world} GPUs: {pool_a} for attention, {pool_f} for experts{more}",
            f"  attention={self.attention_sizes} ffn={self.ffn_sizes} cycle={self.cycle} residual={self.residual}, "
            f"NICs per group {self.nics_a:g} and {self.nics_f:g}",
            f"  step {self.step * 1e3:.1f} ms ({self.micro_batches} micro-batches of {self.workload.micro_batch} sequences; "
            f"{how}), recompute={self.workload.recompute} save={self.workload.save}",
            f"  {self.tokens_per_second:,.0f} tokens/s, MFU {self.mfu:.1%}",
            f"  binds: {self.binding}",
        ]
        for name, t in self.times.items():
            lines.append(f"    {name:26s} {t * 1e3:10.1f} ms  {t / self.busy:6.1%}")
        for name, mem in (("attention rank", self.memory_a), ("expert rank", self.memory_f)):
            parts = ", ".join(f"{k} {v / 2**30:.1f}" for k, v in mem.rows() if v >= 2**27)
            lines.append(f"  fullest {name}: {mem.total / 2**30:.1f} GiB ({parts})")
        for side in ("attention", "experts"):
            prefix = f"{side} do not fit in " if side == "experts" else f"{side} does not fit in "
            found = {k.removeprefix(prefix): v for k, v in self.rejected.items() if k.startswith(prefix)}
            if found:
                lines.append(f"  left out for memory, {side}: " + ", ".join(f"{v} layouts with {k}" for k, v in found.items()))
        if self.gap:
            lines.append(f"  the solver stopped early: at most {self.gap:.2%} from the best")
        return "\n".join(lines)


class _Tables:
    """Seconds of one workload and residual, computed once for all replicas and cycles."""

    def __init__(self, costs: SplitCosts) -> None:
        self.costs = costs
        self._attention: dict[tuple[int, int], float] = {}
        self._experts: dict[tuple[bool, int], float] = {}
        self._wire: dict[tuple[bool, int], tuple[float, float]] = {}

    def layout(
        self,
        replicas: int,
        pa: int,
        pf: int,
        fits: tuple[list[int], list[int], dict[int, int]],
        steps: float,
        bands: tuple[float, float],
    ) -> Layout:
        """The program's tables of one layout: ``steps`` times a micro-batch's seconds, over NICs of ``bands`` B/s."""
        c, (ms, ns, max_n) = self.costs, fits
        for m in ms:
            if (pa, m) not in self._attention:
                self._attention[pa, m] = c.attention_group_seconds(pa, m, even=c.workload.micro_batch % m == 0)
        for n in ns:
            if (pa == 1, n) not in self._experts:
                self._experts[pa == 1, n], self._wire[pa == 1, n] = c.expert_seconds(n, pa), c.wire_bytes(n, pa)
        v_a, v_f = len(c.group_layers(pa, 0)), len(c.group_layers(pf, 0))
        wire = {n: self._wire[pa == 1, n] for n in ns}
        return Layout(
            replicas,
            pa,
            pf,
            {m: steps * self._attention[pa, m] for m in ms},
            {n: steps * v_f * self._experts[pa == 1, n] for n in ns},
            {n: steps * v_a * wire[n][0] / bands[0] for n in ns},
            {n: steps * v_f * wire[n][1] / bands[1] for n in ns},
            max_n,
        )


@dataclass(frozen=True)
class RooflineAllocator:
    """Splits ``cluster`` between attention and experts of ``model`` under ``workload``.

    Args:
        ffn_cluster: a second pool of another GPU kind for the experts; then the first pool holds attention only.
        nics: "fixed" to their GPUs, or "free" to be given to either side (whole NICs).
        even_sequences: M divides the micro-batch's sequences; else the ranks' shares differ by one and the fullest counts.
        even_experts: N divides the experts; else shares differ by one and the fullest rank counts.
        groups: numbers of groups per role to try; ``symmetric`` keeps pA = pF (the paper's form).
        max_replicas: replicas of the whole pipeline to try.
        micro_batches: sequences per micro-batch to try; none: the workload's.
        memory_modes: (recompute, save) pairs to try; none: the workload's.
        residual: with several attention groups, send it to the next one ("direct"), on the dispatched rows ("ride"), or try both
            ("auto").
        count_fill: weigh every time with what filling, draining and too few micro-batches add (:meth:`fill_factor`).
        tie: times within this share count as equal; then fewest GPUs, or ``goal="mfu"``.
    """

    cluster: ClusterSpec
    model: ModelShape
    workload: Workload
    ffn_cluster: ClusterSpec | None = None
    nics: Nics = "fixed"
    even_sequences: bool = True
    even_experts: bool = False
    groups: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16)
    symmetric: bool = True
    max_replicas: int = 64
    micro_batches: Sequence[int] = ()
    memory_modes: Sequence[tuple[Recompute, Save]] = ()
    count_fill: bool = True
    residual: Residuals = "direct"
    tie: float = 0.01
    goal: Literal["fewest_gpus", "mfu"] = "fewest_gpus"
    max_seconds: float = 60.0

    def __post_init__(self) -> None:
        known = {"nics": get_args(Nics), "residual": get_args(Residuals), "goal": ("fewest_gpus", "mfu")}
        for name, allowed in known.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(allowed)}")
        for name in ("groups", "micro_batches"):
            for value in getattr(self, name):
                check_whole(f"an entry of {name}", value, 1, "leave out what is not to be tried")
        check_whole("max_replicas", self.max_replicas, 1, "1 tries one pipeline")
        for mode in self.memory_modes:
            if len(mode) != 2 or mode[0] not in get_args(Recompute) or mode[1] not in get_args(Save):
                raise ConfigError(f"memory_modes has {mode!r}; every entry is (recompute, save), e.g. ('full', 'input')")
        if not 0 <= self.tie < 1:
            raise ConfigError(f"tie={self.tie} is the share within which times count as equal; give a number in [0, 1)")

    @property
    def costs(self) -> SplitCosts:
        return SplitCosts(self.cluster, self.model, self.workload, self.ffn_cluster)

    def costs_of(self, a: Allocation) -> SplitCosts:
        """The costs behind an allocation."""
        return replace(self.costs, workload=a.workload, residual="ride" if a.residual == "ride" else "direct")

    def residuals(self, pa: int) -> tuple[Residual, ...]:
        """Ways of the residual to try with so many attention groups."""
        if pa == 1:
            return ("local",)
        return ("direct", "ride") if self.residual == "auto" else (self.residual,)

    @property
    def world(self) -> int:
        return self.cluster.gpus + (self.ffn_cluster.gpus if self.ffn_cluster else 0)

    # ---- candidates
    def workloads(self) -> list[Workload]:
        """The workload in every micro-batch size and memory mode to try."""
        w = self.workload
        out = []
        for b in self.micro_batches or (w.micro_batch,):
            if w.global_batch % b:
                raise ConfigError(f"micro_batch={b} does not divide global_batch={w.global_batch} sequences; leave it out")
            for recompute, save in self.memory_modes or ((w.recompute, w.save),):
                if save == "half" and not self.model.glu:
                    continue
                out.append(replace(w, micro_batch=b, recompute=recompute, save=save))
        return out

    def _whole_nics(self, sizes: Iterable[int], nics_per_gpu: float) -> list[int]:
        # a NIC that serves several GPUs stays with one group
        free = self.nics == "free" or nics_per_gpu >= 1
        return [n for n in sizes if free or abs(n * nics_per_gpu - round(n * nics_per_gpu)) < 1e-9]

    @staticmethod
    def _shares(whole: int, limit: int, even: bool) -> list[int]:
        return [n for n in range(1, min(limit, whole) + 1) if not even or whole % n == 0]

    def _layouts(self, w: Workload) -> Iterable[tuple[int, int, int]]:
        n = self.model.num_moe_layers
        batches = w.global_batch // w.micro_batch
        for r in range(1, min(batches, self.max_replicas, self.world // 2) + 1):
            if batches % r:
                continue
            for pa in self.groups:
                for pf in [pa] if self.symmetric else self.groups:
                    if max(pa, pf) <= n and r * (pa + pf) <= self.world:
                        yield r, pa, pf

    def problem(self) -> tuple[Problem, list[SplitCosts], Counter[str]]:
        """The program's tables, the costs behind each layout, and why candidates were left out."""
        costs, why = self.costs, Counter[str]()
        budget_a = self.cluster.gpus
        budget_f = self.ffn_cluster.gpus if self.ffn_cluster else budget_a
        band_a, per_a = costs.link(self.cluster)
        band_f, per_f = costs.link(costs.f_cluster)
        layouts, used = [], []
        for w in self.workloads():
            for residual in dict.fromkeys(x for pa in self.groups for x in self.residuals(pa)):
                tables = _Tables(replace(costs, workload=w, residual=residual))
                for r, pa, pf in self._layouts(w):
                    if residual not in self.residuals(pa):
                        continue
                    fits: str | tuple[list[int], list[int], dict[int, int]] = ""
                    for factor in (4, 2):  # the longer cycle hides transfers, the shorter one holds fewer units
                        c = replace(tables.costs, cycle=factor * max(pa, pf))
                        sizes = (budget_a // (r * pa), budget_f // (r * pf))
                        fits = self._fitting(c, r, pa, pf, sizes, (per_a, per_f))
                        if not isinstance(fits, str):
                            break
                    if isinstance(fits, str):
                        why[fits] += 1
                        continue
                    steps = c.micro_batches(r) * self.fill_factor(c, r, max(pa, pf))
                    layouts.append(tables.layout(r, pa, pf, fits, steps, (band_a, band_f)))
                    used.append(c)
        gpus: Any = (budget_a, self.ffn_cluster.gpus) if self.ffn_cluster else budget_a
        nics: Any = None
        if self.nics == "free":
            if self.cluster.nodes == 1 and self.ffn_cluster is None:
                raise ConfigError("nics='free' on one node: its GPUs talk over the node's fabric; use nics='fixed'")
            nics = (self.cluster.nics, self.ffn_cluster.nics) if self.ffn_cluster else self.cluster.nics
        return Problem(layouts, gpus, nics, (per_a, per_f)), used, why

    def fill_factor(self, c: SplitCosts, replicas: int, p: int) -> float:
        """Step over the busiest resource's time: max(1, 3p / n) + (2p - 1) / (n v), n micro-batches of v layers per group.

        Filling and draining a chain of 2p groups idles (2p - 1) units of forward and backward. With fewer micro-batches than a
        turn of the chain takes (2p stages, and transfers half as long) the turn itself is exposed. Simulations of n = 1..64 and
        p = 1, 2, 4 are within 25 % of this (tested up to n = 16).
        """
        if not self.count_fill:
            return 1.0
        n = c.micro_batches(replicas)
        return max(1.0, 3 * p / n) + (2 * p - 1) / (n * len(c.group_layers(p, 0)))

    def _fitting(
        self, c: SplitCosts, r: int, pa: int, pf: int, caps: tuple[int, int], per: tuple[float, float]
    ) -> str | tuple[list[int], list[int], dict[int, int]]:
        """Sizes that fit in memory, and for each M the largest N; or why there are none."""
        # memory falls as N or M grows and, on the attention side, rises with N (more rows per token): bisect
        sizes = self._whole_nics(self._shares(self.model.num_experts, caps[1], self.even_experts), per[1])
        room_f, room_a = c.f_cluster.gpu.hbm_bytes, self.cluster.gpu.hbm_bytes
        first = bisect_left(sizes, True, key=lambda n: c.expert_memory(pa=pa, pf=pf, n=n, replicas=r).total <= room_f)
        ns = sizes[first:]
        if not ns:
            return f"experts do not fit in p={pf}"
        max_n: dict[int, int] = {}
        for m in self._whole_nics(self._shares(c.workload.micro_batch, caps[0], self.even_sequences), per[0]):

            def full(n: int, m: int = m) -> bool:
                return c.attention_memory(pa=pa, pf=pf, m=m, n=n, replicas=r).total > room_a

            if not full(ns[-1]):
                max_n[m] = ns[-1]
            elif not full(ns[0]):
                max_n[m] = ns[bisect_left(ns, True, key=full) - 1]
        if not max_n:
            return f"attention does not fit in p={pa}"
        if all(n == ns[-1] for n in max_n.values()):
            return list(max_n), ns, {}
        return list(max_n), ns, max_n

    # ---- solve
    def solve(self) -> Allocation:
        """The best split.

        Raises:
            ConfigError: nothing fits; the message names the smallest cluster of this kind that would do.
        """
        problem, used, why = self.problem()
        choice = solve(problem, tie=self.tie, goal=self.goal, max_seconds=self.max_seconds) if problem.layouts else None
        if choice is None:
            raise ConfigError(self._nothing_fits(why))
        return self.allocation(problem, choice, used, why)

    def allocation(self, problem: Problem, choice: Choice, used: Sequence[SplitCosts], why: Counter[str]) -> Allocation:
        """Dress a choice of the program up as an answer."""
        o = problem.layouts[choice.layout]
        found = self.describe(
            used[choice.layout], replicas=o.replicas, pa=o.pa, pf=o.pf, m=choice.m, n=choice.n, nics_a=choice.qa, nics_f=choice.qf
        )
        return replace(found, gap=choice.gap, rejected=dict(why))

    def describe(
        self, c: SplitCosts, *, replicas: int, pa: int, pf: int, m: int, n: int, nics_a: float, nics_f: float
    ) -> Allocation:
        """The allocation of these sizes under the workload, cycle and residual of ``c``, whether it fits or not."""
        w, p, steps = c.workload, max(pa, pf), c.micro_batches(replicas)
        factor = self.fill_factor(c, replicas, p)
        wire_a, wire_f = c.wire_bytes(n, pa)
        v_a, v_f = len(c.group_layers(pa, 0)), len(c.group_layers(pf, 0))
        attention = steps * c.attention_group_seconds(pa, m, even=w.micro_batch % m == 0)
        ffn = steps * v_f * c.expert_seconds(n, pa)
        network_a = steps * v_a * wire_a / c.link(self.cluster)[0] / nics_a
        network_f = steps * v_f * wire_f / c.link(c.f_cluster)[0] / nics_f
        peak_a, peak_f = self.cluster.gpu.peak(w.dtype), c.f_cluster.gpu.peak(w.dtype)
        return Allocation(
            m=m,
            n=n,
            pa=pa,
            pf=pf,
            replicas=replicas,
            nics_a=nics_a,
            nics_f=nics_f,
            cycle=c.cycle or 4 * p,
            attention=attention,
            ffn=ffn,
            network_a=network_a,
            network_f=network_f,
            fill=max(attention, ffn, network_a, network_f) * (factor - 1),
            flops=model_flops(self.model, seq_len=w.seq_len, causal=w.causal) * w.global_tokens,
            peak=replicas * (pa * m * peak_a + pf * n * peak_f),
            gpus=replicas * (pa * m + pf * n),
            world=self.world,
            workload=w,
            micro_batches=steps,
            memory_a=c.attention_memory(pa=pa, pf=pf, m=m, n=n, replicas=replicas),
            memory_f=c.expert_memory(pa=pa, pf=pf, n=n, replicas=replicas),
            residual="local" if pa == 1 else c.residual,
        )

    def _nothing_fits(self, why: Counter[str]) -> str:
        reasons = "; ".join(f"{k} ({v} layouts)" for k, v in why.most_common(3)) or "no layout is possible"
        text = f"{self.model.name} fits nowhere on {self.world} GPUs ({reasons})"
        if self.ffn_cluster is not None:
            return text + "; give more GPUs, more memory per GPU, or recompute='full'"
        gpus = self.cluster.gpus
        for _ in range(12):
            gpus *= 2
            try:
                found = replace(self, cluster=self.cluster.resized(gpus)).problem()[0]
                choice = solve(found, tie=1.0, max_seconds=self.max_seconds) if found.layouts else None
            except ConfigError:
                continue
            if choice is not None:
                return text + f"; the smallest cluster of this kind that would do, in doublings, has {gpus} GPUs"
        return text + "; no larger cluster of this kind holds it either: try recompute='full' or a smaller micro_batch"

    def at_length(self, seq_len: int) -> RooflineAllocator:
        """The same allocator at another sequence length, the tokens per step and per micro-batch kept as far as they divide."""
        w = self.workload
        scale = w.seq_len / seq_len
        tokens = max(1, round(w.global_batch * scale))
        sizes = sorted({max(1, round(b * scale)) for b in self.micro_batches or (w.micro_batch,)})
        batch = max(sizes[-1], tokens // sizes[-1] * sizes[-1])
        fitting = [b for b in sizes if batch % b == 0]
        wide = replace(w, seq_len=seq_len, micro_batch=fitting[-1], global_batch=batch)
        return replace(self, workload=wide, micro_batches=fitting if self.micro_batches else ())

    def over_lengths(self, lengths: Sequence[int]) -> list[LengthRow]:
        """The best split at each sequence length, and what it gains over keeping the first length's split."""
        rows: list[LengthRow] = []
        kept: Allocation | None = None
        for s in lengths:
            allocator = self.at_length(s)
            try:
                best = allocator.solve()
            except ConfigError:
                rows.append(LengthRow(s, None, None))
                continue
            gain = None
            if kept is None:
                kept = best
            else:
                old = allocator.keeping(kept)
                gain = None if old is None else old.step / best.step
            rows.append(LengthRow(s, best, gain))
        return rows

    def keeping(self, a: Allocation) -> Allocation | None:
        """The best that this allocator's workload can do on the group sizes of ``a``; None where it does not fit."""
        problem, used, why = self.problem()
        best: Allocation | None = None
        for k, o in enumerate(problem.layouts):
            if (o.replicas, o.pa, o.pf) != (a.replicas, a.pa, a.pf) or a.n not in o.ffn or a.n > o.max_n.get(a.m, a.n):
                continue
            if a.m not in o.attention:
                continue
            found = self.allocation(problem, Choice(k, a.m, a.n, a.nics_a, a.nics_f, 0.0, a.gpus), used, why)
            if best is None or found.step < best.step:
                best = found
        return best


@dataclass(frozen=True)
class LengthRow:
    """One sequence length: its best split (None: nothing fits) and the gain over the first row's split (None: cannot run it)."""

    seq_len: int
    best: Allocation | None
    gain: float | None
