"""One table: colocated schedules and AF-Pipe for one cluster, model and workload, all through the same simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchmoe.alloc.allocator import MEMORY_MODES, Recompute, RooflineAllocator, Save
from torchmoe.alloc.colocated import ColocatedCosts
from torchmoe.alloc.planner import plan
from torchmoe.alloc.simulated import UNITS, extended, refine, simulate_colocated, simulated_step
from torchmoe.alloc.specs import ClusterSpec, Workload
from torchmoe.costs.model import ModelShape
from torchmoe.errors import ConfigError
from torchmoe.pipeline.simulate import Simulation

__all__ = ["Row", "compare"]


@dataclass(frozen=True)
class Row:
    """One schedule. ``step`` None: it was refused, ``note`` says why."""

    scheme: str
    layout: str
    note: str
    step: float | None = None
    bound: float | None = None
    exposed: float | None = None
    closed_form: float | None = None


def compare(
    cluster: ClusterSpec,
    model: ModelShape,
    workload: Workload,
    *,
    micro_batches: Sequence[int],
    modes: Sequence[tuple[Recompute, Save]] = MEMORY_MODES,
    progress: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Interleaved 1F1B blocking, best chunked, DualPipe-like (the layout that fits and is fastest), then AF-Pipe."""
    rows: list[Row] = []
    report = plan(cluster, model, workload, modes=modes, overlap=("none",), progress=progress)
    best = next((p.costs for p in report.plans if _divides(p.costs)), None)
    if best is None:
        rows.append(Row("colocated", "", report.nothing_fits() if not report.plans else "no layout divides the layers"))
    else:
        for scheme in ("blocking", "chunked", "dualpipe"):
            rows.append(_colocated(best, scheme))
            progress()
    try:
        allocator = RooflineAllocator(cluster, model, workload, micro_batches=micro_batches, memory_modes=modes)
        a = allocator.solve()
    except ConfigError as e:
        rows.append(Row("AF-Pipe", "", str(e)))
        return rows
    a = refine(allocator, a)
    step, bound, exposed, note = simulated_step(allocator, a)
    layout = f"{a.pa} x {a.m} A, {a.pf} x {a.n} F" + (f", {a.replicas} replicas" if a.replicas > 1 else "")
    rows.append(Row("AF-Pipe", layout, note, step, bound, exposed, a.busy + a.fill))
    return rows


def _divides(c: ColocatedCosts) -> bool:
    return c.model.num_layers % c.pp == 0


def _chunks(c: ColocatedCosts) -> int:
    per = c.model.num_layers // c.pp
    n = c.micro_batches
    return next((v for v in (4, 2) if c.pp > 1 and per % v == 0 and n % c.pp == 0), 1)


def _colocated(c: ColocatedCosts, scheme: str) -> Row:
    v = _chunks(c)
    layout = f"PP {c.pp} x EP {c.ep} x DP {c.dp}" + (f", {v} chunks" if v > 1 else "")
    units = c.micro_batches * 2 * c.model.num_layers
    short = c.micro_batches if units <= UNITS else min(c.micro_batches, 4 * c.pp)
    best = None
    for parts in (2, 4) if scheme == "chunked" else (1,):

        def run(n: int, parts: int = parts) -> Simulation:
            w = replace(c.workload, global_batch=n * c.workload.micro_batch * c.dp)
            return simulate_colocated(replace(c, workload=w), num_chunks=v, scheme=scheme, chunks=parts)

        got = extended(run, c.micro_batches, short)
        if best is None or got[0] < best[0]:
            best = got
            name = f"{scheme}, {parts} parts" if scheme == "chunked" else scheme
    assert best is not None
    return Row(f"1F1B {name}", layout, best[3], best[0], best[1], best[2], c.step().total)
