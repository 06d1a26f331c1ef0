"""Timelines as SVG, from events alone: one run, runs laid over each other, or runs below each other on one time axis.

Hue says what is done (blue forward, red backward, yellow weight gradients, green messages), shade says by whom: attention is
dark, experts are light.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise

from torchmoe.errors import ConfigError
from torchmoe.pipeline.action import Action, Op
from torchmoe.pipeline.trace import Event

__all__ = ["compare_svg", "stack_svg", "svg"]

_COLORS = {
    "attention forward": "#2b5c9e",
    "experts forward": "#86b6e6",
    "attention backward": "#b5382a",
    "experts backward": "#f0977f",
    "forward": "#2b5c9e",
    "backward": "#b5382a",
    "weight gradient": "#e8b931",
    "head": "#8e5ea2",
    "wait": "#e4e4e4",
    "send": "#1d7a68",
    "recv": "#7cc9b5",
}
_CLASSES = {name: "c" + str(i) for i, name in enumerate(_COLORS)}
_DARK = ("attention forward", "attention backward", "forward", "backward", "head")
_LEFT, _LANE, _THIN = 110, 18, 4


def svg(
    events: Sequence[Event], *, width: int = 1400, num_units: int | None = None, title: str = "", shown: Iterable[str] = _COLORS
) -> str:
    """A picture of one run: a lane per rank, waits grey, messages as thin bars below.

    Args:
        events: of a simulated or measured run.
        num_units: 2L + 1, if units are attention, experts and head; None for plain stages.
        width: pixels.
        title: first line; the step's time and idle share follow.
        shown: kinds of bars (names of the legend) to draw.
    """
    return _document({title: {_summary(events): events}}, width, num_units, set(shown), len(events) < 10_000)


def compare_svg(runs: Mapping[str, Sequence[Event]], *, width: int = 1400, num_units: int | None = None, title: str = "") -> str:
    """Runs of one layout laid over each other: for every rank one lane per run, e.g. ``{"measured": ..., "simulated": ...}``.

    A simulated run may have one rank per group only; it is drawn beside that rank.
    """
    named = {f"{name}: {_summary(events)}": events for name, events in runs.items()}
    return _document({title: named}, width, num_units, set(_COLORS), True)


def stack_svg(
    runs: Mapping[str, Mapping[str, Sequence[Event]]], *, width: int = 1400, num_units: int | None = None, title: str = ""
) -> str:
    """Different layouts below each other on one time axis, the first rank of every group; computations and weights only.

    Args:
        runs: layout -> name of a run (``measured``) -> events.
        num_units, width, title: as for :func:`svg`.
    """
    sections: dict[str, Mapping[str, Sequence[Event]]] = {}
    for name, of in runs.items():
        first: dict[str, int] = {}
        for e in (e for events in of.values() for e in events):
            first[e.group] = min(e.rank, first.get(e.group, e.rank))
        sections[name] = {
            f"{run}: {_summary(events)}": [e for e in events if e.rank == first[e.group]] for run, events in of.items()
        }
    return _document(sections, width, num_units, set(_COLORS) - {"wait", "send", "recv"}, False, title)


def _document(
    sections: Mapping[str, Mapping[str, Sequence[Event]]],
    width: int,
    num_units: int | None,
    shown: set[str],
    tips: bool,
    title: str = "",
) -> str:
    every = [e for runs in sections.values() for events in runs.values() for e in events]
    if not every:
        raise ConfigError("no events to draw; simulate with record=True, or run with trace=True")
    end = max(e.end for e in every)
    scale = (width - _LEFT - 20) / end if end else 1.0
    draw = _Drawing(scale, num_units, shown, tips)
    if title:
        draw.text(8, 15, "t", title)
        draw.y += 24
    for name, runs in sections.items():
        draw.section(name, runs)
    return draw.finish(width, end)


class _Drawing:
    """Lanes from top to bottom; ``y`` is where the next one begins."""

    def __init__(self, scale: float, num_units: int | None, shown: set[str], tips: bool) -> None:
        self.scale, self.num_units, self.shown, self.tips = scale, num_units, shown, tips
        self.y = 4.0
        self.parts: list[str] = []
        self.used: set[str] = set()
        self.paths: dict[str, list[str]] = {}

    def text(self, x: float, dy: float, cls: str, text: str) -> None:
        self.parts.append(f'<text x="{x:g}" y="{self.y + dy:g}" class="{cls}">{escape(text)}</text>')

    def section(self, name: str, runs: Mapping[str, Sequence[Event]]) -> None:
        """A heading and the lanes of all ranks of one layout; ``runs`` are named by what the heading says of them."""
        self.text(8, 14, "t", name)
        for i, run in enumerate(runs):
            self.text(8 + (16 + 7.5 * len(name) if name else 0) + 260 * i, 14, "s", run)
        self.y += 22
        members: dict[str, list[int]] = {}
        for rank, group in sorted({(e.rank, e.group) for events in runs.values() for e in events}):
            members.setdefault(group, []).append(rank)
        for group, ranks in members.items():
            for i, rank in enumerate(ranks):
                for run, events in runs.items():
                    mine = [e for e in events if e.rank == rank]
                    if mine:
                        self.rank(f"{group}[{i}]" + (f" {run.split(':')[0]}" if len(runs) > 1 else ""), mine)
            self.y += 5
        self.y += 6

    def rank(self, label: str, events: Sequence[Event]) -> None:
        """A rank's lane (two if forward and backward overlap in time), then its messages."""
        apart = _two_at_once(events)
        for stream in ("compute", "backward") if apart else ("",):
            self.text(8, 13, "l", label + (f" {stream}" if apart else ""))
            lane = [e for e in events if e.kind in ("wait", "compute") and stream in ("", e.stream)]
            for e in sorted(lane, key=lambda e: (e.kind != "wait", e.start)):
                self.bar(e, _LANE)
            self.y += _LANE + 1
        for kind in ("send", "recv"):
            bars = [e for e in events if e.kind == kind]
            if bars and kind in self.shown:
                for e in bars:
                    self.bar(e, _THIN)
                self.y += _THIN + 1
        self.y += 3

    def bar(self, e: Event, height: int) -> None:
        name = self.name(e)
        if name not in self.shown:
            return
        self.used.add(name)
        x, w = _LEFT + e.start * self.scale, max((e.end - e.start) * self.scale - 0.4, 0.3)  # a gap between neighbours
        if self.tips:
            tip = f"{e.action} {e.kind} {_time(e.start)} - {_time(e.end)}" + (f", {e.num_bytes} B" if e.num_bytes else "")
            box = f'<rect x="{x:.1f}" y="{self.y:g}" width="{w:.1f}" height="{height}" class="{_CLASSES[name]}"'
            self.parts.append(f"{box}><title>{escape(tip)}</title></rect>")
        else:  # a third of the bytes
            self.paths.setdefault(name, []).append(f"M{x:.1f} {self.y:g}h{w:.1f}v{height}h-{w:.1f}z")
        if e.kind == "compute" and w > 6.2 * len(e.action):
            at = f'x="{x + w / 2:.1f}" y="{self.y + 13:g}"'
            self.parts.append(f'<text {at} class="{"i" if name in _DARK else "j"}">{escape(e.action)}</text>')

    def name(self, e: Event) -> str:
        """The legend's name of an event."""
        if e.kind != "compute":
            return e.kind
        a = Action.parse(e.action).parts[0]
        if a.op is Op.BACKWARD_WEIGHT:
            return "weight gradient"
        way = "forward" if a.op is Op.FORWARD else "backward"
        if self.num_units is None:
            return way
        return "head" if a.stage == self.num_units - 1 else f"{'experts' if a.stage % 2 else 'attention'} {way}"

    def finish(self, width: int, end: float) -> str:
        """The document: time axis at the bottom, legend below it."""
        self.parts[:0] = [f'<path class="{_CLASSES[name]}" d="{"".join(bars)}"/>' for name, bars in self.paths.items()]
        axis = []
        for t in _ticks(end):
            x = _LEFT + t * self.scale
            axis.append(f'<line x1="{x:.1f}" y1="22" x2="{x:.1f}" y2="{self.y:g}" class="g"/>')
            axis.append(f'<text x="{x:.1f}" y="{self.y + 12:g}" class="a">{_time(t)}</text>')
        x, y = float(_LEFT), self.y + 24
        for name in (n for n in _COLORS if n in self.used):
            self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="14" height="10" class="{_CLASSES[name]}"/>')
            self.parts.append(f'<text x="{x + 18:g}" y="{y + 9:g}" class="l">{name}</text>')
            x += 36 + 7 * len(name)
        style = (
            "text{font:11px sans-serif}.t{font-size:13px;font-weight:bold}.s{font-size:12px;fill:#444}"
            ".a{text-anchor:middle;fill:#444}.i,.j{text-anchor:middle;font-size:10px}.i{fill:#fff}.g{stroke:#ccc}"
            + "".join(f".{_CLASSES[n]}{{fill:{_COLORS[n]}}}" for n in _COLORS if n in self.used)
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 18:.0f}"><style>{style}</style>'
        return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *axis, *self.parts, "</svg>\n"])


