"""Hypothesis strategies: routings with all the ugly cases, shapes, placements and topologies.

Needs the ``testing`` extra (hypothesis). Every drawn value is plain data, so a failing example prints itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from torchmoe.placement import Placement

__all__ = ["Shape", "Topology", "expert_ids", "owners", "placements", "routings", "shapes", "topologies"]


class Shape(NamedTuple):
    """Tokens T, width D, experts E, experts per token K."""

    T: int
    D: int
    E: int
    K: int


class Topology(NamedTuple):
    """``lanes`` ranks on each of ``nodes`` nodes."""

    nodes: int
    lanes: int


@st.composite
def shapes(draw: st.DrawFn, *, max_tokens: int = 24, max_dim: int = 17, max_experts: int = 12, max_k: int = 6) -> Shape:
    """Small and odd sizes; T may be 0, K at most E, and all of them 1 at once."""
    e = draw(st.integers(1, max_experts))
    return Shape(draw(st.integers(0, max_tokens)), draw(st.integers(1, max_dim)), e, draw(st.integers(1, min(e, max_k))))


@st.composite
def expert_ids(draw: st.DrawFn, num_tokens: int, num_experts: int, top_k: int, *, repeat: bool = False) -> Tensor:
    """[T, K] int64 ids of one of these kinds: any, with drops, all dropped, all on one expert, only the ends, tokens without
    slots, every token alike.

    Args:
        repeat: whether a token may name an expert twice (top-k never does).
    """
    kind = draw(st.sampled_from(("any", "any", "drops", "all dropped", "one expert", "ends", "empty tokens", "alike")))
    pool = list(range(num_experts))
    if kind == "ends":
        pool = sorted({0, num_experts - 1})
    row = st.lists(st.sampled_from(pool), min_size=top_k, max_size=top_k)
    if not repeat and len(pool) >= top_k:
        row = st.permutations(pool).map(lambda p: list(p[:top_k]))
    elif not repeat:
        row = st.permutations([*pool, *[-1] * (top_k - len(pool))]).map(list)
    if kind == "alike":
        ids = [draw(row)] * num_tokens
    elif kind == "one expert":
        hot = draw(st.integers(0, num_experts - 1))
        ids = [[hot] + [-1] * (top_k - 1) for _ in range(num_tokens)]
    elif kind == "all dropped":
        ids = [[-1] * top_k for _ in range(num_tokens)]
    else:
        ids = [draw(row) for _ in range(num_tokens)]
    if kind in ("drops", "ends"):
        ids = [[e if draw(st.booleans()) else -1 for e in r] for r in ids]
    if kind == "empty tokens":
        ids = [r if draw(st.booleans()) else [-1] * top_k for r in ids]
    return torch.tensor(ids, dtype=torch.long).view(num_tokens, top_k)


@st.composite
def routings(draw: st.DrawFn, *, max_tokens: int = 24, max_experts: int = 12, max_k: int = 6) -> tuple[Shape, Tensor, Tensor]:
    """(shape, expert_ids_TK, gates_TK in fp64): gates may be 0, negative, or large."""
    shape = draw(shapes(max_tokens=max_tokens, max_experts=max_experts, max_k=max_k))
    ids = draw(expert_ids(shape.T, shape.E, shape.K))
    value = st.floats(-2, 2) | st.sampled_from([0.0, 1.0, 1e4])
    gates = draw(st.lists(value, min_size=shape.T * shape.K, max_size=shape.T * shape.K))
    return shape, ids, torch.tensor(gates, dtype=torch.float64).view(shape.T, shape.K)


def owners(num_experts: int, num_ranks: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Expert -> rank, any table: ranks without experts included."""
    return st.lists(st.integers(0, num_ranks - 1), min_size=num_experts, max_size=num_experts).map(tuple)


@st.composite
def placements(draw: st.DrawFn, *, max_ranks: int = 8, max_layers: int = 4, max_experts: int = 7) -> Placement:
    """A layout of 2 to ``max_ranks`` ranks: unequal groups and pools, replicas, own expert tables."""
    layers = draw(st.integers(1, max_layers))
    size = st.integers(1, max(1, max_ranks // 3))
    group = st.lists(size, min_size=1, max_size=min(3, layers))
    attention, ffn = draw(group), draw(group)
    while sum(attention) + sum(ffn) > max_ranks:
        largest = max((*attention, *ffn))
        if largest == 1:
            (attention if len(attention) > 1 else ffn).pop()
            continue
        pool = attention if largest in attention else ffn
        pool[pool.index(largest)] -= 1
    experts = draw(st.integers(1, max_experts))
    tables = None
    if draw(st.booleans()):
        tables = [draw(owners(experts, ffn[layer % len(ffn)])) for layer in range(layers)]
    replicas = draw(st.integers(1, 2)) if 2 * (sum(attention) + sum(ffn)) <= max_ranks else 1
    return Placement(attention=attention, ffn=ffn, num_layers=layers, num_experts=experts, owners=tables, replicas=replicas)


@st.composite
def topologies(draw: st.DrawFn, *, max_nodes: int = 4, max_lanes: int = 3) -> Topology:
    """Nodes and lanes, one node or one lane included."""
    return Topology(draw(st.integers(1, max_nodes)), draw(st.integers(1, max_lanes)))
