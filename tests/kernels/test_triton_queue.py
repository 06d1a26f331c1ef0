"""Promises of the queue's Triton kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreted import DEVICE, interpreter, triton_backend  # noqa: F401 (the fixture is autouse)
from torchmoe.kernels import reference


def brute_force(ids: Tensor, num_experts: int, max_rows: int | None) -> tuple[list[int], list[int], list[int], bool]:
    """(tokens of the rows, offsets, row of each slot, overflowed), by three loops."""
    T, K = ids.shape
    P = T * K if max_rows is None else max_rows
    tokens, offsets, rows = [], [0], {}
    for e in range(num_experts):
        for t in range(T):
            for k in range(K):
                if int(ids[t, k]) == e:
                    rows[t, k] = len(tokens)
                    tokens.append(t)
        offsets.append(min(len(tokens), P))
    index_map = [rows[t, k] if rows.get((t, k), P) < P else -1 for t in range(T) for k in range(K)]
    return (tokens + [-1] * P)[:P], offsets, index_map, len(tokens) > P


def check(ids: Tensor, num_experts: int, max_rows: int | None = None) -> None:
    got = triton_backend().build_queue(ids.to(DEVICE), num_experts, max_rows)
    indices, offsets, index_map, overflowed = (t.cpu() for t in got)
    want = brute_force(ids, num_experts, max_rows)
    assert indices.tolist() == want[0]
    assert offsets.tolist() == want[1]
    assert index_map.flatten().tolist() == want[2]
    assert index_map.shape == ids.shape
    assert overflowed.tolist() == [want[3]]
    assert {indices.dtype, offsets.dtype, index_map.dtype} == {torch.int32}


@pytest.mark.parametrize(
    ("T", "K", "E"),
    [(0, 2, 3), (1, 1, 1), (1, 16, 16), (5, 1, 7), (127, 3, 13), (150, 2, 129), (30, 10, 2), (9, 6, 1024), (128, 2, 256)],
)
def test_queue_equals_three_loops(T: int, K: int, E: int) -> None:
    generator = torch.Generator().manual_seed(T + K + E)
    ids = torch.randint(-1, E, (T, K), generator=generator)
    check(ids, E)
    check(ids.int(), E)


@pytest.mark.parametrize("expert", [0, 6])
def test_all_pairs_to_one_expert(expert: int) -> None:
    check(torch.full((300, 1), expert), 7)


def test_nothing_routed() -> None:
    check(torch.full((9, 2), -1), 4)


@pytest.mark.parametrize("bad", [-2, 5, 2**31 + 1, 2**32 + 3, -(2**32) + 3])
def test_ids_out_of_range_are_dropped_and_never_counted_as_another_expert(bad: int) -> None:
    ids = torch.tensor([[3, bad], [bad, 3], [0, 3], [4, bad]])
    check(ids, 5)


@pytest.mark.parametrize("max_rows", [0, 1, 30, 47, 48, 49, 700])
def test_rows_past_max_rows_are_dropped_and_flagged(max_rows: int) -> None:
    ids = torch.randint(0, 5, (24, 2), generator=torch.Generator().manual_seed(3))
    check(ids, 5, max_rows)


def test_expanded_and_transposed_ids() -> None:
    check(torch.randint(0, 4, (3, 40)).t(), 4)
    check(torch.tensor([[1, 3, 0]]).expand(20, 3), 4)


def test_duplicates_in_a_row_keep_slot_order() -> None:
    check(torch.tensor([[2, 2], [2, 3], [1, 1]]), 4)


def test_two_backends_build_the_same_queue() -> None:
    ids = torch.randint(-1, 11, (311, 4))
    for got, want in zip(triton_backend().build_queue(ids.to(DEVICE), 11), reference.build_queue(ids, 11), strict=True):
        assert torch.equal(got.cpu(), want)
