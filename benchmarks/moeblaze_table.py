"""The paper's seven configurations: `python -m benchmarks.moeblaze_table [--quick] [--json FILE]`.

Saved bytes at full size, counted by saved-tensor hooks under fake tensors (any machine, no memory), in bf16 and, because the
paper does not state its dtype, in fp32: torchmoe in every save mode, Algorithm 1 of the paper by its formula, and a dense
routed composition as frameworks run it. Times and the ablation (builder, routed copy, fusion, recomputation) need a GPU.
Goal: torchmoe's default keeps no more than Algorithm 1 in every configuration.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from benchmarks.experts import clock, machine
from benchmarks.queue import sorted_queue
from benchmarks.shapes import MOEBLAZE, ExpertShape, routing
from torchmoe.dispatch import DispatchQueue
from torchmoe.experts import FusedExpertMLP
from torchmoe.kernels import scheme

MODES = ("input", "half", "preact", "all")
PUBLISHED = {"conf4 silu": "6,100 MB (MegaBlocks 22,000)", "conf3 swiglu": "about 10,000 MB (MegaBlocks over 40,000)"}


def routed_composition(x: Tensor, ids: Tensor, gates: Tensor, weights: scheme.Weights, activation: str) -> Tensor:
    """Routed copy, grouped GEMMs as batched ones over equal groups, activation op by op, weighted scatter: the usual way."""
    T, K = ids.shape
    E = weights.w1.size(0)
    order, _, _ = sorted_queue_shapes(ids, E)
    rows = x[order].view(E, -1, x.size(1))
    h = torch.bmm(rows, weights.w1.transpose(1, 2))
    if weights.w3 is not None:
        h = F.silu(h) * torch.bmm(rows, weights.w3.transpose(1, 2))
    else:
        h = F.silu(h)
    y = torch.bmm(h, weights.w2.transpose(1, 2)).view(T * K, -1)
    y = y * gates.reshape(-1, 1).to(y.dtype)
    return torch.zeros_like(x).index_add(0, order, y)


def sorted_queue_shapes(ids: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """argsort's row list without its data-dependent counts (fake tensors have none)."""
    order = torch.argsort(ids.view(-1), stable=True)
    return order // ids.size(1), ids.new_zeros(E + 1), order


def kept_bytes(shape: ExpertShape, dtype: torch.dtype, save: str | None) -> int:
    """Bytes of unique storages saved by one forward at full size, weights excluded; ``save=None`` is the composition."""
    with FakeTensorMode():
        module = FusedExpertMLP(shape.E, shape.D, shape.F, activation=shape.activation, save=save or "preact", dtype=dtype)
        x = torch.empty(shape.T, shape.D, dtype=dtype, requires_grad=True)
        ids = torch.zeros(shape.T, shape.K, dtype=torch.int64)
        gates = torch.empty(shape.T, shape.K, requires_grad=True)
        kept: list[Tensor] = []
        weights = {p.untyped_storage()._cdata for p in module.parameters()}

        def pack(t: Tensor) -> Tensor:
            kept.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            if save is None:
                routed_composition(x, ids, gates, module.weights(), shape.activation)
            else:
                module(x, DispatchQueue.build(ids, shape.E), gates)
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
        return sum(n for key, n in storages.items() if key not in weights)


def algorithm_1(shape: ExpertShape, itemsize: int) -> int:
    """The paper's listing: x, both pre-activations and the product (SiLU: one and its product), and 3 T K + E + 1 indices."""
    hidden = 3 if shape.gated else 2
    return (shape.T * shape.D + hidden * shape.T * shape.K * shape.F) * itemsize + 4 * (3 * shape.T * shape.K + shape.E + 1)


