"""The allocation as a mixed-integer program: tables of times in, one choice out. Knows nothing of models or clusters.

One-hot choices of a layout k (replicas R, attention groups pA, FFN groups pF), of the group sizes M and N and of whole NICs per
group qA, qF. Every time is a product of one factor per choice, so its logarithm is a sum and "min max" is linear:

    ln T >= ln attention[M]        ln T >= ln wire_a[N] - ln qA
    ln T >= ln ffn[N]              ln T >= ln wire_f[N] - ln qF
    R (pA M + pF N) <= GPUs        R (pA qA + pF qF) <= NICs

(-ln is convex, so the relaxation of the one-hots is no better than real-valued group sizes: the program solves fast.)
Phase 1 minimises T (DisagMoE section 4.3, phase 1); phase 2 keeps T within the tie and minimises GPUs, or T x GPUs (MFU).
"""

from __future__ import annotations

import math
from typing import Any, Literal

from torchmoe.alloc.presolve import nic_candidates, presolve
from torchmoe.alloc.problem import Choice, Layout, Problem, evaluate
from torchmoe.errors import ConfigError

__all__ = ["solve"]

Goal = Literal["fewest_gpus", "mfu"]


class _Program:
    """The program with its variables; phases differ in objective and extra rows."""

    def __init__(self, problem: Problem, layouts: list[tuple[int, Layout, float, float]], max_seconds: float) -> None:
        try:
            import mip
        except ImportError:
            raise ConfigError("the allocator needs the solver package 'mip'; install torchmoe[alloc]") from None
        self.mip, self.problem, self.max_seconds = mip, problem, max_seconds
        m = self.model = mip.Model(solver_name=mip.CBC)
        m.verbose, m.threads = 0, 1
        m.max_mip_gap, m.max_mip_gap_abs, m.integer_tol, m.infeas_tol = 1e-9, 1e-9, 1e-8, 1e-8
        self.t = m.add_var(lb=-mip.INF, name="t")
        self.gpus = m.add_var(lb=0, name="gpus")
        self.vars: list[tuple[Any, ...]] = []
        self.index = [k for k, *_ in layouts]
        free = problem.nics is not None
        times: list[Any] = [[], [], [], []]
        budgets: dict[str, list[Any]] = {"gpu_a": [], "gpu_f": [], "nic_a": [], "nic_f": []}
        chosen = []
        reference = min(min(o.attention.values()) for _, o, _, _ in layouts)
        self.reference = reference

        def ln(x: float) -> float:
            return math.log(max(x / reference, 1e-30))

        for _, o, floor, cap in layouts:
            c = m.add_var(var_type=mip.BINARY)
            x = {i: m.add_var(var_type=mip.BINARY) for i in o.attention}
            y = {j: m.add_var(var_type=mip.BINARY) for j in o.ffn}
            chosen.append(c)
            m += mip.xsum(x.values()) == c
            m += mip.xsum(y.values()) == c
            ra, rf = o.replicas * o.pa, o.replicas * o.pf
            budgets["gpu_a"].append(mip.xsum(ra * i * v for i, v in x.items()))
            budgets["gpu_f"].append(mip.xsum(rf * j * v for j, v in y.items()))
            qa: dict[int, Any] = {}
            qf: dict[int, Any] = {}
            if free:
                total = problem.nics if isinstance(problem.nics, tuple) else (problem.nics, problem.nics)
                qa = {q: m.add_var(var_type=mip.BINARY) for q in nic_candidates(o.wire_a, (total[0] or 0) // ra, floor, cap)}
                qf = {q: m.add_var(var_type=mip.BINARY) for q in nic_candidates(o.wire_f, (total[1] or 0) // rf, floor, cap)}
                m += mip.xsum(qa.values()) == c
                m += mip.xsum(qf.values()) == c
                budgets["nic_a"].append(mip.xsum(ra * q * v for q, v in qa.items()))
                budgets["nic_f"].append(mip.xsum(rf * q * v for q, v in qf.items()))
                width_a = mip.xsum(math.log(q) * v for q, v in qa.items())
                width_f = mip.xsum(math.log(q) * v for q, v in qf.items())
            else:
                width_a = mip.xsum(math.log(i * problem.per_gpu(0)) * v for i, v in x.items())
                width_f = mip.xsum(math.log(j * problem.per_gpu(1)) * v for j, v in y.items())
            times[0].append(mip.xsum(ln(o.attention[i]) * v for i, v in x.items()))
            times[1].append(mip.xsum(ln(o.ffn[j]) * v for j, v in y.items()))
            times[2].append(mip.xsum(ln(o.wire_a[j]) * v for j, v in y.items()) - width_a)
            times[3].append(mip.xsum(ln(o.wire_f[j]) * v for j, v in y.items()) - width_f)
            if o.max_n:
                top = max(o.ffn)
                m += mip.xsum(j * v for j, v in y.items()) <= mip.xsum(min(o.max_n.get(i, top), top) * v for i, v in x.items())
            self.vars.append((x, y, qa, qf))
        m += mip.xsum(chosen) == 1
        for parts in times:
            m += self.t >= mip.xsum(parts)
        used_a, used_f = mip.xsum(budgets["gpu_a"]), mip.xsum(budgets["gpu_f"])
        m += self.gpus == used_a + used_f
        self._budget(problem.gpus, used_a, used_f)
        if free:
            self._budget(problem.nics, mip.xsum(budgets["nic_a"]), mip.xsum(budgets["nic_f"]))

    def _budget(self, limit: int | tuple[int, int] | None, a: Any, f: Any) -> None:
        if isinstance(limit, tuple):
            self.model += a <= limit[0]
            self.model += f <= limit[1]
        else:
            self.model += a + f <= limit

    def optimize(self, objective: Any) -> Choice | None:
        self.model.objective = self.mip.minimize(objective)
        status = self.model.optimize(max_seconds=self.max_seconds)
        ok = self.mip.OptimizationStatus
        if status in (ok.INFEASIBLE, ok.INT_INFEASIBLE):
            return None
        if status not in (ok.OPTIMAL, ok.FEASIBLE) or not self.model.num_solutions:
            raise ConfigError(
                f"the solver found no allocation within {self.max_seconds:g} s (status {status.name}); "
                "allow more seconds or fewer candidates"
            )
        gap = 0.0 if status == ok.OPTIMAL else abs(self.model.objective_value - self.model.objective_bound)
        for k, (x, y, qa, qf) in zip(self.index, self.vars, strict=True):
            m = next((i for i, v in x.items() if v.x > 0.5), None)
            if m is None:
                continue
            n = next(j for j, v in y.items() if v.x > 0.5)
            o, p = self.problem.layouts[k], self.problem
            na = next((q for q, v in qa.items() if v.x > 0.5), m * p.per_gpu(0))
            nf = next((q for q, v in qf.items() if v.x > 0.5), n * p.per_gpu(1))
            return Choice(k, m, n, na, nf, evaluate(p, k, m, n, na, nf), o.replicas * (o.pa * m + o.pf * n), math.expm1(gap))
        raise ConfigError("the solver returned no choice; report this problem")


def solve(problem: Problem, *, tie: float = 1e-6, goal: Goal = "fewest_gpus", max_seconds: float = 60.0) -> Choice | None:
    """The best choice, or None where no choice fits the budgets.

    Args:
        tie: times within this share of the best count as equal in phase 2 (at least 1e-6, the solver's precision).
        goal: "fewest_gpus", or "mfu": least T x GPUs among the ties.
        max_seconds: per solve; a feasible choice found by then is returned with its gap.

    Raises:
        ConfigError: no layout, or the solver ran out of time without any choice.
    """
    if not problem.layouts or not all(o.attention and o.ffn for o in problem.layouts):
        raise ConfigError("the problem has a layout without candidates; leave such layouts out")
    tie = max(tie, 1e-6)
    layouts = presolve(problem, tie)
    if not layouts:
        return None
    program = _Program(problem, layouts, max_seconds)
    first = program.optimize(program.t)
    if first is None or first.gap:
        return first
    program.model += program.t <= math.log(first.time / program.reference) + math.log1p(tie)
    least = program.optimize(program.gpus)
    if least is None:
        return first
    best: Choice | None = None
    top = least.gpus if goal == "fewest_gpus" else math.floor(least.gpus * (1 + tie))
    for gpus in range(least.gpus, top + 1):
        row = program.model.add_constr(program.gpus <= gpus + 0.5)
        choice = program.optimize(program.t)
        program.model.remove(row)
        if choice is not None and (best is None or choice.time * choice.gpus < best.time * best.gpus * (1 - 1e-9)):
            best = choice
    return best or least
