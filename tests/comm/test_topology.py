"""Waves: every pair of nodes meets once, in the same wave at both ends, near before far."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmoe.comm.topology import Topology
from torchmoe.errors import ConfigError


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    nodes, levels = draw(st.integers(1, 7)), draw(st.integers(0, 2))
    domains = tuple(tuple(draw(st.integers(0, 2)) for _ in range(levels)) for _ in range(nodes)) if levels else ()
    return Topology(nodes, draw(st.integers(1, 3)), domains)


@given(topologies(), st.booleans())
def test_every_pair_meets_once_in_the_same_wave_at_both_ends(topology: Topology, split: bool) -> None:
    nodes = range(topology.nodes)
    waves = [topology.waves(n, split=split) for n in nodes]
    assert len({len(w) for w in waves}) == 1
    for a in nodes:
        for b in nodes:
            sent = [i for i, w in enumerate(waves[a]) if b in w.sends]
            come = [i for i, w in enumerate(waves[b]) if a in w.receives]
            assert sent == come and len(sent) == (a != b)
    for n in nodes:
        order = [topology.distance(n, m) for w in waves[n] for m in w.sends]
        assert order == sorted(order)
        if split:
            assert all(len(w.sends) <= 1 and len(w.receives) <= 1 for w in waves[n])


def test_distance_counts_the_domains_that_are_not_shared() -> None:
    t = Topology(4, 2, ((0, 0), (0, 0), (0, 1), (1, 0)))
    assert [t.distance(0, m) for m in range(4)] == [0, 1, 2, 3]
    assert Topology(3, 1).distance(0, 2) == 1


def test_what_cannot_be_a_topology_is_refused() -> None:
    with pytest.raises(ConfigError, match="lanes must divide"):
        Topology.of(5, 2)
    with pytest.raises(ConfigError, match="at least 1"):
        Topology(0, 1)
    with pytest.raises(ConfigError, match="each of 2 nodes"):
        Topology(2, 1, ((0,), (1, 2)))
