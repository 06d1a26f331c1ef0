"""Inputs shared by the tests of dispatch, experts and layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmoe.dispatch import DispatchQueue
from torchmoe.experts import FusedExpertMLP
from torchmoe.kernels import scheme
from torchmoe.testing import oracle

GATED = ("swiglu", "geglu", "reglu", "clamped_swiglu")
PLAIN = ("silu", "gelu", "relu2")
EPS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def routings() -> dict[str, Tensor]:
    """Expert ids for E = 7, the fixture set of the issue threads (kernels.md, section 4)."""
    g = torch.Generator().manual_seed(0)
    return {
        "random": torch.randint(0, 7, (19, 3), generator=g),
        "k=1": torch.randint(0, 7, (9, 1), generator=g),
        "k=E": torch.stack([torch.randperm(7, generator=g) for _ in range(5)]),
        "all to one": torch.full((9, 1), 3),
        "first and last empty": torch.randint(1, 6, (9, 2), generator=g),
        "T=0": torch.zeros(0, 2, dtype=torch.long),
        "T=1": torch.tensor([[4, 0]]),
        "T=127": torch.stack([torch.randperm(7, generator=g)[:3] for _ in range(127)]),
        "sentinels": torch.tensor([[0, -1], [-1, -1], [6, 3]]),
        "all dropped": torch.full((4, 2), -1),
        "same expert twice in a row": torch.tensor([[2, 2], [2, 3]]),
        "sorted": torch.arange(7).repeat_interleave(3)[:, None],
        "reversed": torch.arange(7).repeat_interleave(3).flip(0)[:, None],
    }


def experts(E: int, D: int, F: int, *, seed: int = 0, **options: Any) -> FusedExpertMLP:
    """A module with random weights AND biases (fan-in scaled)."""
    module = FusedExpertMLP(E, D, F, **options)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) / (p.shape[-1] ** 0.5 if p.ndim == 3 else 4.0))
    return module


def inputs(ids: Tensor, D: int, dtype: torch.dtype, *, seed: int = 1, grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D], gates like ids in the accumulation dtype, dy [T, D]."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.randn(ids.size(0), D, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad)
    gates = torch.rand(ids.shape, generator=g, dtype=torch.float64).to(wide).requires_grad_(grad)
    return x, gates, torch.randn(ids.size(0), D, generator=g, dtype=torch.float64).to(dtype)


def split_weights(module: FusedExpertMLP) -> dict[str, Tensor]:
    """Weights by short name in the split layout."""
    views = scheme.weight_views(module.weights(), module.layout)._asdict()
    return {n: w.detach() for n, w in views.items() if w is not None}


def split_grads(module: FusedExpertMLP) -> dict[str, Tensor]:
    return {n: g.clone() for n, g in module.grad_views().items()}


def run(module: FusedExpertMLP, ids: Tensor, x: Tensor, gates: Tensor, dy: Tensor, **build: Any) -> dict[str, Tensor]:
    """y and every gradient of the autograd form, by name."""
    for t in (x, gates, *module.parameters()):
        t.grad = None
    y = module(x, DispatchQueue.build(ids, module.num_experts, **build), gates)
    y.backward(dy)
    assert x.grad is not None and gates.grad is not None
    return {"y": y.detach(), "x": x.grad, "gates": gates.grad, **split_grads(module)}


def truth(module: FusedExpertMLP, ids: Tensor, x: Tensor, gates: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The same from the fp64 oracle."""
    y, grads = oracle.expert_mlp_grads(x, ids, gates, split_weights(module), dy, activation=module.activation)
    return {"y": y, **grads}


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    assert got.keys() == want.keys()
    return {n: oracle.relative_error(got[n], want[n]) for n in want}
