"""The expert MLP in fp64 by loops and autograd, independent of the rest of torchmoe: what kernels are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["expert_mlp", "expert_mlp_grads", "relative_error"]


def _act(name: str, g: Tensor, u: Tensor | None) -> Tensor:
    if name == "clamped_swiglu":
        assert u is not None
        g = torch.clamp(g, max=7.0)
        return g * torch.sigmoid(1.702 * g) * (torch.clamp(u, -7.0, 7.0) + 1.0)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "swiglu": F.silu,
        "silu": F.silu,
        "geglu": F.gelu,
        "gelu": F.gelu,
        "reglu": F.relu,
        "relu2": lambda z: F.relu(z) ** 2,
    }
    value = functions[name](g)
    return value if u is None else value * u


def expert_mlp(x: Tensor, ids: Tensor, gates: Tensor, weights: Mapping[str, Tensor], *, activation: str = "swiglu") -> Tensor:
    """y[t] = sum over slots of gate * W2 act(W1 x, W3 x), one (token, slot) at a time.

    Args:
        x: [T, D].
        ids: [T, K]; negative = no slot.
        gates: [T, K].
        weights: w1 [E, F, D], w2 [E, D, F] and where used w3 [E, F, D], b1, b3 [E, F], b2 [E, D].
    """
    by_expert = {name: w.unbind(0) for name, w in weights.items()}
    rows = []
    for t in range(x.size(0)):
        y = torch.zeros(weights["w2"].size(1), dtype=x.dtype)
        for k in range(ids.size(1)):
            e = int(ids[t, k])
            if e < 0:
                continue
            g = by_expert["w1"][e] @ x[t]
            if "b1" in by_expert:
                g = g + by_expert["b1"][e]
            u = by_expert["w3"][e] @ x[t] if "w3" in by_expert else None
            if u is not None and "b3" in by_expert:
                u = u + by_expert["b3"][e]
            out = by_expert["w2"][e] @ _act(activation, g, u)
            if "b2" in by_expert:
                out = out + by_expert["b2"][e]
            y = y + gates[t, k] * out
        rows.append(y)
    return torch.stack(rows) if rows else x.new_zeros(0, weights["w2"].size(1)) + 0.0 * x.sum()


def expert_mlp_grads(
    x: Tensor, ids: Tensor, gates: Tensor, weights: Mapping[str, Tensor], dy: Tensor, *, activation: str = "swiglu"
) -> tuple[Tensor, dict[str, Tensor]]:
    """(y, gradients of x, gates and every weight) in fp64; what no slot reaches has gradient 0."""
    leaves = {"x": x, "gates": gates, **weights}
    leaves = {n: t.detach().cpu().double().requires_grad_() for n, t in leaves.items()}
    y = expert_mlp(
        leaves["x"],
        ids.cpu(),
        leaves["gates"],
        {n: leaves[n] for n in weights},
        activation=activation,
    )
    grads = (
        torch.autograd.grad(y, list(leaves.values()), dy.cpu().double(), allow_unused=True)
        if y.requires_grad
        else [None] * len(leaves)
    )
    return y.detach(), {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), grads, strict=True)}


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, or ||got|| where want is 0: free of scale."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    norm = float(want.norm())
    return float((got - want).norm()) / norm if norm else float(got.norm())
