"""Pictures of plans: roofline, ranking, capacity, sequence lengths, simulated schedules. matplotlib is imported only here.

The same input gives the same file, byte for byte with one version of matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torchmoe.alloc.allocator import Allocation, LengthRow
from torchmoe.alloc.compare import Row
from torchmoe.alloc.planner import Capacity, Plan, PlanReport
from torchmoe.alloc.roofline import Point, Roofline
from torchmoe.costs.memory import MemoryParts
from torchmoe.errors import ConfigError

__all__ = ["check_plot", "plot_capacity", "plot_lengths", "plot_plan", "plot_roofline", "plot_simulation"]

GIB = 2**30
FORMATS = (".png", ".svg", ".pdf")
ROLES = {"attention": "tab:blue", "experts": "tab:orange"}
TIMES = {"attention": "tab:blue", "experts": "tab:orange", "exposed communication": "tab:red", "bubble": "lightgray"}
MEMORY = {"state": "tab:purple", "activations": "tab:green", "exchange and transient": "tab:olive", "allowance": "lightgray"}


def check_plot(path: str | Path) -> None:
    """Refuse a plot that cannot be drawn, before anything is computed for it.

    Raises:
        ConfigError: matplotlib is missing, another format, no such folder.
    """
    path = Path(path)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("plots need matplotlib, which is not installed; pip install 'torchmoe[viz]'") from None
    if path.suffix not in FORMATS:
        raise ConfigError(f"a plot's name {str(path)!r} must end in one of {', '.join(FORMATS)}; it says the format")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}; create it or give another")


class _Picture:
    """A figure with panels side by side, written when the block ends."""

    def __init__(self, path: str | Path, *, width: float, height: float, panels: int = 1, **grid: Any) -> None:
        check_plot(path)
        from matplotlib.figure import Figure

        self.path = Path(path)
        self.figure = Figure(figsize=(width, height), layout="constrained")
        self.axes = list(self.figure.subplots(1, panels, squeeze=False, **grid)[0])

    def __enter__(self) -> _Picture:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            return
        import matplotlib

        drop = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}[self.path.suffix]
        try:
            with matplotlib.rc_context({"svg.hashsalt": "torchmoe", "svg.fonttype": "path"}):
                self.figure.savefig(self.path, dpi=110, metadata={drop: None})
        except OSError as e:
            raise ConfigError(f"cannot write {self.path}: {e.strerror}; give a file in a folder that is yours") from None


# ---- roofline
def plot_roofline(roofline: Roofline, lengths: Sequence[int], path: str | Path) -> None:
    """Left: FLOP/s per GPU over intensity, log-log, both roles, before and after the split, a mark per length. Right: intensity
    over turning point by sequence length; below 1 the network binds."""
    every = [p for s in lengths for p in roofline.points(s)]
    with _Picture(path, width=12.5, height=5, panels=2, gridspec_kw={"width_ratios": [3, 2]}) as picture:
        left, right = picture.axes
        low = min(min(p.intensity, p.turning_point) for p in every) / 2
        high = max(max(p.intensity, p.turning_point) for p in every) * 2
        for role, color in ROLES.items():
            for placement, line in (("aggregated", "--"), ("split", "-")):
                own = [p for p in every if p.role == role and p.placement == placement]
                _roof(left, own, low, high, color, line)
                style = {"color": color, "marker": "o", "markerfacecolor": color if placement == "split" else "white"}
                ratio = [p.intensity / p.turning_point for p in own]
                right.plot([p.seq_len for p in own], ratio, line, label=f"{role}, {placement}", **style)
        left.set(xscale="log", yscale="log", xlabel="FLOPs per byte on the network", ylabel="TFLOP/s per GPU")
        left.legend(fontsize=8, loc="lower right", title="kink: turning point at the last length", title_fontsize=8)
        right.axhline(1.0, color="black", lw=1)
        right.text(lengths[0], 1.03, "compute binds above", fontsize=8, va="bottom")
        right.text(lengths[0], 0.97, "network binds below", fontsize=8, va="top")
        right.set(xscale="log", yscale="log", xlabel="sequence length, tokens", ylabel="intensity / turning point")
        right.set_xticks(list(lengths), [_tokens(s) for s in lengths])
        right.minorticks_off()
        right.legend(fontsize=8)
        for ax in (left, right):
            ax.grid(True, which="major", alpha=0.25)
        where = f"{roofline.model.name} on {roofline.cluster.name}, split {roofline.m}:{roofline.n}"
        picture.figure.suptitle(f"{where}, NICs {roofline.nics_a:g}:{roofline.nics_f:g} ({roofline.mode} mode)", fontsize=11)


def _roof(ax: Any, own: Sequence[Point], low: float, high: float, color: str, line: str) -> None:
    last = own[-1]
    y = [last.ceiling * low / last.turning_point, last.ceiling, last.ceiling]
    ax.plot([low, last.turning_point, high], [v / 1e12 for v in y], line, color=color, lw=1, alpha=0.6)
    face = color if last.placement == "split" else "white"
    label = f"{last.role}, {last.placement} (kink at {last.turning_point:,.0f})"
    xs, ys = [p.intensity for p in own], [p.attained / 1e12 for p in own]
    ax.plot(xs, ys, "o", color=color, markerfacecolor=face, label=label)
    if last.role == "attention":  # the experts' points lie on one another
        shift = (-11, 7) if last.placement == "split" else (13, -10)
        for p in own:
            at = (p.intensity, p.attained / 1e12)
            ax.annotate(_tokens(p.seq_len), at, textcoords="offset points", xytext=shift, fontsize=8, ha="center", color=color)


def _tokens(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


# ---- plans
def _plan_times(p: Plan | Allocation) -> dict[str, float]:
    """Seconds of a step by what they go to. A split's sides work at the same time: its busier side's computation counts."""
    if isinstance(p, Allocation):
        side = "attention" if p.attention >= p.ffn else "experts"
        compute = max(p.attention, p.ffn)
        exposed = max(0.0, min(p.busy, p.step) - compute)
        return {side: min(compute, p.step), "exposed communication": exposed, "bubble": max(0.0, p.step - p.busy)}
    parts = p.parts
    return {
        "attention": parts.attention,
        "experts": parts.experts,
        "exposed communication": parts.exchange - parts.hidden + parts.p2p + parts.gradients,
        "bubble": parts.bubble,
    }


def _memory(m: MemoryParts) -> dict[str, float]:
    return {
        "state": m.state,
        "activations": m.activations + m.routing,
        "exchange and transient": m.exchange + m.transient,
        "allowance": m.allowance,
    }


def _stacked(ax: Any, labels: Sequence[str], rows: Sequence[dict[str, float]], colors: dict[str, str], scale: float) -> None:
    for y, row in enumerate(rows):
        start = 0.0
        for name, value in row.items():
            ax.barh(y, value / scale, left=start, color=colors[name], height=0.7)
            start += value / scale
    ax.set_yticks(range(len(labels)), labels, fontsize=8)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.grid(True, axis="x", alpha=0.25)
    ax.set_axisbelow(True)


def _legend(ax: Any, colors: dict[str, str], used: Iterable[str], extra: Sequence[Any] = ()) -> None:
    from matplotlib.patches import Patch

    present = set(used)
    handles = [*(Patch(color=c, label=k) for k, c in colors.items() if k in present), *extra]
    ax.legend(handles=handles, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False)


def _limit(ax: Any, size: float) -> Any:
    return ax.axvline(size / GIB, color="black", lw=1.2, ls="--", label=f"a GPU has {size / GIB:.0f} GiB")


def plot_plan(report: PlanReport, path: str | Path, *, top: int = 8) -> None:
    """The ranking: a step's time by cause, and the fullest rank's memory against what a GPU has."""
    ranked: list[Plan | Allocation] = [*report.plans[:top], *([report.split] if report.split else [])]
    if not ranked:
        raise ConfigError(report.nothing_fits())
    ranked.sort(key=lambda p: p.step)
    names, memories, memory_names = [], [], []
    for p in ranked:
        if isinstance(p, Allocation):
            where = f"{p.replicas * p.pa * p.m} A + {p.replicas * p.pf * p.n} F GPUs"
            names.append(f"split, {where}")
            memory_names += ["split, attention rank", "split, expert rank"]
            memories += [_memory(p.memory_a), _memory(p.memory_f)]
        else:
            names.append(f"{p.degrees}, {'blocking' if p.costs.overlap == 'none' else 'ideal overlap'}")
            memory_names.append(names[-1])
            memories.append(_memory(p.memory))
    times = [_plan_times(p) for p in ranked]
    seconds = max(p.step for p in ranked)
    unit, scale = ("s", 1.0) if seconds >= 10 else ("ms", 1e-3) if seconds >= 1e-2 else ("us", 1e-6)
    with _Picture(path, width=12.5, height=1.9 + 0.32 * len(memories), panels=2) as picture:
        left, right = picture.axes
        _stacked(left, names, times, TIMES, scale)
        for y, p in enumerate(ranked):
            left.text(p.step / scale, y, f" {p.mfu:.1%}", va="center", fontsize=8)
        left.set_xlim(0, 1.12 * seconds / scale)
        left.set(xlabel=f"step, {unit} (MFU beside it)")
        _legend(left, TIMES, (k for row in times for k in row))
        _stacked(right, memory_names, memories, MEMORY, GIB)
        right.set(xlabel="fullest rank, GiB")
        _legend(right, MEMORY, MEMORY, [_limit(right, report.cluster.gpu.hbm_bytes)])
        picture.figure.suptitle(f"{report.model.name} on {report.cluster.gpus} x {report.cluster.gpu.name}", fontsize=11)


def plot_lengths(rows: Sequence[LengthRow], path: str | Path, *, title: str = "") -> None:
    """GPUs of both roles and tokens per second over the sequence length."""
    found = [(r.seq_len, r.best) for r in rows if r.best is not None]
    if not found:
        raise ConfigError(f"none of the lengths {[r.seq_len for r in rows]} fits; there is nothing to draw")
    with _Picture(path, width=11, height=4.2, panels=2) as picture:
        left, right = picture.axes
        x = range(len(found))
        a = [b.replicas * b.pa * b.m for _, b in found]
        f = [b.replicas * b.pf * b.n for _, b in found]
        left.bar(x, a, color=ROLES["attention"], label="attention")
        left.bar(x, f, bottom=a, color=ROLES["experts"], label="experts")
        for i, (m, n) in enumerate(zip(a, f, strict=True)):
            left.text(i, m / 2, str(m), ha="center", va="center", color="white", fontsize=9)
            left.text(i, m + n / 2, str(n), ha="center", va="center", color="white", fontsize=9)
        left.set(xlabel="sequence length, tokens", ylabel="GPUs")
        left.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
        right.plot(x, [b.tokens_per_second / 1e3 for _, b in found], "o-", color="black")
        for i, (_, b) in enumerate(found):
            right.annotate(
                f"{b.binding} binds",
                (i, b.tokens_per_second / 1e3),
                textcoords="offset points",
                xytext=(0, 8),
                fontsize=8,
                ha="center",
            )
        right.set(xlabel="sequence length, tokens", ylabel="thousand tokens per second", xlim=(-0.5, len(found) - 0.5))
        right.set_ylim(0, 1.2 * max(b.tokens_per_second / 1e3 for _, b in found))
        right.grid(True, alpha=0.25)
        for ax in (left, right):
            ax.set_xticks(list(x), [_tokens(s) for s, _ in found])
        picture.figure.suptitle(title, fontsize=11)


def plot_capacity(c: Capacity, path: str | Path) -> None:
    """Memory of the largest model's ranks, and what the next model needs at least, against what a GPU has."""
    if c.model is None or c.plan is None:
        raise ConfigError(f"no member of the family fits ({c.reason}); there is nothing to draw")
    name = f"{c.model.num_params / 1e9:.1f}B"
    if isinstance(c.plan, Allocation):
        labels = [f"{name}, attention rank", f"{name}, expert rank"]
        rows = [_memory(c.plan.memory_a), _memory(c.plan.memory_f)]
    else:
        costs = c.plan.costs
        labels = [f"{name}, stage {i}" for i in range(costs.pp)]
        rows = [_memory(costs.memory(i)) for i in range(costs.pp)]
    colors = {**MEMORY, "next model, at least": "tab:red"}
    if c.next_bytes is not None:
        labels.append(f"next, {c.next_model.num_params / 1e9:.1f}B")
        rows.append({"next model, at least": c.next_bytes})
    with _Picture(path, width=9, height=1.8 + 0.35 * len(rows)) as picture:
        (ax,) = picture.axes
        _stacked(ax, labels, rows, colors, GIB)
        ax.set(xlabel="GiB per GPU")
        _legend(ax, colors, (k for r in rows for k in r), [_limit(ax, c.hbm_bytes)])
        picture.figure.suptitle(f"largest {c.model.name} that fits; the next is stopped by {c.stopped_by}", fontsize=11)


