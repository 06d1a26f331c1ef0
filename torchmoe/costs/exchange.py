"""Bytes, messages and rows of the exchange, from the routing alone. Pure: plain Python, no communication, no tensors kept.

Definitions (design, section 4). Per token, r = destination F ranks that own at least one of its slots.

- dispatch: one row [x | gates | ids] per (token, destination rank); d_combine one row [dy] per same pair.
- combine: one row [y] per same pair, or with ``combine="slots"`` one per kept slot; d_dispatch [dx | dgates] likewise.
- counts: one message per (attention rank, F rank), also when all are zero.
- ids, residual, d_residual (only where the group changes): one row per token; no residual rows with ``residual="ride"``.
- labels (``head="ffn"``, last layer): one row per token. What a rank has for itself is no message.
- ride: a token without slots still has one row, to F rank (position in its sequence mod N).

A message of n > 0 rows has n + 1 records of one stride (record 0 is the header); a message of 0 rows is not sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torchmoe.placement import GroupId, Placement, Residual

__all__ = ["Traffic", "counts_bytes", "exchange_traffic", "message_bytes", "record_bytes", "rows_per_token", "rows_table"]

COUNTS_WORDS = 6  # header words of a counts message


def record_bytes(fields: Sequence[int]) -> int:
    """Bytes of one record with fields of the given bytes: each aligned to 8, the whole to 16."""
    return max(16, -(-sum(-(-n // 8) * 8 for n in fields) // 16) * 16)


def message_bytes(rows: int, stride: int) -> int:
    """Bytes of a payload message of ``rows`` rows: (rows + 1) * stride, or 0 because it is not sent."""
    return (rows + 1) * stride if rows else 0


def counts_bytes(num_next: int) -> int:
    """Bytes of a counts message: header and (rows, slots) per rank of the next attention group, in int64."""
    return 8 * (COUNTS_WORDS + 2 * num_next)


class Traffic(NamedTuple):
    """What one (kind, source, destination) carries."""

    messages: int = 0
    rows: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class _Strides:
    """Record bytes of every kind."""

    dim: int
    top_k: int
    itemsize: int
    gate_itemsize: int
    slots: bool

    def of(self, kind: str) -> int:
        x, gates = self.dim * self.itemsize, self.top_k * self.gate_itemsize
        return record_bytes(
            {
                "dispatch": [x, gates, 4 * self.top_k],
                "d_dispatch": [x, self.gate_itemsize if self.slots else gates],
                "ids": [4 * self.top_k],
                "labels": [8],
            }.get(kind, [x])
        )


def exchange_traffic(
    placement: Placement,
    expert_ids: Mapping[tuple[int, int], Sequence[Sequence[Sequence[int]]]],
    *,
    dim: int,
    top_k: int,
    itemsize: int = 4,
    residual: Residual | None = None,
    combine: Literal["partial", "slots"] = "partial",
    capacity: int | None = None,
    backward: bool = True,
) -> dict[tuple[str, int, int], Traffic]:
    """Messages, rows and bytes per (kind, source rank, destination rank) of one step.

    Args:
        placement: the layout.
        expert_ids: (layer, micro-batch) -> sequence -> token -> its K expert ids, -1 dropped; all sequences of all replicas.
        dim: model width D.
        top_k: K.
        itemsize: bytes of a row's element; gates have max(4, itemsize).
        residual: how the residual travels; default of the placement.
        combine: rows that come back: per (token, rank) or per slot.
        capacity: fixed sizes: nothing is counted and every payload between A and F has that many rows. None: exact sizes.
        backward: whether gradients are exchanged, too.
    """
    residual = placement.default_residual if residual is None else residual
    strides = _Strides(dim, top_k, itemsize, max(4, itemsize), combine == "slots")
    out: dict[tuple[str, int, int], Traffic] = {}

    def add(kind: str, pairs: Mapping[tuple[int, int], int], num_bytes: int | None = None) -> None:
        for (source, destination), rows in pairs.items():
            if source == destination:
                continue
            size = message_bytes(rows, strides.of(kind)) if num_bytes is None else num_bytes
            if size:
                old = out.get((kind, source, destination), Traffic())
                out[kind, source, destination] = Traffic(old.messages + 1, old.rows + rows, old.num_bytes + size)

    for (layer, _), sequences in expert_ids.items():
        a, f, nxt = placement.attention_group(layer), placement.ffn_group(layer), placement.attention_group(layer + 1)
        for replica in range(placement.replicas):
            rows = _count(placement, layer, replica, sequences, ride=residual == "ride")
            returned = rows.slots if combine == "slots" else rows.rows
            pairs = [(s, d) for s in placement.ranks(a, replica) for d in placement.ranks(f, replica)]
            home, there, back = rows.sum(rows.rows, 0), rows.sum(returned, 1), rows.sum(returned, 0)
            gradients = rows.sum(rows.rows, 1)
            if capacity is None:
                add("counts", dict.fromkeys(pairs, 0), counts_bytes(placement.size(nxt)))
            else:
                home = back = dict.fromkeys(pairs, capacity)
                there = gradients = {(s, d): capacity for s in placement.ranks(nxt, replica) for d in placement.ranks(f, replica)}
            add("dispatch", home)
            add("combine", _reverse(there))
            if backward:
                add("d_combine", gradients)
                add("d_dispatch", _reverse(back))
            for kind in ("ids", "labels", "residual"):
                if placement.has_edge(kind, layer, residual):
                    add(kind, rows.tokens)
            if backward and placement.has_edge("d_residual", layer, residual):
                add("d_residual", _reverse(rows.tokens))
    return out


def _reverse(pairs: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    return {(d, s): n for (s, d), n in pairs.items()}


@dataclass(frozen=True)
class _Rows:
    """Rows and owned slots by (dispatching rank, next attention rank, F rank), tokens by (dispatching rank, next rank)."""

    rows: dict[tuple[int, int, int], int]
    slots: dict[tuple[int, int, int], int]
    tokens: dict[tuple[int, int], int]

    @staticmethod
    def sum(counts: Mapping[tuple[int, int, int], int], side: int) -> dict[tuple[int, int], int]:
        """By (attention rank, F rank); ``side`` 0 is the dispatching rank, 1 the next."""
        out: dict[tuple[int, int], int] = {}
        for key, n in counts.items():
            pair = key[side], key[2]
            out[pair] = out.get(pair, 0) + n
        return out


def _count(placement: Placement, layer: int, replica: int, sequences: Sequence[Sequence[Sequence[int]]], *, ride: bool) -> _Rows:
    owners = placement.expert_owners(layer)
    f = placement.ranks(placement.ffn_group(layer), replica)
    here = _holders(placement, placement.attention_group(layer), replica, len(sequences))
    there = _holders(placement, placement.attention_group(layer + 1), replica, len(sequences))
    out = _Rows({}, {}, {})
    for q, source in here.items():
        nxt = there[q]
        for position, ids in enumerate(sequences[q]):
            out.tokens[source, nxt] = out.tokens.get((source, nxt), 0) + 1
            owned: dict[int, int] = {}
            for e in ids:
                if e >= 0:
                    owned[owners[e]] = owned.get(owners[e], 0) + 1
            if not owned and ride:
                owned = {position % len(f): 0}
            for n, slots in owned.items():
                key = source, nxt, f[n]
                out.rows[key] = out.rows.get(key, 0) + 1
                out.slots[key] = out.slots.get(key, 0) + slots
    return out


def _holders(placement: Placement, group: GroupId, replica: int, batch: int) -> dict[int, int]:
    """Sequence -> global rank that holds it."""
    ranks = placement.ranks(group, replica)
    return {q: ranks[i] for i in range(placement.size(group)) for q in placement.sequences(group, i, batch, replica)}


def rows_per_token(
    expert_ids: Sequence[Sequence[int]], owners: Sequence[int]
) -> dict[Literal["colocated", "direct", "ride"], tuple[float, float, float]]:
    """Mean rows per token and layer of one direction: (out to the experts, back from them, residual).

    Args:
        expert_ids: token -> its K expert ids, -1 dropped.
        owners: expert -> F rank.

    ``colocated`` is the classic all-to-all without deduplication: one row per slot each way. ``direct`` has r rows each way
    and one residual row; ``ride`` the same rows (at least one) and no residual: it saves 1/(r+1) of the way back.
    """
    t = max(1, len(expert_ids))
    kept = [[e for e in ids if e >= 0] for ids in expert_ids]
    slots = sum(map(len, kept)) / t
    ranks = [len({owners[e] for e in ids}) for ids in kept]
    r = sum(ranks) / t
    ride = sum(max(1, n) for n in ranks) / t
    return {"colocated": (slots, slots, 0.0), "direct": (r, r, 1.0), "ride": (ride, ride, 0.0)}


def rows_table(expert_ids: Sequence[Sequence[int]], owners: Sequence[int]) -> str:
    """:func:`rows_per_token` as text, with what deduplication and the fused hand-over save against the colocated exchange."""
    table = rows_per_token(expert_ids, owners)
    base = sum(table["colocated"])
    lines = [f"{'rows per token':16}{'out':>8}{'back':>8}{'residual':>10}{'all':>8}{'saved':>8}"]
    for name, (out, back, residual) in table.items():
        total = out + back + residual
        saved = 1 - total / base if base else 0.0
        lines.append(f"{name:16}{out:8.3f}{back:8.3f}{residual:10.3f}{total:8.3f}{saved:8.1%}")
    return "\n".join(lines)
