"""Experts in DCP checkpoints: any owners load what any other owners saved, and stock tensors load both ways."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchmoe.errors import CheckpointError
from torchmoe.testing import run_ranks
from torchmoe.titan.checkpoint import ExpertShards

WORLD, EXPERTS = 3, 7


def owners(generator: torch.Generator) -> list[list[int]]:
    """Experts over ranks at random: not contiguous, uneven, maybe none on a rank."""
    table = torch.randint(WORLD, (EXPERTS,), generator=generator)
    return [[e for e in range(EXPERTS) if table[e] == r] for r in range(WORLD)]


def exchange(ctx: Any, folder: str) -> list[bool]:
    """Save with one table, load with another and as a whole tensor; then the whole saved and loaded in shards."""
    import torch.distributed.checkpoint as dcp

    generator = torch.Generator().manual_seed(0)
    out = []
    tables = [owners(generator) for _ in range(5)] + [[list(range(EXPERTS)), [], []], [[], [6, 4, 2, 0], [5, 3, 1]]]
    for i, (a, b) in enumerate(zip(tables, tables[1:] + tables[:1], strict=True)):
        whole = torch.randn(EXPERTS, 4, 3, generator=generator)
        mine = ExpertShards(whole[a[ctx.rank]].clone(), a[ctx.rank], EXPERTS)
        dcp.save({"layers.0.w": mine}, checkpoint_id=f"{folder}/{i}")
        got = ExpertShards(torch.zeros(len(b[ctx.rank]), 4, 3), b[ctx.rank], EXPERTS)
        full = torch.zeros(EXPERTS, 4, 3)
        dcp.load({"layers.0.w": got}, checkpoint_id=f"{folder}/{i}")
        dcp.load({"layers.0.w": full}, checkpoint_id=f"{folder}/{i}")
        out += [torch.equal(got.local, whole[b[ctx.rank]]), torch.equal(full, whole)]
        dcp.save({"layers.0.w": whole}, checkpoint_id=f"{folder}/{i}-whole")
        got.local.zero_()
        dcp.load({"layers.0.w": got}, checkpoint_id=f"{folder}/{i}-whole")
        out.append(torch.equal(got.local, whole[b[ctx.rank]]))
    return out


def test_every_owner_table_loads_every_other_and_whole_tensors() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for results in run_ranks(exchange, WORLD, backend="gloo", timeout=120, args=(folder,)):
            assert results and all(results)


@given(st.lists(st.integers(0, 19), unique=True))
def test_runs_cover_the_owned_experts_once(owned: list[int]) -> None:
    shards = ExpertShards(torch.arange(len(owned) * 2.0).view(-1, 2), owned, 20)
    covered = [(first + i, row + i) for first, row, n in shards.runs() for i in range(n)]
    assert covered == [(e, r) for r, e in enumerate(owned)]
    assert shards.shape == (20, 2) and len(shards.__create_write_items__("w", shards)) == len(shards.runs())


def test_a_shard_refuses_arithmetic_and_wrong_rows() -> None:
    shards = ExpertShards(torch.ones(2, 3), (4, 1), 5)
    with pytest.raises(CheckpointError, match=r"work on its \.local"):
        shards + 1
    with pytest.raises(CheckpointError, match="one row per owned expert"):
        ExpertShards(torch.ones(3, 3), (4, 1), 5)
    assert shards.to(torch.float64).dtype is torch.float64
    assert "[4, 1] of (5, 3)" in repr(shards)
