"""Links of the simulator: full-duplex NICs that share their rate max-min fairly among the messages under way."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torchmoe.errors import ConfigError

__all__ = ["Host", "Links", "Network", "fair_rates"]

_DONE = 1e-12  # relative rest of a message that counts as nothing


@dataclass(frozen=True, kw_only=True)
class Links:
    """What carries the messages.

    Args:
        bandwidth: payload bytes per second and direction of one rank's NIC; inf for free transfers.
        latency: seconds from the last byte sent to the receiver's knowing it.
        latencies: of the groups whose NICs are of another kind; a message takes the mean of its two ends'.
        host_latency: the same for counts and ids, default ``latency``.
        handshake: seconds from posting a receive to the sender's knowing it; nothing travels before.
        send_overhead: seconds of the issuing rank per message to one peer.
        burst: bytes that pass a NIC's direction at once after a pause: the bucket of a shaped link, refilled at ``bandwidth``.
        nics: NICs per group where it is not one per rank, e.g. ``{"A0": 8}``; the group's ranks share them.

    Raises:
        ConfigError: a negative, zero (bandwidth, NICs) or NaN value.
    """

    bandwidth: float = math.inf
    latency: float = 0.0
    host_latency: float | None = None
    handshake: float = 0.0
    send_overhead: float = 0.0
    burst: float = 0.0
    nics: Mapping[str, float] = field(default_factory=dict)
    latencies: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ConfigError(f"bandwidth={self.bandwidth} must be positive bytes per second; use inf for free transfers")
        for name in ("latency", "host_latency", "handshake", "send_overhead", "burst"):
            value = getattr(self, name)
            if value is not None and not (0 <= value < math.inf):
                raise ConfigError(f"{name}={value} must be 0 or more, and finite")
        for group, value in self.latencies.items():
            if not (0 <= value < math.inf):
                raise ConfigError(f"latencies[{group!r}]={value} must be 0 or more seconds, and finite")
        for group, n in self.nics.items():
            if not (0 < n < math.inf):
                raise ConfigError(f"nics[{group!r}]={n} must be positive; every group needs a link")

    def between(self, source: str, target: str) -> float:
        """Latency of a message from one group to another, seconds."""
        return (self.latencies.get(source, self.latency) + self.latencies.get(target, self.latency)) / 2


@dataclass(frozen=True, kw_only=True)
class Host:
    """The machine that issues units and messages, where all ranks share its cores (an emulated cluster).

    Copying bytes is left out: it goes on beside the transfer.

    Args:
        message: CPU seconds of one end of a message between two ranks.
        unit: CPU seconds of one rank to issue a forward or a gradient with everything around it but its messages.
        cores: cores that serve all ranks, first come first served.

    Raises:
        ConfigError: a negative or NaN cost, no core.
    """

    message: float
    cores: int
    unit: float = 0.0

    def __post_init__(self) -> None:
        for name in ("message", "unit"):
            if not (0 <= getattr(self, name) < math.inf):
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more CPU seconds, and finite")
        if self.cores < 1:
            raise ConfigError(f"cores={self.cores} must be at least 1")


def fair_rates(flows: Mapping[tuple[int, int], int], egress: list[float], ingress: list[float]) -> dict[tuple[int, int], float]:
    """Max-min fair rate of ONE flow of each (source, destination) pair, by progressive filling.

    Args:
        flows: number of flows of each pair.
        egress: bytes per second that each source can send.
        ingress: bytes per second that each destination can receive.
    """
    left = {("out", s): egress[s] for s, _ in flows} | {("in", d): ingress[d] for _, d in flows}
    users: dict[tuple[str, int], dict[tuple[int, int], int]] = {k: {} for k in left}
    count = dict.fromkeys(left, 0)
    for pair, n in flows.items():
        for side in (("out", pair[0]), ("in", pair[1])):
            users[side][pair] = n
            count[side] += n
    rates: dict[tuple[int, int], float] = {}
    while users:
        tight = min(users, key=lambda k: left[k] / count[k])
        rate = left[tight] / count[tight]
        for pair, n in list(users[tight].items()):
            rates[pair] = rate
            for side in (("out", pair[0]), ("in", pair[1])):
                left[side] = max(0.0, left[side] - rate * n)
                count[side] -= n
                del users[side][pair]
                if not users[side]:
                    del users[side]
    return rates


M = TypeVar("M")


class _Channel(Generic[M]):
    """Messages between two ends on one communicator: first in, first out, one under way at a time."""

    __slots__ = ("pair", "queue", "rest")

    def __init__(self, pair: tuple[int, int]) -> None:
        self.pair = pair
        self.queue: deque[tuple[M, float]] = deque()
        self.rest = 0.0


class Network(Generic[M]):
    """The transfers of a simulation. :meth:`next_end` says when the next one ends, :meth:`finish` takes those that end then."""

    def __init__(self, egress: list[float], ingress: list[float], burst: Sequence[float] | None = None) -> None:
        self.egress, self.ingress = egress, ingress
        self._burst = tuple(burst or [0.0] * len(egress))
        self._credit = (list(self._burst), list(self._burst))  # bytes in the buckets of the two directions
        self._now = 0.0
        self._next: float | None = math.inf
        self._channels: dict[Hashable, _Channel[M]] = {}
        self._active: dict[_Channel[M], None] = {}
        self._stale = False  # the set of transfers changed since the rates were shared out
        self._rates: dict[tuple[int, int], float] = {}
        self._known: dict[frozenset[tuple[tuple[int, int], int]], dict[tuple[int, int], float]] = {}

    def start(self, now: float, channel: Hashable, pair: tuple[int, int], message: M, num_bytes: float) -> bool:
        """Put a message on its channel. False: it is through already (nothing to carry, or a free link)."""
        c = self._channels.get(channel)
        if c is None:
            c = self._channels[channel] = _Channel(pair)
        if not c.queue and (num_bytes == 0 or min(self.egress[pair[0]], self.ingress[pair[1]]) == math.inf):
            return False
        c.queue.append((message, num_bytes))
        if len(c.queue) == 1:
            self._sync(now)
            self._begin(c)
            self._active[c] = None
            self._stale, self._next = True, None
        return True

    def next_end(self) -> float:
        """When the next transfer ends; inf without any."""
        if self._next is None:
            if self._stale:
                self._share()
            self._next = min((self._now + c.rest / self._rates[c.pair] for c in self._active), default=math.inf)
        return self._next

    def finish(self, now: float) -> list[M]:
        """The messages whose last byte has left by ``now``, which is not past :meth:`next_end`."""
        if self._stale:
            self._share()
        self._sync(now)
        ended: list[M] = []
        for c in list(self._active):
            if c.rest <= max(_DONE * c.queue[0][1], self._rates[c.pair] * 1e-15 * now):
                ended.append(c.queue.popleft()[0])
                if c.queue:
                    self._begin(c)
                else:
                    del self._active[c]
        self._stale, self._next = True, None
        return ended

    def _begin(self, c: _Channel[M]) -> None:
        """The channel's first message sets off; what both buckets hold passes at once."""
        sides = [(self._credit[0], c.pair[0]), (self._credit[1], c.pair[1])]
        free = min(c.queue[0][1], *(credit[i] for credit, i in sides))
        c.rest = c.queue[0][1] - free
        for credit, i in sides:
            credit[i] -= free

    def _sync(self, now: float) -> None:
        dt = now - self._now
        self._now = now
        if dt > 0:  # time only moves after next_end(), so the rates are those of this interval
            for c in self._active:
                c.rest -= self._rates[c.pair] * dt
            if any(self._burst):
                self._refill(dt)

    def _refill(self, dt: float) -> None:
        for side, (credit, capacity) in enumerate(zip(self._credit, (self.egress, self.ingress), strict=True)):
            unused = list(capacity)
            for c in self._active:
                unused[c.pair[side]] -= self._rates[c.pair]
            for i, rate in enumerate(unused):
                credit[i] = min(self._burst[i], credit[i] + max(0.0, rate) * dt)

    def _share(self) -> None:
        flows = Counter(c.pair for c in self._active)
        key = frozenset(flows.items())
        rates = self._known.get(key)
        if rates is None:  # the same sets of transfers come again and again
            rates = self._known[key] = fair_rates(flows, self.egress, self.ingress)
        self._rates, self._stale, self._next = rates, False, None
