"""Exact traffic of a routing agrees with the closed forms under uniform routing, and with hand counts."""

from __future__ import annotations

import random

import pytest

from torchmoe.costs.colocated import Load, flat_exchange, halo_exchange, row_message_bytes, total
from torchmoe.costs.traffic import copies_leaving_node

NODES, LANES, E, K, T = 4, 2, 32, 4, 400


def uniform(limit: int) -> list[list[list[int]]]:
    """T tokens a rank with K distinct experts on ``limit`` uniformly chosen nodes."""
    g = random.Random(limit)
    per_node = E // NODES

    def token() -> list[int]:
        nodes = g.sample(range(NODES), limit)
        return g.sample([n * per_node + i for n in nodes for i in range(per_node)], K)

    return [[token() for _ in range(T)] for _ in range(NODES * LANES)]


def crossing_rows(loads: dict[tuple[int, int], Load]) -> float:
    """Rows of 16 bytes between nodes, per token."""
    between = total(loads, lanes=LANES)
    return (between.num_bytes - 16 * between.messages) / 16 / (T * NODES * LANES)


@pytest.mark.parametrize("limit", [NODES, 2])
def test_rows_between_nodes_are_those_of_the_closed_forms(limit: int) -> None:
    ids = uniform(limit)
    owners = [e // (E // (NODES * LANES)) for e in range(E)]
    got = {
        "flat": crossing_rows(flat_exchange(ids, owners, [16], dedup=False)),
        "rank": crossing_rows(flat_exchange(ids, owners, [16])),
        "node": crossing_rows(halo_exchange(ids, owners, [16], lanes=LANES)),
    }
    for dedup, rows in got.items():
        node_limit = None if limit == NODES else limit
        want = copies_leaving_node(E, K, nodes=NODES, ranks_per_node=LANES, dedup=dedup, node_limit=node_limit)  # type: ignore[arg-type]
        assert rows == pytest.approx(want, rel=0.03), dedup
    assert got["node"] < got["rank"] < got["flat"]


def test_a_routing_counted_by_hand() -> None:
    """2 nodes x 2 lanes, expert e on rank e; rank 0's token goes to ranks 1, 2 and 3, rank 3 has none."""
    ids = [[[1, 2, 3]], [[1, -1, -1]], [[0, 1, 2]], []]
    owners, message = [0, 1, 2, 3], Load(1, row_message_bytes(1, [12]))
    assert message.num_bytes == 32
    assert flat_exchange(ids, owners, [12]) == dict.fromkeys([(0, 1), (0, 2), (0, 3), (2, 0), (2, 1)], message)
    # 0 -> 2 crosses once and is passed on to 3; 2 -> 0 crosses once and is passed on to 1; 0 -> 1 stays in its node
    twice = Load(2, 2 * message.num_bytes)  # 0 -> 1: its own row, and what came from 2
    assert halo_exchange(ids, owners, [12], lanes=2) == {(0, 1): twice, (0, 2): message, (2, 3): message, (2, 0): message}


def test_no_rows_no_message() -> None:
    assert row_message_bytes(0, [64]) == 0
    assert row_message_bytes(3, [8, 4]) == 16 + 32 + 16