def ablation(shape: ExpertShape, device: torch.device) -> dict[str, float]:
    """Milliseconds of forward plus backward when one thing at a time is taken away (GPU)."""
    ids = routing("balanced", shape.T, shape.E, shape.K, device=device)
    x = torch.randn(shape.T, shape.D, device=device, dtype=torch.bfloat16, requires_grad=True)
    gates = torch.rand(shape.T, shape.K, device=device, requires_grad=True)
    dy = torch.randn_like(x)
    result = {}

    def timed(call: Any) -> float:
        call()
        return statistics.median(clock(call, device) for _ in range(10)) * 1e3

    def step(module: FusedExpertMLP, queue: DispatchQueue | None = None) -> None:
        module(x, queue or DispatchQueue.build(ids, shape.E), gates).backward(dy)

    for save in MODES if shape.gated else ("input", "preact", "all"):
        module = FusedExpertMLP(shape.E, shape.D, shape.F, activation=shape.activation, save=save, device=device, dtype=x.dtype)
        result[f"save={save}"] = timed(lambda m=module: step(m))
    fixed = DispatchQueue.build(ids, shape.E)
    result["without building the queue"] = timed(lambda: step(module, fixed))
    result["queue by argsort"] = result["without building the queue"] + timed(lambda: sorted_queue(ids, shape.E))
    rows = torch.arange(shape.T * shape.K, device=device).view(-1, 1)

    def copied() -> None:
        # The tokens are routed into a buffer first; the kernels then see K = 1 rows in expert order.
        routed = fixed.gather(x)
        owner = torch.repeat_interleave(torch.arange(shape.E, device=device), fixed.counts().long(), output_size=len(rows))
        ones = torch.ones(len(rows), 1, device=device)
        y = module(routed, DispatchQueue.build(owner[:, None], shape.E), ones)
        fixed.combine(y, gates).backward(dy)

    result["with a routed copy"] = timed(copied)
    weights = scheme.weight_views(module.weights(), "split")
    result["without fusion"] = timed(lambda: routed_composition(x, ids, gates, weights, shape.activation).backward(dy))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two configurations")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    rows: list[dict[str, Any]] = []
    worst = 0.0
    shapes = [s for s in MOEBLAZE if not options.quick or s.name.startswith(("conf4", "conf3"))]
    print("saved MiB, x and indices included; 'composition' = routed copy, op by op")
    for shape in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            modes = [m for m in MODES if shape.gated or m != "half"]
            row: dict[str, Any] = {"shape": shape.name, "dtype": str(dtype).removeprefix("torch.")}
            row |= {f"save={m}": kept_bytes(shape, dtype, m) for m in modes}
            formula = FusedExpertMLP(shape.E, shape.D, shape.F, activation=shape.activation, device="meta", dtype=dtype).costs(
                shape.K
            )
            for m in modes:
                if row[f"save={m}"] != formula.saved_bytes(shape.T, m):
                    raise SystemExit(
                        f"{shape.name} {m}: hooks count {row[f'save={m}']}, the formula {formula.saved_bytes(shape.T, m)}"
                    )
            row["algorithm 1"] = algorithm_1(shape, dtype.itemsize)
            row["composition"] = kept_bytes(shape, dtype, None)
            worst = max(worst, row["save=preact"] / row["algorithm 1"])
            row["published"] = PUBLISHED.get(shape.name)
            if gpu and dtype is torch.bfloat16:
                row["ms"] = ablation(shape, torch.device("cuda"))
            rows.append(row)
            cells = "  ".join(f"{k} {v / 2**20:9.0f}" for k, v in row.items() if isinstance(v, int))
            print(
                f"{shape.name:13s} {row['dtype']:8s} {cells}  {row['published'] or ''}  time {row.get('ms', 'not measured')}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(torch.device("cuda" if gpu else "cpu")), "rows": rows}, indent=1))
    good = worst <= 1.0
    print(
        f"{'PASS' if good else 'MISS'}: the default keeps at most {worst:.2f}x the bytes of the paper's Algorithm 1 (goal 1.00)"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
