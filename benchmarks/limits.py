"""The time limits that the project promises, measured: ``python -m benchmarks.limits [--json FILE] [--quick] [--only NAME]``.

Each line is the best of a few runs, so that a busy machine is not mistaken for slow code.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchmoe.pipeline.costs import Costs
from torchmoe.pipeline.lower import lower
from torchmoe.pipeline.schedules.afpipe import AFPipeSchedule
from torchmoe.pipeline.simulate import simulate
from torchmoe.pipeline.verify import verify
from torchmoe.placement import Communicator, Placement
from torchmoe.testing.ranks import run_ranks


class Limit(NamedTuple):
    """What is timed, the promise in seconds, and how often it is tried."""

    name: str
    seconds: float
    measure: Callable[[], float]
    runs: int


def import_cost() -> float:
    """``import torchmoe`` over ``import torch``."""
    code = "import torch, time; t = time.perf_counter(); import torchmoe; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def ring(ctx: Any) -> int:
    """Every rank sends 1 KiB to the next one."""
    from torchmoe.comm.transport import P2P

    wire = ctx.transport([Communicator("ring", tuple(range(ctx.world)), False)])
    out, back = torch.full((1024,), ctx.rank % 251, dtype=torch.uint8), torch.empty(1024, dtype=torch.uint8)
    ops = [P2P("send", (ctx.rank + 1) % ctx.world, out), P2P("recv", (ctx.rank - 1) % ctx.world, back)]
    wire.post("ring", ops, "ring").wait(30)
    return int(back[0])


def ranks(world: int, backend: Any) -> float:
    start = time.perf_counter()
    results = run_ranks(ring, world, backend=backend)
    seconds = time.perf_counter() - start
    assert results == [(r - 1) % world % 251 for r in range(world)], "the ring delivered something else"
    return seconds


def big_verify() -> float:
    """64 groups, 256 micro-batches: lowered before the clock starts."""
    placement = Placement(attention=[1] * 32, ffn=[1] * 32, num_layers=32, num_experts=64)
    schedule = lower(AFPipeSchedule(placement, 256), placement)
    start = time.perf_counter()
    verify(schedule, placement)
    return time.perf_counter() - start


def big_simulation() -> float:
    """1,024 ranks in 8 groups, 64 micro-batches, 8 chunks per group; costs are uniform, so groups are simulated."""
    placement = Placement(attention=[128] * 4, ffn=[128] * 4, num_layers=32, num_experts=128)
    schedule = AFPipeSchedule(placement, 64)
    start = time.perf_counter()
    simulate(schedule, Costs(message={"dispatch": 1.0, "combine": 1.0}), placement, record=False)
    return time.perf_counter() - start


def allocation() -> float:
    """1,024 GPUs."""
    from torchmoe.alloc.allocator import RooflineAllocator
    from torchmoe.alloc.presets import cluster_preset, model_preset
    from torchmoe.alloc.specs import Workload

    cluster, model = cluster_preset("h800x1024"), model_preset("qwen3-30b")
    workload = Workload(seq_len=4096, micro_batch=128, global_batch=4096)
    start = time.perf_counter()
    RooflineAllocator(cluster, model, workload).solve()
    return time.perf_counter() - start


def limits(quick: bool) -> list[Limit]:
    runs = 2 if quick else 5
    return [
        Limit("import torchmoe over import torch", 0.3, import_cost, runs),
        Limit("64 sim ranks, one exchange", 0.5, lambda: ranks(64, "sim"), runs),
        # the first run starts the fork server, the others are what a test costs
        Limit("8 gloo processes, one exchange", 1.0, lambda: ranks(8, "gloo"), runs + 1),
        Limit("verify 64 groups x 256 micro-batches", 1.5, big_verify, runs),
        Limit("simulate 1,024 ranks x 64 micro-batches x 8 chunks", 10.0, big_simulation, 1 if quick else 2),
        Limit("allocate 1,024 GPUs", 10.0, allocation, 1 if quick else 2),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the results there")
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--only", default="", help="only limits whose name contains this")
    options = parser.parse_args()
    rows = []
    for limit in limits(options.quick):
        if options.only not in limit.name:
            continue
        times = [limit.measure() for _ in range(limit.runs)]
        rows.append({"name": limit.name, "seconds": min(times), "limit": limit.seconds, "runs": times})
        verdict = "ok" if min(times) <= limit.seconds else "MISSED"
        print(f"{limit.name:52s} {min(times):8.3f} s   limit {limit.seconds:5.1f} s   {verdict}", flush=True)
    missed = [r["name"] for r in rows if r["seconds"] > r["limit"]]
    if options.json:
        about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        with open(options.json, "w") as f:
            json.dump({"about": about, "rows": rows}, f, indent=1)
    print(f"{len(rows) - len(missed)} of {len(rows)} limits kept" + (f"; missed: {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