def _summary(events: Sequence[Event]) -> str:
    """Step time, and the share of it in which the busiest rank does not compute."""
    busy: dict[int, float] = {}
    for e in events:
        if e.kind == "compute":
            busy[e.rank] = busy.get(e.rank, 0.0) + e.end - e.start
    end = max((e.end for e in events if e.kind == "compute"), default=0.0)
    return f"step {_time(end)}, bubble {1 - max(busy.values()) / end:.0%}" if end else "no computation"


def _two_at_once(events: Sequence[Event]) -> bool:
    """Whether computations overlap in time: then forward and backward need a lane each."""
    spans = sorted((e.start, e.end) for e in events if e.kind == "compute")
    return any(b[0] < a[1] - 1e-9 * max(1.0, a[1]) for a, b in pairwise(spans))


def _ticks(end: float) -> list[float]:
    """Five to twelve round times from 0 to the end."""
    step = 10.0 ** len(str(int(end))) if end >= 1 else 1.0
    while end and end / step < 5:
        for divisor in (2, 2.5, 2):
            step /= divisor
            if end / step >= 5:
                break
    return [i * step for i in range(int(end / step) + 1)]


def _time(t: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if t == 0 or t * factor >= 1:
            return f"{t * factor:.4g} {unit}"
    return f"{t * 1e9:.3g} ns"
