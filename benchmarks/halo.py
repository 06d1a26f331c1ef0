"""How much the hierarchical exchange gains over flat ones on slow links between nodes of 2 lanes.

    python -m benchmarks.halo [--nodes 2 4] [--quick] [--json FILE]

2 and 4 emulated nodes (network namespaces, :mod:`benchmarks.netns`) of 2 processes. Compared: gloo's ``all_to_all_single``,
``AllToAllExchange``, ``HierarchicalAllToAll`` and ``AutoAllToAll`` (which measured the links at start-up) on ragged rows over
sizes (with and without the exchange of counts); then dispatch + combine of tokens one row per slot, per (token, rank), per
(token, node), and whatever the automatic form takes; then experts behind the exchange.
Every result is compared with the others before anything is timed. Times are medians of the slowest rank, forms in turn.

Goals: HALO gains where messages are many and small; the automatic form is never below 0.95x of the faster flat form; node
deduplication is at least 1.2x where the link between the nodes is the bottleneck. The links are the bottleneck where gloo's
form takes at least 3 times what it takes over links without a limit; other points are bound by this machine's processors
(up to 8 processes share them) and are printed, but not judged.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks import halo_ranks
from benchmarks.netns import Link, Network, missing

SIZES = (1024, 16384, 65536)
LINKS = (Link(20, packet_bytes=8192), Link(20))
FREE = Link(10000)
BOUND = 3.0
TOKENS = {"T": 32, "D": 1024, "experts": 64, "K": 8}


def child(pipe: Connection, network: Network, rank: int, world: int, port: int, job: dict[str, Any]) -> None:
    try:
        pipe.send(halo_ranks.run(network, rank, world, port, job))
    except BaseException as e:
        pipe.send(e if isinstance(e, Exception) else RuntimeError(repr(e)))
        raise


def measure(nodes: int, link: Link, job: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's results of a job on emulated nodes."""
    context, world = mp.get_context("fork"), nodes * halo_ranks.LANES
    with Network(nodes, link) as network:
        pipes, children = [], []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=child, args=(there, network, rank, world, 29617, job), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            children.append(process)
        try:
            results = [pipe.recv() if pipe.poll(900) else RuntimeError("no answer within 900 s") for pipe in pipes]
        finally:
            for process in children:
                process.join(5)
                if process.is_alive():
                    process.kill()
    for r in results:
        if isinstance(r, Exception):
            raise r
    found: dict[str, Any] = results[0]
    return found


def fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(seconds, bytes per second) of time = latency + bytes / bandwidth, least squares of relative errors."""
    rows = torch.tensor([[1.0 / t, n / t] for n, t in points], dtype=torch.float64)
    latency, slope = torch.linalg.lstsq(rows, torch.ones(len(points), 1, dtype=torch.float64)).solution[:, 0].tolist()
    return latency, 1.0 / slope if slope > 0 else float("inf")


def med(times: list[float]) -> float:
    return statistics.median(times)


def report(nodes: int, link: Link, found: dict[str, Any], free: dict[int, float]) -> dict[str, Any]:
    """Print the tables of one network; returns its figures. ``free``: gloo's seconds by size over links without a limit."""
    latency, bandwidth = fit(found["link"])
    print(f"\n{nodes} nodes x {halo_ranks.LANES} lanes, links of {link}")
    print(f"  one message between nodes: {latency * 1e3:.2f} ms + bytes / {bandwidth / 1e6:.1f} MB/s (fitted)")
    m = found["model"]
    print(f"  measured by the automatic form: between {m['between']}, inside {m['inside']}; counts by {m['counts']}")
    head = f"{'gloo':>9} {'flat':>9} {'HALO':>9} {'gain':>6} {'auto':>9} {'gain':>6}"
    print(f"  ms{'':8}{'counts and rows':>53}   {'rows alone':>53}\n  {'B a pair':>9} {head}   {head}")
    rows = []
    for entry in found["sizes"]:
        t = {name: med(v) for name, v in entry["times"].items()}
        best, best_rows = min(t["gloo"], t["flat"]), min(t["gloo rows"], t["flat rows"])
        gain, gain_auto = best / t["halo"], best / t["auto"]
        judged = t["gloo"] >= BOUND * free[entry["pair_bytes"]]
        gain_rows, gain_auto_rows = best_rows / t["halo rows"], best_rows / t["auto rows"]
        print(
            f"  {entry['pair_bytes']:>9} {t['gloo'] * 1e3:9.2f} {t['flat'] * 1e3:9.2f} {t['halo'] * 1e3:9.2f} {gain:6.2f} "
            f"{t['auto'] * 1e3:9.2f} {gain_auto:6.2f}   "
            f"{t['gloo rows'] * 1e3:9.2f} {t['flat rows'] * 1e3:9.2f} {t['halo rows'] * 1e3:9.2f} {gain_rows:6.2f} "
            f"{t['auto rows'] * 1e3:9.2f} {gain_auto_rows:6.2f}   rows by {entry['form']}"
            + ("" if judged else "   processor-bound, not judged")
        )
        rows.append(
            {
                "pair_bytes": entry["pair_bytes"],
                "rank_bytes": entry["rank_bytes"],
                "seconds": t,
                "gain": gain,
                "gain_rows": gain_rows,
                "gain_auto": gain_auto,
                "gain_auto_rows": gain_auto_rows,
                "auto_form": entry["form"],
                "gloo_free_seconds": free[entry["pair_bytes"]],
                "judged": judged,
            }
        )
    fits = {}
    for name in ("gloo", "flat", "halo"):
        a, b = fit([(e["rank_bytes"], e["seconds"][name]) for e in rows])
        fits[name] = {"latency_s": a, "bytes_per_s_and_rank": b}
        print(f"  {name}: {a * 1e3:.2f} ms + bytes of a rank / {b / 1e6:.2f} MB/s")
    t = {name: med(v) for name, v in found["tokens"]["times"].items()}
    dedup = {"vs_slots": t["slots"] / t["node dedup"], "vs_rank_dedup": t["rank dedup"] / t["node dedup"]}
    print(
        f"  tokens {found['tokens']['shape']}: per slot (gloo) {t['slots'] * 1e3:.1f} ms, "
        f"rank dedup {t['rank dedup'] * 1e3:.1f} ms, auto {t['auto'] * 1e3:.1f} ms, node dedup {t['node dedup'] * 1e3:.1f} ms: "
        f"{dedup['vs_slots']:.2f}x and {dedup['vs_rank_dedup']:.2f}x"
    )
    o = found["overlap"]
    whole, waves = med(o["times"]["whole"]), med(o["times"]["waves"])
    exposed = {"whole": whole - o["compute"], "waves": waves - o["compute"]}
    print(
        f"  experts of {o['compute'] * 1e3:.1f} ms: after the exchange {whole * 1e3:.1f} ms, in waves {waves * 1e3:.1f} ms; "
        f"exposed {exposed['whole'] * 1e3:.1f} -> {exposed['waves'] * 1e3:.1f} ms"
    )
    return {
        "nodes": nodes,
        "lanes": halo_ranks.LANES,
        "link": {"mbit": link.mbit, "packet_bytes": link.packet_bytes, "latency_s": latency, "bytes_per_s": bandwidth},
        "model": m,
        "sizes": rows,
        "fits": fits,
        "tokens": {"shape": found["tokens"]["shape"], "seconds": t, **dedup},
        "overlap": {"compute_s": o["compute"], "whole_s": whole, "waves_s": waves, "exposed_s": exposed},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--reps", type=int, default=None, help="rounds per size")
    parser.add_argument("--quick", action="store_true", help="2 nodes, one link, fewer sizes and rounds")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"not measured: {reason}")
        return 0
    sizes, links, nodes = (SIZES[::2], LINKS[:1], args.nodes[:1]) if args.quick else (SIZES, LINKS, args.nodes)
    tokens = {**TOKENS, "T": 12} if args.quick else TOKENS
    job = {"sizes": sizes, "reps": args.reps or (3 if args.quick else 5), "tokens": tokens}
    start, found = time.time(), []
    for n in nodes:
        free = {e["pair_bytes"]: med(e["times"]["gloo"]) for e in measure(n, FREE, {**job, "tokens": None})["sizes"]}
        found += [report(n, link, measure(n, link, job), free) for link in links]
    machine = {
        "processors": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seconds": time.time() - start,
    }
    print(f"\n{machine}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"benchmark": "halo", "machine": machine, "networks": found}, f, indent=1)
    judged = [(e["gain"], n["nodes"], e["pair_bytes"], e["gain_auto"]) for n in found for e in n["sizes"] if e["judged"]]
    if not judged:
        print("not measured: the processors of this machine are slower than the emulated links at every size")
        return 0
    small = [g for g in judged if g[1] == max(nodes) and g[2] <= 4096]
    (most, *_), plain, least = max(small), min(judged), min(judged, key=lambda g: g[3])
    dedup = min(n["tokens"]["vs_rank_dedup"] for n in found)
    good = least[3] >= 0.95 and most > 1.0 and dedup >= 1.2
    print(
        f"{'PASS' if good else 'FAIL'}: HALO {most:.2f}x on small messages of {max(nodes)} nodes (goal > 1); automatic form "
        f"at least {least[3]:.2f}x ({least[1]} nodes, {least[2]} B; goal 0.95), HALO always {plain[0]:.2f}x; "
        f"node dedup {dedup:.2f}x over rank dedup (goal 1.2)"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
