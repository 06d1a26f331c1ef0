"""One event record for simulated and measured runs; pictures are made from it and from nothing else."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Event"]


class Event(NamedTuple):
    """What one rank did, or waited for, between two times.

    Args:
        rank: global rank.
        group: the rank's group, e.g. ``A0``.
        stream: lane of the picture: ``compute``, ``backward``, ``send`` or ``recv``.
        action: the action's text, e.g. ``3F0`` or ``2SEND_F0:dispatch``.
        kind: ``compute``, ``send``, ``recv`` or ``wait`` (blocked).
        start, end: seconds since the step began, on one clock for all ranks.
        peer: the other rank of a message.
        num_bytes: payload and header of a message.
    """

    rank: int
    group: str
    stream: str
    action: str
    kind: Literal["compute", "send", "recv", "wait"]
    start: float
    end: float
    peer: int | None = None
    num_bytes: int = 0
