"""The dispatcher override against torchtitan's own dispatcher: bit for bit, empty experts and uneven ranks included."""

from __future__ import annotations

import pytest
import torch

from torchmoe.testing import run_ranks

from .dispatcher_program import NAMES, dispatch_and_combine


@pytest.mark.parametrize("num_experts, top_k", [(8, 2)])
def test_overrides_are_bit_equal_to_torchtitans_dispatcher(num_experts: int, top_k: int) -> None:
    for rank in run_ranks(dispatch_and_combine, 4, backend="gloo", timeout=300, args=(num_experts, top_k)):
        for name in NAMES[1:]:
            for got, want in zip(rank[name], rank["torchtitan"], strict=True):
                assert torch.equal(got, want), name
        assert rank["torchtitan"][0].shape[0] == int(rank["torchtitan"][1].sum())
