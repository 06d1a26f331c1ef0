"""Messages and bytes of expert parallelism on one pool of ranks, exactly, from the rows or the routing. Pure Python.

W ranks are nodes times lanes; rank i is on node i // lanes. The expected copies under uniform routing are
:func:`torchmoe.costs.traffic.copies_leaving_node`; what an exchange sends equals what these functions say, message by message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = [
    "COUNT_BYTES",
    "TRAILER_BYTES",
    "Load",
    "flat_all_to_all",
    "flat_exchange",
    "halo_all_to_all",
    "halo_exchange",
    "row_message_bytes",
    "total",
]

TRAILER_BYTES = 16  # sequence number and kind, rows
COUNT_BYTES = 8

Pair = tuple[int, int]


class Load(NamedTuple):
    """Messages and their bytes of one (source, destination)."""

    messages: int = 0
    num_bytes: int = 0


def row_message_bytes(rows: int, fields: Sequence[int]) -> int:
    """Bytes of a message of ``rows`` rows whose fields have the given bytes each: one block per field, padded to 16, and a
    trailer; 0 for no rows, because nothing is sent."""
    return TRAILER_BYTES + sum(-(-rows * n // 16) * 16 for n in fields) if rows else 0


def _add(loads: dict[Pair, Load], pair: Pair, rows: int, fields: Sequence[int]) -> None:
    if rows and pair[0] != pair[1]:
        old = loads.get(pair, Load())
        loads[pair] = Load(old.messages + 1, old.num_bytes + row_message_bytes(rows, fields))


def flat_all_to_all(send_rows: Sequence[Sequence[int]], fields: Sequence[int]) -> dict[Pair, Load]:
    """One message per non-empty pair. ``send_rows[i][j]``: rows from rank i to rank j."""
    out: dict[Pair, Load] = {}
    for i, row in enumerate(send_rows):
        for j, n in enumerate(row):
            _add(out, (i, j), n, fields)
    return out


def halo_all_to_all(send_rows: Sequence[Sequence[int]], fields: Sequence[int], *, lanes: int, waves: int = 1) -> dict[Pair, Load]:
    """The hierarchical all-to-all: node-local rows directly; rows for node n in one message to (n, own lane), then within n.

    Args:
        send_rows: rows from rank i to rank j.
        fields: bytes of a row's fields.
        lanes: ranks of a node.
        waves: 1 (one redistribution for all nodes) or nodes - 1 (one each).
    """
    W = len(send_rows)
    nodes = W // lanes
    out: dict[Pair, Load] = {}
    for i in range(W):
        for n in range(nodes):
            rows = [send_rows[i][n * lanes + k] for k in range(lanes)]
            if n == i // lanes:
                for k, r in enumerate(rows):
                    _add(out, (i, n * lanes + k), r, fields)
            else:
                _add(out, (i, n * lanes + i % lanes), sum(rows), fields)
    for n in range(nodes):
        others = [m for m in range(nodes) if m != n]
        groups = [others] if waves == 1 else [[m] for m in others]
        for group in groups:
            for a in range(lanes):
                for b in range(lanes):
                    _add(out, (n * lanes + a, n * lanes + b), sum(send_rows[m * lanes + a][n * lanes + b] for m in group), fields)
    return out


def _targets(ids: Iterable[int], owners: Sequence[int]) -> list[int]:
    return sorted({owners[e] for e in ids if e >= 0})


def flat_exchange(
    expert_ids: Sequence[Sequence[Sequence[int]]], owners: Sequence[int], fields: Sequence[int], *, dedup: bool = True
) -> dict[Pair, Load]:
    """Dispatch (or, with the pairs turned round, combine) of the flat exchange.

    Args:
        expert_ids: rank -> token -> its expert ids, -1 dropped.
        owners: expert -> rank.
        fields: bytes of a row's fields.
        dedup: one row per (token, rank); else one per slot.
    """
    W = max(len(expert_ids), max(owners, default=0) + 1)
    rows = [[0] * W for _ in range(W)]
    for i, tokens in enumerate(expert_ids):
        for ids in tokens:
            for j in _targets(ids, owners) if dedup else [owners[e] for e in ids if e >= 0]:
                rows[i][j] += 1
    return flat_all_to_all(rows, fields)


def halo_exchange(
    expert_ids: Sequence[Sequence[Sequence[int]]], owners: Sequence[int], fields: Sequence[int], *, lanes: int, waves: int = 1
) -> dict[Pair, Load]:
    """Dispatch of the node-deduplicating exchange: one row per (token, node) to (node, own lane), expanded inside the node.

    With the pairs turned round: combine. Arguments as in :func:`flat_exchange` and :func:`halo_all_to_all`.
    """
    W = len(expert_ids)
    nodes = W // lanes
    unique: dict[Pair, int] = {}
    final: dict[tuple[int, int], int] = {}  # (source rank, destination rank) rows
    for i, tokens in enumerate(expert_ids):
        for ids in tokens:
            ranks = _targets(ids, owners)
            for n in sorted({r // lanes for r in ranks}):
                unique[i, n] = unique.get((i, n), 0) + 1
            for r in ranks:
                final[i, r] = final.get((i, r), 0) + 1
    out: dict[Pair, Load] = {}
    for (i, n), r in unique.items():
        if n != i // lanes:
            _add(out, (i, n * lanes + i % lanes), r, fields)
    for n in range(nodes):
        others = [m for m in range(nodes) if m != n]
        groups = [[n], *([others] if waves == 1 else [[m] for m in others])]
        for group in groups:
            for a in range(lanes):
                for b in range(lanes):
                    rows = sum(final.get((m * lanes + a, n * lanes + b), 0) for m in group)
                    _add(out, (n * lanes + a, n * lanes + b), rows, fields)
    return out


def total(loads: Mapping[Pair, Load], *, lanes: int | None = None) -> Load:
    """Sum of all loads; with ``lanes``, of those between nodes only."""
    kept = [v for (i, j), v in loads.items() if lanes is None or i // lanes != j // lanes]
    return Load(sum(v.messages for v in kept), sum(v.num_bytes for v in kept))
