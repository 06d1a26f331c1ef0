"""Verify, tune and measure the Triton kernels on the GPU of this machine: `python -m benchmarks.gpu [--dry-run] [--quick]`.

Needs torch and triton alone. Stages, each within its share of --budget seconds:
verify   forward and every gradient of small layers against the fp64 reference, two runs bit for bit; nothing is timed before;
tune     the candidates of every grouped GEMM at the goal's shapes, winners into the cache (and with --ship into configs.json);
measure  every kernel at the models' shapes: median time with a cold L2, TFLOP/s, GB/s; queue against argsort.

--dry-run: the same program on a CPU under Triton's interpreter, on tiny shapes; what only a GPU can tell is "not measured".
Goals (H200, bf16): forward >= 450 TFLOP/s and forward plus backward >= 430 at qwen3-30b, olmoe and qwen3-235b, kernels alone;
combine >= 85 % of the copy rate; queue >= 3x faster than argsort.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GOALS = {"forward": 450.0, "both": 430.0}
GOAL_SHAPES = ("qwen3-30b", "olmoe", "qwen3-235b")
TINY = {"T": 12, "D": 48, "F": 32, "E": 4, "K": 2}


@dataclass
class Timing:
    """Seconds of one kernel at one shape; None says "not measured"."""

    shape: str
    kernel: str
    seconds: float | None
    flops: int = 0
    bytes: int = 0

    def line(self) -> str:
        """One row of the table."""
        if self.seconds is None:
            return f"{self.shape:16} {self.kernel:18} not measured"
        flops, moved = self.flops / self.seconds / 1e12, self.bytes / self.seconds / 1e9
        rate = f"{flops:7.1f} TFLOP/s" if self.flops else f"{moved:7.0f} GB/s"
        return f"{self.shape:16} {self.kernel:18} {self.seconds * 1e3:8.3f} ms {rate}"


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a check fails or, on the card that they are meant for, a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, under the interpreter")
    parser.add_argument("--quick", action="store_true", help="one model, no tuning")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for all stages")
    parser.add_argument("--ship", action="store_true", help="write the winners into torchmoe/kernels/configs.json")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, below
    os.environ.setdefault("TORCHMOE_CACHE_DIR", str(ROOT / "outputs" / "tuning"))
    os.environ["TORCHMOE_AUTOTUNE"] = "" if options.quick else "1"
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("gpu: not measured (no GPU here; --dry-run checks the program under the interpreter)")
        return 0
    device = torch.device("cpu" if options.dry_run else "cuda")
    started = time.monotonic() if device.type == "cuda" else float("inf")  # an interpreter has no budget to keep
    print(json.dumps(machine(device)), flush=True)
    worst = verify(device, deadline=started + 0.35 * options.budget)
    rows = measure(device, quick=options.quick, deadline=started + options.budget)
    for row in rows:
        print(row.line(), flush=True)
    entries = winners(device)
    if options.ship and entries:
        ship(torch.cuda.get_device_name(device), entries)
    if options.json:
        content = {"machine": machine(device), "worst_error": worst, "tuned": entries, "rows": [vars(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=1))
    return verdict(rows, worst, device)


def machine(device: Any) -> dict[str, str]:
    """What the figures belong to."""
    import torch
    import triton

    found = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    if device.type == "cpu":
        return {**found, "device": "interpreter"}
    return {**found, "device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda or torch.version.hip)}


def verify(device: Any, *, deadline: float) -> float:
    """Largest relative error over output and gradients, against the reference in fp64.

    Raises:
        SystemExit: an error above the tolerance, or two runs that differ.
    """
    import torch

    small = device.type == "cpu"
    large = [(300, 97, 47, 7, 3), (2048, 512, 384, 16, 2), (64, 256, 128, 64, 8)]
    shapes = [(7, 33, 20, 3, 2)] if small else large
    dtypes = {torch.float32: 1e-5, torch.float16: 3e-3, **({} if small else {torch.bfloat16: 2e-2})}
    cases = [("swiglu", False, "preact"), ("clamped_swiglu", True, "input"), ("geglu", False, "half"), ("relu2", True, "all")]
    cases += [] if small else [("reglu", False, "preact"), ("silu", False, "preact"), ("gelu", True, "preact")]
    worst, done, total = 0.0, 0, len(shapes) * len(dtypes) * len(cases)
    for shape in shapes:
        for dtype, tolerance in dtypes.items():
            for activation, bias, save in cases:
                if time.monotonic() > deadline:
                    raise SystemExit(f"verify: only {done} of {total} layers within the budget; raise --budget")
                error = check_layer(shape, dtype, activation, bias, save, device)
                worst, done = max(worst, error / tolerance), done + 1
                if error > tolerance:
                    raise SystemExit(f"verify: {shape} {dtype} {activation} save={save} is off by {error:.2e}; nothing is timed")
    print(
        f"verify: {done} layers equal the fp64 reference, two runs bit-equal; worst error {worst:.2f} of the tolerance",
        flush=True,
    )
    return worst


def check_layer(shape: tuple[int, ...], dtype: Any, activation: str, bias: bool, save: str, device: Any) -> float:
    """Largest relative error of one layer; infinity if a second run gives other bits."""
    import torch

    from torchmoe.kernels import reference, triton_backend
    from torchmoe.testing.oracle import relative_error

    layer = Layer(*shape, activation, bias, dtype, device)
    first, second = layer.run(triton_backend, save), layer.run(triton_backend, save)
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        return float("inf")
    want = layer.wide().run(reference, save)
    return max(relative_error(a, b) for a, b in zip(first, want, strict=True))


class Layer:
    """Random weights, tokens and routing of one layer, and its forward and backward by the kernels of a backend."""

    def __init__(
        self, T: int, D: int, F: int, E: int, K: int, activation: str, bias: bool, dtype: Any, device: Any, skew: bool = False
    ) -> None:
        import torch

        from torchmoe.kernels.activations import is_gated
        from torchmoe.kernels.mlp import Weights

        generator = torch.Generator(device=device).manual_seed(T + D)

        def random(*sizes: int, scale: float = 1.0) -> Any:
            return (torch.randn(*sizes, generator=generator, device=device) * scale).to(dtype)

        def maybe(*sizes: int, wanted: bool) -> Any:
            return random(*sizes) if wanted else None

        gated = is_gated(activation)
        score = torch.rand(T, E, generator=generator, device=device)
        self.ids = (score + (torch.linspace(1, 0, E, device=device) if skew else 0)).topk(min(K, E), dim=1).indices
        self.E, self.activation = E, activation
        self.gates = torch.rand(T, min(K, E), generator=generator, device=device)
        self.x, self.dy = random(T, D), random(T, D)
        self.weights = Weights(
            random(E, F, D, scale=D**-0.5),
            random(E, F, D, scale=D**-0.5) if gated else None,
            random(E, D, F, scale=F**-0.5),
            maybe(E, F, wanted=bias),
            maybe(E, F, wanted=bias and gated),
            maybe(E, D, wanted=bias),
        )

    def wide(self) -> Layer:
        """The same values in fp64."""
        import copy

        other = copy.copy(self)
        other.x, other.dy, other.gates = self.x.double(), self.dy.double(), self.gates.double()
        other.weights = type(self.weights)(*(None if w is None else w.double() for w in self.weights))
        return other

    def run(self, kernels: Any, save: str) -> list[Any]:
        """y, then the gradients of x, the gates and every weight."""
        import torch

        from torchmoe.kernels import mlp

        tokens, offsets, index_map, _ = kernels.build_queue(self.ids, self.E)
        index = mlp.Index(tokens, offsets, index_map)
        problem = mlp.Problem(index, self.weights, self.activation, save)
        y, kept = mlp.forward(kernels, self.x, self.gates, problem)
        up, dgates = mlp.backward_rows(kernels, self.dy, self.x, self.gates, problem, kept)
        results = [y, mlp.input_gradient(kernels, up, index, self.weights), dgates]
        for name, weight in zip(self.weights._fields, self.weights, strict=True):
            if weight is not None:
                out = torch.zeros(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
                mlp.weight_gradient(kernels, name, up, self.x, self.dy, index, out, True)
                results.append(out)
        return results


def measure(device: Any, *, quick: bool, deadline: float) -> list[Timing]:
    """Every kernel at the models' shapes (tuned on first use); shapes past the deadline are "not measured"."""
    from benchmarks.shapes import MODELS

    order = [s for name in GOAL_SHAPES for s in MODELS if s.name == name] + [s for s in MODELS if s.name not in GOAL_SHAPES]
    rows: list[Timing] = []
    for shape in order[:1] if quick else order:
        if device.type == "cpu":
            tiny = replace(shape, **TINY)
            # The calls are made, so that the program is checked; their times would mean nothing.
            rows += [replace(row, seconds=None) for row in kernel_times(tiny, device)] if shape is order[0] else []
            rows += [Timing(shape.name, kernel, None) for kernel in ("forward", "both")] if shape is not order[0] else []
        elif time.monotonic() > deadline:
            rows += [Timing(shape.name, kernel, None) for kernel in ("forward", "both")]
        else:
            rows += kernel_times(shape, device)
    return rows


