"""Commands of ``python -m torchmoe``. Each takes --json and prints a table otherwise; a refused input is one line and exit 2."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchmoe.alloc.allocator import MEMORY_MODES, Allocation, RooflineAllocator
from torchmoe.alloc.models import MoESpec
from torchmoe.alloc.planner import Plan, PlanReport, capacity, plan
from torchmoe.alloc.presets import cluster_presets, model_presets
from torchmoe.alloc.report import Progress, print_table
from torchmoe.alloc.roofline import Roofline
from torchmoe.alloc.specs import ClusterSpec, Workload
from torchmoe.errors import ConfigError, TorchMoEError

__all__ = ["main"]

_PLAN = """examples:
  python -m torchmoe plan --cluster h800x128 --model qwen3-235b --seq 4096 --batch 512
  python -m torchmoe plan --cluster h200x8 --model qwen3-30b --seq 4096 --batch 64 --simulate --emit recipes/mine.py
  python -m torchmoe plan --cluster mine.json --model config.json --seq 8192 --batch 256 --json"""
_CAPACITY = """example:
  python -m torchmoe capacity --cluster frontierx1024 --model xmoe-medium --seq 4096 --batch 4096 --grow experts"""
_ROOFLINE = """example:
  python -m torchmoe roofline --cluster h800x32 --model qwen3-235b --split 20:12 --nics 16:16 --plot roofline.png"""
_SIMULATE = """examples:
  python -m torchmoe simulate --preset 128-h800
  python -m torchmoe simulate --cluster h800x32 --model deepseek-moe --seq 8192 --batch 256
  python -m torchmoe simulate --costs stages.json          (your own stage times, see docs/simulate.md)"""
_PROFILE = """examples:
  python -m torchmoe profile --out platform.json
  torchrun --nproc-per-node 8 -m torchmoe profile --out platform.json"""

SIMULATIONS: dict[str, dict[str, Any]] = {
    "128-h800": {"cluster": "h800x128", "model": "deepseek-moe", "seq": 4096, "batch": 1024},
    "10000-gpus": {"cluster": "h800x10000", "model": "qwen3-30b", "seq": 4096, "batch": 20000},
}
"""Presets of ``simulate``: the paper's cluster, and ten thousand GPUs."""


