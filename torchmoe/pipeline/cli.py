"""``python -m torchmoe simulate --costs FILE``: layouts compared from stage costs in JSON, with pictures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchmoe.errors import ConfigError
from torchmoe.pipeline.compare import Work, comparison
from torchmoe.pipeline.pictures import perfetto, strip
from torchmoe.pipeline.svg import stack_svg, svg

__all__ = ["main", "parser", "run_simulate"]

EXAMPLE = """example of the JSON (seconds and bytes of one rank's micro-batch of one layer; links per rank and direction):
  {"ranks": 8, "layers": 8, "rounds": 4,
   "costs": {"attention": 0.0189, "experts": 0.0128, "all_to_all": 328000, "hand_over": 41000},
   "links": {"bandwidth": 12.5e6, "latency": 0.001}}"""


def parser() -> argparse.ArgumentParser:
    """Options of ``python -m torchmoe simulate --costs FILE``."""
    top = argparse.ArgumentParser(
        prog="python -m torchmoe simulate",
        description="Compare colocated and disaggregated layouts by simulation, each tuned.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--costs", type=Path, required=True, metavar="FILE.json", help="costs of one unit, see below")
    top.add_argument("--ranks", type=int, help="instead of the file's")
    top.add_argument("--layers", type=int, help="instead of the file's")
    top.add_argument("--rounds", type=int, help="micro-batches of every rank, instead of the file's")
    top.add_argument("--pictures", type=Path, metavar="FOLDER", help="SVG and Perfetto files of every layout")
    return top


def main(argv: Sequence[str]) -> int:
    """Parse and run."""
    return run_simulate(parser().parse_args(argv))


def run_simulate(args: argparse.Namespace) -> int:
    """Print the table; write the pictures.

    Raises:
        ConfigError: a file that cannot be read, or costs that make no sense.
    """
    try:
        text = args.costs.read_text()
    except OSError as e:
        raise ConfigError(f"stage costs {args.costs}: {e.strerror}; give a JSON file, see --help") from None
    work = Work.from_json(text, ranks=args.ranks, layers=args.layers, rounds=args.rounds)
    schemes = comparison(work)
    runs = [s.simulate(work.links, record=True) for s in schemes]
    print(f"{work.ranks} ranks, {work.layers} layers, {work.ranks * work.rounds} rank-micro-batches")
    print(f"{'layout':46s} {'step':>10s} {'gain':>6s} {'exposed':>8s} {'bound':>10s} {'live':>6s} {'memory':>10s}")
    for s, r in zip(schemes, runs, strict=True):
        memory = max(r.peak_memory.values())
        print(
            f"{s.name:46s} {r.makespan:8.4g} s {runs[0].makespan / r.makespan:5.2f}x {100 * r.exposed:6.1f} % "
            f"{r.bound:8.4g} s {s.live():6.0f} {memory / 2**20:6.1f} MiB"
        )
    fastest = min(range(len(runs)), key=lambda i: runs[i].makespan)
    print(f"\n{schemes[fastest].name}\n{strip(runs[fastest].events)}")
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
        units = 2 * work.layers + 1
        for s, r in zip(schemes, runs, strict=True):
            name = "".join(c if c.isalnum() or c in "+-." else "_" for c in s.name)
            (args.pictures / f"{name}.svg").write_text(svg(r.events, num_units=units, title=s.name))
            (args.pictures / f"{name}.json").write_text(perfetto(r.events))
        stacked = {s.name: {"simulated": r.events} for s, r in zip(schemes, runs, strict=True)}
        title = f"{work.ranks} ranks, {work.layers} layers, simulated"
        (args.pictures / "comparison.svg").write_text(stack_svg(stacked, num_units=units, title=title))
        print(f"pictures in {args.pictures}")
    return 0