def plot_simulation(rows: Sequence[Row], path: str | Path, *, title: str = "") -> None:
    """A simulated step of every schedule: what the busiest rank computes, the rest, and the bound that no order beats."""
    from matplotlib.lines import Line2D

    shown = [r for r in rows if r.step is not None and r.exposed is not None and r.bound is not None]
    if not shown:
        raise ConfigError("no schedule could be simulated; there is nothing to draw: " + "; ".join(r.note for r in rows))
    colors = {"computing": "tab:green", "not computing": "lightgray"}
    seconds = max(r.step or 0.0 for r in shown)
    unit, scale = ("s", 1.0) if seconds >= 10 else ("ms", 1e-3)
    parts = [{"computing": r.step * (1 - r.exposed), "not computing": r.step * r.exposed} for r in shown]  # type: ignore[operator]
    with _Picture(path, width=9.5, height=1.8 + 0.45 * len(shown)) as picture:
        (ax,) = picture.axes
        _stacked(ax, [f"{r.scheme}\n{r.layout}" for r in shown], parts, colors, scale)
        for y, r in enumerate(shown):
            bound, step = (r.bound or 0.0) / scale, (r.step or 0.0) / scale
            ax.plot([bound, bound], [y - 0.4, y + 0.4], color="black", lw=1.5)
            ax.text(step, y, f" {shown[0].step / r.step:.2f}x", va="center", fontsize=8)  # type: ignore[operator]
        ax.set(xlabel=f"simulated step, {unit} (speed-up over the first beside it)", xlim=(0, 1.12 * seconds / scale))
        _legend(ax, colors, colors, [Line2D([], [], color="black", label="busiest resource: no order is faster")])
        picture.figure.suptitle(title, fontsize=11)
