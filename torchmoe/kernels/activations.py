"""The activations of the expert MLP, their values and derivatives, in plain PyTorch.

A gated unit takes two pre-activations, gate and up; the others take one. ``gelu`` and ``geglu``
use erf. ``clamped_swiglu`` is GPT-OSS's: g = min(gate, 7), u = clamp(up, -7, 7), A = g sigmoid(1.702 g) (u + 1).

PyTorch's vectorised exp and its scalar tail may differ in the last bit, so the bits of an element depend on the strides of the
operands. Both functions therefore take and write contiguous blocks: forward and recomputation agree.
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


def activate(gate_NF: Tensor, up_NF: Tensor | None, activation: str, *, out: Tensor, value: Tensor | None = None) -> None:
    """out [N, F] = act(H). ``value`` [N, F], if given, receives the gate's own activation (for :func:`activate_backward`).

    ``identity`` (out = H) is there for the recomputation of one half of a gated unit.
    """
    target = out if value is None else value
    if activation in ("swiglu", "silu"):
        torch.ops.aten.silu.out(gate_NF, out=target)
    elif activation in ("geglu", "gelu"):
        torch.ops.aten.gelu.out(gate_NF, out=target)
    elif activation in ("reglu", "relu2"):
        torch.clamp(gate_NF, min=0, out=target)
    elif activation == "clamped_swiglu":
        assert up_NF is not None
        g = gate_NF.clamp(max=CLAMP_LIMIT)
        torch.mul(g, torch.sigmoid(CLAMP_ALPHA * g), out=target)
        up_NF = up_NF.clamp(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1.0)
    elif activation == "identity":
        target.copy_(gate_NF)
    else:
        is_gated(activation)
    if up_NF is not None:
        torch.mul(target, up_NF, out=out)
    elif activation == "relu2":
        torch.mul(target, target, out=out)
    elif target is not out:
        out.copy_(target)


def activate_backward(
    gate_NF: Tensor, up_NF: Tensor | None, value_NF: Tensor, da_NF: Tensor, activation: str
) -> tuple[Tensor, Tensor | None]:
    """dH from dA, H and the ``value`` of :func:`activate`; the gate's is written over dA, the up half's over ``value``.

    At a clamp's own bound the gradient passes, as torch.clamp's does.
    """
    dup_NF = None
    if activation == "clamped_swiglu":
        assert up_NF is not None
        dup_NF = value_NF.mul_(da_NF).mul_(up_NF.abs() <= CLAMP_LIMIT)
        g = gate_NF.clamp(max=CLAMP_LIMIT)
        s = torch.sigmoid(CLAMP_ALPHA * g)
        # d/dg [g s(ag)] = s + a g s (1 - s)
        slope = torch.addcmul(s, g * s, 1.0 - s, value=CLAMP_ALPHA).mul_(gate_NF <= CLAMP_LIMIT)
        return da_NF.mul_(up_NF.clamp(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1.0)).mul_(slope), dup_NF
    if up_NF is not None:
        dup_NF = value_NF.mul_(da_NF)
        da_NF.mul_(up_NF)
    if activation in ("swiglu", "silu"):
        torch.ops.aten.silu_backward.grad_input(da_NF, gate_NF, grad_input=da_NF)
    elif activation in ("geglu", "gelu"):
        torch.ops.aten.gelu_backward.grad_input(da_NF, gate_NF, grad_input=da_NF)
    elif activation == "reglu":
        da_NF.mul_(gate_NF > 0)
    elif activation == "relu2":
        da_NF.mul_(value_NF).mul_(2.0)
    else:
        raise ConfigError(f"activation {activation!r} has no derivative here; use one of {', '.join(ACTIVATIONS)}")
    return da_NF, dup_NF