def _common(p: argparse.ArgumentParser, *, required: bool = True) -> None:
    p.add_argument("--cluster", required=required, help=f"KINDxGPUS ({', '.join(cluster_presets())}) or a JSON/YAML file")
    p.add_argument("--model", required=required, help=f"a preset ({', '.join(model_presets())}), sizes in JSON, or config.json")
    p.add_argument("--seq", type=int, default=None if not required else 4096, help="tokens per sequence")
    p.add_argument("--batch", type=int, default=None if not required else 512, help="sequences per optimizer step")
    p.add_argument(
        "--micro",
        type=int,
        action="append",
        default=[],
        help="sequences per micro-batch to try (repeatable): of a pipeline for split plans, of a GPU for colocated ones",
    )
    p.add_argument("--dtype", default="bf16", help="of the products; the GPU must have a peak for it")
    p.add_argument("--recompute", choices=["auto", "none", "full"], default="auto")
    p.add_argument("--save", choices=["auto", "input", "half", "preact", "all"], default="auto")
    p.add_argument("--shard-optimizer", action="store_true", help="spread optimizer state over equal ranks")
    p.add_argument("--profile", help="platform profile that `profile` wrote: measured efficiencies instead of assumed ones")
    p.add_argument("--json", action="store_true", help="machine-readable output")
    p.add_argument("--plot", metavar="FILE", help="draw the result: .png, .svg or .pdf (needs matplotlib)")


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(prog="python -m torchmoe", description="Plan, size and simulate MoE training. No GPU needed.")
    sub = top.add_subparsers(dest="command", required=True)
    p = sub.add_parser("plan", help="the best strategy for a cluster and a model, explained", epilog=_PLAN, formatter_class=raw)
    _common(p)
    p.add_argument("--nics", choices=["fixed", "free"], default="fixed", help="NICs stay with their GPUs, or go to either role")
    p.add_argument(
        "--residual",
        choices=["direct", "ride", "auto"],
        default="direct",
        help="of split plans with several attention groups: a message of its own, on the dispatched rows, or the better one",
    )
    p.add_argument("--a2a", choices=["flat", "halo"], default="halo", help="all-to-all of colocated plans")
    p.add_argument("--memory", choices=["exact", "paper"], default="exact", help="memory model of colocated plans")
    p.add_argument("--top", type=int, default=8, help="plans to list")
    p.add_argument("--rejected", action="store_true", help="list every rejected strategy with its reason")
    p.add_argument("--simulate", action="store_true", help="run the split plan through the simulator")
    p.add_argument("--lengths", help="comma-separated sequence lengths: a table that says when to re-split")
    p.add_argument("--ffn-cluster", help="a second pool, of another GPU kind, for the experts")
    p.add_argument("--solver-seconds", type=float, default=60.0, help="then the best split found counts, and its gap is said")
    p.add_argument("--emit", metavar="FILE.py", help="write the torchtitan recipe of the best runnable plan")
    p.add_argument("--kind", choices=["auto", "split", "colocated"], default="auto", help="which plan --emit writes")
    p.set_defaults(run=_plan)
    p = sub.add_parser("capacity", help="the largest model of a family that fits", epilog=_CAPACITY, formatter_class=raw)
    _common(p)
    p.add_argument("--grow", choices=["experts", "layers", "width"], default="experts")
    p.set_defaults(run=_capacity)
    p = sub.add_parser("roofline", help="what binds at each sequence length", epilog=_ROOFLINE, formatter_class=raw)
    _common(p)
    p.add_argument("--split", required=True, metavar="A:F", help="GPUs of both roles")
    p.add_argument("--nics", metavar="A:F", help="NICs of both roles (default: as the GPUs)")
    p.add_argument("--lengths", default="4096,8192,16384,32768")
    p.add_argument("--mode", choices=["exact", "paper"], default="exact")
    p.set_defaults(run=_roofline)
    p = sub.add_parser(
        "simulate", help="AF-Pipe and colocated schedules in simulated time", epilog=_SIMULATE, formatter_class=raw
    )
    _common(p, required=False)
    p.add_argument("--preset", choices=list(SIMULATIONS))
    p.add_argument("--costs", metavar="FILE.json", help="stage times instead of a model and a cluster")
    p.set_defaults(run=_simulate)
    p = sub.add_parser("profile", help="measure this hardware and store a platform profile", epilog=_PROFILE, formatter_class=raw)
    p.add_argument("--out", default="platform.json")
    p.add_argument("--quick", action="store_true", help="fewer shapes, under a minute")
    p.add_argument("--device", default="auto", help="cpu, cuda or auto")
    p.add_argument("--dtype", default="auto", help="bf16 on GPU, fp32 on CPU unless given")
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=_profile)
    return top


def main(argv: Sequence[str]) -> int:
    """Parse and run."""
    try:
        if argv[:1] == ["simulate"] and "--costs" in argv:
            return _simulate_costs(argv[1:])
        args = _parser().parse_args(argv)
        if getattr(args, "plot", None):
            from torchmoe.alloc.plots import check_plot

            check_plot(args.plot)
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except TorchMoEError as e:
        print(f"torchmoe: {e}", file=sys.stderr)
        return 2


# ---- inputs
def _specs(args: argparse.Namespace) -> tuple[ClusterSpec, MoESpec, Workload]:
    cluster = ClusterSpec.load(args.cluster)
    model = MoESpec.load(args.model)
    if args.profile:
        from torchmoe.alloc.profile import Profile

        measured = Profile.load(args.profile)
        if measured.dtype != args.dtype:
            raise ConfigError(
                f"the profile was measured in {measured.dtype} and the plan is for {args.dtype}; "
                f"measure with profile --dtype {args.dtype}, or plan with --dtype {measured.dtype}"
            )
        cluster = measured.apply(cluster, head_dim=model.qk_dim)
    cluster.gpu.peak(args.dtype)  # refuses a dtype that the GPU does not have
    for b in args.micro:
        if b < 1 or args.batch % b:
            raise ConfigError(f"--micro {b} does not divide --batch {args.batch} sequences; give divisors of it, from 1")
    w = Workload(
        seq_len=args.seq,
        micro_batch=args.micro[0] if args.micro else 1,
        global_batch=args.batch,
        dtype=args.dtype,
        shard_optimizer=args.shard_optimizer,
    )
    return cluster, model, w


def _drawn(path: str | None) -> None:
    if path:
        print(f"wrote {path}")


