"""The expert block against its peers: `python -m benchmarks.experts [--quick] [--json FILE]`.

On a CPU: fp32, the three shapes of the goal, 2 threads. On a GPU: bf16, the models' shapes. Every implementation is verified on
64 tokens against the fp64 oracle, output and all gradients, before it is timed; they are then timed in turns, so that a busy
machine hits all of them. Goals: CPU, at most 0.8x torchtitan's grouped experts forward plus backward, and below transformers'
eager; GPU, 450 / 430 TFLOP/s and 1.3x / 1.6x Liger (forward / both) on qwen3-30b, olmoe and qwen3-235b.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import Block, peers
from benchmarks.shapes import CPU, MODELS, ROUTINGS, ExpertShape, routing
from torchmoe.costs.experts import ExpertCosts
from torchmoe.dispatch import DispatchQueue
from torchmoe.experts import FusedExpertMLP
from torchmoe.testing import oracle

CHECKED = 64
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
GPU_GOAL = ("qwen3-30b", "olmoe", "qwen3-235b")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one routing, few rounds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", action="append", help="only these shapes, by name")
    parser.add_argument("--save", default="preact")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cpu":
        torch.set_num_threads(2)
    shapes = [s for s in (MODELS if device.type == "cuda" else CPU) if not options.shape or s.name in options.shape]
    kinds = ROUTINGS[:1] if options.quick else ROUTINGS
    rows: list[dict[str, Any]] = []
    for shape in shapes[:3] if options.quick else shapes:
        for kind in kinds:
            rows += measure(shape, kind, device, dtype, save=options.save, rounds=4 if options.quick else 12)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(device), "dtype": str(dtype), "rows": rows}, indent=1))
    return verdict(rows, device)


def machine(device: torch.device) -> dict[str, str]:
    """What the figures were measured on."""
    card = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": card,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }


def build(shape: ExpertShape, device: torch.device, dtype: torch.dtype, save: str) -> tuple[dict[str, Block], FusedExpertMLP]:
    """All implementations by name, on one set of weights; torchmoe's own come first."""
    torch.manual_seed(0)
    module = FusedExpertMLP(
        shape.E, shape.D, shape.F, activation=shape.activation, bias=shape.bias, save=save, device=device, dtype=dtype
    )

    def ours(x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        y: Tensor = module(x, DispatchQueue.build(ids, shape.E), gates)
        return y

    weights = {n.split("_")[0]: p for n, p in module.named_parameters()}
    return {"torchmoe": ours, **peers(shape, weights, device)}, module


def leaves(block: Block, module: FusedExpertMLP) -> list[nn.Parameter]:
    joint = getattr(block, "joint", None)
    return [*module.parameters(), *([joint] if joint is not None else [])]


Truth = tuple[Tensor, dict[str, Tensor], Tensor]
"""(y, gradients, dy) of the oracle on the first CHECKED tokens."""


def truth(module: FusedExpertMLP, x: Tensor, ids: Tensor, gates: Tensor) -> Truth:
    """What every implementation has to give on the first tokens, in fp64."""
    dy = torch.randn(min(CHECKED, len(x)), x.size(1), generator=torch.Generator().manual_seed(3)).to(x)
    weights = {n.split("_")[0]: p.detach() for n, p in module.named_parameters()}
    first = (t[:CHECKED].detach() for t in (x, ids, gates))
    return (*oracle.expert_mlp_grads(*first, weights, dy, activation=module.activation), dy)


def verify(name: str, block: Block, module: FusedExpertMLP, x: Tensor, ids: Tensor, gates: Tensor, want: Truth) -> None:
    """Output and gradients of the first tokens against the fp64 oracle.

    Raises:
        SystemExit: they differ.
    """
    want_y, want_grads, dy = want
    x, gates = (t[:CHECKED].detach().clone().requires_grad_() for t in (x, gates))
    for p in leaves(block, module):
        p.grad = None
    y = block(x, ids[:CHECKED], gates)
    y.backward(dy)
    got = {"y": y, "x": x.grad, "gates": gates.grad}
    joint = getattr(block, "joint", None)
    own = {n.split("_")[0]: p.grad for n, p in module.named_parameters()}
    if joint is not None and joint.grad is not None:
        own["w1"], own["w3"] = joint.grad.chunk(2, dim=1)
    got |= {n: g for n, g in own.items() if g is not None}
    for key, value in got.items():
        assert value is not None
        error = oracle.relative_error(value, want_y if key == "y" else want_grads[key])
        if error > TOLERANCE[x.dtype]:
            raise SystemExit(f"{name}: {key} is off by {error:.2e} from the oracle; nothing is timed")


def measure(
    shape: ExpertShape, kind: str, device: torch.device, dtype: torch.dtype, *, save: str, rounds: int
) -> list[dict[str, Any]]:
    """One row per implementation: median seconds of forward and of forward plus backward, saved bytes, peak bytes."""
    blocks, module = build(shape, device, dtype, save)
    ids = routing(kind, shape.T, shape.E, shape.K, device=device)
    g = torch.Generator(device=device).manual_seed(1)
    x = torch.randn(shape.T, shape.D, device=device, generator=g).to(dtype).requires_grad_()
    gates = torch.rand(shape.T, shape.K, device=device, generator=g).requires_grad_()
    dy = torch.randn(shape.T, shape.D, device=device, generator=g).to(dtype)
    times: dict[str, dict[str, list[float]]] = {n: {"forward": [], "both": []} for n in blocks}
    saved, peak = {}, {}
    want = truth(module, x, ids, gates)
    for name, block in blocks.items():
        verify(name, block, module, x, ids, gates, want)
        saved[name] = saved_bytes(block, module, x, ids, gates)
        for p in (x, gates, *leaves(block, module)):
            p.grad = None
        peak[name] = peak_bytes(lambda b=block: b(x, ids, gates).backward(dy), device)
    for _ in range(rounds):
        for name, block in blocks.items():
            for p in (x, gates, *leaves(block, module)):
                p.grad = None
            times[name]["forward"].append(clock(lambda b=block: forward_only(b, x, ids, gates), device))
            times[name]["both"].append(clock(lambda b=block: b(x, ids, gates).backward(dy), device))
    costs = ExpertCosts(shape.E, shape.D, shape.F, shape.K, gated=shape.gated, bias=shape.bias)
    work = costs.forward_flops(shape.T)
    rows = []
    for name in blocks:
        forward, both = (statistics.median(times[name][k]) for k in ("forward", "both"))
        # Neighbours in time see the same machine: the median of ratios, not the ratio of medians.
        ratios = {
            peer: statistics.median(a / b for a, b in zip(times["torchmoe"]["both"], times[peer]["both"], strict=True))
            for peer in blocks
        }
        rows.append(
            {
                "shape": shape.name,
                "routing": kind,
                "name": name,
                "forward_s": forward,
                "both_s": both,
                "forward_tflops": work / forward / 1e12,
                "both_tflops": 3 * work / both / 1e12,
                "saved_bytes": saved[name],
                "peak_bytes": peak[name],
                "torchmoe_over_it": ratios[name],
            }
        )
        r = rows[-1]
        print(
            f"{shape.name:16s} {kind:10s} {name:24s} forward {forward * 1e3:8.2f} ms {r['forward_tflops']:8.3f} TF  "
            f"both {both * 1e3:8.2f} ms {r['both_tflops']:8.3f} TF  saved {saved[name] / 2**20:8.1f} MiB  "
            f"peak {peak[name] / 2**20:8.1f} MiB  torchmoe/it {r['torchmoe_over_it']:.2f}",
            flush=True,
        )
    return rows


def forward_only(block: Block, x: Tensor, ids: Tensor, gates: Tensor) -> None:
    with torch.no_grad():
        block(x, ids, gates)


def clock(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call; on a GPU with a cold L2."""
    if device.type == "cuda":
        torch.empty(1 << 28, dtype=torch.int8, device=device).zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(stop)) / 1e3
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def saved_bytes(block: Block, module: FusedExpertMLP, x: Tensor, ids: Tensor, gates: Tensor) -> int:
    """Unique storages that autograd holds after a forward, weights excluded."""
    weights = {p.untyped_storage().data_ptr() for p in leaves(block, module)}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = block(x, ids, gates)
    del y
    return sum(kept.values())


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Most bytes allocated at one moment of a forward and backward, over what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with _stderr_closed(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        call()
    live = peak = 0
    for event in prof.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@contextlib.contextmanager
def _stderr_closed() -> Iterator[None]:
    """Sends the process's stderr to nowhere: the profiler's library prints two lines a run there, at every log level."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def verdict(rows: list[dict[str, Any]], device: torch.device) -> int:
    balanced = [r for r in rows if r["routing"] == "balanced"]
    if device.type == "cpu":
        titan = {r["shape"]: r["torchmoe_over_it"] for r in balanced if r["name"].startswith("torchtitan")}
        eager = {r["shape"]: r["torchmoe_over_it"] for r in balanced if r["name"] == "transformers eager"}
        if not titan:
            print("GPU goals not measured; CPU goal not measured: torchtitan is not installed")
            return 0
        worst, slow = max(titan.values()), max(eager.values(), default=0.0)
        good = worst <= 0.8 and slow < 1.0
        figures = ", ".join(f"{k} {v:.2f}" for k, v in titan.items())
        print(
            f"GPU goals not measured. {'PASS' if good else 'MISS'}: forward+backward over torchtitan's {figures} (goal 0.80), "
            f"over transformers' eager at most {slow:.2f} (goal below 1)"
        )
        return 0 if good else 1
    good, figures = True, []
    for r in balanced:
        if r["name"] == "torchmoe" and r["shape"] in GPU_GOAL:
            liger = next((o for o in balanced if o["shape"] == r["shape"] and o["name"].startswith("liger")), None)
            fast = r["forward_tflops"] >= 450 and r["both_tflops"] >= 430
            ahead = liger is None or (liger["forward_s"] / r["forward_s"] >= 1.3 and liger["both_s"] / r["both_s"] >= 1.6)
            good &= fast and ahead
            figures.append(f"{r['shape']} {r['forward_tflops']:.0f}/{r['both_tflops']:.0f} TFLOP/s")
    print(f"{'PASS' if good else 'MISS'}: {'; '.join(figures) or 'no goal shape was run'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
