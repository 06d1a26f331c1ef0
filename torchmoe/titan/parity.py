"""Parity: one seed checkpoint and one global batch through one process, torchtitan's EP = 2, and disaggregated layouts.

``python -m torchmoe.titan.parity`` prints one line a layout: fp64 gradients and norms of step 1, fp32 losses over some steps with
the routing of the single process replayed, the same running freely, and bytes and messages per pair against the prediction.
All layouts run torchtitan's Trainer; forced casts are lifted in all of them alike (:mod:`torchmoe.titan.exact`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchmoe.testing import run_ranks
from torchmoe.titan.parity_data import Tokens
from torchmoe.titan.parity_run import Program, run_program
from torchmoe.titan.preload import start as start_server

__all__ = ["LAYOUTS", "Layout", "Result", "main", "run_layouts"]

GRADIENTS, LOSSES = 1e-10, 1e-5  # relative, fp64; absolute, fp32
RAGGED = ((16, 5, 9, 1), (3, 16, 2, 7), (8, 8, 1, 16), (4, 11, 16, 2))
IDLE = ((0, 0, 16, 16), (16, 9, 0, 0), (16, 16, 16, 16), (0, 0, 0, 5))


@dataclass(frozen=True)
class Layout:
    """One line of the table. ``attention`` and ``ffn`` are sizes per group; without them torchtitan runs on its own path."""

    name: str
    attention: tuple[int, ...] = ()
    ffn: tuple[int, ...] = ()
    replicas: int = 1
    expert_parallel: int = 1
    model: str = "plain"
    """One of :data:`~torchmoe.titan.parity_models.MODELS`."""
    lengths: tuple[tuple[int, ...], ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """More of :class:`~torchmoe.titan.options.DisagConfig`."""
    recompute: str | None = None
    """Activation checkpointing of the attention halves: None, "full" or "selective"."""

    @property
    def world(self) -> int:
        return self.replicas * (sum(self.attention) + sum(self.ffn)) or self.expert_parallel


LAYOUTS = (
    Layout("torchtitan EP=2", expert_parallel=2),
    Layout("1A1F", (1,), (1,)),
    Layout("2A1F", (2,), (1,)),
    Layout("1A2F", (1,), (2,)),
    Layout("2A2F", (2,), (2,)),
    Layout("2A2F, p = 2, L = 3", (1, 1), (1, 1)),
    Layout("3A1F, uneven sequences", (3,), (1,)),
    Layout("1A3F, uneven experts", (1,), (3,)),
    Layout("[2,1]A x [1,2]F", (2, 1), (1, 2)),
    Layout("2A2F, shared expert and dense layers", (2,), (2,), model="mixed"),
    Layout("[1,1]A x [1,1]F, shared expert and dense layers", (1, 1), (1, 1), model="mixed"),
    Layout("2A2F, idle sources", (2,), (2,), lengths=IDLE),
    Layout("2A2F, sequences of unequal length", (2,), (2,), lengths=RAGGED),
    Layout("[2,1]A x [1,2]F, sequences of unequal length", (2, 1), (1, 2), lengths=RAGGED),
    Layout("2 replicas of 1A1F", (1,), (1,), replicas=2),
    Layout("[1,1]A x [1,1]F, ride, shared expert, dense layers", (1, 1), (1, 1), model="mixed", options={"residual": "ride"}),
    Layout("1A2F, slots, weight gradients apart", (1,), (2,), options={"combine": "slots", "weights_held": 2, "cycle": 2}),
    Layout("2A1F, fixed sizes", (2,), (1,), options={"sizes": "fixed", "capacity": 32, "save": "input"}),
    Layout("[1,1]A x [1,1]F, head on F", (1, 1), (1, 1), options={"head": "ffn"}),
    Layout("2A1F, full recompute, shared expert, dense", (2,), (1,), model="mixed", recompute="full"),
    Layout("[1,1]A x [1,1]F, selective recompute", (1, 1), (1, 1), recompute="selective"),
    Layout("2A2F, sharded attention, shared expert, dense", (2,), (2,), model="mixed", options={"shard_attention": True}),
    Layout("[2,1]A x [1]F, sharded attention, recompute", (2, 1), (1,), recompute="full", options={"shard_attention": True}),
    Layout("1A2F, qwen3 debug model", (1,), (2,), model="qwen3"),
    Layout("2A1F, DeepSeek-V3 debug model, full recompute", (2,), (1,), model="deepseek_v3", recompute="full"),
    Layout("1A2F, GPT-OSS debug model", (1,), (2,), model="gpt_oss"),
    Layout("1A2F, head on F, ride, unequal lengths", (1,), (2,), lengths=RAGGED, options={"head": "ffn", "residual": "ride"}),
)


@dataclass(frozen=True)
class Result:
    """What was measured for one layout; None where it does not apply."""

    name: str
    gradients: float
    norm: float
    replayed: float
    free: float
    wire: tuple[int, int] | None
    """(pairs and kinds compared, pairs and kinds that differ from the prediction)."""
    seconds: float

    @property
    def passed(self) -> bool:
        wire = self.wire is None or self.wire[1] == 0
        return self.gradients <= GRADIENTS and self.norm <= GRADIENTS and self.replayed <= LOSSES and wire


def _references(layouts: Sequence[Layout], steps: int, folder: str) -> dict[Any, Any]:
    """The single process, once per model and shape of the batch. Writes the seed checkpoints."""
    keys = sorted({(la.model, la.lengths) for la in layouts}, key=repr)
    programs = [Program(model=model, tokens=Tokens(lengths), steps=steps, folder=folder) for model, lengths in keys]
    results = run_ranks(run_program, 1, backend="gloo", timeout=300.0, args=(programs, None))[0]
    return dict(zip(keys, results, strict=True))


def _relative(got: Any, want: Any) -> float:
    scale = float(want.norm())
    return float((got - want).norm()) / (scale or 1.0)


def _compare(layout: Layout, ranks: list[Any], want: Any, seconds: float) -> Result:
    worst = 0.0
    seen = set()
    for rank in ranks:
        for name, (gradient, owned) in rank["gradients"].items():
            reference = want["gradients"][name][0]
            worst = max(worst, _relative(gradient, reference if owned is None else reference[list(owned)]))
            seen |= {(name, e) for e in (owned if owned is not None else [None])}
    full = {(n, e) for n, (g, _) in want["gradients"].items() for e in ([None] if (n, None) in seen else range(len(g)))}
    if seen != full:
        raise RuntimeError(f"{layout.name}: gradients of {sorted(map(str, full ^ seen))[:3]} are on no rank, or on too many")
    norm = max(abs(r["norm"] - want["norm"]) / want["norm"] for r in ranks)
    pairs = [[abs(a - b) for a, b in zip(ranks[0][k], want["losses"], strict=True)] for k in ("replayed", "free")]
    wire = None
    if ranks[0]["sent"] is not None:
        sent: dict[Any, Any] = {}
        for r in ranks:
            sent.update(r["sent"])
        predicted = ranks[0]["predicted"]
        both = sent.keys() | predicted.keys()
        wire = len(both), sum(sent.get(k) != predicted.get(k) for k in both)
    return Result(layout.name, worst, norm, max(pairs[0]), max(pairs[1]), wire, seconds)


def run_layouts(layouts: Sequence[Layout] = LAYOUTS, *, steps: int = 10, report: Any = None) -> list[Result]:
    """Compare every layout with the single process.

    Args:
        layouts: which ones.
        steps: fp32 steps.
        report: called with each result as it comes.
    """
    out = []
    start_server()
    with tempfile.TemporaryDirectory(prefix="torchmoe-parity-") as folder:
        references = _references(layouts, steps, folder)
        by_world: dict[int, list[Layout]] = {}
        for layout in layouts:
            by_world.setdefault(layout.world, []).append(layout)
        for world, group in sorted(by_world.items()):
            start = time.monotonic()
            programs = [
                Program(
                    model=la.model,
                    tokens=Tokens(la.lengths),
                    steps=steps,
                    folder=folder,
                    attention=la.attention,
                    ffn=la.ffn,
                    replicas=la.replicas,
                    expert_parallel=la.expert_parallel,
                    options=la.options,
                    recompute=la.recompute,
                )
                for la in group
            ]
            routing = [references[la.model, la.lengths]["routing"] for la in group]
            results = run_ranks(run_program, world, backend="gloo", timeout=600.0, args=(programs, routing))
            seconds = (time.monotonic() - start) / len(group)
            for i, la in enumerate(group):
                result = _compare(la, [r[i] for r in results], references[la.model, la.lengths], seconds)
                out.append(result)
                if report is not None:
                    report(result)
    return out


def _line(r: Result) -> str:
    wire = "-" if r.wire is None else f"{r.wire[0]} equal" if not r.wire[1] else f"{r.wire[1]} of {r.wire[0]} DIFFER"
    verdict = "ok" if r.passed else "FAILED"
    return f"{r.name:50}{r.gradients:11.1e}{r.norm:10.1e}{r.replayed:10.1e}{r.free:10.1e}  {wire:>12}  {verdict}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torchmoe.titan.parity", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three layouts and four steps")
    parser.add_argument("--steps", type=int, help="fp32 steps (default 10, quick 4)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(argv)
    layouts = [la for la in LAYOUTS if la.name in ("2A2F", "[2,1]A x [1,2]F", "torchtitan EP=2")] if options.quick else LAYOUTS
    print(f"{'against one process':50}{'gradients':>11}{'norm':>10}{'replayed':>10}{'free':>10}  {'messages':>12}")
    print(f"{'allowed':50}{GRADIENTS:11.0e}{GRADIENTS:10.0e}{LOSSES:10.0e}{'':>10}", flush=True)
    results = run_layouts(
        layouts, steps=options.steps or (4 if options.quick else 10), report=lambda r: print(_line(r), flush=True)
    )
    if options.json:
        options.json.write_text(json.dumps([{**vars(r), "passed": r.passed} for r in results], indent=1))
    failed = [r.name for r in results if not r.passed]
    print(
        f"parity: {len(results) - len(failed)} of {len(results)} layouts equal one process"
        + (f"; not {failed}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
