"""Timelines as pictures, from events alone: Perfetto JSON, SVG, a strip of text. Simulated and measured runs look alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

from torchmoe.errors import ConfigError, ScheduleError
from torchmoe.pipeline.action import Action, Op
from torchmoe.pipeline.lower import KINDS, message_layer
from torchmoe.pipeline.trace import Event

__all__ = ["compare_svg", "perfetto", "strip", "svg"]

_LANES = ("compute", "backward", "send", "recv")
_COLORS = {
    "attention forward": "#4c78a8",
    "attention backward": "#9ecae9",
    "experts forward": "#54a24b",
    "experts backward": "#b5d9a3",
    "weight gradient": "#f2cf5b",
    "head": "#b279a2",
    "stage forward": "#4c78a8",
    "stage backward": "#9ecae9",
    "wait": "#eeeeee",
    "send": "#e45756",
    "recv": "#ff9da6",
}


class _Look(NamedTuple):
    label: str
    color: str


def _look(e: Event, num_units: int | None) -> _Look:
    """Text and colour of an event. With ``num_units`` (2L + 1) units are attention, experts and head; else plain stages."""
    if e.kind != "compute":
        return _Look(e.action, _COLORS[e.kind])
    a = Action.parse(e.action).parts[0]
    if a.op is Op.BACKWARD_WEIGHT:
        return _Look(e.action, _COLORS["weight gradient"])
    way = "forward" if a.op is Op.FORWARD else "backward"
    if num_units is None:
        return _Look(e.action, _COLORS[f"stage {way}"])
    if a.stage == num_units - 1:
        return _Look(e.action, _COLORS["head"])
    return _Look(e.action, _COLORS[f"{'experts' if a.stage % 2 else 'attention'} {way}"])


# ---- Perfetto
def perfetto(events: Sequence[Event], *, node: Callable[[int], int] | None = None) -> str:
    """Chrome/Perfetto trace: open it at ui.perfetto.dev. Processes are nodes, threads are ranks and streams, arrows messages.

    Args:
        events: of a simulated or a measured run.
        node: node of a rank; default: every group is a node.
    """
    groups = {e.group: i for i, e in enumerate({e.group: e for e in events}.values())}
    out: list[dict[str, Any]] = []
    named: set[tuple[int, int]] = set()
    for e in events:
        pid = groups[e.group] if node is None else node(e.rank)
        tid = len(_LANES) * e.rank + _LANES.index(e.stream)
        if (pid, tid) not in named:
            named.add((pid, tid))
            out.append(_meta("process_name", pid, tid, e.group if node is None else f"node {pid}"))
            out.append(_meta("thread_name", pid, tid, f"rank {e.rank} {e.stream}"))
        args = {"bytes": e.num_bytes} if e.num_bytes else {}
        if e.peer is not None:
            args["peer"] = e.peer
        out.append(
            {
                "name": e.action,
                "cat": e.kind,
                "ph": "X",
                "ts": 1e6 * e.start,
                "dur": 1e6 * (e.end - e.start),
                "pid": pid,
                "tid": tid,
            }
            | ({"args": args} if args else {})
        )
    for i, (s, r) in enumerate(_arrows(events)):
        for ph, e, at in (("s", s, s.start), ("f", r, r.end)):
            pid = groups[e.group] if node is None else node(e.rank)
            tid = len(_LANES) * e.rank + _LANES.index(e.stream)
            arrow = {"name": "message", "cat": "message", "id": i, "ph": ph, "ts": 1e6 * at, "pid": pid, "tid": tid}
            out.append(arrow | ({"bp": "e"} if ph == "f" else {}))
    return json.dumps({"traceEvents": out, "displayTimeUnit": "ms"})


def _meta(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _message_key(e: Event) -> tuple[object, ...]:
    """What both ends of a message have in common; a measured receive is named by its wait."""
    a = Action.parse(e.action)
    if a.edge in KINDS:
        try:
            return a.edge, message_layer(a), a.microbatch
        except ScheduleError:  # colocated schedules name other units
            pass
    forward = a.op in (Op.SEND_F, Op.RECV_F, Op.WAIT_F)
    if a.edge is not None and a.edge.split(".")[0] in KINDS:
        return a.edge, a.stage // 2, a.microbatch
    boundary = a.stage if (a.op in (Op.SEND_F, Op.SEND_B)) == forward else a.stage - 1
    return ("act" if forward else "grad"), boundary, a.microbatch


def _arrows(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    sends: dict[tuple[object, ...], list[Event]] = {}
    for e in events:
        if e.kind == "send":
            sends.setdefault(_message_key(e), []).append(e)
    out = []
    for r in events:
        if r.kind == "recv":
            for s in sends.get(_message_key(r), ()):
                known = s.peer is not None and r.peer is not None
                if s.rank != r.rank and (not known or (s.peer == r.rank and r.peer == s.rank)):
                    out.append((s, r))
    return out


# ---- text
def strip(events: Sequence[Event], *, width: int = 100) -> str:
    """One line per rank for the terminal: F, B, I, W while computing (the longest thing in a cell), ``.`` while not."""
    if width < 1:
        raise ConfigError(f"width={width} must be at least one character")
    busy = [e for e in events if e.kind == "compute"]
    if not busy:
        return ""
    end = max(e.end for e in busy)
    ranks = {e.rank: e.group for e in sorted(busy)}
    pad = max(len(f"{g} {r}") for r, g in ranks.items())
    lines = []
    for rank, group in ranks.items():
        share: list[dict[str, float]] = [{} for _ in range(width)]
        for e in (e for e in busy if e.rank == rank):
            letter = Action.parse(e.action).parts[0].op.value if "OVERLAP" not in e.action else "X"
            for i in range(int(e.start / end * width), min(width, int(e.end / end * width) + 1)):
                part = min(e.end, (i + 1) * end / width) - max(e.start, i * end / width)
                if part > 0:
                    share[i][letter] = share[i].get(letter, 0.0) + part
        cells = ("." if sum(s.values()) < end / width / 2 else max(s, key=s.__getitem__) for s in share)
        lines.append(f"{group + ' ' + str(rank):>{pad}} |{''.join(cells)}|")
    return "\n".join(lines)


# ---- SVG
def svg(events: Sequence[Event], *, width: int = 1400, num_units: int | None = None, title: str = "") -> str:
    """A picture of one run: a lane per rank and stream, waits grey, messages as thin bars below their rank."""
    return _picture({"": events}, width, num_units, title)


def compare_svg(runs: Mapping[str, Sequence[Event]], *, width: int = 1400, num_units: int | None = None, title: str = "") -> str:
    """Runs laid over each other: for every rank one lane per run, e.g. ``{"measured": ..., "simulated": ...}``.

    A simulated run may have one rank per group only; it is drawn beside that rank.
    """
    return _picture(runs, width, num_units, title)


def _picture(runs: Mapping[str, Sequence[Event]], width: int, num_units: int | None, title: str) -> str:
    every = [e for events in runs.values() for e in events]
    if not every:
        raise ConfigError("no events to draw; simulate with record=True, or run with trace=True")
    end = max(e.end for e in every)
    ranks = {e.rank: e.group for e in sorted(every)}
    left, top, lane, gap = 130, 46, 18, 8
    scale = (width - left - 10) / end if end else 1.0
    parts: list[str] = []
    y = float(top)
    for rank, group in ranks.items():
        for name, events in runs.items():
            mine = [e for e in events if e.rank == rank]
            if not mine:
                continue
            streams = [s for s in ("compute", "backward") if any(e.stream == s and e.kind in ("compute", "wait") for e in mine)]
            overlap = len(streams) > 1 and _two_at_once(mine)
            for stream in streams if overlap else ["compute"]:
                label = f"{group} rank {rank}" + (f" {name}" if name else "") + (f" ({stream})" if overlap else "")
                parts.append(f'<text x="4" y="{y + 13:.1f}">{escape(label)}</text>')
                shown = [e for e in mine if e.kind in ("compute", "wait") and (not overlap or e.stream == stream)]
                parts += [_bar(e, y, lane, left, scale, num_units) for e in sorted(shown, key=lambda e: e.kind != "wait")]
                y += lane + 1
            for kind in ("send", "recv"):
                bars = [e for e in mine if e.kind == kind]
                if bars:
                    parts += [_bar(e, y, 3, left, scale, num_units) for e in bars]
                    y += 4
            y += 3
        y += gap
    ticks = _ticks(end)
    grid = [
        f'<line x1="{left + t * scale:.1f}" y1="{top - 6}" x2="{left + t * scale:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        f'<text x="{left + t * scale:.1f}" y="{top - 9}" text-anchor="middle">{_time(t)}</text>'
        for t in ticks
    ]
    always = ("weight gradient", "wait", "send", "recv")
    names = [k for k in _COLORS if (num_units is None) == k.startswith("stage") or k in always]
    x = left
    legend = []
    for k in names:
        legend.append(f'<rect x="{x}" y="{y:.1f}" width="12" height="10" fill="{_COLORS[k]}" stroke="#888" stroke-width=".3"/>')
        legend.append(f'<text x="{x + 16}" y="{y + 9:.1f}">{k}</text>')
        x += 30 + 7 * len(k)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 20:.0f}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/><text x="4" y="16" font-size="14">{escape(title)}</text>'
    )
    return "\n".join([head, *grid, *parts, *legend, "</svg>\n"])


def _two_at_once(events: Sequence[Event]) -> bool:
    """Whether forward and backward computations overlap in time: then they need a lane each."""
    spans = sorted((e.start, e.end) for e in events if e.kind == "compute")
    return any(b[0] < a[1] - 1e-9 * max(1.0, a[1]) for a, b in pairwise(spans))


def _bar(e: Event, y: float, height: int, left: int, scale: float, num_units: int | None) -> str:
    look = _look(e, num_units)
    x, w = left + e.start * scale, max((e.end - e.start) * scale, 0.3)
    tip = f"{e.action} {e.kind} {_time(e.start)} - {_time(e.end)}" + (f", {e.num_bytes} B" if e.num_bytes else "")
    rect = (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{w:.2f}" height="{height}" fill="{look.color}" stroke="#666" stroke-width=".25">'
        f"<title>{escape(tip)}</title></rect>"
    )
    if e.kind == "compute" and w > 6.5 * len(look.label) and height > 10:
        at = f'x="{x + w / 2:.1f}" y="{y + height - 5:.1f}" text-anchor="middle" font-size="10"'
        rect += f"<text {at}>{escape(look.label)}</text>"
    return rect


def _ticks(end: float) -> list[float]:
    """About ten round times from 0 to the end."""
    step = 10.0 ** len(str(int(end))) if end >= 1 else 1.0
    while end / step < 5:
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
