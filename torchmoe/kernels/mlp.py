"""The forward and the backward of the expert MLP, composed of the kernels of one backend.

The minimal scheme: with x, H, the indices and the gates every gradient follows without repeating a GEMM. A is always computed
from H rounded to its storage dtype, so every save mode gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from torchmoe.kernels import blocked, reference
from torchmoe.kernels.reference import Hidden
from torchmoe.kernels.scheme import Hiddens, Index, Piece, Weights, rows_of_slots, slots_of_rows

__all__ = ["Upstream", "backward", "backward_rows", "forward", "forward_pieces", "input_gradient", "weight_gradient"]


@dataclass
class Upstream:
    """Row-wise products of the backward that the input and the weight gradients share: dH [P, G], A' [P, F], gates [P]."""

    dh: Tensor
    ag: Tensor
    gates_P: Tensor


def forward(
    kernels: ModuleType, x_TD: Tensor, gates: Tensor, index: Index, weights: Weights, activation: str, save: str
) -> tuple[Tensor, Hiddens]:
    """y [T, D] and what ``save`` keeps. ``save="none"`` keeps nothing and writes no pre-activations (inference)."""
    if kernels is reference:
        return blocked.forward(x_TD, gates, index, weights, activation, save)
    w = weights
    saves = save in ("half", "preact", "all")
    a_PF, h = kernels.up_projection(x_TD, index.tokens, index.offsets, w.w1, w.w3, w.b1, w.b3, activation, saves, save == "half")
    y_PD = kernels.down_projection(a_PF, index.offsets, w.w2, w.b2)
    kept = Hiddens(h, a_PF if save == "all" else None)
    del a_PF
    return kernels.combine(y_PD, index.map, gates, index.token_offsets), kept


def forward_pieces(
    kernels: ModuleType, x_TD: Tensor, gates: Tensor, parts: list[Piece], weights: Weights, activation: str, save: str
) -> tuple[Tensor, Hiddens]:
    """:func:`forward` over all chunks; what is kept is one tensor each, [P, ...]."""
    if len(parts) == 1:
        return forward(kernels, x_TD, gates, parts[0].queue, weights, activation, save)
    y_TD = x_TD.new_empty(x_TD.size(0), weights.w2.size(1))
    whole = Hiddens()
    P = sum(p.queue.tokens.numel() for p in parts)
    for part in parts:
        y, kept = forward(kernels, x_TD[part.tokens], gates[part.tokens], part.queue, weights, activation, save)
        y_TD[part.tokens] = y
        if whole.h is None:
            whole = Hiddens(*(None if t is None else t.new_empty(P, t.size(1)) for t in kept))
        for target, value in zip(whole, kept, strict=True):
            if target is not None and value is not None:
                target[part.rows] = value
    return y_TD, whole


def backward_rows(
    kernels: ModuleType,
    dy_TD: Tensor,
    x_TD: Tensor | None,
    gates: Tensor,
    index: Index,
    weights: Weights,
    hiddens: Hiddens,
    activation: str,
    save: str,
) -> tuple[Upstream, Tensor]:
    """dH, A' and the gate gradient (in slot order). Repeats what ``save`` did not keep: nothing, one half, or H."""
    w = weights
    h: Hidden
    if save == "input":
        _, whole = kernels.up_projection(x_TD, index.tokens, index.offsets, w.w1, w.w3, w.b1, w.b3, activation, True, False)
        assert whole is not None
        h = whole
    elif save == "half":
        up_PF, _ = kernels.up_projection(x_TD, index.tokens, index.offsets, w.w3, None, w.b3, None, "identity", False, False)
        assert hiddens.h is not None
        h = (hiddens.h, up_PF)
    else:
        assert hiddens.h is not None
        h = hiddens.h
    gates_P = rows_of_slots(gates, index)
    dh, ag, dgates_P = kernels.backward_hidden(dy_TD, index.tokens, index.offsets, gates_P, h, w.w2, w.b2, activation, hiddens.a)
    return Upstream(dh, ag, gates_P), slots_of_rows(dgates_P, index, gates.dtype)


def input_gradient(kernels: ModuleType, up: Upstream, index: Index, weights: Weights) -> Tensor:
    """dX [T, D]: the K rows of a token summed in fp32 in slot order."""
    dxr_PD = kernels.input_grad(up.dh, index.offsets, weights.w1, weights.w3)
    dx_TD: Tensor = kernels.combine(dxr_PD, index.map, None, index.token_offsets)
    return dx_TD


def weight_gradient(
    kernels: ModuleType, name: str, up: Upstream, x_TD: Tensor | None, dy_TD: Tensor, index: Index, out: Tensor, accumulate: bool
) -> None:
    """(Add) one weight's gradient into ``out``; name is a field of :class:`Weights`."""
    F = up.ag.size(1)
    half = up.dh[:, F:] if name in ("w3", "b3") else up.dh[:, :F]
    if name in ("w1", "w3"):
        kernels.weight_grad_rows(half, x_TD, None, index.tokens, index.offsets, out, accumulate)
    elif name == "w2":
        kernels.weight_grad_rows(dy_TD, up.ag, index.tokens, None, index.offsets, out, accumulate)
    elif name in ("b1", "b3"):
        kernels.bias_grad_rows(half, None, None, index.offsets, out, accumulate)
    else:
        kernels.bias_grad_rows(dy_TD, index.tokens, up.gates_P, index.offsets, out, accumulate)


def backward(
    kernels: ModuleType,
    dy_TD: Tensor,
    x_TD: Tensor | None,
    gates: Tensor,
    index: Index,
    weights: Weights,
    hiddens: Hiddens,
    activation: str,
    save: str,
    *,
    need_x: bool,
    grads: dict[str, Tensor],
    accumulate: bool,
) -> tuple[Tensor | None, Tensor]:
    """The whole backward: (dx or None, dgates in slot order); weight gradients go into ``grads`` by field name.

    The order frees early: A' dies with dW2, before dX~ is made, and dX~ before dW1.
    """
    if kernels is reference:
        return blocked.backward(
            dy_TD, x_TD, gates, index, weights, hiddens, activation, save, need_x=need_x, grads=grads, accumulate=accumulate
        )
    up, dgates = backward_rows(kernels, dy_TD, x_TD, gates, index, weights, hiddens, activation, save)

    def add(*names: str) -> None:
        for name in names:
            if name in grads:
                weight_gradient(kernels, name, up, x_TD, dy_TD, index, grads[name], accumulate)

    add("w2", "b2")
    up.ag = up.ag.new_empty(0, up.ag.size(1))
    dx_TD = input_gradient(kernels, up, index, weights) if need_x else None
    add("w1", "w3", "b1", "b3")
    return dx_TD, dgates
