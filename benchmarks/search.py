"""What measuring adds to the roofline's split: the allocator's local search with every trial run on the emulated cluster.

    python -m benchmarks.search                 8 ranks, 16K, all splits within 2 of the seed; root and iproute2
    python -m benchmarks.search --loopback      no namespaces: links shaped in the process, approximate
    python -m benchmarks.search --quick         radius 1

The seed is the program's answer on the calibration of benchmarks.emulated_cluster; a trial is one step of the real engine and
transport there. Beside it the simulator's step, with links as fitted. Exit 1: the split that the simulator would choose is more
than 10 % slower, measured, than the best one measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.emulated_cluster import RATE
from benchmarks.emulated_cluster_model import LAYERS, ROUNDS, TOKENS, WORLD, Calibration, work_of
from benchmarks.emulated_cluster_net import Cluster, Loopback, missing
from benchmarks.emulated_cluster_ranks import measure_links, run_schemes
from torchmoe.alloc.milp import solve
from torchmoe.alloc.problem import Layout, Problem
from torchmoe.alloc.search import Trial, local_search
from torchmoe.pipeline.compare import Scheme, af_scheme
from torchmoe.pipeline.network import Links

TOLERANCE = 0.10


def seed_of(cal: Calibration) -> Trial:
    """The program's split: seconds of a step per role on one rank, and of a direction's bytes over one NIC."""
    units = WORLD * ROUNDS * LAYERS
    backward = 3 if cal.reading == "fwd" else 2
    a, f, c = cal.attention * backward * units, cal.experts * backward * units, 2 * cal.all_to_all * units
    sizes = range(1, WORLD)
    layout = Layout(
        1, 1, 1, {m: a / m for m in sizes}, {n: f / n for n in sizes}, dict.fromkeys(sizes, c), dict.fromkeys(sizes, c)
    )
    found = solve(Problem([layout], WORLD))
    assert found is not None
    return trial(found.m)


def trial(m: int) -> Trial:
    """All ranks: m for attention, the others for experts, each with its NIC."""
    return Trial(m, WORLD - m, m, WORLD - m)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=float, default=16.0, help="thousands of tokens")
    parser.add_argument("--unit", type=float, default=1.25, help="ms that 1 %% of a colocated layer's forward takes")
    parser.add_argument("--loopback", action="store_true", help="no namespaces: links shaped in the process, approximate")
    parser.add_argument("--quick", action="store_true", help="radius 1")
    parser.add_argument("--json", help="the history")
    args = parser.parse_args(argv)
    reason = None if args.loopback else missing()
    if reason is not None:
        print(f"not measured: {reason}")
        return 0
    cal, rate = Calibration(args.length, "step", args.unit), RATE / args.unit
    predicted: dict[Trial, float] = {}
    with (Loopback if args.loopback else Cluster)(WORLD, rate) as cluster:
        bandwidth, latency, _ = measure_links(cluster)
        links = Links(bandwidth=bandwidth, latency=latency)

        def measure(t: Trial) -> float:
            scheme: Scheme = af_scheme(work_of(cal, rate), p=1, attention=t.m, cycle=4)
            predicted[t] = scheme.simulate(links).makespan
            (ranks,) = run_schemes(cluster, [scheme], 1)[scheme.name]
            return max(r.end for r in ranks)

        seed = seed_of(cal)
        radius = 1 if args.quick else 2
        even = [trial(m) for m in range(1, WORLD) if TOKENS % (WORLD - m) == 0]  # a rank's rows are cut evenly over the experts
        found = local_search(seed, even, measure, trials=2 * radius, radius=radius)
    print(f"{args.length:g}K, {WORLD} ranks, links {bandwidth * 8e-6:.1f} Mbit/s, latency {latency * 1e3:.2f} ms")
    for t, seconds in found.history:
        mark = "  seed" if t == seed else ""
        print(f"  {t.m}:{t.n}  measured {seconds * 1e3:6.0f} ms  simulated {predicted[t] * 1e3:6.0f} ms{mark}")
    measured = dict(found.history)
    simulated = min(predicted, key=lambda t: predicted[t])
    behind = measured[simulated] / found.seconds - 1
    rows = [{"m": t.m, "n": t.n, "measured": s, "simulated": predicted[t]} for t, s in found.history]
    if args.json:
        Path(args.json).write_text(json.dumps({"history": rows, "gain": found.gain, "behind": behind}, indent=1) + "\n")
    print(
        f"best {found.best.m}:{found.best.n}, {found.gain:.2f}x over the seed; the simulator's choice "
        f"{simulated.m}:{simulated.n} is {behind:.1%} slower than the best measured"
    )
    return 0 if behind <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
