"""The activations of the expert MLP, their values and derivatives, in plain PyTorch.

A gated unit takes two pre-activations, gate and up (the columns [:F] and [F:] of H); the others take one. ``gelu`` and ``geglu``
use erf. ``clamped_swiglu`` is GPT-OSS's: g = min(gate, 7), u = clamp(up, -7, 7), A = g sigmoid(1.702 g) (u + 1).

PyTorch's vectorised exp and its scalar tail may differ in the last bit, so the bits of an element depend on the strides of the
operands. Both functions therefore take H as one contiguous block and write contiguous blocks: forward and recomputation agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchmoe.errors import ConfigError

__all__ = ["ACTIVATIONS", "CLAMP_ALPHA", "CLAMP_LIMIT", "GATED", "activate", "activate_backward", "is_gated"]

GATED = frozenset({"swiglu", "geglu", "reglu", "clamped_swiglu"})
ACTIVATIONS = (*sorted(GATED), "silu", "gelu", "relu2")
CLAMP_ALPHA = 1.702
CLAMP_LIMIT = 7.0


def is_gated(activation: str) -> bool:
    """Whether the activation has a gate and an up half.

    Raises:
        ConfigError: unknown name.
    """
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation {activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    return activation in GATED


def activate(h_NG: Tensor, activation: str, *, out: Tensor, value: Tensor | None = None) -> None:
    """out [N, F] = act(H). ``value`` [N, F], if given, receives the gate's own activation (for :func:`activate_backward`).

    ``identity`` (out = H) is there for the recomputation of one half of a gated unit.
    """
    F = out.size(1)
    gate, up = h_NG[:, :F], h_NG[:, F:]
    target = out if value is None else value
    if activation in ("swiglu", "silu"):
        torch.ops.aten.silu.out(gate, out=target)
    elif activation in ("geglu", "gelu"):
        torch.ops.aten.gelu.out(gate, out=target)
    elif activation in ("reglu", "relu2"):
        torch.clamp(gate, min=0, out=target)
    elif activation == "clamped_swiglu":
        g = gate.clamp(max=CLAMP_LIMIT)
        torch.mul(g, torch.sigmoid(CLAMP_ALPHA * g), out=target)
        up = up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1.0)
    elif activation == "identity":
        target.copy_(gate)
    else:
        is_gated(activation)
    if activation in GATED:
        torch.mul(target, up, out=out)
    elif activation == "relu2":
        torch.mul(target, target, out=out)
    elif target is not out:
        out.copy_(target)


def activate_backward(h_NG: Tensor, value_NF: Tensor, da_NF: Tensor, activation: str, *, out: Tensor) -> None:
    """dH [N, G] from dA, H and the ``value`` of :func:`activate`. ``da_NF`` is overwritten.

    At a clamp's own bound the gradient passes, as torch.clamp's does.
    """
    F = da_NF.size(1)
    gate, up = h_NG[:, :F], h_NG[:, F:]
    dgate, dup = out[:, :F], out[:, F:]
    if activation == "clamped_swiglu":
        torch.mul(da_NF, value_NF, out=dup).mul_(up.abs() <= CLAMP_LIMIT)
        g = gate.clamp(max=CLAMP_LIMIT)
        s = torch.sigmoid(CLAMP_ALPHA * g)
        # d/dg [g s(ag)] = s + a g s (1 - s)
        slope = torch.addcmul(s, g * s, 1.0 - s, value=CLAMP_ALPHA).mul_(gate <= CLAMP_LIMIT)
        torch.mul(da_NF.mul_(up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1.0)), slope, out=dgate)
        return
    if activation in GATED:
        torch.mul(da_NF, value_NF, out=dup)
        da_NF.mul_(up)
    if activation in ("swiglu", "silu"):
        torch.ops.aten.silu_backward.grad_input(da_NF, gate, grad_input=dgate)
    elif activation in ("geglu", "gelu"):
        torch.ops.aten.gelu_backward.grad_input(da_NF, gate, grad_input=dgate)
    elif activation == "reglu":
        torch.mul(da_NF, gate > 0, out=dgate)
    elif activation == "relu2":
        torch.mul(da_NF, value_NF, out=dgate).mul_(2.0)
    else:
        raise ConfigError(f"activation {activation!r} has no derivative here; use one of {', '.join(ACTIVATIONS)}")