def kernel_times(shape: Any, device: Any) -> list[Timing]:
    """The kernels of one layer, one by one, and the two sums."""
    import torch

    from torchmoe.kernels import triton_backend as k

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    layer = Layer(shape.T, shape.D, shape.F, shape.E, shape.K, shape.activation, shape.bias, dtype, device)
    w, x, dy, act = layer.weights, layer.x, layer.dy, layer.activation
    tokens, offsets, index_map, _ = k.build_queue(layer.ids, shape.E)
    P, D, F, size = tokens.numel(), shape.D, shape.F, x.element_size()
    halves, product = 2 if w.w3 is not None else 1, 2 * P * D * F
    a, h = k.up_projection(x, tokens, offsets, w.w1, w.w3, w.b1, w.b3, act, True)
    y = k.down_projection(a, offsets, w.w2, w.b2)
    gates_P = torch.rand(P, device=device)
    dh, ag, _ = k.backward_hidden(dy, tokens, offsets, gates_P, h, w.w2, w.b2, act)
    dw1 = torch.zeros(shape.E, F, D, device=device)
    dw2 = torch.zeros(shape.E, D, F, device=device)
    moved = (P + shape.T) * D * size

    def dw13() -> None:
        for half in dh[:halves]:
            k.weight_grad_rows(half, x, None, tokens, offsets, dw1)

    calls: list[tuple[str, Callable[[], object], int, int]] = [
        ("queue", lambda: k.build_queue(layer.ids, shape.E), 0, P * 16),
        ("argsort", lambda: torch.argsort(layer.ids.reshape(-1), stable=True), 0, P * 16),
        ("up_projection", lambda: k.up_projection(x, tokens, offsets, w.w1, w.w3, w.b1, w.b3, act, True), halves * product, 0),
        ("down_projection", lambda: k.down_projection(a, offsets, w.w2, w.b2), product, 0),
        ("combine", lambda: k.combine(y, index_map, layer.gates), 0, moved),
        ("copy", lambda: y.clone(), 0, 2 * P * D * size),
        ("backward_hidden", lambda: k.backward_hidden(dy, tokens, offsets, gates_P, h, w.w2, w.b2, act), product, 0),
        ("weight_grad dW2", lambda: k.weight_grad_rows(dy, ag, tokens, None, offsets, dw2), product, 0),
        ("input_grad", lambda: k.input_grad(dh, offsets, w.w1, w.w3), halves * product, 0),
        ("combine dX", lambda: k.combine(y, index_map, None), 0, moved),
        ("weight_grad dW1 dW3", dw13, halves * product, 0),
    ]
    rows = [Timing(shape.name, name, seconds(call, device), flops, moved_bytes) for name, call, flops, moved_bytes in calls]
    time_of = {row.kernel: row.seconds or 0.0 for row in rows}
    forward = sum(time_of[name] for name in ("queue", "up_projection", "down_projection", "combine"))
    backward = sum(time_of[n] for n in ("backward_hidden", "weight_grad dW2", "input_grad", "combine dX", "weight_grad dW1 dW3"))
    rows.append(Timing(shape.name, "forward", forward, (halves + 1) * product))
    rows.append(Timing(shape.name, "both", forward + backward, 3 * (halves + 1) * product))
    return rows


