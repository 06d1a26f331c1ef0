"""Gradient sums and the global norm equal those of one process."""

from __future__ import annotations

from typing import Any

import torch

from torchmoe.comm.gradients import clip_by_global_norm, counts_in_norm, global_norm, sum_gradients
from torchmoe.placement import Placement
from torchmoe.testing.ranks import run_ranks

PL = Placement(attention=[2], ffn=[1, 1], num_layers=2, num_experts=4, replicas=2)


def gradients(rank: int) -> list[torch.Tensor | None]:
    """Own gradients of a rank before any sum: two parameters, one of them without a gradient on rank 1."""
    g = torch.Generator().manual_seed(rank)
    first = torch.randn(3, 2, generator=g, dtype=torch.float64)
    return [first, None if rank == 1 else torch.randn(5, generator=g, dtype=torch.float64)]


def program(ctx: Any, max_norm: float) -> dict[str, Any]:
    import torch.distributed as dist

    where = PL.where(ctx.rank)
    members = [PL.attention_gradient_ranks(g) for g in PL.groups("attention")]
    members += [PL.expert_gradient_ranks(g, i) for g in PL.groups("ffn") for i in range(PL.size(g))]
    groups = {ranks: dist.new_group(list(ranks)) for ranks in members}
    mine = (
        PL.attention_gradient_ranks(where.group)
        if where.role == "attention"
        else PL.expert_gradient_ranks(where.group, where.index)
    )
    params = [torch.zeros(3, 2, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)]
    for p, g in zip(params, gradients(ctx.rank), strict=True):
        p.requires_grad_()
        p.grad = g
    sum_gradients(params, groups[mine])
    counted = counts_in_norm(PL, ctx.rank)
    infinite = float(global_norm(params, counted=counted, norm_type=float("inf")))
    norm = float(clip_by_global_norm(params, max_norm, counted=counted))
    after = float(global_norm(params, counted=counted))
    return {"norm": norm, "inf": infinite, "after": after, "ranks": mine, "grads": [p.grad for p in params]}


def test_norm_and_clipping_over_both_roles_and_replicas() -> None:
    results = run_ranks(program, PL.world_size, backend="gloo", args=(0.5,))
    whole = {}
    for r in results:
        parts = [gradients(q) for q in r["ranks"]]
        whole[r["ranks"]] = [sum(p[i] for p in parts if p[i] is not None) for i in range(2)]
    flat = torch.cat([g.flatten() for grads in whole.values() for g in grads])
    for r in results:
        assert abs(r["norm"] - float(flat.norm())) < 1e-12 * float(flat.norm())
        assert r["inf"] == float(flat.abs().max())
        assert abs(r["after"] - 0.5) < 1e-5
        scale = 0.5 / (r["norm"] + 1e-6)
        for got, want in zip(r["grads"], whole[r["ranks"]], strict=True):
            assert torch.allclose(got, want * scale, rtol=1e-12, atol=0)


def rounded(ctx: Any) -> list[torch.Tensor]:
    """Four gradients of which three vanish beside the first in bf16, summed in bf16 and in fp32."""
    import torch.distributed as dist

    out = []
    for dtype in (None, torch.float32):
        p = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
        p.grad = torch.tensor([256.0 if ctx.rank == 0 else 0.75], dtype=torch.bfloat16)
        sum_gradients([p], dist.group.WORLD, dtype=dtype)
        out.append(p.grad)
    return out


def test_narrow_gradients_can_be_summed_in_a_wider_dtype() -> None:
    for narrow, wide in run_ranks(rounded, 4, backend="gloo"):
        assert wide.dtype is torch.bfloat16 and float(wide) == float(torch.tensor(258.25).bfloat16())
        assert abs(float(narrow) - 258.25) >= abs(float(wide) - 258.25)
