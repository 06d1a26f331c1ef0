"""Local search around the allocator's answer: every trial is MEASURED (DisagMoE, Algorithm 1). Resumable.

The measurement is a callable: a few steps of a real run, the emulated cluster, or the simulator.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchmoe.alloc.allocator import Allocation, RooflineAllocator
from torchmoe.alloc.problem import Choice, evaluate
from torchmoe.errors import ConfigError

__all__ = ["SearchResult", "Trial", "local_search", "search_allocations"]


class Trial(NamedTuple):
    """A candidate: sizes and NICs per group."""

    m: int
    n: int
    nics_a: float
    nics_f: float


@dataclass(frozen=True)
class SearchResult:
    """The best trial, its seconds, and everything that was measured in order (infinite seconds: the trial failed)."""

    best: Trial
    seconds: float
    history: tuple[tuple[Trial, float], ...]

    @property
    def gain(self) -> float:
        """Seconds of the seed over the best."""
        return self.history[0][1] / self.seconds


def local_search(
    seed: Trial,
    candidates: Sequence[Trial],
    measure: Callable[[Trial], float],
    *,
    trials: int,
    radius: int,
    path: str | Path | None = None,
    rng: int = 0,
) -> SearchResult:
    """Measure the seed and up to ``trials`` candidates within ``radius`` of it; keep the best.

    Args:
        candidates: feasible trials; those whose sizes and NICs differ from the seed's by at most ``radius`` steps (positions
            among the values that occur) are drawn without repetition.
        measure: seconds of a step; a ConfigError marks the trial as failed, any other error ends the search with the
            history saved.
        path: JSON file of the history; measurements found there are not repeated.

    Raises:
        ConfigError: no trials or radius, a history of another search, a seed that cannot be measured.
    """
    if trials < 0 or radius < 1:
        raise ConfigError(f"trials={trials} must be at least 0 and radius={radius} at least 1")
    axes = [sorted({t[i] for t in (*candidates, seed)}) for i in range(4)]

    def near(t: Trial) -> bool:
        return all(abs(axis.index(a) - axis.index(b)) <= radius for axis, a, b in zip(axes, t, seed, strict=True))

    order = [t for t in dict.fromkeys(candidates) if t != seed and near(t)]
    random.Random(rng).shuffle(order)
    done = _load(path, seed)
    history: list[tuple[Trial, float]] = []
    for t in [seed, *order[:trials]]:
        seconds = done.get(t)
        if seconds is None:
            try:
                seconds = float(measure(t))
            except ConfigError:
                if t == seed:
                    raise
                seconds = math.inf
            if not seconds > 0:
                raise ConfigError(f"the measurement of {t} returned {seconds}; it must be positive seconds")
        history.append((t, seconds))
        _save(path, seed, history)
    best, seconds = min(history, key=lambda h: h[1])
    return SearchResult(best, seconds, tuple(history))


def _load(path: str | Path | None, seed: Trial) -> dict[Trial, float]:
    if path is None or not Path(path).exists():
        return {}
    try:
        data = json.loads(Path(path).read_text())
        same = Trial(*data["seed"]) == seed
        done = {Trial(*t): float("inf" if s is None else s) for t, s in data["history"]}
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} is not a search history ({e}); remove it or give another path") from None
    if not same:
        raise ConfigError(f"{path} belongs to a search around {data['seed']}, not {list(seed)}; remove it or give another path")
    return done


def _save(path: str | Path | None, seed: Trial, history: list[tuple[Trial, float]]) -> None:
    if path is None:
        return
    rows = [[list(t), None if math.isinf(s) else s] for t, s in history]
    temporary = Path(path).with_suffix(".tmp")
    temporary.write_text(json.dumps({"seed": list(seed), "history": rows}))
    temporary.replace(path)


def search_allocations(
    allocator: RooflineAllocator,
    measure: Callable[[Allocation], float],
    *,
    trials: int = 16,
    radius: int = 2,
    path: str | Path | None = None,
    rng: int = 0,
) -> tuple[Allocation, SearchResult]:
    """Solve, then search around the answer within its layout (groups, replicas and micro-batch stay)."""
    problem, used, why = allocator.problem()
    seed = allocator.solve()
    k = next(
        i
        for i, (o, c) in enumerate(zip(problem.layouts, used, strict=True))
        if (o.replicas, o.pa, o.pf, c.workload) == (seed.replicas, seed.pa, seed.pf, seed.workload)
        and (o.pa == 1 or c.residual == seed.residual)
    )
    o = problem.layouts[k]
    ra, rf = o.replicas * o.pa, o.replicas * o.pf

    def fits(limit: int | tuple[int, int], a: float, f: float) -> bool:
        return a <= limit[0] and f <= limit[1] if isinstance(limit, tuple) else a + f <= limit

    def choice(t: Trial) -> Choice:
        time = evaluate(problem, k, t.m, t.n, t.nics_a, t.nics_f)
        return Choice(k, t.m, t.n, t.nics_a, t.nics_f, time, o.replicas * (o.pa * t.m + o.pf * t.n))

    def allocation(t: Trial) -> Allocation:
        return allocator.allocation(problem, choice(t), used, why)

    candidates = []
    for m in o.attention:
        for n in o.ffn:
            if not fits(problem.gpus, ra * m, rf * n) or n > o.max_n.get(m, n):
                continue
            if problem.nics is None:
                candidates.append(Trial(m, n, m * problem.per_gpu(0), n * problem.per_gpu(1)))
                continue
            for qa in range(max(1, int(seed.nics_a) - radius), int(seed.nics_a) + radius + 1):
                for qf in range(max(1, int(seed.nics_f) - radius), int(seed.nics_f) + radius + 1):
                    if fits(problem.nics, ra * qa, rf * qf):
                        candidates.append(Trial(m, n, qa, qf))
    start = Trial(seed.m, seed.n, seed.nics_a, seed.nics_f)
    result = local_search(start, candidates, lambda t: measure(allocation(t)), trials=trials, radius=radius, path=path, rng=rng)
    return allocation(result.best), result
