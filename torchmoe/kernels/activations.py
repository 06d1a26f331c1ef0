"""The activations of the expert MLP, their values and derivatives, in plain PyTorch.

A gated unit takes two pre-activations (gate, up); the others take one. ``gelu`` and ``geglu`` use erf.
``clamped_swiglu`` is GPT-OSS's: g = min(gate, 7), u = clamp(up, -7, 7), A = g sigmoid(1.702 g) (u + 1).
"""

from __future__ import annotations

import math

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


def activate(gate: Tensor, up: Tensor | None, activation: str, *, out: Tensor) -> None:
    """out = act(gate, up), computed in fp32 (fp64) and rounded once to ``out``'s dtype.

    ``identity`` (out = gate) is there for the recomputation of one half of a gated unit.
    """
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    g = gate.to(wide)
    target = out if out.dtype == wide else torch.empty_like(g)
    if activation in ("swiglu", "silu"):
        torch.ops.aten.silu.out(g, out=target)
    elif activation in ("geglu", "gelu"):
        torch.ops.aten.gelu.out(g, out=target)
    elif activation in ("reglu", "relu2"):
        torch.clamp(g, min=0, out=target)
        if activation == "relu2":
            target.mul_(target)
    elif activation == "clamped_swiglu":
        c = g.clamp(max=CLAMP_LIMIT)
        torch.mul(c, torch.sigmoid(CLAMP_ALPHA * c), out=target)
    elif activation == "identity":
        target.copy_(g)
    else:
        is_gated(activation)
    if up is not None:
        u = up.to(wide)
        target.mul_(u.clamp(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1.0) if activation == "clamped_swiglu" else u)
    if target is not out:
        out.copy_(target)


def activate_backward(
    gate: Tensor, up: Tensor | None, da: Tensor, activation: str, *, out_gate: Tensor, out_up: Tensor | None
) -> None:
    """dgate and dup from da (in the accumulation dtype; may be overwritten), rounded once.

    At a clamp's own bound the gradient passes, as torch.clamp's does.
    """
    wide = da.dtype
    g = gate.to(wide)
    if activation == "clamped_swiglu":
        assert_up = up
        if assert_up is None or out_up is None:
            raise ConfigError("clamped_swiglu needs an up half; pass w3")
        u = assert_up.to(wide)
        c = g.clamp(max=CLAMP_LIMIT)
        s = torch.sigmoid(CLAMP_ALPHA * c)
        uc = u.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        out_up.copy_(da * c * s * (u.abs() <= CLAMP_LIMIT))
        out_gate.copy_(da * (uc + 1.0) * (s + CLAMP_ALPHA * c * s * (1.0 - s)) * (g <= CLAMP_LIMIT))
        return
    if activation in ("swiglu", "silu"):
        s = torch.sigmoid(g)
        if up is not None and out_up is not None:
            value = g * s
            torch.mul(da, value, out=out_up) if out_up.dtype == wide else out_up.copy_(da * value)
            da = da.mul_(up.to(wide))
            # silu'(g) = s + silu(g) (1 - s)
            slope = torch.addcmul(s, value, 1.0 - s)
        else:
            slope = torch.addcmul(s, g * s, 1.0 - s)
    elif activation in ("geglu", "gelu"):
        cdf = 0.5 * (1.0 + torch.erf(g * math.sqrt(0.5)))
        slope = cdf + g * torch.exp(-0.5 * g * g) * (1.0 / math.sqrt(2.0 * math.pi))
        if up is not None and out_up is not None:
            out_up.copy_(da * (g * cdf))
            da = da.mul_(up.to(wide))
    elif activation == "reglu" and up is not None and out_up is not None:
        out_up.copy_(da * g.clamp(min=0))
        da = da.mul_(up.to(wide))
        slope = (g > 0).to(wide)
    elif activation == "relu2":
        slope = 2.0 * g.clamp(min=0)
    else:
        raise ConfigError(f"activation {activation!r} has no derivative here; use one of {', '.join(ACTIVATIONS)}")
    torch.mul(da, slope, out=out_gate) if out_gate.dtype == wide else out_gate.copy_(da * slope)
