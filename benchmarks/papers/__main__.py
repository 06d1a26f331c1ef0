"""``python -m benchmarks.papers [--quick] [--json FILE]``: published beside computed; exit 1 when a verdict changes."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from benchmarks.papers import disagmoe, moeblaze, piper
from benchmarks.papers.record import Check
from torchmoe.alloc.report import print_table


def collect(*, quick: bool = False) -> list[Check]:
    """All checks; ``quick`` leaves out what is simulated."""
    return [*(disagmoe.quick_checks() if quick else disagmoe.checks()), *piper.checks(), *moeblaze.checks()]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without simulations")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    found = collect(quick=args.quick)
    print_table(["paper", "item", "published", "computed", "unit", "deviation", "verdict", "note"], [c.row() for c in found])
    changed = [c for c in found if c.verdict != c.expected]
    if args.json:
        rows = [{**vars(c), "deviation": c.deviation, "verdict": c.verdict} for c in found]
        Path(args.json).write_text(json.dumps({"checks": rows, "changed": [c.item for c in changed]}, indent=1))
    counts = Counter(c.verdict for c in found)
    said = ", ".join(f"{counts[v]} {v}" for v in ("equal", "close", "differs", "not computable"))
    print(f"{'FAIL' if changed else 'PASS'}: {len(found)} published figures: {said}; {len(changed)} verdicts changed")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
