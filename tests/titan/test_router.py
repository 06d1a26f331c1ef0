"""TopKRouter, for own loops, routes like torchtitan's router, which stays in torchtitan's models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchmoe.router import TopKRouter
from torchmoe.titan.shims import ensure

ensure()

from torchtitan.models.common.config_utils import make_router_config  # noqa: E402

DIM, EXPERTS, TOKENS = 16, 12, 200


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("groups", [None, (4, 2), (3, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_ids_and_gates_equal_those_of_torchtitan(score: Any, normalize: bool, groups: tuple[int, int] | None, bias: bool) -> None:
    g = torch.Generator().manual_seed(0)
    num_groups, top_groups = groups or (None, None)
    theirs = make_router_config(
        dim=DIM,
        num_experts=EXPERTS,
        gate_param_init={"weight": nn.init.zeros_},
        top_k=3,
        score_func=score,
        route_norm=normalize,
        route_scale=2.5,
        num_expert_groups=num_groups,
        num_limited_groups=top_groups,
    ).build()
    ours = TopKRouter(DIM, EXPERTS, 3, score=score, normalize=normalize, scale=2.5, num_groups=num_groups, top_groups=top_groups)
    weight = torch.randn(EXPERTS, DIM, generator=g)
    expert_bias = 0.2 * torch.randn(EXPERTS, generator=g) * bias
    with torch.no_grad():
        theirs.gate.weight.copy_(weight)
        ours.weight_ED.copy_(weight)
        assert ours.expert_bias_E is not None
        ours.expert_bias_E.copy_(expert_bias)
        x = torch.randn(TOKENS, DIM, generator=g)
        gates, ids, _ = theirs(x[None], expert_bias)
        routing = ours(x)
    dense = [
        torch.zeros(TOKENS, EXPERTS).scatter(1, i.long(), w)
        for i, w in ((ids[0], gates[0]), (routing.expert_ids_TK, routing.gates_TK))
    ]
    assert torch.equal(ids[0].sort(1).values, routing.expert_ids_TK.long().sort(1).values)
    assert torch.allclose(dense[0], dense[1], rtol=1e-5, atol=1e-6)
