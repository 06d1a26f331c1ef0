"""Makes the allocation program small without changing its answer: bounds on T, then candidates that cannot matter are left out.

A lower bound comes from dropping the coupling between choices (bisection over T), an incumbent from scanning N with the largest
M that is left. A candidate slower than the incumbent is never chosen; of the candidates that can never be the bottleneck (at
most the lower bound under every other choice) only the smallest is needed, because phase 2 wants the fewest GPUs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil, inf

from torchmoe.alloc.problem import Layout, Problem

__all__ = ["nic_candidates", "presolve"]


def _fits(limit: int | tuple[int, int], a: float, f: float) -> bool:
    return a <= limit[0] and f <= limit[1] if isinstance(limit, tuple) else a + f <= limit


def _smallest(table: Mapping[int, float], bound: float) -> float:
    return min((k for k, v in table.items() if v <= bound), default=inf)


def lower_bound(p: Problem, o: Layout) -> float:
    """A T that no choice of this layout beats; ``inf`` if no choice fits the budgets."""
    ra, rf = o.replicas * o.pa, o.replicas * o.pf
    wire_a, wire_f = min(o.wire_a.values()), min(o.wire_f.values())

    def feasible(t: float) -> bool:
        m, n = _smallest(o.attention, t), _smallest(o.ffn, t)
        need_a, need_f = max(1, ceil(wire_a / t * (1 - 1e-12))), max(1, ceil(wire_f / t * (1 - 1e-12)))
        if p.nics is not None:
            return _fits(p.gpus, ra * m, rf * n) and _fits(p.nics, ra * need_a, rf * need_f)
        m = max(m, wire_a / t / p.per_gpu(0) * (1 - 1e-12))
        n = max(n, wire_f / t / p.per_gpu(1) * (1 - 1e-12))
        return _fits(p.gpus, ra * m, rf * n)

    high = max(*o.attention.values(), *o.ffn.values())
    high = max(high, max(o.wire_a.values()), max(o.wire_f.values()))
    if p.nics is None:
        high /= min(1.0, p.per_gpu(0), p.per_gpu(1))
    if not feasible(high):
        return inf
    low = 0.0
    for _ in range(60):
        mid = (low + high) / 2
        if mid > 0 and feasible(mid):
            high = mid
        else:
            low = mid
    return low


def incumbent(p: Problem, o: Layout) -> float:
    """T of a good choice that fits; ``inf`` if the scan finds none."""
    ra, rf = o.replicas * o.pa, o.replicas * o.pf
    best = inf
    sizes = sorted(o.attention)
    fastest: dict[int, int] = {}  # size budget -> the M that is fastest within it
    champion = None
    for m in sizes:
        if champion is None or o.attention[m] <= o.attention[champion]:
            champion = m
        fastest[m] = champion
    for n, ffn in o.ffn.items():
        left = p.gpus[0] if isinstance(p.gpus, tuple) else p.gpus - rf * n
        if isinstance(p.gpus, tuple) and rf * n > p.gpus[1]:
            continue
        at = bisect_right(sizes, left // ra)
        if not at:
            continue
        cap = sizes[at - 1]
        for m in {cap, fastest[cap]}:
            if o.max_n.get(m, n) < n:
                continue
            if p.nics is None:
                best = min(best, max(o.attention[m], ffn, o.wire_a[n] / (m * p.per_gpu(0)), o.wire_f[n] / (n * p.per_gpu(1))))
                continue
            for qa, qf in _nic_splits(p.nics, ra, rf, o.wire_a[n], o.wire_f[n]):
                best = min(best, max(o.attention[m], ffn, o.wire_a[n] / qa, o.wire_f[n] / qf))
    return best


def _nic_splits(nics: int | tuple[int, int], ra: int, rf: int, wire_a: float, wire_f: float) -> Iterable[tuple[int, int]]:
    if isinstance(nics, tuple):
        qa, qf = nics[0] // ra, nics[1] // rf
        if qa and qf:
            yield qa, qf
        return
    total = wire_a * ra + wire_f * rf
    real = wire_a * nics / total if total else 1
    for qa in {max(1, int(real)), int(real) + 1}:
        qf = (nics - ra * qa) // rf
        if qf >= 1:
            yield qa, qf


def _thin(sizes: Iterable[int], harmless: Iterable[int], limit: Mapping[int, int]) -> list[int]:
    """Of the harmless sizes keep the smallest, and a larger one where its ``limit`` is wider; all others stay."""
    kept: list[int] = []
    widest = -1.0
    free = set(harmless)
    for s in sorted(sizes):
        width = limit.get(s, inf)
        if s not in free:
            kept.append(s)
        elif width > widest:
            kept.append(s)
            widest = width
    return kept


def presolve(p: Problem, tie: float) -> list[tuple[int, Layout, float, float]]:
    """The layouts that can hold the answer: (index, thinned layout, lower bound, cap on T)."""
    bounds = [lower_bound(p, o) for o in p.layouts]
    order = sorted((b, k) for k, b in enumerate(bounds) if b < inf)
    cap = inf
    for bound, k in order:
        if bound > cap * (1 + 1e-9):
            break
        cap = min(cap, incumbent(p, p.layouts[k]))
    cap *= (1 + tie) * (1 + 1e-9)
    floor = min((b for b, _ in order), default=inf)
    out = []
    for bound, k in order:
        if bound > cap:
            continue
        o = p.layouts[k]
        att = {m: v for m, v in o.attention.items() if v <= cap}
        ffn = {n: v for n, v in o.ffn.items() if v <= cap}
        if p.nics is None:
            wire_a, wire_f = min(o.wire_a[n] for n in ffn) if ffn else inf, o.wire_f
            att = {m: v for m, v in att.items() if wire_a / (m * p.per_gpu(0)) <= cap}
            ffn = {n: v for n, v in ffn.items() if wire_f[n] / (n * p.per_gpu(1)) <= cap}
        if not att or not ffn:
            continue
        worst = max(o.wire_a[n] for n in ffn)
        quick = [m for m, v in att.items() if v <= floor and (p.nics is not None or worst / (m * p.per_gpu(0)) <= floor)]
        keep = _thin(att, quick, o.max_n)
        flat = max(o.wire_a[n] for n in ffn) == min(o.wire_a[n] for n in ffn) if p.nics is not None else False
        flat = flat and max(o.wire_f[n] for n in ffn) == min(o.wire_f[n] for n in ffn)
        keep_n = _thin(ffn, [n for n, v in ffn.items() if v <= floor], {}) if flat else sorted(ffn)
        thin = replace(
            o,
            attention={m: att[m] for m in keep},
            ffn={n: ffn[n] for n in keep_n},
            wire_a={n: o.wire_a[n] for n in keep_n},
            wire_f={n: o.wire_f[n] for n in keep_n},
        )
        out.append((k, thin, floor, cap))
    return out


def nic_candidates(wire: Mapping[int, float], most: int, floor: float, cap: float) -> list[int]:
    """NICs per group that are worth a variable: fast enough for ``cap``, and one of those that never bind."""
    low, high = min(wire.values()), max(wire.values())
    fast = [q for q in range(1, most + 1) if low / q <= cap]
    never = next((q for q in fast if high / q <= floor), most)
    return [q for q in fast if q <= never]
