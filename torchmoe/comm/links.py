"""What messages cost between and inside nodes, and what the flat and the hierarchical exchange cost by that. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from torchmoe.comm.topology import Topology
from torchmoe.errors import ConfigError

__all__ = ["Hop", "LinkModel", "Sizes", "fit_hop"]


@dataclass(frozen=True)
class Hop:
    """seconds = latency + messages * per_message + bytes / bandwidth, of all that one rank sends at once while all ranks send.

    Args:
        latency: seconds, once.
        bandwidth: bytes per second of one rank, with its node's other ranks busy, too.
        per_message: seconds that every further message costs.
    """

    latency: float
    bandwidth: float
    per_message: float = 0.0

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.per_message >= 0 and self.bandwidth > 0):
            raise ConfigError(
                f"latency={self.latency} and per_message={self.per_message} (seconds) must not be negative and "
                f"bandwidth={self.bandwidth} (bytes/s) must be positive"
            )

    def seconds(self, messages: int, num_bytes: float) -> float:
        return self.latency + messages * self.per_message + num_bytes / self.bandwidth if messages else 0.0


class Sizes(NamedTuple):
    """Rows of the rank that sends most: over the links between nodes, and to other lanes of a node, per form."""

    flat_between: int
    flat_inside: int
    halo_between: int
    halo_inside: int

    @classmethod
    def of(cls, rows: Sequence[int], out: Sequence[int], node: int, lane: int, lanes: int) -> Sizes:
        """Of one rank: ``rows`` to every rank, ``out`` to every node."""
        here = range(node * lanes, (node + 1) * lanes)
        inside = sum(rows[r] for r in here if r % lanes != lane)
        return cls(
            sum(rows) - sum(rows[r] for r in here),
            inside,
            sum(out) - out[node],
            sum(n for r, n in enumerate(rows) if r % lanes != lane),
        )


@dataclass(frozen=True)
class LinkModel:
    """A message's price between nodes and inside one. Ranks must decide alike, so all of them need the same model.

    Args:
        between, inside: see :class:`Hop`. From a platform profile: ``Hop(curve.latency, curve.bandwidth)`` of
            ``Profile.links["p2p"]``, for the links that were measured.
    """

    between: Hop
    inside: Hop

    def flat(self, t: Topology, sizes: Sizes, row_bytes: float) -> float:
        """Seconds of the flat exchange: everything at once, to (nodes - 1) * lanes ranks of other nodes and lanes - 1 here."""
        return max(
            self.between.seconds((t.nodes - 1) * t.lanes, sizes.flat_between * row_bytes),
            self.inside.seconds(t.lanes - 1, sizes.flat_inside * row_bytes),
        )

    def halo(self, t: Topology, sizes: Sizes, row_bytes: float) -> float:
        """Seconds of two hops, one after the other: nodes - 1 messages between nodes, then lanes - 1 inside."""
        return self.between.seconds(t.nodes - 1, sizes.halo_between * row_bytes) + self.inside.seconds(
            t.lanes - 1, sizes.halo_inside * row_bytes
        )


def fit_hop(points: Sequence[tuple[int, int, float]]) -> Hop:
    """Least squares of relative errors over (messages, bytes, seconds); prices that come out negative are left out.

    A price per message needs points with different numbers of messages. Computed in rationals, because every rank must get the
    same bits: LAPACK's depend on how its operands lie in memory.
    """
    rows = [[Fraction(x) / Fraction(seconds) for x in (1, num_bytes, messages)] for messages, num_bytes, seconds in points]
    use = [0, 1, 2] if len({messages for messages, _, _ in points}) > 1 else [0, 1]
    while True:  # at most three unknowns
        price = _solve([[row[i] for i in use] for row in rows])
        if len(use) == 1 or min(price) >= 0:
            break
        del use[price.index(min(price))]
    latency, slope, per_message = (float(dict(zip(use, price, strict=True)).get(i, 0)) for i in range(3))
    return Hop(latency, 1.0 / slope if slope > 0 else float("inf"), per_message)


def _solve(rows: list[list[Fraction]]) -> list[Fraction]:
    """x that minimises the sum of (row . x - 1)^2: the normal equations, by elimination; 0 for an unknown that has no say."""
    n = len(rows[0])
    wide = [[*r, Fraction(1)] for r in rows]
    m = [[sum((r[i] * r[j] for r in wide), Fraction(0)) for j in range(n + 1)] for i in range(n)]
    for i in range(n):
        if m[i][i]:
            m[i] = [v / m[i][i] for v in m[i]]
            for j in range(n):
                if j != i:
                    m[j] = [v - m[j][i] * w for v, w in zip(m[j], m[i], strict=True)]
    return [m[i][n] if m[i][i] else Fraction(0) for i in range(n)]
