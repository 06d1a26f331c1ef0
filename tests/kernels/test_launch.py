"""Promises of what the Triton backend checks and computes on the host, before a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchmoe.errors import ConfigError
from torchmoe.kernels import launch as host

CPU = torch.device("cpu")
COUNTS = st.lists(st.integers(0, 700), min_size=1, max_size=20)


@given(COUNTS, st.sampled_from([1, 16, 64, 128]))
def test_no_routing_needs_more_row_tiles_than_the_grid_has(counts: list[int], block_m: int) -> None:
    needed = sum(-(-count // block_m) for count in counts)
    assert needed <= host.row_tiles(sum(counts), len(counts), block_m)


@pytest.mark.parametrize(("rows", "experts"), [(0, 4), (3, 4), (4, 4), (5, 4), (1000, 7), (4096, 128)])
def test_some_routing_needs_every_row_tile(rows: int, experts: int) -> None:
    """One row for all experts but one is the worst case, so the bound cannot be lowered."""
    small = min(rows, experts - 1)
    counts = [1] * small + [rows - small]
    assert host.row_tiles(rows, experts, 64) == sum(-(-count // 64) for count in counts)


@given(COUNTS, st.integers(1, 300))
def test_no_routing_needs_more_slices_than_the_workspace_has(counts: list[int], slice_rows: int) -> None:
    experts, slices = host.split_slices(sum(counts), slice_rows)
    long = [count for count in counts if count > slice_rows]
    assert len(long) <= experts
    assert sum(-(-count // slice_rows) for count in long) <= slices


@given(st.integers(1, 10**6), st.integers(1, 5000))
def test_the_workspace_of_split_reductions_is_bounded(rows: int, tiles: int) -> None:
    """At most four partial tiles a multiprocessor, and two more where an expert is just longer than a slice."""
    _, slices = host.split_slices(rows, host.split_rows(rows, tiles, CPU))
    assert slices * tiles <= 4 * host.SIMULATED_SMS + 2 * tiles


def test_offsets_are_wide_only_where_they_can_overflow() -> None:
    just = torch.empty_strided((2, 1), (2**31 - 1, 1), device="meta")
    over = torch.empty_strided((2, 2), (2**31 - 1, 1), device="meta")
    assert not host.index_64((just, (0, 1)))
    assert host.index_64((over, (0, 1)))
    assert not host.index_64((over, (1,)))
    assert not host.index_64((torch.empty(0, 4), (0, 1)))


def test_fp32_products_are_exact_unless_pytorch_allows_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert host.dot_precision(torch.float32) == "ieee"
        torch.set_float32_matmul_precision("high")
        assert host.dot_precision(torch.float32) == "tf32"
        assert host.dot_precision(torch.bfloat16) == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_grid_without_programs_launches_nothing() -> None:
    host.launch(None, (0,), CPU)
    host.launch(None, (3, 0), CPU)


@pytest.mark.parametrize(
    ("dtype", "weights", "message"),
    [
        (torch.float64, {}, "f: dtype torch.float64 has no Triton kernel; use float32, bfloat16 or float16"),
        (torch.float16, {"w1": torch.ones(1)}, "f: w1 is torch.float32, the rows are torch.float16; cast it"),
        (torch.float32, {"b2": torch.ones(1, device="meta")}, "f: b2 is on meta, the rows are on cpu; move it"),
    ],
)
def test_what_no_kernel_computes_is_refused_with_the_remedy(dtype: torch.dtype, weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        host.check("f", CPU, dtype, **weights)
