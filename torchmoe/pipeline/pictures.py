"""Timelines for other tools, from events alone: Perfetto JSON, and a strip of text. :mod:`.svg` draws them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from torchmoe.errors import ConfigError, ScheduleError
from torchmoe.pipeline.action import Action, Op
from torchmoe.pipeline.lower import KINDS, message_layer
from torchmoe.pipeline.trace import Event

__all__ = ["perfetto", "strip"]

_LANES = ("compute", "backward", "wait", "send", "recv")


# ---- Perfetto
def perfetto(events: Sequence[Event], *, node: Callable[[int], int] | None = None) -> str:
    """Chrome/Perfetto trace: open it at ui.perfetto.dev. Processes are nodes, threads are ranks and streams, arrows messages.

    Slices of one thread must not overlap, so what does (messages, waits beside a device's work) gets further threads.

    Args:
        events: of a simulated or a measured run.
        node: node of a rank; default: every group is a node.
    """
    groups = {g: i for i, g in enumerate(dict.fromkeys(e.group for e in events))}
    threads = _threads(events)
    out: list[dict[str, Any]] = []
    named: set[int] = set()
    for tid, (e, name) in enumerate({t: (e, n) for e, (t, n) in zip(events, threads, strict=True)}.values()):
        pid = groups[e.group] if node is None else node(e.rank)
        if pid not in named:
            named.add(pid)
            out.append(_meta("process_name", pid, tid, e.group if node is None else f"node {pid}"))
        out.append(_meta("thread_name", pid, tid, name))
    numbers = {t: i for i, t in enumerate(dict.fromkeys(t for t, _ in threads))}
    places = []
    for e, (thread, _) in zip(events, threads, strict=True):
        pid = groups[e.group] if node is None else node(e.rank)
        places.append({"pid": pid, "tid": numbers[thread]})
        args = {"bytes": e.num_bytes} if e.num_bytes else {}
        if e.peer is not None:
            args["peer"] = e.peer
        times = {"ts": 1e6 * e.start, "dur": 1e6 * (e.end - e.start)}
        out.append({"name": e.action, "cat": e.kind, "ph": "X", **times, **places[-1]} | ({"args": args} if args else {}))
    for i, (s, r) in enumerate(_arrows(events)):
        arrow = {"name": "message", "cat": "message", "id": i}
        # an arrow binds to the slice that it lies in, so its end is a little before that of the receive
        start, end = events[s].start, max(events[s].start, events[r].start, events[r].end - 1e-7)
        out.append({**arrow, "ph": "s", "ts": 1e6 * start, **places[s]})
        out.append({**arrow, "ph": "f", "bp": "e", "ts": 1e6 * end, **places[r]})
    return json.dumps({"traceEvents": out, "displayTimeUnit": "ms"})


def _threads(events: Sequence[Event]) -> list[tuple[tuple[int, int, int], str]]:
    """Per event its thread (rank, lane, number) and the thread's name: the first thread of its lane that is free."""
    until: dict[tuple[int, int], list[float]] = {}
    out: dict[int, tuple[tuple[int, int, int], str]] = {}
    for i in sorted(range(len(events)), key=lambda i: (events[i].start, events[i].end)):
        e = events[i]
        lane = _LANES.index("wait" if e.kind == "wait" else e.stream)
        ends = until.setdefault((e.rank, lane), [])
        number = next((n for n, end in enumerate(ends) if end <= e.start), len(ends))
        ends[number : number + 1] = [e.end]
        name = f"rank {e.rank} {_LANES[lane]}" + (f" {number + 1}" if number else "")
        out[i] = (e.rank, lane, number), name
    return [out[i] for i in range(len(events))]


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


def _arrows(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Positions of every send and its receive."""
    sends: dict[tuple[object, ...], list[int]] = {}
    for i, e in enumerate(events):
        if e.kind == "send":
            sends.setdefault(_message_key(e), []).append(i)
    out = []
    for i, r in enumerate(events):
        if r.kind == "recv":
            for j in sends.get(_message_key(r), ()):
                s = events[j]
                known = s.peer is not None and r.peer is not None
                if s.rank != r.rank and (not known or (s.peer == r.rank and r.peer == s.rank)):
                    out.append((j, i))
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
