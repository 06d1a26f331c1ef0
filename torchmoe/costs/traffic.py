"""Expected traffic of the experts' exchange under uniform routing: closed forms, in copies, rows and bytes.

What a concrete routing sends is predicted elsewhere (costs.exchange); these are means over routings that choose K distinct
experts of E uniformly. h(e) = 1 - C(E-e, K) / C(E, K) is the chance that a token meets a given set of e experts.
Checked in the tests by Monte Carlo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal, get_args

from torchmoe.errors import ConfigError, check_whole

__all__ = [
    "Dedup",
    "LayerTraffic",
    "copies_leaving_node",
    "hit_probability",
    "layer_traffic",
    "rows_per_token",
    "split_sizes",
]

Dedup = Literal["flat", "rank", "node"]


def hit_probability(num_experts: int, held: int, top_k: int) -> float:
    """h(e): the chance that K distinct uniform choices out of E meet at least one of ``held`` experts."""
    if not 0 <= held <= num_experts or not 1 <= top_k <= num_experts:
        raise ConfigError(f"held={held} and top_k={top_k} must lie within num_experts={num_experts}")
    return 1.0 - comb(num_experts - held, top_k) / comb(num_experts, top_k)


def split_sizes(num_experts: int, num_ranks: int) -> list[int]:
    """Experts per rank in contiguous blocks; the first ``E mod N`` ranks hold one more."""
    base, more = divmod(num_experts, num_ranks)
    return [base + (i < more) for i in range(num_ranks)]


def rows_per_token(num_experts: int, top_k: int, held: Sequence[int]) -> float:
    """r: mean number of distinct ranks that a token is sent to, given the experts ``held`` by each rank."""
    return sum(hit_probability(num_experts, e, top_k) for e in held)


def copies_leaving_node(
    num_experts: int, top_k: int, *, nodes: int, ranks_per_node: int, dedup: Dedup = "flat", node_limit: int | None = None
) -> float:
    """Mean copies of a token that cross to another node.

    flat K (1 - 1/n); one per rank (R - R/n) h(E/R); one per node (n - 1) h(E/n), with R ranks on n nodes.
    ``node_limit`` restricts a token to that many uniformly chosen nodes first (DeepSeek's routing chooses the best nodes
    instead, which puts a little more experts on each chosen node).
    """
    for name, value in (("num_experts", num_experts), ("top_k", top_k), ("nodes", nodes), ("ranks_per_node", ranks_per_node)):
        check_whole(name, value, 1, "give the sizes of the layer and of the cluster")
    if dedup not in get_args(Dedup):
        raise ConfigError(f"dedup={dedup!r} is unknown; use one of {', '.join(get_args(Dedup))}")
    ranks = nodes * ranks_per_node
    if num_experts % ranks:
        raise ConfigError(f"num_experts={num_experts} is not a multiple of {ranks} ranks; the closed form needs equal shares")
    if node_limit is not None and not 1 <= node_limit <= nodes:
        raise ConfigError(f"node_limit={node_limit} must be between 1 and nodes={nodes}")
    limit = nodes if node_limit is None else node_limit
    pool = num_experts * limit // nodes
    if top_k > pool:
        raise ConfigError(f"top_k={top_k} does not fit on {limit} nodes with {pool} experts; raise node_limit")
    away = limit * (1 - 1 / nodes)  # mean number of chosen nodes that are not the token's own
    if dedup == "flat":
        return top_k * (1 - 1 / nodes)
    if dedup == "rank":
        return away * ranks_per_node * hit_probability(pool, num_experts // ranks, top_k)
    return away * hit_probability(pool, num_experts // nodes, top_k)


@dataclass(frozen=True)
class LayerTraffic:
    """Mean bytes per token and MoE layer between an A group and an F group, by message kind, one direction each."""

    rows: float
    dispatch: float
    combine: float
    d_combine: float
    d_dispatch: float
    residual: float
    d_residual: float
    ids: float

    @property
    def forward(self) -> float:
        return self.dispatch + self.combine + self.residual + self.ids

    @property
    def backward(self) -> float:
        return self.d_combine + self.d_dispatch + self.d_residual

    @property
    def total(self) -> float:
        return self.forward + self.backward

    @property
    def attention_out(self) -> float:
        """Bytes that leave the attention side per token: a residual leaves one attention group and enters another, so it
        counts in both of the side's directions."""
        return self.dispatch + self.d_combine + self.residual + self.d_residual + self.ids

    @property
    def attention_in(self) -> float:
        return self.combine + self.d_dispatch + self.residual + self.d_residual + self.ids

    @property
    def ffn_out(self) -> float:
        return self.combine + self.d_dispatch

    @property
    def ffn_in(self) -> float:
        return self.dispatch + self.d_combine


def layer_traffic(
    *,
    dim: int,
    num_experts: int,
    top_k: int,
    ffn_ranks: int,
    itemsize: int = 2,
    residual: Literal["local", "direct", "ride"] = "local",
    dedup: bool = True,
) -> LayerTraffic:
    """Expected bytes per token of one MoE layer of a disaggregated run.

    A dispatched row is [x | K gates fp32 | K ids int32], every field aligned to 8 B and the record padded to 16 B; a d_dispatch
    row is [dx | K gate gradients]; combine and d_combine rows are D elements. r rows per token with dedup, K without. The
    header, one record per message, is left out. "direct" adds one row per token and direction from one attention group to the
    next; "ride" has no residual edge. In both the K ids (int32) go to the next group.
    """
    r = rows_per_token(num_experts, top_k, split_sizes(num_experts, ffn_ranks)) if dedup else float(top_k)
    gate = 4 if itemsize <= 4 else itemsize

    def record(*sizes: int) -> int:
        return max(16, -(-sum(-(-n // 8) * 8 for n in sizes) // 16) * 16)

    row = record(dim * itemsize)
    other = residual != "local"
    direct = residual == "direct"
    return LayerTraffic(
        rows=r,
        dispatch=r * record(dim * itemsize, top_k * gate, top_k * 4),
        combine=r * row,
        d_combine=r * row,
        d_dispatch=r * record(dim * itemsize, top_k * gate),
        residual=row if direct else 0,
        d_residual=row if direct else 0,
        ids=4 * top_k if other else 0,
    )
