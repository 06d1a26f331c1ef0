"""The forward and the backward of the expert MLP, composed of the kernels of one backend.

The minimal scheme: with x, H, the indices and the gates every gradient follows without repeating a GEMM. A is always computed
from H rounded to its storage dtype, so every save mode gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from torchmoe.kernels import blocked, reference
from torchmoe.kernels.scheme import Halves, Hiddens, Index, Piece, Problem, Weights, rows_of_slots, slots_of_rows, take

__all__ = [
    "Upstream",
    "backward",
    "backward_pieces",
    "backward_rows",
    "forward",
    "forward_pieces",
    "input_gradient",
    "weight_gradient",
]


@dataclass
class Upstream:
    """Row-wise products of the backward that the input and the weight gradients share: dH, A' [P, F], gates [P]."""

    dh: Halves
    ag: Tensor
    gates_P: Tensor


def forward(kernels: ModuleType, x_TD: Tensor, gates: Tensor, problem: Problem) -> tuple[Tensor, Hiddens]:
    """y [T, D] and what ``problem.save`` keeps."""
    if kernels is reference:
        return blocked.forward(x_TD, gates, problem)
    index, w, activation, save = problem
    saves = save in ("half", "preact", "all")
    a_PF, h = kernels.up_projection(x_TD, index.tokens, index.offsets, w.w1, w.w3, w.b1, w.b3, activation, saves, save == "half")
    y_PD = kernels.down_projection(a_PF, index.offsets, w.w2, w.b2)
    gate_PF, up_PF = h or (None, None)
    kept = Hiddens(gate_PF, up_PF, a_PF if save == "all" else None)
    del a_PF
    return kernels.combine(y_PD, index.map, gates, index.token_offsets), kept


def forward_pieces(
    kernels: ModuleType, x_TD: Tensor, gates: Tensor, parts: list[Piece], problem: Problem
) -> tuple[Tensor, Hiddens]:
    """:func:`forward` over all chunks; what is kept is one tensor each, [P, ...]."""
    if len(parts) == 1:
        return forward(kernels, x_TD, gates, problem._replace(queue=parts[0].queue))
    y_TD = x_TD.new_empty(x_TD.size(0), problem.weights.w2.size(1))
    whole = Hiddens()
    P = sum(p.queue.tokens.numel() for p in parts)
    for part in parts:
        y, kept = forward(kernels, x_TD[part.tokens], gates[part.tokens], problem._replace(queue=part.queue))
        y_TD[part.tokens] = y
        if whole.gate is None:
            whole = Hiddens(*(None if t is None else t.new_empty(P, t.size(1)) for t in kept))
        for target, value in zip(whole, kept, strict=True):
            if target is not None and value is not None:
                target[part.rows] = value
    return y_TD, whole


def backward_rows(
    kernels: ModuleType, dy_TD: Tensor, x_TD: Tensor | None, gates: Tensor, problem: Problem, hiddens: Hiddens
) -> tuple[Upstream, Tensor]:
    """dH, A' and the gate gradient (in slot order). Repeats what ``save`` did not keep: nothing, one half, or H."""
    index, w, activation, save = problem
    gate_PF, up_PF = hiddens.gate, hiddens.up
    if save == "input":
        _, (gate_PF, up_PF) = kernels.up_projection(
            x_TD, index.tokens, index.offsets, w.w1, w.w3, w.b1, w.b3, activation, True, False
        )
    elif save == "half":
        up_PF, _ = kernels.up_projection(x_TD, index.tokens, index.offsets, w.w3, None, w.b3, None, "identity", False, False)
    gates_P = rows_of_slots(gates, index)
    dh, ag, dgates_P = kernels.backward_hidden(
        dy_TD, index.tokens, index.offsets, gates_P, (gate_PF, up_PF), w.w2, w.b2, activation, hiddens.a
    )
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
    half = up.dh[1] if name in ("w3", "b3") else up.dh[0]
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
    problem: Problem,
    hiddens: Hiddens,
    *,
    need_x: bool,
    grads: dict[str, Tensor],
    accumulate: bool,
) -> tuple[Tensor | None, Tensor]:
    """The whole backward: (dx or None, dgates in slot order); weight gradients go into ``grads`` by field name.

    The order frees early: A' dies with dW2, before dX~ is made, and dX~ before dW1.
    """
    if kernels is reference:
        return blocked.backward(dy_TD, x_TD, gates, problem, hiddens, need_x=need_x, grads=grads, accumulate=accumulate)
    up, dgates = backward_rows(kernels, dy_TD, x_TD, gates, problem, hiddens)

    def add(*names: str) -> None:
        for name in names:
            if name in grads:
                weight_gradient(kernels, name, up, x_TD, dy_TD, problem.queue, grads[name], accumulate)

    add("w2", "b2")
    up.ag = up.ag.new_empty(0, up.ag.size(1))
    dx_TD = input_gradient(kernels, up, problem.queue, problem.weights) if need_x else None
    add("w1", "w3", "b1", "b3")
    return dx_TD, dgates


def backward_pieces(
    kernels: ModuleType,
    dy_TD: Tensor,
    x_TD: Tensor | None,
    gates: Tensor,
    parts: list[Piece],
    problem: Problem,
    hiddens: Hiddens,
    *,
    need_x: bool,
    grads: dict[str, Tensor],
    accumulate: bool,
) -> tuple[Tensor | None, Tensor]:
    """:func:`backward` over all chunks. Several chunks add up in ``grads``, so these must then hold their start values."""
    results = [
        backward(
            kernels,
            dy_TD[part.tokens],
            None if x_TD is None else x_TD[part.tokens],
            gates[part.tokens],
            problem._replace(queue=part.queue),
            take(hiddens, part),
            need_x=need_x,
            grads=grads,
            accumulate=accumulate or len(parts) > 1,
        )
        for part in parts
    ]
    if len(results) == 1:
        return results[0]
    dxs, dgates = zip(*results, strict=True)
    return torch.cat(dxs) if need_x else None, torch.cat(dgates)
