"""Nodes, lanes and distances: who is where, and the order in which a node talks to the others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchmoe.errors import ConfigError

__all__ = ["Topology", "Wave"]


class Wave(NamedTuple):
    """One step between nodes: the nodes this one sends to and the nodes it receives from."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """W = nodes * lanes ranks; rank i is lane ``i % lanes`` of node ``i // lanes``.

    Args:
        nodes, lanes: how many.
        domains: per node, the domains it lies in from the outermost to the innermost, e.g. (rack, switch). Two nodes are nearer
            the more of them they share. Default: all nodes are equally near.

    Raises:
        ConfigError: no nodes, no lanes, or domains that do not fit the nodes.
    """

    nodes: int
    lanes: int
    domains: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.lanes < 1:
            raise ConfigError(f"nodes={self.nodes} and lanes={self.lanes} must be at least 1")
        if self.domains and (len(self.domains) != self.nodes or len({len(d) for d in self.domains}) > 1):
            raise ConfigError(
                f"domains={self.domains} must give each of {self.nodes} nodes a tuple of one length, e.g. (rack, switch)"
            )

    @classmethod
    def of(cls, num_ranks: int, lanes: int, domains: Sequence[Sequence[int]] = ()) -> Topology:
        """The topology of ``num_ranks`` ranks with so many a node."""
        if lanes < 1 or num_ranks % lanes:
            raise ConfigError(f"{num_ranks} ranks cannot be split into nodes of lanes={lanes}; lanes must divide the ranks")
        return cls(num_ranks // lanes, lanes, tuple(tuple(d) for d in domains))

    def distance(self, a: int, b: int) -> int:
        """0 for one node; 1 where all domains are shared; one more for every domain, from the innermost, that is not."""
        if a == b:
            return 0
        if not self.domains:
            return 1
        shared = 0
        while shared < len(self.domains[a]) and self.domains[a][shared] == self.domains[b][shared]:
            shared += 1
        return 1 + len(self.domains[a]) - shared

    def waves(self, node: int, *, split: bool) -> tuple[Wave, ...]:
        """The waves of ``node``, nearest first: one per distance, or with ``split`` one per distance and shift.

        Every node has the same number of waves and a message is in the same wave at both of its ends, so waves are in one
        order everywhere and cannot block each other. A wave may be empty on some nodes.
        """

        def key(a: int, b: int) -> tuple[int, int]:
            return self.distance(a, b), (b - a) % self.nodes if split else 0

        others = [m for m in range(self.nodes) if m != node]
        keys = sorted({key(a, b) for a in range(self.nodes) for b in range(self.nodes) if a != b})
        return tuple(
            Wave(tuple(m for m in others if key(node, m) == k), tuple(m for m in others if key(m, node) == k)) for k in keys
        )
