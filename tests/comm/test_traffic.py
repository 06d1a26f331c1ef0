"""Bytes and messages: predicted from the routing alone, counted again here in numpy, and equal to what is logged."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from tests.comm.toy import Toy, random_toy, run_rank
from torchmoe.comm.wire import COUNTS_HEADER
from torchmoe.costs.exchange import COUNTS_WORDS, exchange_traffic, rows_per_token, rows_table
from torchmoe.testing import run_ranks

CASES = {
    "5A3F": random_toy([5], [3], layers=2),
    "2A2F slots": random_toy([2], [2], top_k=3, layers=2, settings={"combine": "slots"}),
    "[2,1]A[1,2]F direct": random_toy([2, 1], [1, 2], layers=4),
    "[2,1]A[1,2]F direct slots": random_toy([2, 1], [1, 2], layers=3, settings={"combine": "slots"}),
    "[2,1]A[1,2]F ride": random_toy([2, 1], [1, 2], layers=4, settings={"residual": "ride"}),
    "2A3F ride": random_toy([2], [3], layers=2, settings={"residual": "ride"}),
    "2x(1A2F)": random_toy([1], [2], layers=2, replicas=2),
    "everything dropped": Toy((2,), (2,), (((((-1, -1),) * 3), ((-1, -1),)),), 3),
}


def by_hand(toy: Toy) -> dict[tuple[str, int, int], tuple[int, int, int]]:
    """From the ids, token by token, with numpy: messages, rows, bytes of each pair. Shares no code with costs."""
    pl, slots, ride = toy.placement, toy.settings.get("combine") == "slots", toy.residual == "ride"
    batch, k, d = len(toy.lengths), toy.top_k, toy.dim
    pad8, pad16 = (lambda n: (n + 7) // 8 * 8), (lambda n: max(16, (n + 15) // 16 * 16))
    width = {
        "dispatch": pad16(pad8(8 * d) + pad8(8 * k) + pad8(4 * k)),
        "combine": pad16(8 * d),
        "d_combine": pad16(8 * d),
        "d_dispatch": pad16(pad8(8 * d) + (8 if slots else pad8(8 * k))),
        "ids": pad16(pad8(4 * k)),
        "residual": pad16(8 * d),
        "d_residual": pad16(8 * d),
    }
    total: dict[tuple[str, int, int], tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
    for layer, sequences in enumerate(toy.ids):
        owner = np.array(pl.expert_owners(layer))
        for rep in range(pl.replicas):
            rows: Counter[tuple[str, int, int]] = Counter()
            at = lambda group: [  # noqa: E731
                next((r for i, r in enumerate(pl.ranks(group, rep)) if q in pl.sequences(group, i, batch, rep)), None)  # noqa: B023
                for q in range(batch)
            ]
            here, there = at(pl.attention_group(layer)), at(pl.attention_group(layer + 1))
            experts = pl.ranks(pl.ffn_group(layer), rep)
            for q in range(batch):
                if here[q] is None:
                    continue
                for position, token in enumerate(sequences[q]):
                    own = owner[np.array([e for e in token if e >= 0], dtype=int)]
                    targets = {int(n): int((own == n).sum()) for n in np.unique(own)}
                    if ride and not targets:
                        targets = {position % len(experts): 0}
                    for n, c in targets.items():
                        back = c if slots else 1
                        rows["dispatch", here[q], experts[n]] += 1
                        rows["combine", experts[n], there[q]] += back
                        rows["d_combine", there[q], experts[n]] += 1
                        rows["d_dispatch", experts[n], here[q]] += back
                    if len(pl.attention) > 1:
                        rows["ids", here[q], there[q]] += 1
                        if not ride:
                            rows["residual", here[q], there[q]] += 1
                            rows["d_residual", there[q], here[q]] += 1
            for (kind, s, t), n in rows.items():
                if n:
                    m, r, b = total[kind, s, t]
                    total[kind, s, t] = (m + 1, r + n, b + (n + 1) * width[kind])
            for s in pl.ranks(pl.attention_group(layer), rep):
                for t in experts:
                    m, r, b = total["counts", s, t]
                    total["counts", s, t] = (m + 1, r, b + 8 * (6 + 2 * pl.size(pl.attention_group(layer + 1))))
    return dict(total)


def logged(ranks: list[dict]) -> dict[tuple[str, int, int], tuple[int, int]]:
    out: dict[tuple[str, int, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for rank in ranks:
        for m in rank["log"]:
            key = m.communicator.split(":")[0], m.source, m.destination
            out[key] = (out[key][0] + 1, out[key][1] + m.num_bytes)
    return dict(out)


@pytest.mark.parametrize("name", CASES)
def test_prediction_equals_numpy_and_the_log(name: str) -> None:
    toy = CASES[name]
    ids = {(layer, 0): sequences for layer, sequences in enumerate(toy.ids)}
    combine = toy.settings.get("combine", "partial")
    got = exchange_traffic(
        toy.placement,
        ids,
        dim=toy.dim,
        top_k=toy.top_k,
        itemsize=8,
        residual=toy.residual,
        combine=combine,  # type: ignore[arg-type]
    )
    want = by_hand(toy)
    assert {k: tuple(v) for k, v in got.items()} == want
    seen = logged(run_ranks(run_rank, toy.placement.world_size, args=(toy,)))
    assert seen == {k: (v[0], v[2]) for k, v in want.items()}


def test_gloo_logs_the_same_bytes() -> None:
    toy = CASES["[2,1]A[1,2]F direct"]
    seen = logged(run_ranks(run_rank, toy.placement.world_size, backend="gloo", args=(toy,)))
    assert seen == {k: (v[0], v[2]) for k, v in by_hand(toy).items()}


def test_fixed_sizes_send_no_counts_and_always_the_capacity() -> None:
    toy = random_toy([2], [3], settings={"sizes": "fixed", "capacity": 20})
    seen = logged(run_ranks(run_rank, toy.placement.world_size, args=(toy,)))
    stride = 16 * -(-(8 * toy.dim + 8 * toy.top_k + 8) // 16)
    assert {k for k, _, _ in seen} == {"dispatch", "combine", "d_combine", "d_dispatch"}
    assert {v for (k, _, _), v in seen.items() if k == "dispatch"} == {(1, 21 * stride)}
    ids = {(layer, 0): sequences for layer, sequences in enumerate(toy.ids)}
    got = exchange_traffic(toy.placement, ids, dim=toy.dim, top_k=toy.top_k, itemsize=8, capacity=20)
    assert seen == {k: (v.messages, v.num_bytes) for k, v in got.items()}


def test_riding_saves_one_row_in_2r_plus_1_and_one_in_r_plus_1_of_the_way_back() -> None:
    rng = np.random.default_rng(0)
    ids = [rng.choice(64, 8, replace=False).tolist() for _ in range(400)]
    table = rows_per_token(ids, [e // 8 for e in range(64)])
    r = np.mean([len({e // 8 for e in row}) for row in ids])
    direct, ride = table["direct"], table["ride"]
    assert np.isclose(1 - sum(ride) / sum(direct), 1 / (2 * r + 1))
    assert np.isclose(1 - (ride[1] + ride[2]) / (direct[1] + direct[2]), 1 / (r + 1))
    assert table["colocated"] == (8.0, 8.0, 0.0)
    text = rows_table(ids, [e // 8 for e in range(64)])
    assert f"{r:8.3f}" in text and "colocated" in text


def test_the_counts_header_is_counted_where_it_is_written() -> None:
    assert COUNTS_WORDS == COUNTS_HEADER
