"""Expected traffic: closed forms against Monte Carlo and against enumeration of every routing."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchmoe.comm.wire import Layout
from torchmoe.costs import copies_leaving_node, hit_probability, layer_traffic, rows_per_token
from torchmoe.costs.traffic import split_sizes
from torchmoe.errors import ConfigError


@given(data=st.data())
def test_rows_per_token_is_the_mean_over_all_routings(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 8))
    k = data.draw(st.integers(1, experts))
    owners = data.draw(st.lists(st.integers(0, 3), min_size=experts, max_size=experts))
    held = [owners.count(r) for r in range(4)]
    counts = [len({owners[e] for e in chosen}) for chosen in combinations(range(experts), k)]
    assert rows_per_token(experts, k, held) == pytest.approx(sum(counts) / len(counts))


def test_hit_probability_at_its_ends() -> None:
    assert hit_probability(8, 0, 3) == 0
    assert hit_probability(8, 8, 3) == 1
    assert hit_probability(8, 6, 3) == 1  # only two experts are elsewhere
    assert hit_probability(8, 1, 8) == 1
    with pytest.raises(ConfigError, match="held=9"):
        hit_probability(8, 9, 1)


# distributed.md 2.3: copies that leave the node, flat / one per rank / one per node
PUBLISHED = [
    (256, 8, 2, 8, 4.00, 3.26, 0.997),
    (256, 8, 4, 8, 6.00, 5.45, 2.71),
    (256, 8, 8, 8, 7.00, 6.72, 4.63),
    (128, 8, 4, 8, 6.00, 5.52, 2.72),
    (128, 4, 2, 8, 2.00, 1.84, 0.94),
    (8, 2, 8, 1, 1.75, 1.75, 1.75),
]


@pytest.mark.parametrize(("experts", "k", "nodes", "per", "flat", "rank", "node"), PUBLISHED)
def test_copies_leaving_the_node(experts: int, k: int, nodes: int, per: int, flat: float, rank: float, node: float) -> None:
    for dedup, expected in (("flat", flat), ("rank", rank), ("node", node)):
        got = copies_leaving_node(experts, k, nodes=nodes, ranks_per_node=per, dedup=dedup)  # type: ignore[arg-type]
        assert got == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("limit", [None, 2, 3])
def test_copies_leaving_the_node_by_monte_carlo(limit: int | None) -> None:
    experts, k, nodes, per, tokens = 32, 4, 4, 2, 40_000
    g = torch.Generator().manual_seed(0)
    scores = torch.rand(tokens, experts, generator=g)
    if limit is not None:
        chosen = torch.rand(tokens, nodes, generator=g).topk(limit).indices
        allowed = torch.zeros(tokens, nodes, dtype=torch.bool).scatter_(1, chosen, True)
        scores = scores.masked_fill(~allowed.repeat_interleave(experts // nodes, 1), -1)
    rank = scores.topk(k).indices // (experts // (nodes * per))
    home = torch.randint(nodes, (tokens, 1), generator=g)
    away = rank // per != home
    ranks = torch.zeros(tokens, nodes * per).scatter_(1, rank, 1).view(tokens, nodes, per)
    ranks.scatter_(1, home[..., None].expand(-1, 1, per), 0)
    measured = {
        "flat": away.float().sum(1).mean(),
        "rank": ranks.sum((1, 2)).mean(),
        "node": ranks.amax(2).sum(1).mean(),
    }
    for dedup, value in measured.items():
        got = copies_leaving_node(experts, k, nodes=nodes, ranks_per_node=per, dedup=dedup, node_limit=limit)  # type: ignore[arg-type]
        assert got == pytest.approx(value.item(), rel=0.02), dedup


@given(
    dim=st.integers(1, 300),
    k=st.integers(1, 6),
    ranks=st.integers(1, 9),
    itemsize=st.sampled_from([2, 4, 8]),
    residual=st.sampled_from(["local", "direct", "ride"]),
)
def test_bytes_per_token_are_rows_of_the_wire_format(dim: int, k: int, ranks: int, itemsize: int, residual: str) -> None:
    experts = 12
    t = layer_traffic(
        dim=dim,
        num_experts=experts,
        top_k=k,
        ffn_ranks=ranks,
        itemsize=itemsize,
        residual=residual,  # type: ignore[arg-type]
    )
    x = (dim, {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize])
    gates = (k, torch.float64 if itemsize == 8 else torch.float32)
    r = rows_per_token(experts, k, split_sizes(experts, ranks))
    assert t.rows == r
    assert t.dispatch == pytest.approx(r * Layout((x, gates, (k, torch.int32))).stride)
    assert t.d_dispatch == pytest.approx(r * Layout((x, gates)).stride)
    assert t.combine == t.d_combine == pytest.approx(r * Layout((x,)).stride)
    assert t.residual == t.d_residual == (Layout((x,)).stride if residual == "direct" else 0)
    assert t.attention_out + t.ffn_out == pytest.approx(t.total)
    assert t.ffn_in + t.attention_in == pytest.approx(t.total)


def test_riding_saves_the_published_share_of_rows() -> None:
    """1 / (2r + 1) of the rows of a direct residual, 1 / (r + 1) of the return leg (design section 4)."""
    args = {"dim": 256, "num_experts": 64, "top_k": 8, "ffn_ranks": 16}
    direct, ride = (layer_traffic(**args, residual=r) for r in ("direct", "ride"))  # type: ignore[arg-type]
    r, row = direct.rows, 512
    assert (direct.combine + direct.residual) / row == pytest.approx(r + 1)
    assert ride.combine / (direct.combine + direct.residual) == pytest.approx(1 - 1 / (r + 1))


def test_uneven_shares_are_refused_by_the_node_form() -> None:
    with pytest.raises(ConfigError, match="num_experts=10"):
        copies_leaving_node(10, 2, nodes=2, ranks_per_node=2)
    with pytest.raises(ConfigError, match="node_limit=5"):
        copies_leaving_node(16, 2, nodes=4, ranks_per_node=1, node_limit=5)
    with pytest.raises(ConfigError, match="top_k=8"):
        copies_leaving_node(16, 8, nodes=4, ranks_per_node=1, node_limit=1)


def test_an_unknown_way_of_counting_is_refused() -> None:
    """It once counted per node, whatever was asked."""
    with pytest.raises(ConfigError, match="dedup='ranks' is unknown"):
        copies_leaving_node(16, 2, nodes=2, ranks_per_node=2, dedup="ranks")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nodes=0"):
        copies_leaving_node(16, 2, nodes=0, ranks_per_node=2)