def _modes(args: argparse.Namespace) -> list[Any]:
    recomputes = ["none", "full"] if args.recompute == "auto" else [args.recompute]
    saves = ["preact", "input"] if args.save == "auto" else [args.save]
    return [m for m in [*MEMORY_MODES, *((r, s) for r in recomputes for s in saves)] if m[0] in recomputes and m[1] in saves]


def _micro(args: argparse.Namespace) -> list[int]:
    return args.micro or [b for b in (1, 2, 4, 8, 16, 32, 64) if args.batch % b == 0]


def _pair(text: str, name: str) -> tuple[float, float]:
    try:
        a, f = (float(x) for x in text.split(":"))
    except ValueError:
        a = f = math.nan
    if not (0 < a < math.inf and 0 < f < math.inf):
        raise ConfigError(f"{name} {text!r} must be two positive numbers A:F, e.g. 20:12") from None
    return a, f


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(x) for x in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"--lengths {text!r} must be whole numbers from 1 with commas, e.g. 4096,8192")
    return lengths


def _dump(data: Any) -> int:
    def clean(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: clean(v) for k, v in x.items()}
        if isinstance(x, list | tuple):
            return [clean(v) for v in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    print(json.dumps(clean(data), indent=2, default=str))
    return 0


# ---- commands
def _plan(args: argparse.Namespace) -> int:
    cluster, model, w = _specs(args)
    if args.top < 1 or not args.solver_seconds > 0:
        raise ConfigError(f"--top {args.top} must be at least 1 and --solver-seconds {args.solver_seconds:g} more than 0")
    if args.emit:
        from torchmoe.alloc.emit import check_target

        check_target(Path(args.emit))
    if args.ffn_cluster or args.lengths:
        return _split_only(args, cluster, model, w)
    with Progress("strategies", quiet=args.json) as tick:
        report = plan(
            cluster,
            model,
            w,
            modes=_modes(args),
            all_to_all=args.a2a,
            memory_model=args.memory,
            nics=args.nics,
            residual=args.residual,
            simulate=args.simulate,
            max_seconds=args.solver_seconds,
            progress=tick,
            **({"micro_batches": args.micro, "split_micro_batches": args.micro} if args.micro else {}),
        )
    best = report.best  # refuses when nothing fits
    if args.emit:
        from torchmoe.alloc.emit import emit_recipe

        emit_recipe(report, Path(args.emit), kind=args.kind)
    if args.plot:
        from torchmoe.alloc.plots import plot_plan

        plot_plan(report, args.plot, top=args.top)
    if args.json:
        return _dump(report.to_dict())
    _print_plan(report, args)
    if args.emit or args.plot:
        print()
    _drawn(args.emit)
    _drawn(args.plot)
    kind = "split" if isinstance(best, Allocation) else "colocated"
    print(f"\nfastest: {kind}, {best.tokens_per_second:,.0f} tokens/s, step {best.step * 1e3:.4g} ms, MFU {best.mfu:.1%}")
    return 0


def _row(p: Plan) -> list[str]:
    c, w = p.costs, p.costs.workload
    return [
        p.degrees,
        "blocking" if c.overlap == "none" else "ideal overlap",
        f"{c.micro_batches} x {w.micro_batch}",
        f"{w.recompute}/{w.save}",
        f"{p.memory.total / 2**30:.1f}",
        f"{p.flat * 1e3:.2f}/{p.halo * 1e3:.2f}",
        f"{p.step * 1e3:.0f}" if p.step >= 0.1 else f"{p.step * 1e3:.3g}",
        f"{p.mfu:.1%}",
        p.bottleneck,
    ]


def _print_plan(report: PlanReport, args: argparse.Namespace) -> None:
    shape, cluster = report.model, report.cluster
    print(
        f"{shape.name}: {shape.num_params / 1e9:.1f}B parameters, {shape.active_params / 1e9:.2f}B active; {cluster.gpus} x ",
        end="",
    )
    print(f"{cluster.gpu.name} ({cluster.gpu.source})\n")
    header = [
        "colocated",
        "exchange",
        "micro-batches",
        "recompute/save",
        "GiB",
        "a2a ms flat/halo",
        "step ms",
        "MFU",
        "loses most to",
    ]
    if report.plans:
        print_table(header, [_row(p) for p in report.plans[: args.top]])
    else:
        print("no colocated strategy fits")
    if args.rejected:
        rows = [[f"PP {r.pp} x EP {r.ep} x DP {r.dp}", r.constraint, r.reason] for r in report.rejected]
        print_table(["rejected", "constraint", "reason"], rows)
    elif report.rejected:
        print(f"{len(report.rejected)} strategies rejected (--rejected lists them)")
    print("\nattention and experts on different GPUs:")
    print(report.split.explain() if report.split else f"  {report.split_refused}")


def _split_only(args: argparse.Namespace, cluster: ClusterSpec, model: MoESpec, w: Workload) -> int:
    """Allocator alone: two pools, or a table over lengths."""
    unused = [k for k, given in (("--emit", args.emit), ("--simulate", args.simulate)) if given]
    if unused:
        raise ConfigError(f"{' and '.join(unused)} with --lengths or --ffn-cluster: there is no one plan for it; leave it out")
    if args.plot and not args.lengths:
        raise ConfigError("--plot with --ffn-cluster needs --lengths: it draws the split over sequence lengths")
    pool = ClusterSpec.load(args.ffn_cluster) if args.ffn_cluster else None
    allocator = RooflineAllocator(
        cluster,
        model,
        w,
        pool,
        nics=args.nics,
        residual=args.residual,
        micro_batches=_micro(args),
        memory_modes=_modes(args),
        symmetric=pool is None,
        max_seconds=args.solver_seconds,
    )
    if not args.lengths:
        a = allocator.solve()
        if args.json:
            return _dump(a.to_dict())
        print(a.explain())
        return 0
    table = allocator.over_lengths(_lengths(args.lengths))
    if args.plot:
        from torchmoe.alloc.plots import plot_lengths

        plot_lengths(table, args.plot, title=f"{model.name} on {allocator.world} GPUs: the split by sequence length")
    if args.json:
        return _dump([{"seq_len": r.seq_len, "best": r.best and r.best.to_dict(), "gain": r.gain} for r in table])
    rows = []
    for r in table:
        if r.best is None:
            rows.append([str(r.seq_len), "fits nowhere", "", "", "", ""])
            continue
        a = r.best
        split = f"{a.replicas * a.pa * a.m}:{a.replicas * a.pf * a.n}"
        again = "-" if r.gain is None else f"{r.gain:.2f}x"
        rows.append(
            [str(r.seq_len), split, f"{a.attention_sizes} {a.ffn_sizes}", f"{a.tokens_per_second:,.0f}", a.binding, again]
        )
    print_table(["sequence", "A:F GPUs", "groups", "tokens/s", "binds", "re-split gains"], rows)
    print("re-split gains: this length with its own split over this length with the first row's split")
    _drawn(args.plot)
    return 0


def _capacity(args: argparse.Namespace) -> int:
    cluster, model, w = _specs(args)
    with Progress("models", quiet=args.json) as tick:
        sizes = {"micro_batches": args.micro, "split_micro_batches": args.micro} if args.micro else {}
        c = capacity(cluster, model, w, grow=args.grow, modes=_modes(args), progress=tick, **sizes)
    if c.model is None or c.plan is None:
        raise ConfigError(f"{model.name} itself does not fit on {cluster.gpus} x {cluster.gpu.name}: {c.reason}")
    if args.plot:
        from torchmoe.alloc.plots import plot_capacity

        plot_capacity(c, args.plot)
    if args.json:
        return _dump(
            {
                "largest": c.model.num_params,
                "model": c.model.to_dict() if isinstance(c.model, MoESpec) else None,
                "plan": c.plan.to_dict(),
                "next": c.next_model.num_params,
                "stopped_by": c.stopped_by,
                "reason": c.reason,
            }
        )
    m = c.model
    shape = f"{m.num_layers} layers, {m.num_experts} experts of width {m.expert_dim}"
    print(f"largest that fits: {m.num_params / 1e9:.1f}B parameters ({m.active_params / 1e9:.2f}B active; {shape})")
    where = c.plan.degrees if isinstance(c.plan, Plan) else f"attention={c.plan.attention_sizes} ffn={c.plan.ffn_sizes}"
    print(f"  with {where}: step {c.plan.step * 1e3:.0f} ms, MFU {c.plan.mfu:.1%}")
    print(f"next ({c.next_model.num_params / 1e9:.1f}B) is stopped by {c.stopped_by}: {c.reason}")
    _drawn(args.plot)
    return 0


def _roofline(args: argparse.Namespace) -> int:
    cluster, model, w = _specs(args)
    m, n = _pair(args.split, "--split")
    qa, qf = _pair(args.nics, "--nics") if args.nics else (m, n)
    if m != int(m) or n != int(n) or m + n > cluster.gpus or qa + qf > max(cluster.nics, m + n):
        raise ConfigError(
            f"--split {args.split} --nics {qa:g}:{qf:g}: both roles need whole GPUs, together at most {cluster.gpus}, "
            f"and at most {cluster.nics} NICs; change one"
        )
    if not args.micro:  # a pipeline's micro-batch fills several GPUs: with one sequence the experts would look starved
        w = replace(w, micro_batch=8, global_batch=8 * w.global_batch)
    roofline = Roofline(cluster, model, w, int(m), int(n), qa, qf, mode=args.mode)
    points = [p for s in _lengths(args.lengths) for p in roofline.points(s)]
    if args.plot:
        from torchmoe.alloc.plots import plot_roofline

        plot_roofline(roofline, _lengths(args.lengths), args.plot)
    if args.json:
        return _dump([{**vars(p), "bound": p.bound, "attained": p.attained} for p in points])
    rows = [
        [
            str(p.seq_len),
            p.role,
            p.placement,
            f"{p.intensity:,.0f}",
            f"{p.turning_point:,.0f}",
            p.bound,
            f"{p.attained / 1e12:.0f}",
        ]
        for p in points
    ]
    print_table(["sequence", "role", "placement", "FLOPs/byte", "turning point", "binds", "TFLOP/s per GPU"], rows)
    _drawn(args.plot)
    return 0


def _simulate(args: argparse.Namespace) -> int:
    from torchmoe.alloc.compare import compare

    if args.preset:
        for key, value in SIMULATIONS[args.preset].items():
            if getattr(args, key) is None:
                setattr(args, key, value)
    if not args.cluster or not args.model:
        raise ConfigError("simulate needs --preset, or --cluster and --model, or --costs FILE.json")
    args.seq, args.batch = 4096 if args.seq is None else args.seq, 512 if args.batch is None else args.batch
    cluster, model, w = _specs(args)
    with Progress("schedules", quiet=args.json) as tick:
        rows = compare(cluster, model, w, micro_batches=_micro(args), modes=_modes(args), progress=tick)
    if all(r.step is None for r in rows):
        raise ConfigError("; ".join(f"{r.scheme}: {r.note}" for r in rows))
    if args.plot:
        from torchmoe.alloc.plots import plot_simulation

        where = f"{model.name} on {cluster.gpus} x {cluster.gpu.name}, {args.batch} sequences of {args.seq} tokens"
        plot_simulation(rows, args.plot, title=where)
    if args.json:
        return _dump([vars(r) for r in rows])
    base = next((r.step for r in rows if r.step is not None), None)
    table = []
    for r in rows:
        if r.step is None or base is None:
            table.append([r.scheme, r.layout, r.note, "", "", "", ""])
            continue
        bound = f"{r.bound * 1e3:.0f}" if r.bound is not None else ""
        exposed = f"{r.exposed:.1%}" if r.exposed is not None else ""
        table.append([r.scheme, r.layout, r.note, f"{r.step * 1e3:.0f}", f"{base / r.step:.2f}x", bound, exposed])
    print_table(["schedule", "layout", "", "step ms", "speed-up", "bound ms", "not computing"], table)
    _drawn(args.plot)
    return 0


def _simulate_costs(argv: Sequence[str]) -> int:
    try:
        stages = importlib.import_module("torchmoe.pipeline.cli")
    except ImportError:
        raise ConfigError("this version has no simulation from stage times; use --cluster and --model") from None
    return int(stages.main(list(argv)))


def _profile(args: argparse.Namespace) -> int:
    from torchmoe.alloc.profile import profile

    if Path(args.out).is_dir() or not Path(args.out).resolve().parent.is_dir():
        raise ConfigError(f"cannot write {args.out}: it is a folder, or in none; give a file in an existing folder")
    result = profile(device=args.device, dtype=args.dtype, quick=args.quick, progress=not args.json)
    if not result.writes:
        return 0
    result.save(args.out)
    if args.json:
        return _dump(result.to_dict())
    print_table(["measurement", "shapes", "fit", "median error", "p90 error"], result.rows())
    print(f"wrote {args.out}")
    return 0
