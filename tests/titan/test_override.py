"""torchtitan's experts replaced by an override: the same numbers as torchtitan's own, computed in fp32."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="the override is for torchtitan; pip install 'torchmoe[titan]'")


def configs() -> tuple[Any, Any]:
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    inner = GroupedExperts.Config(dim=16, hidden_dim=24, num_experts=5)
    return inner, RoutedExperts.Config(inner_experts=inner, token_dispatcher=LocalTokenDispatcher.Config(num_experts=5, top_k=2))


def fp32(module: Any) -> Any:
    """torchtitan's own experts without its casts to bf16: a loop over experts in fp32."""

    def grouped_mm(*, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        starts = [0, *offs.tolist()]
        return torch.cat([A[a:b].float() @ B_t[e].float() for e, (a, b) in enumerate(itertools.pairwise(starts))])

    module._grouped_mm = grouped_mm
    return module


def random_weights(*modules: Any) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for pairs in zip(*(m.parameters() for m in modules), strict=True):
            # values that bf16 holds exactly, because torchtitan's experts cast their weights to it
            values = torch.randn(pairs[0].shape).bfloat16().float() * 0.25
            for p in pairs:
                p.copy_(values)


@pytest.mark.parametrize("save", ["input", "preact"])
def test_grouped_experts_equal_torchtitans(save: str) -> None:
    """NVIDIA/Megatron-LM#4167, PR#6601: a drop-in for GroupedExperts, rows past the counts included."""
    from torchmoe.titan.override import grouped_experts

    inner, _ = configs()
    theirs, ours = fp32(inner.build()), grouped_experts(inner, save=save).build()
    random_weights(theirs, ours)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    counts = torch.tensor([3, 0, 4, 1, 2])
    x = torch.randn(10, 16).bfloat16().float()
    results = []
    for module in (theirs, ours):
        leaf = x.clone().requires_grad_()
        y = module(leaf, counts)
        y.backward(torch.ones_like(y))
        results.append([y, leaf.grad, *(p.grad for p in module.parameters())])
    # torchtitan rounds x and the activation to bf16 on the way
    for want, got in zip(*results, strict=True):
        assert (got - want).norm() < 1e-2 * want.norm()
    padded = ours(torch.cat([x, torch.full((3, 16), float("nan"))]), counts)
    assert torch.equal(padded[:10], results[1][0]) and not padded[10:].any()


def test_routed_experts_equal_torchtitans() -> None:
    from torchmoe.titan.override import routed_experts

    _, routed = configs()
    theirs, ours = routed.build(), routed_experts(routed).build()
    fp32(theirs.inner_experts)
    random_weights(theirs, ours)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(12)]).view(3, 4, 2)
    counts = torch.bincount(ids.flatten(), minlength=5)
    results = []
    for module in (theirs, ours):
        torch.manual_seed(1)
        x = torch.randn(3, 4, 16).bfloat16().float().requires_grad_()
        scores = torch.rand(3, 4, 2, requires_grad=True)
        y = module(x, scores, ids, counts)
        y.square().sum().backward()
        results.append([y, x.grad, scores.grad, *(p.grad for p in module.parameters())])
    for want, got in zip(*results, strict=True):
        assert (got - want).norm() < 1e-2 * want.norm()


def test_routed_experts_refuse_a_dispatcher_that_exchanges() -> None:
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from torchmoe.errors import ConfigError
    from torchmoe.titan.override import routed_experts

    inner, _ = configs()
    exchanging = AllToAllTokenDispatcher.Config(num_experts=5, top_k=2)
    config = routed_experts(RoutedExperts.Config(inner_experts=inner, token_dispatcher=exchanging))
    with pytest.raises(ConfigError, match="grouped_experts"):
        config.build()


@pytest.mark.parametrize(("name", "kind"), [("grouped_experts", "GroupedExperts"), ("routed_experts", "RoutedExperts")])
def test_one_line_in_a_recipe_activates_it(name: str, kind: str) -> None:
    """torchtitan's own mechanism finds the experts in a config tree and replaces them, arguments included."""
    from torchtitan.config import OverrideConfig
    from torchtitan.config.override import apply_overrides
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter

    _, routed = configs()
    gate = Linear.Config(in_features=16, out_features=5)
    tree = MoE.Config(
        num_experts=5, routed_experts=routed, router=TokenChoiceTopKRouter.Config(num_experts=5, gate=gate, top_k=2)
    )
    lines = apply_overrides(OverrideConfig(imports=[(f"torchmoe.titan.override.{name}", {"save": "input"})]), tree)
    assert len(lines) == 1 and f"TorchMoE{kind}.Config" in lines[0]
    built = tree.routed_experts.build()
    ours = built if name == "routed_experts" else built.inner_experts
    assert type(ours).__name__ == f"TorchMoE{kind}" and ours.save == "input"
