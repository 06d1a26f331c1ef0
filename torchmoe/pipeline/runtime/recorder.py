"""Measured events of one rank: what ran when, and how long every message was on its way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torchmoe.comm.m2n import Pending
from torchmoe.pipeline.action import BACKWARD, Action
from torchmoe.pipeline.trace import Event

__all__ = ["Recorder"]


class Recorder:
    """Collects :class:`Event` with times of this host's monotonic clock, which all processes of a host share.

    A send's end is the moment its completion was noticed, at the latest after the next action.
    """

    def __init__(self, rank: int, group: str) -> None:
        self.rank, self.group = rank, group
        self.events: list[Event] = []
        self._posted: dict[int, float] = {}

    def clear(self) -> None:
        self.events = []
        self._posted.clear()

    @contextmanager
    def span(self, action: Action, kind: Literal["compute", "wait"]) -> Iterator[None]:
        start = time.monotonic()
        yield
        stream = "backward" if action.op in BACKWARD else "compute"
        self.events.append(Event(self.rank, self.group, stream, str(action), kind, start, time.monotonic()))

    def posted(self, pending: Pending[Any]) -> None:
        self._posted[id(pending)] = time.monotonic()

    def message(self, action: Action, pending: Pending[Any], kind: Literal["send", "recv"]) -> None:
        start = self._posted.pop(id(pending))
        event = Event(self.rank, self.group, kind, str(action), kind, start, time.monotonic(), num_bytes=pending.num_bytes)
        self.events.append(event)