def seconds(call: Callable[[], object], device: Any) -> float:
    """Median seconds of a call with a cold L2; on a CPU the call is made once."""
    if device.type == "cpu":
        call()
        return 0.0
    from triton.testing import do_bench

    call()  # compiles, and tunes where asked for
    return float(do_bench(call, warmup=20, rep=60, return_mode="median")) / 1e3


def winners(device: Any) -> dict[str, list[int]]:
    """What tuning has written for this card."""
    import torch

    if device.type == "cpu":
        return {}
    from torchmoe.kernels.tuning import cache_path

    path = cache_path(Path(os.environ["TORCHMOE_CACHE_DIR"]), torch.cuda.get_device_name(device))
    return dict(json.loads(path.read_text())) if path.exists() else {}


def ship(card: str, entries: dict[str, list[int]]) -> None:
    """Write a card's winners into the shipped table."""
    path = ROOT / "torchmoe" / "kernels" / "configs.json"
    tables = json.loads(path.read_text())
    tables["measured"][card] = {**tables["measured"].get(card, {}), **entries}
    path.write_text(json.dumps(tables, indent=1) + "\n")
    print(f"{len(entries)} configurations of {card} written to {path.relative_to(ROOT)}")


def verdict(rows: list[Timing], worst: float, device: Any) -> int:
    """Prints the last line; 1 if a goal is missed on an H200."""
    import torch

    rate = {(r.shape, r.kernel): r.flops / r.seconds / 1e12 for r in rows if r.seconds and r.flops}
    passed = {(r.shape, r.kernel): r for r in rows if r.seconds}
    if not passed:
        print(f"gpu: verified (worst error {worst:.2f} of the tolerance); TFLOP/s not measured")
        return 0
    missed = [f"{s} {k} {rate[s, k]:.0f}" for s in GOAL_SHAPES for k, goal in GOALS.items() if rate.get((s, k), goal) < goal]
    for shape in GOAL_SHAPES:
        if (shape, "queue") in passed:
            queue, sort = passed[shape, "queue"], passed[shape, "argsort"]
            combine, copy = passed[shape, "combine"], passed[shape, "copy"]
            gain = (sort.seconds or 0) / (queue.seconds or 1)
            share = (combine.bytes / (combine.seconds or 1)) / (copy.bytes / (copy.seconds or 1))
            print(f"{shape}: queue {gain:.1f}x argsort, combine {share:.0%} of the copy rate")
            missed += [f"{shape} queue {gain:.1f}x"] if gain < 3 else []
            missed += [f"{shape} combine {share:.0%}"] if share < 0.85 else []
    figures = ", ".join(f"{s} {rate[s, 'forward']:.0f}/{rate[s, 'both']:.0f}" for s in GOAL_SHAPES if (s, "forward") in rate)
    meant = "H200" in torch.cuda.get_device_name(device)
    print(f"gpu: TFLOP/s forward/both {figures}; {'missed: ' + ', '.join(missed) if missed else 'all goals met'}")
    return 1 if missed and meant else 0


if __name__ == "__main__":
    sys.exit(main())
